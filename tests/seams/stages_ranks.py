"""Run by test_stages_and_torch.py: torch's utilities on plans with and without stages, on two ranks.

Prints ``ok <check>`` once for each check that holds on every rank, ``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan, Strategy
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.analysis.blocks import num_blocks
from tests.runtime.launch import Check, fork_checks
from tests.runtime.shared_lowerings import compile_before_the_fork
from tests.seams.adapter_checks import stages_switch_adapters

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".")
ROLES = ("data", "zero", "tensor", "mixed")


class Layers(nn.Module):
    """Equal layers between a wider first and last one; a loss, another scalar and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor | None = None) -> dict[str, Tensor]:
        """Return a loss, what depends on parameters that it does not depend on, and logits; these alone without y."""
        hidden = self.first(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        out = self.last(hidden)
        if y is None:
            return {"logits": out}
        return {"loss": (out - y).square().mean(), "reg": self.unused(hidden).square().mean(), "logits": out}


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(4, width, generator=generator).double() for name, width in (("x", 6), ("y", 4))}


def plan_of(role: str) -> Plan:
    """Under "mixed", neighbours are unlike, and parameters of every second block are on the host, as all of stages are;
    what enters the others waits there for backward.
    """
    away = {"offload_states": True, "offload_parameters": True}
    if role == "pipeline":
        return Plan.uniform((2,), ("pipeline",), **away, pipelining=Pipelining(2, 2, "1f1b"))
    if role != "mixed":
        return Plan.uniform((2,), (role,))
    blocks = num_blocks(galvatron_fx.capture(Layers().double(), batch()))
    strategies = [
        Strategy((ROLES[i % 3],), **(away if i % 2 == 0 else {"offload_entering": True})) for i in range(blocks)
    ]
    return Plan.from_roles((2,), strategies)


def pair(mesh: DeviceMesh, role: str) -> tuple[DistributedGraphModule, Layers]:
    """A compiled model beside the plain one."""
    torch.manual_seed(0)
    plain = Layers().double()
    return galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=plan_of(role)), plain


def refused(call: Callable[[], Any], said: str) -> None:
    try:
        call()
    except InputError as error:
        assert said in str(error), error
    else:
        raise AssertionError("it was not refused")


def same(got: Any, expected: Tensor, what: str) -> None:
    whole = got.full_tensor() if hasattr(got, "full_tensor") else got
    torch.testing.assert_close(whole.detach(), expected.detach(), rtol=1e-10, atol=1e-12, msg=lambda m: f"{what}: {m}")


def same_gradients(compiled: nn.Module, plain: nn.Module) -> None:
    """Of the parameters that this rank holds."""
    for name, parameter in compiled.named_parameters():
        expected = plain.get_parameter(name).grad
        assert (parameter.grad is None) == (expected is None), name
        if expected is not None:
            same(parameter.grad, expected, name)


