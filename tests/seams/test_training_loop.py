"""What people do in a loop around a compiled model: it is as without compiling, or refused with the remedy."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import prune as prune_utils
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan
from galvatron_fx.errors import InputError


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Net(nn.Module):
    """Two layers; ``returns`` makes what is returned of hidden values, prediction and target."""

    def __init__(self, returns: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.drop = nn.Dropout(0.5)
        self.returns = returns

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = self.drop(self.up(x).tanh())
        return self.returns(hidden, self.down(hidden), y)


class Parts(NamedTuple):
    """Two losses with names that say nothing."""

    first: Tensor
    second: Tensor


def with_logits(hidden: Tensor, out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"loss": (out - y).square().mean(), "logits": out}


def terms(hidden: Tensor, out: Tensor, y: Tensor) -> dict[str, Tensor]:
    return {"cls": (out - y).square().mean(), "reg": hidden.square().sum()}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(4, 6, generator=generator).double(),
        "y": torch.randn(4, 3, generator=generator).double(),
    }


def pair(mesh: DeviceMesh, returns: Callable[..., Any] = with_logits) -> tuple[DistributedGraphModule, Net]:
    """A compiled model beside the plain one, without dropout."""
    torch.manual_seed(0)
    plain = Net(returns).double()
    plain.drop.p = 0.0
    plan = Plan.uniform((1,), ("data",))
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=plan), plain


def same_gradients(compiled: nn.Module, plain: nn.Module) -> None:
    ours = dict(compiled.named_parameters())
    for name, parameter in plain.named_parameters():
        gradient = ours[name].grad
        assert (gradient is None) == (parameter.grad is None), name
        if gradient is not None and parameter.grad is not None:
            torch.testing.assert_close(gradient.full_tensor(), parameter.grad, rtol=1e-10, atol=1e-12)


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


def asked_for(model: nn.Module) -> None:
    parameters = list(model.parameters())
    loss = model(**batch())["loss"]
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        parameter.grad = gradient


@pytest.mark.parametrize("use", [
    backward_twice, each_loss_alone, accumulate, zeros_stay, change_what_backward_does_not_read,
    gradient_of_a_scaled_loss, asked_for,
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


@pytest.mark.parametrize("use, said", [
    (step_first, "parameter 'down.weight' was changed in place between forward and backward"),
    (change_a_weight, "parameter 'down.weight' was changed in place between forward and backward"),
    (backward_again, "backward\\(\\) ran twice on one forward"),
    (second_derivative, "create_graph=True asks for gradients of gradients"),
])  # fmt: skip
def test_wrong_ways_to_call_backward(mesh: DeviceMesh, use: Callable[..., None], said: str) -> None:
    compiled, _ = pair(mesh)
    with pytest.raises(InputError, match=said):
        use(compiled, compiled(**batch())["loss"])


def test_a_batch_changed_before_backward_is_refused(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh)
    given = batch()
    loss = compiled(**given)["loss"]
    given["x"].zero_()
    with pytest.raises(InputError, match="input 'x' was changed in place"):
        loss.backward()


# ---- switched, converted or hooked after compile ----


class Normed(nn.Module):
    """A batch norm and dropout, which evaluate otherwise than they train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.9))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        loss: Tensor = (self.head(self.body(x)) - y).square().mean()
        return loss


def normed(mesh: DeviceMesh, switch: Callable[[Normed], object] = nn.Module.train) -> tuple[Any, Normed]:
    """A compiled model beside the plain one, both switched before."""
    torch.manual_seed(0)
    plain = Normed().double()
    switch(plain)
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=Plan.uniform((1,), ("data",))), plain


def modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def same_step(compiled: Any, plain: nn.Module, rows: int = 4) -> None:
    """Equal in loss, gradients and buffers, without dropout."""
    given = {name: value[:rows] for name, value in batch().items()}
    compiled.zero_grad()
    plain.zero_grad()
    loss, expected = compiled.forward_backward(**given), plain(**given)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-10, atol=0)
    same_gradients(compiled, plain)
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(compiled.get_buffer(name), buffer, rtol=1e-10, atol=1e-12)


def frozen_norm(model: nn.Module) -> None:
    model.get_submodule("body.1").eval()
    model.get_submodule("body.2").eval()


