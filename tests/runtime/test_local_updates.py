"""Torch's optimizers update local tensors; what is seen of them is as without that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.utils._python_dispatch import TorchDispatchMode

from galvatron_fx.errors import InputError
from galvatron_fx.runtime.local_updates import _in_turns
from tests.seams.conftest import mesh as mesh
from tests.seams.one_rank import batch, pair

Make = Callable[[Any], Optimizer]


class OwnAdamW(AdamW):
    """Might do anything else."""


class DTensorCalls(TorchDispatchMode):
    """Counts operators that get DTensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(argument, DTensor) for argument in args)
        return func(*args, **(kwargs or {}))


def trained(mesh: DeviceMesh, make: Make, act: Callable[[Optimizer], None] | None = None) -> list[nn.Module]:
    """A compiled model and the plain one after three steps, with what they were optimised by in ``optimizer``."""
    models = list(pair(mesh))
    for model in models:
        optimizer = make(model.parameters())
        if act is not None:
            act(optimizer)
        for _ in range(3):
            model(**batch())["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        model.__dict__["optimizer"] = optimizer
    return models


def same(models: list[nn.Module]) -> None:
    """Parameters and states are equal; those of the compiled model are DTensors."""
    compiled, plain = models
    for name, expected in plain.named_parameters():
        parameter = compiled.get_parameter(name)
        assert isinstance(parameter, DTensor)
        torch.testing.assert_close(parameter.full_tensor(), expected, rtol=1e-12, atol=1e-14)
        states = [model.__dict__["optimizer"].state[p] for model, p in ((compiled, parameter), (plain, expected))]
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            got = states[0][key]
            if value is None or key == "step":
                assert got == value and not isinstance(got, DTensor)
            else:
                assert isinstance(got, DTensor) and got.placements == parameter.placements
                torch.testing.assert_close(got.full_tensor(), value, rtol=1e-12, atol=1e-14)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("make", [
    lambda p: AdamW(p, lr=0.1),
    lambda p: Adam(p, lr=0.1, weight_decay=0.1, amsgrad=True, maximize=True),
    lambda p: AdamW(p, lr=0.1, fused=True),
    lambda p: AdamW(p, lr=0.1, foreach=True),
    lambda p: SGD(p, lr=0.1),
    lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    lambda p: OwnAdamW(p, lr=0.1),
    lambda p: RMSprop(p, lr=0.1),
])  # fmt: skip
def test_updates_and_states_are_equal(mesh: DeviceMesh, make: Make) -> None:
    same(trained(mesh, make))


def test_no_operator_of_an_update_gets_a_dtensor(mesh: DeviceMesh) -> None:
    counts = []
    for kind in (AdamW, OwnAdamW):
        compiled, _ = pair(mesh)
        optimizer = kind(compiled.parameters())
        compiled.forward_backward(**batch())
        with DTensorCalls() as calls:
            optimizer.step()
        counts.append(calls.count)
        assert all(parameter.grad is not None for parameter in compiled.parameters())
    assert counts[0] == 0 < counts[1]


def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook of steps that changes what they take."""
    for group in optimizer.param_groups:
        group["lr"] *= 0.7
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 3


def test_hooks_of_the_optimizer_are_obeyed(mesh: DeviceMesh) -> None:
    """Also those that run after the compiler's own, and a scheduler."""
    seen: list[int] = []

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        seen.append(len(optimizer.state))

    def act(optimizer: Optimizer) -> None:
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    same(trained(mesh, lambda p: SGD(p, lr=0.1, momentum=0.9), act))
    assert seen == [4] * 6


def test_a_closure_and_frozen_parameters(mesh: DeviceMesh) -> None:
    """The closure runs behind hooks, and makes other gradients than these have changed."""
    models = list(pair(mesh))
    for model in models:
        model.get_parameter("up.weight").requires_grad_(False)
        optimizer = AdamW(model.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(before)

        def closure(model: nn.Module = model, optimizer: Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**batch())["loss"]
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
            closure()
            optimizer.step()
        model.__dict__["optimizer"] = optimizer
        assert len(optimizer.state) == 3
    same(models)


def test_states_that_lie_otherwise_are_refused(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh)
    optimizer = AdamW(compiled.parameters())
    compiled.forward_backward(**batch())
    optimizer.step()
    state = optimizer.state[compiled.get_parameter("up.bias")]
    state["exp_avg"] = state["exp_avg"].full_tensor()
    with pytest.raises(InputError, match=r"state 'exp_avg' of a parameter of shape \(8,\) does not lie as the"):
        optimizer.step()


def test_groups_without_their_settings_are_refused(mesh: DeviceMesh) -> None:
    """As torch's checkpoints of stages leave them, whose ranks have other parameters."""
    compiled, _ = pair(mesh)
    optimizer = AdamW(compiled.parameters())
    del optimizer.param_groups[0]["betas"]
    compiled.forward_backward(**batch())
    with pytest.raises(InputError, match=r"of this AdamW lacks betas\. .*flatten_optimizer_state_dict=True"):
        optimizer.step()


def test_on_gpus_as_many_are_updated_at_once_as_have_no_more_elements_than_the_largest() -> None:
    group = {"params": [torch.empty(size, device="meta") for size in (3, 10, 4, 6, 1, 9)], "lr": 0.1}
    turns = _in_turns(group)
    assert [[each.numel() for each in turn["params"]] for turn in turns] == [[3], [10], [4, 6], [1, 9]]
    assert all(turn["foreach"] and turn["lr"] == 0.1 for turn in turns)
    assert _in_turns({**group, "foreach": False}) == [{**group, "foreach": False}]
    assert _in_turns({**group, "fused": True}) == [{**group, "fused": True}]