def stages_refuse_norms(mesh: DeviceMesh) -> None:
    """Torch's clipping would give each stage another norm; the model's own is right."""
    compiled, plain = pair(mesh, "pipeline")
    compiled.forward_backward(**batch())
    plain(**batch())["loss"].backward()
    same_gradients(compiled, plain)
    parameters = list(compiled.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    remedy = "call model.clip_grad_norm_(max_norm)"
    for foreach in (None, False, True):
        refused(lambda f=foreach: nn.utils.clip_grad_norm_(parameters, 0.1, foreach=f), remedy)  # type: ignore[misc]
    refused(lambda: nn.utils.get_total_norm(gradients), remedy)
    for norm_type in (2.0, 1.0, float("inf")):
        given = copy.deepcopy(plain)
        for mine, theirs in zip(given.parameters(), plain.parameters(), strict=True):
            mine.grad = theirs.grad
        expected = nn.utils.get_total_norm([p.grad for p in given.parameters() if p.grad is not None], norm_type)
        same(compiled.clip_grad_norm_(1e9, norm_type), expected, f"norm {norm_type}")
    same(compiled.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(plain.parameters(), 0.1), "norm")
    same_gradients(compiled, plain)
    nn.utils.clip_grads_with_norm_(parameters, 0.01, torch.tensor(0.1, dtype=torch.float64))
    nn.utils.clip_grads_with_norm_(plain.parameters(), 0.01, torch.tensor(0.1, dtype=torch.float64))
    same_gradients(compiled, plain)
    nn.utils.clip_grad_value_(parameters, 1e-3)
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    same_gradients(compiled, plain)
    for gradient in gradients:
        assert gradient.norm().full_tensor() > 0, "of one gradient the norm is right"


def stages_train_with_torch_optimizers(mesh: DeviceMesh) -> None:
    for make in (
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ):
        compiled, plain = pair(mesh, "pipeline")
        optimizers = [make(model.parameters()) for model in (compiled, plain)]
        for _ in range(2):
            compiled.forward_backward(**batch())
            plain(**batch())["loss"].backward()
            compiled.clip_grad_norm_(0.5)
            nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        for name, parameter in compiled.named_parameters():
            same(parameter, plain.get_parameter(name), name)


def stages_refuse_whole_states(mesh: DeviceMesh) -> None:
    """A full state dict would be that of one rank's stages."""
    compiled, plain = pair(mesh, "pipeline")
    optimizer = torch.optim.AdamW(compiled.parameters())
    compiled.forward_backward(**batch())
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True)
    remedy = "galvatron_fx.save_weights(model, folder)"
    for options in (whole, StateDictOptions(full_state_dict=True, cpu_offload=True)):
        refused(lambda o=options: get_model_state_dict(compiled, options=o), remedy)  # type: ignore[misc]
    refused(lambda: get_optimizer_state_dict(compiled, optimizer, options=whole), remedy)
    refused(lambda: torch.save(compiled.state_dict(), io.BytesIO()), remedy)
    refused(lambda: torch.save(optimizer.state_dict(), io.BytesIO()), remedy)
    refused(lambda: torch.optim.LBFGS(compiled.parameters()).step(lambda: 0.0), "compile without stages (num_stages=1)")
    owner, _, name = next(name for name in plain.state_dict() if name not in compiled.state_dict()).rpartition(".")
    with pytest.raises(AttributeError, match=rf"'{owner}\.{name}' is not on this rank: under a plan with stages"):
        getattr(compiled.get_submodule(owner), name)
    own = get_model_state_dict(compiled)
    assert own.keys() == compiled.state_dict().keys() < plain.state_dict().keys()
    get_optimizer_state_dict(compiled, optimizer)
    held: list[Any] = [None, None]
    dist.all_gather_object(held, set(own))
    assert held[0] | held[1] == plain.state_dict().keys()


def stages_save_and_load_their_parts(mesh: DeviceMesh) -> None:
    """What DCP saves of all ranks is the whole model; load_state_dict takes a rank's own."""
    compiled, plain = pair(mesh, "pipeline")
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    dcp.save({"model": compiled.state_dict()}, checkpoint_id=FOLDER / "dcp")
    kept = {name: value.clone() for name, value in compiled.state_dict().items()}
    with torch.no_grad():
        for parameter in compiled.parameters():
            parameter.zero_()
    state = {"model": compiled.state_dict()}
    dcp.load(state, checkpoint_id=FOLDER / "dcp")
    for name, parameter in compiled.named_parameters():
        same(parameter, expected[name], name)
        parameter.detach().zero_()
    compiled.load_state_dict(kept)
    compiled.load_state_dict(compiled.state_dict())
    for name, parameter in compiled.named_parameters():
        same(parameter, expected[name], name)
        parameter.detach().zero_()
    for number, layer in enumerate(plain.layers):  # of which this rank holds some
        assert str(compiled.get_submodule(f"layers.{number}").load_state_dict(layer.state_dict())).startswith("<All")
    for name, parameter in compiled.named_parameters():
        same(parameter, expected[name] * name.startswith("layers."), name)
    compiled.load_state_dict(expected)
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"none"'):
        compiled.get_submodule("layers.0").load_state_dict(
            {**plain.layers[0].state_dict(), "none": expected["last.bias"]}
        )
    other = copy.deepcopy(compiled)
    other.forward_backward(**batch())
    plain(**batch())["loss"].backward()
    same_gradients(other, plain)
    assert all(parameter.grad is None for parameter in compiled.parameters())