@pytest.mark.parametrize("before, after", [
    (nn.Module.eval, nn.Module.eval),
    (nn.Module.train, nn.Module.eval),
    (frozen_norm, lambda model: None),
    (nn.Module.train, frozen_norm),
    (nn.Module.eval, lambda model: setattr(model.get_submodule("body.1"), "training", True)),
    (nn.Module.train, lambda model: setattr(model.get_submodule("body"), "training", False) or frozen_norm(model)),
])  # fmt: skip
def test_modules_train_and_evaluate_as_switched(mesh: DeviceMesh, before: Any, after: Any) -> None:
    compiled, plain = normed(mesh, before)
    for model in (compiled, plain):
        after(model)
    assert modes(compiled) == modes(plain)
    same_step(compiled, plain)
    same_step(compiled, plain, rows=3)


def test_a_model_compiled_for_evaluation_trains_after_train(mesh: DeviceMesh) -> None:
    compiled, plain = normed(mesh, nn.Module.eval)
    with torch.no_grad():
        torch.testing.assert_close(compiled(**batch()), plain(**batch()))
    before = compiled.get_buffer("body.1.running_mean").clone()
    assert compiled.train().training
    first, second = compiled.forward_backward(**batch()), compiled.forward_backward(**batch())
    assert first != second, "dropout did nothing"
    assert not compiled.get_buffer("body.1.running_mean").equal(before)


def test_a_train_method_of_the_model_is_called(mesh: DeviceMesh) -> None:
    class Frozen(Normed):
        def train(self, mode: bool = True) -> Frozen:
            super().train(mode)
            frozen_norm(self)
            return self

    plain = Frozen().double()
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    for model in (compiled, plain):
        model.eval()
        model.train()
    assert modes(compiled) == modes(plain)
    same_step(compiled, plain)


class Adapted(Normed):
    """A layer with an adapter, which ``eval`` merges into its weight, as in LoRA; ``how`` it writes."""

    how = "add"

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(3, 1, bias=False), nn.Linear(1, 3, bias=False)
        self.merged = False

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if self.merged == mode:
            change = (self.up.weight @ self.down.weight).detach() @ self.head.weight.detach() * (-1 if mode else 1)
            if self.how == "add":
                self.head.weight.data.add_(change)
            elif self.how == "data":
                self.head.weight.data = self.head.weight.data + change
            elif self.how == "parameter":
                self.head.weight = nn.Parameter(self.head.weight.detach() + change)
            elif self.how == "buffer":
                self.get_buffer("body.1.running_mean").zero_()
            self.merged = not mode
        return self


@pytest.mark.parametrize("how", ["add", "data", "parameter", "buffer"])
def test_weights_that_train_and_eval_merge_are_refused_by_name(mesh: DeviceMesh, how: str) -> None:
    plain = Adapted().double()
    plain.how = how
    compiled = galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    before, name = modes(compiled), r"body\.1\.running_mean" if how == "buffer" else r"head\.weight"
    with pytest.raises(InputError, match=rf"eval\(\) of Adapted changes '{name}'.*merge before compile"):
        compiled.eval()
    assert modes(compiled) == before and compiled.training
    compiled.train().forward_backward(**batch())


class Staged(Normed):
    """A module whose ``train`` freezes a part, and sets a plain attribute that forward reads."""

    scale = 1.0
    rounds = 0

    def train(self, mode: bool = True) -> Staged:
        super().train(mode)
        frozen_norm(self)
        self.rounds += mode
        self.scale = 2.0 * self.rounds if mode else 1.0
        self.head.weight.requires_grad_(not mode)
        return self

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, y) * self.scale


