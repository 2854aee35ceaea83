"""Parts of a compiled model that are exchanged behind its back, and hooks that are registered for every module."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.modules.module as every_module
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.flop_counter import FlopCounterMode

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan
from galvatron_fx.errors import InputError

PLAN = Plan.uniform((1,), ("data",))


class Net(nn.Module):
    """Layers in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.last = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.scales = nn.ParameterList([torch.ones(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return (self.last(self.named["a"](x)) * self.scales[0]).square().mean()


X = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def compiled(mesh: DeviceMesh) -> Any:
    return galvatron_fx.compile(Net(), mesh, (X,), plan=PLAN)


def new() -> nn.Linear:
    return nn.Linear(4, 4)


EXCHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "set": (lambda m: m.layers.__setitem__(1, new()), "'layers.1' is assigned"),
    "delete": (lambda m: m.layers.__delitem__(0), "'layers.0' is deleted"),
    "insert": (lambda m: m.layers.insert(0, new()), r"modules of a compiled model are exchanged \('layers.2'\)"),
    "add": (lambda m: m.layers.__iadd__([new()]), "'layers' is given other parts"),
    "set by name": (lambda m: m.named.update({"a": new()}), "'named' is given other parts"),
    "pop by name": (lambda m: m.named.pop("a"), r"exchanged \('named.a'\)"),
    "clear": (lambda m: m.named.clear(), r"exchanged \('named.\*'\)"),
    "in a row": (lambda m: m.last.__setitem__(0, new()), "'last.0' is assigned"),
    "parameter": (lambda m: m.scales.__setitem__(0, torch.zeros(4)), "'scales.0' is assigned .* write the values in"),
    "table": (lambda m: m._modules.update(first=new()), r"exchanged \('\*'\)"),
    "entry": (lambda m: m._modules.__setitem__("first", new()), r"exchanged \('first'\)"),
    "entry inside": (lambda m: m.layers._modules.__setitem__("1", new()), r"exchanged \('layers.1'\)"),
}


@pytest.mark.parametrize(("exchange", "said"), EXCHANGES.values(), ids=EXCHANGES)
def test_parts_of_containers_are_not_exchanged(
    compiled: DistributedGraphModule, exchange: Callable[[Any], Any], said: str
) -> None:
    for model in (compiled, copy.deepcopy(compiled)):
        with pytest.raises(InputError, match=said):
            exchange(model)
    assert "ModuleList" in repr(compiled)


def test_an_entry_that_is_written_in_place_stays(compiled: Any) -> None:
    with torch.no_grad():
        compiled.scales[0] *= 2
    torch.testing.assert_close(compiled.scales[0].full_tensor(), torch.full((4,), 2.0))


@contextmanager
def hook_of_all(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def noted(*_: Any) -> None:
    """A hook of a user's own."""


FORWARD = every_module.register_module_forward_hook, every_module.register_module_forward_pre_hook
BACKWARD = every_module.register_module_full_backward_hook, every_module.register_module_full_backward_pre_hook


@pytest.mark.parametrize("register", [*FORWARD, *BACKWARD])
def test_hooks_of_all_modules_are_told_of_once(compiled: DistributedGraphModule, register: Callable[..., Any]) -> None:
    with hook_of_all(register, noted), pytest.warns(UserWarning, match=r"hooks of all modules \(noted\).* as a whole"):
        compiled(X)
        with warnings.catch_warnings(record=True) as again:
            compiled(X).backward()
    assert not [said for said in again if "all modules" in str(said.message)]


def test_hooks_of_all_modules_see_no_graph_inside(compiled: DistributedGraphModule) -> None:
    """What they return would be taken for what the graph computes."""
    seen: list[type] = []
    with hook_of_all(FORWARD[0], lambda module, *_: seen.append(type(module))), pytest.warns(UserWarning):
        compiled(X).backward()
        compiled.forward_backward(X)
    assert seen == [DistributedGraphModule] * 2


def test_hooks_of_all_modules_before_compile(mesh: DeviceMesh) -> None:
    with hook_of_all(FORWARD[0], noted), pytest.warns(UserWarning, match=r"hooks of all modules \(noted\)"):
        galvatron_fx.compile(Net(), mesh, (X,), plan=PLAN)
    with hook_of_all(BACKWARD[0], noted), pytest.raises(InputError, match="all modules have a backward hook"):
        galvatron_fx.compile(Net(), mesh, (X,), plan=PLAN)


def test_backward_hooks_of_all_modules_want_a_backward_of_torchs(compiled: DistributedGraphModule) -> None:
    with hook_of_all(BACKWARD[0], noted), pytest.raises(InputError, match="all modules have backward hooks"):
        compiled.forward_backward(X)


def test_counters_of_torchs_own_run_around_a_step(compiled: DistributedGraphModule) -> None:
    """They hook all modules, too, for their names alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with FlopCounterMode(display=False) as counted:
            compiled(X).backward()
    assert counted.get_total_flops() >= 3 * 5 * 2 * 4**3 - 2 * 4**3  # the input wants no gradient