def stages_refuse_flags(mesh: DeviceMesh) -> None:
    """The rank that changed one of its parameters names it; the other one is told, and does not wait."""
    for ranks, said in (((0, 1), "under a plan with stages"), ((0,), "train other parameters")):
        compiled, _ = pair(mesh, "pipeline")
        if dist.get_rank() in ranks:
            next(compiled.parameters()).requires_grad_(False)
            said = "under a plan with stages"
        refused(lambda m=compiled: m.forward_backward(**batch()), said)  # type: ignore[misc]


def stages_evaluate_frozen_averages(mesh: DeviceMesh) -> None:
    """Averages of weights are copies that are frozen: what that changes is backward alone, which is refused."""
    compiled, plain = pair(mesh, "pipeline")
    average = copy.deepcopy(compiled).requires_grad_(False)
    with torch.no_grad():
        same(average(**batch())["loss"], plain(**batch())["loss"], "loss")
        refused(lambda: average.forward_backward(**batch()), "under a plan with stages")
    refused(lambda: average(**batch()), "under a plan with stages")


def stages_differentiate(mesh: DeviceMesh) -> None:
    """``loss.backward()``: scaled, asked for, of a copy; gradients are of one stage, as those of forward_backward."""
    compiled, plain = pair(mesh, "pipeline")
    for model in (compiled, plain):
        for scale in (0.5, 3.0):
            (scale * model(**batch())["loss"]).backward()
    same_gradients(compiled, plain)
    for model in (compiled, copy.deepcopy(compiled)):
        model.zero_grad()
        model(**batch())["loss"].backward()
        refused(lambda m=model: nn.utils.clip_grad_norm_(m.parameters(), 0.1), "call model.clip_grad_norm_")  # type: ignore[misc]
    trained = {n: p for n, p in plain.named_parameters() if p.grad is not None}
    expected = dict(zip(trained, torch.autograd.grad(plain(**batch())["loss"], [*trained.values()]), strict=True))
    held = [name for name, _ in compiled.named_parameters() if name in trained]
    asked = torch.autograd.grad(compiled(**batch())["loss"], [compiled.get_parameter(name) for name in held])
    for name, gradient in zip(held, asked, strict=True):
        same(gradient, expected[name], name)
    refused(lambda: compiled(**batch())["reg"].backward(), "output 'reg'")
    refused(lambda: compiled(**batch())["loss"].backward(create_graph=True), "create_graph=True")


def outputs_with_dims_where_they_are(mesh: DeviceMesh) -> None:
    """The loss is everywhere; logits of a step in micro-batches nowhere, of evaluation on the last stage."""
    compiled, plain = pair(mesh, "pipeline")
    out = compiled.forward_backward(**batch())
    same(out["loss"], plain(**batch())["loss"], "loss")
    reads = (
        lambda: out["logits"].argmax(-1),
        lambda: torch.argmax(out["logits"], -1),
        lambda: torch.stack([out["logits"], out["logits"]]),
        lambda: out["logits"] * 2,
        lambda: out["logits"][0],
        lambda: float(out["logits"]),
        lambda: [row for row in out["logits"]],
    )
    for read in reads:
        refused(read, "output 'logits' is not on this rank: ")
    assert "not on this rank" in repr(copy.deepcopy(out["logits"]))
    with torch.no_grad():
        out, unlabelled = compiled.eval()(**batch()), compiled(batch()["x"])
    if mesh.get_rank() == 1:
        for made in (out, unlabelled):
            same(made["logits"], plain(**batch())["logits"], "logits")
    else:
        refused(lambda: out["logits"].argmax(-1), "or compile with num_stages=1, num_microbatches=1")