def test_what_train_sets_beside_the_mode_holds(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Staged().double()
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    for _ in range(2):
        for mode in (True, False):
            for model in (compiled, plain):
                model.train(mode)
            same_step(compiled, plain)
    assert plain.rounds == 2


@pytest.mark.parametrize("name", ["up.weight", "down.bias"])
def test_parameters_are_frozen_and_trained_again_after_compile(mesh: DeviceMesh, name: str) -> None:
    compiled, plain = pair(mesh)
    for flag in (False, True):
        for model in (compiled, plain):
            model.zero_grad()
            model.get_parameter(name).requires_grad_(flag)
        compiled.forward_backward(**batch())
        plain(**batch())["loss"].backward()
        same_gradients(compiled, plain)
        assert (plain.get_parameter(name).grad is not None) == flag
        for model in (compiled, plain):
            model.zero_grad()
            model(**batch())["loss"].backward()
        same_gradients(compiled, plain)
    for model in (compiled, plain):
        model.requires_grad_(False)
    with pytest.raises(InputError, match="returns no scalar loss"):
        compiled.forward_backward(**batch())


def test_autocast_around_a_step_is_refused_with_the_remedy(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh)
    remedy = r"mixed_precision=MixedPrecisionPolicy\(param_dtype=torch.bfloat16\)"
    with torch.autocast("cpu", torch.bfloat16):
        for call in (compiled.forward_backward, compiled):
            with pytest.raises(InputError, match=remedy):
                call(**batch())
        with pytest.raises(InputError, match=remedy):
            pair(mesh)
        with torch.autocast("cpu", enabled=False):
            loss = compiled(**batch())["loss"]
        loss.backward()  # many call it inside
    plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)


def test_autocast_of_the_dtype_that_is_computed_in_changes_nothing(mesh: DeviceMesh) -> None:
    plain = Net(with_logits)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    given = {name: value.float() for name, value in batch().items()}
    plan = Plan.uniform((1,), ("data",))
    compiled = galvatron_fx.compile(plain.eval(), mesh, given, plan=plan, mixed_precision=policy)
    gradients = []
    for enabled in (False, True):
        compiled.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            compiled.forward_backward(**given)
            compiled(**given)["loss"].backward()
        gradients.append([p.grad.to_local() for p in compiled.parameters()])
    assert all(map(torch.equal, *gradients))
    with torch.autocast("cpu", torch.float16), pytest.raises(InputError, match=r"which now has torch.bfloat16"):
        compiled.forward_backward(**given)


@pytest.mark.parametrize("convert, said", [
    (lambda m: m.to(torch.bfloat16), "stay torch.float64.*MixedPrecisionPolicy"),
    (lambda m: m.half(), "stay torch.float64.*cannot become torch.float16"),
    (lambda m: m.float(), "stay torch.float64"),
    (lambda m: m.get_submodule("up").to(torch.float16), "stay torch.float64"),
    (lambda m: m.to("meta"), "stay on cpu.*compile for a mesh of meta"),
    (lambda m: m.to_empty(device="meta"), "stay on cpu"),
])  # fmt: skip
def test_conversions_after_compile_are_refused(mesh: DeviceMesh, convert: Callable[..., Any], said: str) -> None:
    compiled, plain = pair(mesh)
    with pytest.raises(InputError, match=said):
        convert(compiled)
    assert compiled.to("cpu").double().to(torch.float64) is compiled
    compiled.forward_backward(**batch())
    plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)


def hook_of_a_module(model: DistributedGraphModule) -> None:
    model.get_submodule("up").register_forward_hook(lambda *_: None)


def backward_hook_of_a_module(model: DistributedGraphModule) -> None:
    model.get_submodule("up").register_full_backward_hook(lambda *_: None)


def backward_hook_of_the_model(model: DistributedGraphModule) -> None:
    model.register_full_backward_hook(lambda *_: None)
    model.forward_backward(**batch())


def another_parameter(model: Any) -> None:
    model.up.weight = nn.Parameter(torch.zeros(8, 6))


