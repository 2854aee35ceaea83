"""What people do with losses in a loop around a compiled model: as without compiling, or refused with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx import DistributedGraphModule
from galvatron_fx.errors import InputError
from tests.seams.one_rank import Parts, batch, pair, same_gradients, terms

# ---- losses ----


@pytest.mark.parametrize("returns", [
    terms, lambda h, o, y: tuple(terms(h, o, y).values()), lambda h, o, y: Parts(*terms(h, o, y).values()),
])  # fmt: skip
def test_several_losses_without_one_called_loss_are_refused_by_name(mesh: DeviceMesh, returns: Any) -> None:
    compiled, plain = pair(mesh, returns)
    names = {dict: "'cls', 'reg'", tuple: "'0', '1'", Parts: "'first', 'second'"}[type(plain(**batch()))]
    with pytest.raises(
        InputError, match=f"several scalars that need gradients \\({names}\\).*return their sum as 'loss'"
    ):
        compiled.forward_backward(**batch())


@pytest.mark.parametrize("weights", [(2.0, -3.0), (1.0, 0.0)])
def test_any_combination_of_losses_is_differentiated(mesh: DeviceMesh, weights: tuple[float, float]) -> None:
    compiled, plain = pair(mesh, terms)
    for model in (compiled, plain):
        out = model(**batch())
        (weights[0] * out["cls"] + weights[1] * out["reg"]).backward()
    same_gradients(compiled, plain)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_is_scaled_in_place(mesh: DeviceMesh, microbatches: int) -> None:
    """As Trainer of transformers does, also where the loss is a view of what the program made."""
    compiled, plain = pair(mesh, lambda h, o, y: {"loss": (o - y).square().mean(0, keepdim=True).mean(1).view(())},
                           microbatches)  # fmt: skip
    for model in (compiled, plain):
        loss = model(**batch())["loss"]
        loss *= 3
        loss.backward()
    same_gradients(compiled, plain)


def test_a_loss_alone_of_several_is_differentiated(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh, terms)
    for model in (compiled, plain):
        model(**batch())["reg"].backward()
    same_gradients(compiled, plain)


@pytest.mark.parametrize("returns", [
    lambda h, o, y: {"reg": h.square().sum(), "loss": (o - y).square().mean()},
    lambda h, o, y: {"parts": {"loss": h.square().sum()}, "loss": (o - y).square().mean()},
    lambda h, o, y: {"metric": h.square().sum().detach(), "mse": (o - y).square().mean()},
])  # fmt: skip
def test_the_output_called_loss_or_the_only_one_is_the_loss(mesh: DeviceMesh, returns: Any) -> None:
    compiled, plain = pair(mesh, returns)
    compiled.forward_backward(**batch())
    out = plain(**batch())
    out.get("loss", out.get("mse")).backward()
    same_gradients(compiled, plain)


def test_one_loss_under_two_names_is_the_loss(mesh: DeviceMesh) -> None:
    def twice(hidden: Tensor, out: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = (out - y).square().mean()
        return {"total": loss, "objective": loss}

    compiled, plain = pair(mesh, twice)
    compiled.forward_backward(**batch())
    plain(**batch())["total"].backward()
    same_gradients(compiled, plain)


def test_a_gradient_at_a_detached_output_is_refused_by_name(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh)
    out = compiled(**batch())
    with pytest.raises(InputError, match=r"arrives at output 'logits'.*wrapper module that returns it as 'loss'"):
        (out["loss"] + out["logits"].softmax(-1).square().sum()).backward()
    assert all(parameter.grad is None for parameter in compiled.parameters())
    head = nn.Linear(3, 1).double()
    out = compiled.forward_backward(**batch())
    with pytest.raises(InputError, match="arrives at output 'logits'"):
        head(out["logits"]).sum().backward()


def test_a_gradient_at_another_scalar_after_a_step_is_refused(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh, lambda h, o, y: {"loss": (o - y).square().mean(), "reg": h.square().sum()})
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = compiled.forward_backward(**batch())
    with pytest.raises(InputError, match="arrives at output 'reg'"):
        (weight * out["reg"]).backward()


def test_reading_detached_outputs_is_free(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh)
    out = compiled(**batch())
    assert out["logits"].argmax(-1).equal(plain(**batch())["logits"].argmax(-1))
    (out["loss"] + out["logits"].detach().square().sum()).backward()
    plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)
    with torch.no_grad():
        assert not compiled(**batch())["logits"].requires_grad
    assert compiled.forward_backward(**batch())["loss"].numpy() > 0


def test_a_loss_outside_of_a_model_without_one(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh, lambda h, o, y: {"hidden": h, "logits": o})
    with pytest.raises(InputError, match="returns no scalar loss"):
        compiled.forward_backward(**batch())
    for model in (compiled, plain):
        out = model(**batch())
        (out["logits"].square().mean() + out["hidden"].sum()).backward()
    same_gradients(compiled, plain)
    for model in (compiled, plain):
        model(**batch())["logits"].square().mean().backward()
    same_gradients(compiled, plain)


def test_gradients_of_what_no_loss_depends_on_are_none(mesh: DeviceMesh) -> None:
    """Zeros would have weights decay."""
    compiled, plain = pair(mesh, lambda h, o, y: {"loss": h.square().sum(), "reg": (o - y).square().mean()})
    compiled.forward_backward(**batch())
    plain(**batch())["loss"].backward()
    assert plain.down.weight.grad is None
    same_gradients(compiled, plain)


# ---- between forward and backward ----


def backward_twice(model: nn.Module) -> None:
    loss = model(**batch())["loss"]
    loss.backward(retain_graph=True)
    loss.backward()


def each_loss_alone(model: nn.Module) -> None:
    out = model(**batch())
    out["loss"].backward(retain_graph=True)
    out["reg"].backward()


def accumulate(model: nn.Module) -> None:
    for _ in range(2):
        model(**batch())["loss"].backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.div_(2)
    model(**batch())["loss"].backward()


def zeros_stay(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(**batch())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    model(**batch())["loss"].backward()


def change_what_backward_does_not_read(model: nn.Module) -> None:
    loss = model(**batch())["loss"]
    with torch.no_grad():
        dict(model.named_parameters())["down.bias"].add_(1.0)
    loss.backward()


def gradient_of_a_scaled_loss(model: nn.Module) -> None:
    (model(**batch())["loss"] * 1024).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad / 1024


def penalty_on_weights(model: nn.Module) -> None:
    """Which is added to the loss outside of the model."""
    (model(**batch())["loss"] / 2 + sum(weight.norm() for weight in model.parameters())).backward()


def asked_for(model: nn.Module) -> None:
    parameters = list(model.parameters())
    loss = model(**batch())["loss"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use", [
    backward_twice, each_loss_alone, accumulate, zeros_stay, change_what_backward_does_not_read,
    gradient_of_a_scaled_loss, penalty_on_weights, asked_for,
])  # fmt: skip
def test_ways_to_call_backward(mesh: DeviceMesh, use: Callable[[nn.Module], None]) -> None:
    compiled, plain = pair(mesh, lambda h, o, y: {"loss": (o - y).square().mean(), "reg": h.square().sum()})
    use(compiled)
    use(plain)
    same_gradients(compiled, plain)


def step_first(model: DistributedGraphModule, loss: Tensor) -> None:
    """An optimizer's step before backward."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(model.parameters()).step()
    loss.backward()