def stages_without_parameters_to_train(mesh: DeviceMesh) -> None:
    """The loss needs a gradient on a rank that trains nothing, too."""
    torch.manual_seed(0)
    plain = Layers().double()
    for part in (plain.first, *plain.layers[:2]):
        part.requires_grad_(False)
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2, "1f1b"))
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, batch(), plan=plan)
    trains = [None, None]
    dist.all_gather_object(trains, any(parameter.requires_grad for parameter in compiled.parameters()))
    assert trains == [False, True]
    for model in (compiled, plain):
        model(**batch())["loss"].backward()
    same_gradients(compiled, plain)


def stages_skip_infinite_steps_together(mesh: DeviceMesh) -> None:
    """A scaler that sees an infinity in one stage skips the step of all."""
    compiled, plain = pair(mesh, "pipeline")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (compiled, plain)]
    for is_infinite in (True, False):
        scaler.scale(compiled(**batch())["loss"]).backward()
        if is_infinite and dist.get_rank() == 1:
            next(p.grad for p in compiled.parameters() if p.grad is not None).to_local().fill_(float("inf"))
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        for name, parameter in compiled.named_parameters():
            if is_infinite:
                same(parameter, plain.get_parameter(name), f"{name} after a step that is skipped")
    plain(**batch())["loss"].backward()
    optimizers[1].step()
    for name, parameter in compiled.named_parameters():
        same(parameter, plain.get_parameter(name), name)


def clipping(mesh: DeviceMesh) -> None:
    """Torch's own is right without stages, also where neighbours lie otherwise."""
    for role in ROLES:
        compiled, plain = pair(mesh, role)
        for norm_type in (2.0, 1.0, float("inf")):
            compiled.zero_grad()
            plain.zero_grad()
            compiled.forward_backward(**batch())
            plain(**batch())["loss"].backward()
            norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type) for model in (compiled, plain)]
            same(norms[0], norms[1], f"norm {norm_type} under {role}")
            same_gradients(compiled, plain)


def whole_states(mesh: DeviceMesh) -> None:
    """Full state dicts are those of the model without stages."""
    options = StateDictOptions(full_state_dict=True)
    for role in ROLES:
        compiled, plain = pair(mesh, role)
        state = get_model_state_dict(compiled, options=options)
        assert state.keys() == plain.state_dict().keys()
        for name, value in plain.state_dict().items():
            same(state[name], value, name)
        changed = {name: value + 1 for name, value in plain.state_dict().items()}
        set_model_state_dict(compiled, dict(changed), options=options)
        for name, value in compiled.state_dict().items():
            same(value, changed[name], name)


def losses_and_flags(mesh: DeviceMesh) -> None:
    """Any combination of scalars; flags and modes after compile; a scaler that sees one rank's infinity."""
    for role in ROLES:
        compiled, plain = pair(mesh, role)
        for model in (compiled, plain):
            out = model(**batch())
            (2 * out["loss"] - 3 * out["reg"]).backward()
        same_gradients(compiled, plain)
        refused(lambda m=compiled: m(**batch())["logits"].sum().backward(), "output 'logits'")  # type: ignore[misc]
        for flag in (False, True):
            for model in (compiled, plain):
                model.zero_grad()
                model.get_parameter("first.weight").requires_grad_(flag)
                model.get_parameter("last.bias").requires_grad_(flag)
            compiled.forward_backward(**batch())
            plain(**batch())["loss"].backward()
            same_gradients(compiled, plain)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        optimizer.zero_grad()
        scaler.scale(compiled(**batch())["loss"]).backward()
        gradient = compiled.get_parameter("layers.0.0.weight").grad
        assert isinstance(gradient, DTensor)
        if dist.get_rank() == 0 or gradient.placements == (Replicate(),):
            gradient.to_local()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        for name, value in plain.named_parameters():
            same(compiled.get_parameter(name), value, f"{name} after a step that is skipped under {role}")