def another_rate(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3


def parametrize(model: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.up)


def prune(model: Any) -> None:
    prune_utils.l1_unstructured(model.up, "weight", 0.5)


def call_a_module(model: Any) -> None:
    model.up(batch()["x"])


@pytest.mark.parametrize("change, said", [
    (hook_of_a_module, "would never be called \\('up'\\)"),
    (backward_hook_of_a_module, "would never be called \\('up'\\)"),
    (backward_hook_of_the_model, "backward hooks, which forward_backward cannot call"),
    (another_parameter, "'up.weight' is assigned after compile.*copy_"),
    (another_rate, "'drop.p' is assigned after compile.*compile again"),
    (parametrize, "after compile: change the model before compile|is assigned after compile"),
    (prune, "'up' is given other parts after compile"),
    (call_a_module, "module 'up' of a compiled model cannot be called by itself"),
])  # fmt: skip
def test_changes_that_come_too_late_are_refused(mesh: DeviceMesh, change: Callable[..., None], said: str) -> None:
    compiled, _ = pair(mesh)
    with pytest.raises(InputError, match=said):
        change(compiled)


def test_hooks_of_the_model_and_of_its_parameters_are_called(mesh: DeviceMesh) -> None:
    def scale(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(5)

    def hook(model: Any, calls: list[str]) -> None:
        model.register_forward_pre_hook(lambda *_: calls.append("before"))
        model.register_forward_hook(lambda _, __, out: calls.append(f"after {sorted(out)}"))
        model.get_parameter("up.weight").register_hook(lambda gradient: gradient * 3)
        model.get_parameter("up.bias").register_hook(lambda _: calls.append("gradient"))
        model.get_parameter("down.bias").register_post_accumulate_grad_hook(scale)

    (compiled, plain), ours, theirs = pair(mesh), [], []  # type: ignore[var-annotated]
    hook(compiled, ours)
    hook(plain, theirs)
    compiled.forward_backward(**batch())
    compiled(**batch())["loss"].backward()
    for _ in range(2):
        plain(**batch())["loss"].backward()
    assert sorted(ours) == sorted(theirs)
    same_gradients(compiled, plain)


def test_gradients_that_lie_otherwise_are_refused(mesh: DeviceMesh) -> None:
    compiled, _ = pair(mesh)
    weight = compiled.get_parameter("up.weight")
    weight.grad = DTensor.from_local(torch.zeros(8, 6).double(), weight.device_mesh, [Partial()])
    with pytest.raises(InputError, match=r"gradient of 'up.weight' has \(Partial"):
        compiled.forward_backward(**batch())


def test_another_thread_is_refused(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh)
    errors: list[Exception] = []

    def other() -> None:
        try:
            compiled.forward_backward(**batch())
        except InputError as error:
            errors.append(error)

    def meanwhile(_: Tensor) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    handle = compiled.get_parameter("up.bias").register_hook(meanwhile)
    compiled.forward_backward(**batch())
    handle.remove()
    assert "another thread runs this compiled model" in str(errors[0])
    plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)
    other()
    assert len(errors) == 1


def test_a_model_compiled_at_its_first_call_keeps_what_was_set_before(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Normed().double().eval()
    lazy = galvatron_fx.compile(copy.deepcopy(plain), mesh, plan=Plan.uniform((1,), ("data",)))
    assert not lazy.training
    calls: list[str] = []
    lazy.register_forward_hook(lambda *_: calls.append("after"))
    with torch.no_grad():
        torch.testing.assert_close(lazy.train().eval()(**batch()), plain(**batch()))
    assert calls == ["after"]
    same_step(lazy, plain)
    lazy = galvatron_fx.compile(copy.deepcopy(plain), mesh, plan=Plan.uniform((1,), ("data",)))
    assert lazy.train().forward_backward(**batch()) != plain(**batch()), "dropout did nothing"
    assert lazy.training


def test_an_optimizer_built_before_compile_is_refused(mesh: DeviceMesh) -> None:
    plain = Net(with_logits).double()
    head = nn.Linear(3, 1).double()
    optimizer = torch.optim.AdamW([*plain.parameters(), *head.parameters()])
    compiled = galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    compiled.forward_backward(**batch())
    head.weight.grad = torch.ones_like(head.weight)
    with pytest.raises(InputError, match=r"AdamW holds parameters of the model that was compiled \('up.weight'\)"):
        optimizer.step()
    plain(**batch())["loss"].backward()  # the original may be trained itself
    optimizer.step()
    torch.optim.AdamW(compiled.parameters()).step()


@pytest.mark.parametrize("register, error", [
    (lambda m: m.up.register_full_backward_hook(lambda *_: None), "module 'up' has a backward hook"),
    (lambda m: m.up.weight.register_hook(lambda _: None), "parameter 'up.weight' has a hook"),
    (lambda m: m.up.weight.register_post_accumulate_grad_hook(lambda _: None), "parameter 'up.weight' has a hook"),
])  # fmt: skip
def test_hooks_of_gradients_before_compile_are_refused(mesh: DeviceMesh, register: Any, error: str) -> None:
    plain = Net(with_logits).double()
    handle = register(plain)
    with pytest.raises(InputError, match=error):
        galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    handle.remove()
    galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))


