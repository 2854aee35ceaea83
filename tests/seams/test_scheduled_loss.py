"""``loss.backward()`` under micro-batches, whose backward runs with forward: as without compiling, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Pipelining, Plan
from galvatron_fx.errors import InputError
from tests.seams.one_rank import batch, pair, same_gradients, terms, with_logits
from tests.seams.test_training_loop import (
    accumulate,
    asked_for,
    backward_twice,
    change_what_backward_does_not_read,
    gradient_of_a_scaled_loss,
    penalty_on_weights,
    zeros_stay,
)


def any_function_of_the_loss(model: nn.Module) -> None:
    loss = model(**batch())["loss"]
    (loss.exp() + loss**2 / 3).backward()


def losses_of_two_calls(model: nn.Module) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for scale in (0.5, -2.0):
        given = {name: scale * value for name, value in batch().items()}
        total = total + scale * model(**given)["loss"]
    total.backward()


def divided_in_place(model: nn.Module) -> None:
    loss = model(**batch())["loss"]
    loss /= 4
    loss.backward()


def one_that_is_dropped(model: nn.Module) -> None:
    model(**batch())
    model(**batch())["loss"].backward()


def hooked(model: nn.Module) -> None:
    """Of the model, of its parameters, and after accumulation."""

    def enlarge(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(5)

    weight = model.get_parameter("down.weight")
    model.register_forward_hook(lambda module, args, out: {"loss": 3 * out["loss"]})
    weight.register_hook(lambda gradient: 2 * gradient)
    weight.register_post_accumulate_grad_hook(enlarge)
    model(**batch())["loss"].backward()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use", [
    any_function_of_the_loss, losses_of_two_calls, divided_in_place, one_that_is_dropped, hooked, accumulate,
    asked_for, backward_twice, change_what_backward_does_not_read, gradient_of_a_scaled_loss,
    penalty_on_weights, zeros_stay,
])  # fmt: skip
def test_ways_to_call_backward(mesh: DeviceMesh, use: Callable[[nn.Module], None]) -> None:
    compiled, plain = pair(mesh, microbatches=2)
    use(compiled)
    use(plain)
    same_gradients(compiled, plain)


def test_both_ways_of_training_add_up(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh, microbatches=2)
    compiled.forward_backward(**batch())
    compiled(**batch())["loss"].backward()
    compiled.forward_backward(**batch())
    for _ in range(3):
        plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)


def test_an_equal_gradient_of_two_parameters_is_scaled_once(mesh: DeviceMesh) -> None:
    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(6, dtype=torch.float64)) for _ in range(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x + self.a + self.b).square().mean()

    plain = Biases()
    plan = Plan.uniform((1,), ("data",), pipelining=Pipelining(1, 2))
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=plan)
    for model in (compiled, plain):
        (3 * model(**batch())).backward()
    same_gradients(compiled, plain)


def test_no_loss_is_refused_by_name(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh, terms, microbatches=2)
    said = (
        r"several scalars that need gradients \('cls', 'reg'\).*a plan with stages or micro-batches differentiates: "
        r"return their sum as 'loss'.*evaluate under torch.no_grad"
    )
    for call in (compiled, compiled.forward_backward):
        with pytest.raises(InputError, match=said):
            call(**batch())
    with torch.no_grad():
        for name, value in plain(**batch()).items():
            torch.testing.assert_close(compiled(**batch())[name], value, rtol=1e-10, atol=1e-12)


def test_a_call_without_labels_evaluates(mesh: DeviceMesh) -> None:
    def labelled(hidden: Tensor, out: Tensor, y: Tensor | None) -> dict[str, Tensor]:
        return {"logits": out} if y is None else with_logits(hidden, out, y)

    compiled, plain = pair(mesh, labelled, microbatches=2)
    x = batch()["x"]
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, None)["logits"], plain(x, None)["logits"], rtol=1e-10, atol=1e-12)
    with pytest.raises(InputError, match=r"no scalar loss.*pass labels, or evaluate under torch\.no_grad"):
        compiled(x, None)
    for model in (compiled, plain):
        model(**batch())["loss"].backward()
    same_gradients(compiled, plain)


def test_a_gradient_at_another_output_is_refused_by_name(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh, lambda h, o, y: {"loss": (o - y).square().mean(), "reg": h.square().sum()}, microbatches=2)
    out = compiled(**batch())
    with pytest.raises(InputError, match="arrives at output 'reg'"):
        (out["loss"] + out["reg"]).backward()
    assert all(parameter.grad is None for parameter in compiled.parameters())


def test_a_frozen_model_evaluates_under_grad_mode(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh, microbatches=2)
    for model in (compiled, plain):
        model.requires_grad_(False)
    loss = compiled(**batch())["loss"]
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(**batch())["loss"], rtol=1e-10, atol=0)