def whole_models(mesh: DeviceMesh) -> None:
    """A plain state dict is loaded into shards and stages, and gathered again, on one rank or all."""
    for role in ("pipeline", "mixed"):
        compiled, _ = pair(mesh, role)
        other = Layers().double()
        with torch.no_grad():
            for number, parameter in enumerate(other.parameters()):
                parameter.fill_(0.1 * number).view(-1)[-1] = 1.0
        compiled.load_state_dict(other.state_dict())
        whole, elsewhere = galvatron_fx.gather(compiled), galvatron_fx.gather(compiled, rank=1)
        assert whole is not None and (elsewhere is None) == (dist.get_rank() == 0)
        for model in filter(None, (whole, elsewhere)):
            for name, value in other.state_dict().items():
                assert model.state_dict()[name].equal(value), f"{name} under {role}"
        refused(lambda m=compiled: galvatron_fx.gather(m, rank=2), "give a number under 2")  # type: ignore[misc]


def whole_updates(mesh: DeviceMesh) -> None:
    """Optimizers that look at whole parameters."""
    compiled, plain = pair(mesh, "mixed")
    for make in (torch.optim.Adafactor, torch.optim.Rprop):
        optimizers = [make(model.parameters(), lr=0.01) for model in (compiled, plain)]
        for _ in range(2):
            compiled.forward_backward(**batch())
            plain(**batch())["loss"].backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in plain.named_parameters():
        same(compiled.get_parameter(name), parameter, name)


def batches_in_parts_and_padded(mesh: DeviceMesh) -> None:
    """Outputs are in the order of the batch where ranks have rows of every micro-batch, and without padding."""
    torch.manual_seed(0)
    plain = Layers().double()
    inputs = {name: value[:3] for name, value in batch().items()}
    expected = plain(**inputs)
    expected["loss"].backward()
    for parts in (1, 2):
        plan = Plan.uniform((2,), ("data",), pipelining=Pipelining(1, parts, "1f1b", (0,)))
        compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, inputs, plan=plan)
        out = compiled.forward_backward(**inputs)
        same(out["loss"], expected["loss"], f"loss in {parts}")
        same_gradients(compiled, plain)
        if parts == 1:
            assert out["logits"].shape == expected["logits"].shape
            same(out["logits"], expected["logits"], "logits")
        compiled.eval()
        with torch.no_grad():
            same(compiled(**inputs)["logits"], expected["logits"], f"logits in {parts}")


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        stages_refuse_norms,
        stages_train_with_torch_optimizers,
        stages_refuse_whole_states,
        stages_save_and_load_their_parts,
        stages_refuse_flags,
        stages_evaluate_frozen_averages,
        stages_differentiate,
        outputs_with_dims_where_they_are,
        batches_in_parts_and_padded,
        stages_without_parameters_to_train,
        stages_skip_infinite_steps_together,
        stages_switch_adapters,
        clipping,
        whole_states,
        losses_and_flags,
        whole_models,
        whole_updates,
    )
}


def prepare() -> None:
    """Lower what the pairs compile."""
    roles = ["pipeline"] * 13 + [*ROLES] * 3 + ["mixed"] * 2
    compile_before_the_fork((2,), [(Layers().double(), batch(), [plan_of(role) for role in roles])])


def main() -> None:
    """Run all checks, or those named after the folder."""
    fork_checks((2,), CHECKS, sys.argv[2:], prepare)


if __name__ == "__main__":
    main()