def test_forward_hooks_before_compile_are_traced_with_a_warning(mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    plain = Net(with_logits).double().eval()
    plain.up.register_forward_hook(lambda _, __, out: out * 2)
    with pytest.warns(UserWarning, match=r"module 'up' has the forward hook .*<lambda>"):
        compiled = galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    compiled.forward_backward(**batch())
    plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)


@pytest.mark.parametrize("register, name", [
    (lambda m: m.up.register_forward_hook(lambda *_: None), "up"),
    (lambda m: m.down.register_full_backward_hook(lambda *_: None), "down"),
    (lambda m: m.up.weight.register_hook(lambda _: None), "up.weight"),
])  # fmt: skip
def test_hooks_of_the_original_after_compile_are_told_of_once(mesh: DeviceMesh, register: Any, name: str) -> None:
    plain = Net(with_logits).double()
    compiled = galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    register(plain)
    with pytest.warns(UserWarning, match=f"a hook was registered on '{name}' of the original model after compile"):
        compiled.forward_backward(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled.forward_backward(**batch())


# ---- what torch does to whole models ----


def test_copies_have_weights_and_modes_of_their_own(mesh: DeviceMesh) -> None:
    compiled, plain = normed(mesh, frozen_norm)
    other = copy.deepcopy(compiled)
    for model in (compiled, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.zero_grad()
        (model(**batch())).backward()
        optimizer.step()
    kept = copy.deepcopy(other)
    assert modes(kept) == modes(compiled)
    kept.train()
    assert modes(kept) != modes(compiled)
    same_step(compiled, plain)
    same_step(other, copy.deepcopy(normed(mesh, frozen_norm)[1]))
    with pytest.raises(InputError, match=r"cannot be pickled: save its weights with galvatron_fx.save_weights"):
        pickle.dumps(compiled)


@pytest.mark.parametrize("options", [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_averages_of_weights(mesh: DeviceMesh, options: dict[str, Any]) -> None:
    compiled, plain = normed(mesh, frozen_norm)
    averages = []
    for model in (compiled, plain):
        average = AveragedModel(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            model(**batch()).backward()
            optimizer.step()
            average.update_parameters(model)
        with torch.no_grad():
            averages.append(average.eval()(**batch()))
    torch.testing.assert_close(*averages, rtol=1e-10, atol=0)


def test_norms_are_not_renewed_by_torch(mesh: DeviceMesh) -> None:
    compiled, _ = normed(mesh)
    with pytest.raises(InputError, match=r"'body.1' of a compiled model has no 'reset_running_stats'"):
        update_bn([batch()["x"]], compiled)


def test_a_scaler_scales_the_loss(mesh: DeviceMesh) -> None:
    compiled, plain = pair(mesh)
    scales = []
    for model in (compiled, plain):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for blow_up in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(**batch())["loss"] * blow_up).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1]
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(compiled.get_parameter(name).full_tensor(), parameter, rtol=1e-10, atol=1e-12)


# ---- optimizers ----


def test_states_that_the_plan_does_not_count_are_told_of_once(mesh: DeviceMesh) -> None:
    plain = Net(with_logits).double()
    compiled = galvatron_fx.compile(plain, mesh, batch(), optimizer="sgd")
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled.forward_backward(**batch())
    states = 2 * 8 * (6 * 8 + 8 + 8 * 3 + 3)
    with pytest.warns(UserWarning, match=rf"this AdamW keeps .*\({states} bytes\) .* counts 0 B \(0 bytes\).*='sgd'"):
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        torch.optim.SGD(compiled.parameters(), lr=0.1).step()


def test_states_that_the_plan_counts_are_not_told_of(mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(Net(with_logits).double(), mesh, batch())
    compiled.forward_backward(**batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for make in (torch.optim.AdamW, torch.optim.Adafactor):
            make(compiled.parameters()).step()
