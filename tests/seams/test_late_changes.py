"""What the program of a compiled model cannot see: parts put in the place of others, inputs that it cannot follow."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan
from galvatron_fx.errors import InputError

PLAN = Plan.uniform((1,), ("data",))


class Net(nn.Module):
    """Two layers, scaled by an attribute and by what is passed beside the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.alpha = nn.Linear(6, 8), nn.Linear(8, 3), 1.0

    def forward(self, x: Tensor, how: Any = None) -> dict[str, Tensor]:
        out = self.down(self.up(x).tanh()) * self.alpha
        if callable(how):
            out = how(out)
        elif isinstance(how, np.ndarray):
            out = out * torch.from_numpy(how)[1500]
        elif how is not None:
            out = out * (how["scale"] if isinstance(how, dict) else how.scale)
        return {"loss": out.square().mean(), "logits": out}

    def gradient_checkpointing_enable(self) -> None:
        """As models of transformers have it."""


def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def pair(mesh: DeviceMesh, **inputs: Any) -> tuple[DistributedGraphModule, Net]:
    torch.manual_seed(0)
    plain = Net().double()
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, {"x": x(), **inputs}, plan=PLAN), plain


# ---- parts ----


def assigned_data(model: Any) -> None:
    model.up.weight.data = model.up.weight.data * 2
    model.forward_backward(x=x())


def assigned_data_of_a_copy(model: Any) -> None:
    other = copy.deepcopy(model)
    other.forward_backward(x=x())
    other.up.weight.data = model.up.weight.data * 2
    with torch.no_grad():
        other(x=x())


def vector(model: Any) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())
    model(x=x())


def new_module(model: Any) -> None:
    model.head = nn.Linear(3, 3)


def new_forward(model: Any) -> None:
    model.forward = lambda **batch: None


def no_plain_value(model: Any) -> None:
    model.alpha = torch.tensor(3.0)


def new_parameter(model: Any) -> None:
    model.register_parameter("extra", nn.Parameter(torch.ones(3)))


def deleted(model: Any) -> None:
    del model.up