def change_a_weight(model: DistributedGraphModule, loss: Tensor) -> None:
    with torch.no_grad():
        model.get_parameter("down.weight").mul_(2.0)
    loss.backward()


def backward_again(model: DistributedGraphModule, loss: Tensor) -> None:
    loss.backward()
    loss.backward()


def second_derivative(model: DistributedGraphModule, loss: Tensor) -> None:
    torch.autograd.grad(loss, list(model.parameters()), create_graph=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use, said", [
    (step_first, "parameter 'down.weight' was changed in place between forward and backward"),
    (change_a_weight, "parameter 'down.weight' was changed in place between forward and backward"),
    (backward_again, "backward\\(\\) ran twice on one forward"),
    (second_derivative, "create_graph=True asks for gradients of gradients"),
])  # fmt: skip
@pytest.mark.parametrize("microbatches", [1, 2])
def test_wrong_ways_to_call_backward(mesh: DeviceMesh, use: Callable[..., None], said: str, microbatches: int) -> None:
    compiled, _ = pair(mesh, microbatches=microbatches)
    with pytest.raises(InputError, match=said):
        use(compiled, compiled(**batch())["loss"])


def test_a_batch_changed_before_backward_is_refused(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh)
    given = batch()
    loss = compiled(**given)["loss"]
    given["x"].zero_()
    with pytest.raises(InputError, match="input 'x' was changed in place"):
        loss.backward()
