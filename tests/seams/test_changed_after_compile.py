"""Models that are switched, converted or hooked around compile: as without compiling, or refused with the remedy."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial
from torch.nn.utils import prune as prune_utils

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan
from galvatron_fx.errors import InputError
from tests.seams.one_rank import (
    Net,
    Normed,
    batch,
    frozen_norm,
    modes,
    normed,
    pair,
    same_gradients,
    same_step,
    with_logits,
)


@pytest.mark.sampled(4)
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
    with pytest.raises(InputError, match=r"depends on a parameter that trains.*requires_grad_\(\)"):
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


def test_transforms_of_functions_are_refused_with_the_remedy(mesh: DeviceMesh) -> None:
    """Their derivatives would be zero, or missing."""
    compiled, plain = pair(mesh)
    given = batch()

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = compiled(**{**given, "x": x})["loss"]
        return loss

    x = given["x"]
    for transform in (
        lambda: torch.func.jvp(loss_of, (x,), (x,)),
        lambda: torch.func.grad(loss_of)(x),
        lambda: torch.func.vmap(loss_of)(x[None]),
    ):
        with pytest.raises(InputError, match=r"do not reach a compiled program.*use loss\.backward\(\)"):
            transform()
    with torch.autograd.forward_ad.dual_level():
        with pytest.raises(InputError, match="forward-mode derivatives"):
            loss_of(torch.autograd.forward_ad.make_dual(x, x))
        loss_of(x).backward()
    plain(**given)["loss"].backward()
    same_gradients(compiled, plain)


def test_a_model_that_is_compiled_by_inference_trains_later(mesh: DeviceMesh) -> None:
    plain = Normed().double().eval()
    lazy = galvatron_fx.compile(copy.deepcopy(plain), mesh, plan=Plan.uniform((1,), ("data",)))
    with torch.inference_mode():
        torch.testing.assert_close(lazy(**batch()), plain(**batch()))
    same_step(lazy, plain)


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


def test_a_loop_that_calls_the_original_is_refused(mesh: DeviceMesh) -> None:
    """It would go on, and train nothing."""
    plain = Net(with_logits).double()
    compiled = galvatron_fx.compile(plain, mesh, batch(), plan=Plan.uniform((1,), ("data",)))
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    optimizer.step()  # before any gradient, as schedulers are warmed up
    plain(**batch())["loss"].backward()
    with pytest.raises(InputError, match=r"SGD updates a compiled model, none of .* call what compile returned"):
        optimizer.step()
    compiled(**batch())["loss"].backward()
    optimizer.step()


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