def reset(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def checkpointed(model: Any) -> None:
    model.gradient_checkpointing_enable()


def hooked(model: Any) -> None:
    model.register_forward_hook(lambda *given: {**given[-1], "loss": given[-1]["loss"] * 2})
    model.forward_backward(x=x())


@pytest.mark.parametrize("change, said", [
    (assigned_data, r"\.data of 'up\.weight' was assigned, which has no effect on a DTensor: .*copy_"),
    (assigned_data_of_a_copy, r"\.data of 'up\.weight' was assigned"),
    (vector, r"\.data of 'up\.weight' was assigned"),
    (new_module, "'head' of a compiled model is assigned.*before compile"),
    (new_forward, "'forward' of a compiled model is assigned"),
    (no_plain_value, "'alpha' of a compiled model is assigned"),
    (new_parameter, "'extra' of a compiled model is added or deleted"),
    (deleted, "'up' of a compiled model is added or deleted"),
    (reset, r"up.reset_parameters\(\) of a compiled model would draw.*before compile"),
    (checkpointed, r"gradient_checkpointing_enable\(\) of a compiled model is too late, .*recompute=True"),
    (hooked, "forward hook of the compiled model returns another output.*call the model and backward"),
])  # fmt: skip
def test_what_the_program_would_not_see_is_refused(mesh: DeviceMesh, change: Callable[..., None], said: str) -> None:
    compiled, _ = pair(mesh)
    with pytest.raises(InputError, match=said):
        change(compiled)


class Adapted(Net):
    """With an adapter that can be switched off, as PEFT has them, and rates that are assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.drop, self.active = nn.Linear(6, 8), nn.Dropout(0.0), ["adapter"]
        self.adapter.enabled = True

    def enable(self, enabled: bool) -> None:
        """Switch the adapter on or off."""
        self.adapter.requires_grad_(enabled)
        self.adapter.enabled = enabled

    def forward(self, x: Tensor, how: Any = None) -> dict[str, Tensor]:
        """The loss of both layers together."""
        hidden = self.up(x) + self.adapter(x) if self.adapter.enabled and self.active else self.up(x)
        return {"loss": (self.down(self.drop(hidden)) * self.alpha).square().mean()}


def adapted(compiled: Any, plain: Any) -> None:
    """Both give the same loss and gradients."""
    loss, expected = compiled.forward_backward(x=x())["loss"], plain(x=x())["loss"]
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for own, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(own.grad.full_tensor(), other.grad, rtol=1e-10, atol=1e-12)
    compiled.zero_grad()
    plain.zero_grad()


def test_plain_values_that_are_assigned_hold_from_the_next_step_on(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain: Any = Adapted().double()
    compiled: Any = galvatron_fx.compile(copy.deepcopy(plain), mesh, {"x": x()}, plan=PLAN)
    changes: list[Callable[[Any], None]] = [
        lambda model: setattr(model, "alpha", 3.0),
        lambda model: setattr(model.drop, "p", 1.0),
        lambda model: (setattr(model, "alpha", 1.0), setattr(model.drop, "p", 0.0)),
        lambda model: setattr(model, "active", []),
        lambda model: model.active.append("adapter"),
        lambda model: model.enable(False),
    ]
    for change in changes:
        for model in (compiled, plain):
            change(model)
        adapted(compiled, plain)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x=x())["loss"], plain(x=x())["loss"])
    assert len(compiled._programs) == 5 and galvatron_fx.gather(compiled).adapter.enabled is False
    for model in (compiled, plain):
        model.enable(True)
    adapted(compiled, plain)
    assert len(compiled._programs) == 5 and compiled.alpha == 1.0


def test_a_value_of_its_own_for_each_step_is_told_once(mesh: DeviceMesh) -> None:
    """Each would be compiled anew."""
    compiled: Any = galvatron_fx.compile(Adapted().double(), mesh, {"x": x()}, plan=PLAN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (*range(7), *range(7)):
            compiled.drop.p = step / 10
    with pytest.warns(UserWarning, match=r"'drop\.p' .* given 8 values.*buffer.*input.*a name that") as told:
        for step in range(7, 20):
            compiled.drop.p = step / 20 + 0.025
    assert len(told) == 1 and told[0].filename == __file__


def test_a_plain_copy_beside_a_compiled_model_is_told_what_to_do(mesh: DeviceMesh) -> None:
    """A teacher that follows: torch's words are of tensors that the script never made."""
    compiled, plain = pair(mesh)
    with torch.no_grad(), pytest.raises(InputError, match=r"plain tensor \(8, 6\) beside a DTensor.*full_tensor\(\)"):
        plain.up.weight.lerp_(compiled.up.weight, 0.1)
    with pytest.raises(InputError, match="teacher or an average that is compiled"):
        (compiled.up.weight - plain.up.weight.detach()).square().sum()
    with torch.no_grad():
        plain.up.weight.lerp_(compiled.up.weight.full_tensor(), 0.1)
    with implicit_replication():
        assert compiled.up.weight - plain.up.weight.detach() is not None


def test_settings_that_are_changed_in_place_in_each_step_are_told_once(mesh: DeviceMesh) -> None:
    plain: Any = Net().double()
    plain.config = types.SimpleNamespace(scale=1.0)
    compiled: Any = galvatron_fx.compile(plain, mesh, {"x": x()}, plan=PLAN)
    said = []
    for step in range(12):
        compiled.config.scale = step + 2.0
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert compiled._tree.modes.attributes
        said.append([str(each.message) for each in told])
    assert said[:7] + said[8:] == [[]] * 11
    assert "'config' of a compiled model was given 8 values" in said[7][0]


def test_values_that_are_assigned_before_the_first_call_hold_in_it(mesh: DeviceMesh) -> None:
    plain: Any = Net().double()
    compiled: Any = galvatron_fx.compile(copy.deepcopy(plain), mesh, plan=PLAN)
    compiled.alpha = plain.alpha = 3.0
    compiled.notes = "mine"
    torch.testing.assert_close(compiled.forward_backward(x=x())["loss"], plain(x=x())["loss"])
    assert compiled.notes == "mine" and compiled.alpha == 3.0
    lazy: Any = galvatron_fx.compile(copy.deepcopy(plain), mesh, plan=PLAN)
    lazy.head = nn.Linear(3, 3)
    with pytest.raises(InputError, match=r"'head' of a compiled model is assigned.*before compile"):
        lazy(x=x())


def test_what_people_keep_on_a_model_is_theirs(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh)
    compiled.best_loss, compiled.notes = 3.0, {"lr": 0.1}
    compiled.register_forward_hook(lambda *given: given[-1])
    for model in (compiled, plain):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
    compiled.forward_backward(x=x())
    with torch.no_grad():
        torch.testing.assert_close(compiled(x=x().requires_grad_())["loss"], plain(x())["loss"])
    assert compiled.best_loss == 3.0 and compiled.notes == {"lr": 0.1}


def test_changed_weights_of_the_original_are_told_of_once(mesh: DeviceMesh) -> None:
    plain = Net().double()
    compiled = galvatron_fx.compile(plain, mesh, {"x": x()}, plan=PLAN)
    compiled.forward_backward(x=x())
    plain.load_state_dict({name: value * 2 for name, value in plain.state_dict().items()})
    with pytest.warns(UserWarning, match=r"'up\.weight' of the original model was changed after compile"):
        compiled.forward_backward(x=x())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.forward_backward(x=x())


# ---- inputs ----


class Scaled:
    """Tells nothing of itself."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def times(self, out: Tensor) -> Tensor:
        return out * self.scale


@dataclass
class Given:
    """Taken apart where it holds a tensor."""

    scale: Any


def grown(array: np.ndarray) -> None:
    array[1500] = 3.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how, change", [
    (Scaled(2.0), lambda how: setattr(how, "scale", 3.0)),
    (types.SimpleNamespace(scale=2.0), lambda how: setattr(how, "scale", 3.0)),
    (Scaled(torch.tensor(2.0)), lambda how: setattr(how, "scale", torch.tensor(3.0))),
    (Given(2.0), lambda how: setattr(how, "scale", 3.0)),
    (Given(torch.tensor(2.0)), lambda how: setattr(how, "scale", torch.tensor(3.0))),
    ({"scale": 2.0}, lambda how: how.update(scale=3.0)),
    (np.full(3000, 2.0), grown),
])  # fmt: skip
def test_inputs_beside_tensors_are_what_they_hold(mesh: DeviceMesh, how: Any, change: Callable[[Any], None]) -> None:
    compiled, plain = pair(mesh, how=how)
    for _ in range(2):
        torch.testing.assert_close(compiled.forward_backward(x=x(), how=how)["loss"], plain(x(), how)["loss"].detach())
        change(how)


def test_inputs_that_cannot_be_followed_are_refused(mesh: DeviceMesh) -> None:
    scale = 2.0
    for how in (lambda out: out * scale, Scaled(2.0).times, nn.Tanh()):
        with pytest.raises(InputError, match=r"input how\S* is a \w+, which the compiled program cannot follow.*pass"):
            pair(mesh, how=how)
    compiled, plain = pair(mesh, how=torch.tanh)
    torch.testing.assert_close(compiled(x=x(), how=torch.tanh)["loss"], plain(x(), torch.tanh)["loss"])
