"""Run by test_training_on_ranks.py: real processes, gloo, a compiled model beside the plain one.

Prints ``ok <check>`` once for each check that holds on every rank, ``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, fx, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from galvatron_fx import Plan, Strategy
from galvatron_fx.compiling import compile_captured
from galvatron_fx.errors import InputError, PlanError, TimeLimitError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.pipelining import ONE_STAGE, Pipelining
from passes.analysis.blocks import num_blocks
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep
from tests.models import zoo
from tests.models.mixtures import mixture
from tests.models.test_odd_sizes import Convolutions, untidy
from tests.passes.sharding.test_expert_rules import Mixture
from tests.runtime.launch import Check, fork_checks

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".")
MESH = (2, 2)
# By model: roles of the first and of the last blocks, schedule, number of stages and of micro-batches.
STAGED = {
    "gpt2": ("data", "tensor", "1f1b", 2, 4),
    "t5": ("zero", "data", "zb_h1", 2, 2),
    "llama": ("tensor_sequence", "zero", "zbv", 4, 4),
    "swin": ("data", "zero", "dualpipev", 4, 4),
    "bert": ("sequence", "data", "interleaved_1f1b", 4, 2),
    "vit": ("zero", "tensor", "gpipe", 2, 4),
}


def full(value: Tensor) -> Tensor:
    """The whole tensor of a DTensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def same(got: Tensor, expected: Tensor, what: str) -> None:
    """Equal to 1e-10 relative to the largest element."""
    scale = float(expected.abs().max()) or 1.0
    error = float((full(got).detach() - expected.detach()).abs().max()) / scale
    assert error < 1e-10, f"{what} differs by {error:.2e}"


def same_parameters(compiled: nn.Module, plain: nn.Module, what: str) -> None:
    """All parameters that this rank holds, under the same names; together the ranks hold them all."""
    ours, theirs = dict(compiled.named_parameters()), dict(plain.named_parameters())
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, set(ours))
    assert set().union(*held) == theirs.keys(), f"{what}: names differ: {set().union(*held) ^ theirs.keys()}"
    for name, value in theirs.items():
        if name not in ours:
            continue
        # Adam divides by the root of a second moment, which magnifies rounding where a gradient is nearly zero.
        torch.testing.assert_close(
            full(ours[name]), value, rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{what} {n}: {m}"
        )


def train(
    compiled: nn.Module, plain: nn.Module, inputs: dict[str, Any], *, steps: int = 3, direct: bool = True
) -> None:
    """AdamW, clipped gradients and a schedule, on both, compared at every step."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (compiled, plain)]
    schedules = [torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5) for o in optimizers]
    for step in range(steps):
        if direct:
            loss = compiled.forward_backward(**inputs)["loss"]
        else:
            loss = compiled(**inputs)["loss"]
            loss.backward()
        expected = plain(**inputs)["loss"]
        expected.backward()
        same(loss, expected, f"loss of step {step}")
        norms = [compiled.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5)]
        same(norms[0], norms[1], f"gradient norm of step {step}")
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        same_parameters(compiled, plain, f"step {step}")


def compiled_by(model: nn.Module, mesh: DeviceMesh, inputs: Any, roles: tuple[str, ...], **options: bool) -> Any:
    """Compile a copy of a model by one strategy for all blocks."""
    return galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=Plan.uniform(MESH, roles, **options))


@cache
def captured(name: str) -> tuple[nn.Module, dict[str, Any], fx.GraphModule]:
    """A model, a batch with a sample for every rank, and the graph, captured once before the ranks are forked."""
    model, once = zoo.MODELS[name]()
    inputs = {key: torch.cat([value, value.flip(0)]) for key, value in once.items()}
    return model, inputs, galvatron_fx.capture(model, inputs)


def trains_captured(name: str, mesh: DeviceMesh, plan: Plan, cluster: Cluster, steps: int = 3) -> None:
    """Train a model of the zoo as :func:`train` does, from its captured graph."""
    model, inputs, graph = captured(name)
    compiled = compile_captured(copy.deepcopy(model), graph, mesh, plan, cluster)
    train(compiled, copy.deepcopy(model), inputs, steps=steps)


def uniform_plans(mesh: DeviceMesh) -> None:
    for roles, options in [
        (("data", "tensor"), {"recompute": True}),
        (("zero", "tensor_sequence"), {}),
        (("sequence", "zero"), {"keep_gathered": True}),
    ]:
        trains_captured("llama", mesh, Plan.uniform(MESH, roles, **options), Cluster.from_mesh(mesh))


def gathers_ahead(mesh: DeviceMesh) -> None:
    """Gathers start a block ahead where computing and communicating at once gains something, as it does not here."""
    cluster = replace(Cluster.from_mesh(mesh), overlap=Overlap(1.0, 1.0))
    in_stages = Plan.uniform(MESH, ["pipeline", "zero"], pipelining=Pipelining(2, 2, "1f1b"))
    for plan in (Plan.uniform(MESH, ["zero", "zero"]), in_stages):
        trains_captured("llama", mesh, plan, cluster)


def compiled_kernels(mesh: DeviceMesh) -> None:
    """Inductor compiles what lies between collectives: gradients in bundles, gathers ahead, reductions in forward."""
    cluster = replace(Cluster.from_mesh(mesh), overlap=Overlap(1.0, 1.0))
    model, inputs = untidy()
    blocks = num_blocks(galvatron_fx.capture(model, inputs))
    plan = Plan.from_roles(MESH, [Strategy(("zero", "tensor") if i % 2 else ("data", "data")) for i in range(blocks)])
    options = {"plan": plan, "cluster": cluster, "backend": "inductor"}
    train(galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, **options), copy.deepcopy(model), inputs, steps=1)


def stages(mesh: DeviceMesh) -> None:
    """Every schedule, uneven stages, unlike strategies, tied embeddings in the first and last stage."""
    for name, (first, second, schedule, count, parts) in STAGED.items():
        blocks = num_blocks(captured(name)[2])
        half = blocks // 2
        cuts = (0, half) if count == 2 else (0, 1, half, half + 1)
        strategies = [Strategy(("pipeline", first), recompute=True)] * half
        strategies += [Strategy(("pipeline", second), keep_gathered=second == "zero")] * (blocks - half)
        plan = Plan.from_roles(MESH, strategies, Pipelining(count, parts, schedule, cuts))
        trains_captured(name, mesh, plan, Cluster.from_mesh(mesh), steps=2)


def stages_evaluate_and_train(mesh: DeviceMesh) -> None:
    """Every rank gets the loss, in evaluation and for ``loss.backward()``."""
    model, inputs = zoo.gpt2(layers=3)
    plan = Plan.uniform(MESH, ("pipeline", "data"), pipelining=Pipelining(2, 2))
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=plan)
    compiled.eval()
    model.eval()
    with torch.no_grad():
        same(compiled(**inputs)["loss"], model(**inputs)["loss"], "loss of evaluation")
    train(compiled.train(), model.train(), inputs, direct=False)


def later_batches_fail_together(mesh: DeviceMesh) -> None:
    """A batch that only one rank brings otherwise is refused on all; none waits for the others."""
    model, inputs = zoo.gpt2(layers=1)
    compiled = compiled_by(model, mesh, inputs, ("data", "tensor"))
    other = zoo.tokens(2, 6)
    if dist.get_rank() == 3:
        other["labels"] = other["labels"][:, :3]
    try:
        compiled.forward_backward(**other)
    except InputError as error:
        assert "ranks [3] bring another batch than rank 0" in str(error), f"refused otherwise: {error}"
    else:
        raise AssertionError("a batch of unlike shapes was taken")


def loss_backward(mesh: DeviceMesh) -> None:
    model, inputs = zoo.gpt2(layers=2)
    train(compiled_by(model, mesh, inputs, ("zero", "tensor")), copy.deepcopy(model), inputs, direct=False)


def unlike_neighbours(mesh: DeviceMesh) -> None:
    model, inputs = zoo.gpt2(layers=2)
    graph = galvatron_fx.capture(model, inputs)
    tables = [("zero", "tensor"), ("tensor", "data"), ("data", "sequence")]
    strategies = [Strategy(tables[i % 3], recompute=i % 2 == 0) for i in range(num_blocks(graph))]
    plan = Plan.from_roles(MESH, strategies)
    train(galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=plan), copy.deepcopy(model), inputs)


def searched_plan(mesh: DeviceMesh) -> None:
    model, inputs = zoo.bert(layers=2)
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, memory_budget="1GiB")
    assert compiled.plan.memory_budget_bytes == 2**30
    assert 0 < compiled.plan.peak_memory_bytes <= 2**30
    train(compiled, copy.deepcopy(model), inputs)


def flat_mesh(mesh: DeviceMesh) -> None:
    model, inputs = untidy()
    compiled = compiled_by(model, init_device_mesh("cpu", (4,)), inputs, ("zero", "tensor"))
    train(compiled, copy.deepcopy(model), inputs, steps=1)


def gradients_accumulate(mesh: DeviceMesh) -> None:
    model, inputs = untidy()
    compiled, plain = compiled_by(model, mesh, inputs, ("zero", "tensor")), copy.deepcopy(model)
    for _ in range(2):
        compiled.forward_backward(**inputs)
        compiled(**inputs)["loss"].backward()
        plain(**inputs)["loss"].backward()
        plain(**inputs)["loss"].backward()
    for name, parameter in plain.named_parameters():
        found = compiled.get_parameter(name).grad
        assert (found is None) == (parameter.grad is None), f"gradient of {name}"
        if found is not None:
            same(found, parameter.grad, f"gradient of {name}")


def evaluation(mesh: DeviceMesh) -> None:
    model, inputs = zoo.gpt2(layers=2, resid_pdrop=0.3, embd_pdrop=0.3)
    compiled = compiled_by(model.train(), mesh, inputs, ("data", "tensor"))
    plain = copy.deepcopy(model).eval()
    with torch.no_grad():
        first = compiled(**inputs)["loss"]
        out = compiled.eval()(**inputs)
        expected = plain(**inputs)
    assert not torch.equal(first, out.loss), "dropout did nothing in training mode"
    assert not out.loss.requires_grad
    same(out.loss, expected.loss, "loss")
    same(out.logits, expected.logits, "logits")


def buffers_update(mesh: DeviceMesh) -> None:
    model = zoo.build(Convolutions)
    inputs = {"image": zoo.images()["pixel_values"], "label": torch.tensor([0, 4, 2, 1])}
    compiled, plain = compiled_by(model, mesh, inputs, ("data", "zero")), copy.deepcopy(model)
    for _ in range(2):
        compiled.forward_backward(**inputs)
        plain(**inputs)[0].backward()
    for name, buffer in plain.named_buffers():
        same(compiled.get_buffer(name).double(), buffer.double(), name)
    compiled.eval(), plain.eval()
    with torch.no_grad():
        same(compiled(**inputs)[1], plain(**inputs)[1], "logits in eval")


def other_batch_shapes(mesh: DeviceMesh) -> None:
    model, inputs = zoo.llama(layers=2)
    compiled, plain = compiled_by(model, mesh, inputs, ("zero", "tensor")), copy.deepcopy(model)
    for batch, sequence in ((4, 10), (3, 7), (4, 10)):
        train(compiled, plain, zoo.tokens(batch, sequence), steps=1)


def state_dicts(mesh: DeviceMesh) -> None:
    model, inputs = untidy()
    first = compiled_by(model, mesh, inputs, ("zero", "tensor"))
    assert list(first.state_dict()) == list(model.state_dict())
    train(first, copy.deepcopy(model), inputs, steps=1)
    second = compiled_by(model, mesh, inputs, ("zero", "tensor"))
    missing = second.load_state_dict(first.state_dict())
    assert not missing.missing_keys and not missing.unexpected_keys
    for name, parameter in first.named_parameters():
        same(second.get_parameter(name), full(parameter), name)


def checkpoint_to_another_plan(mesh: DeviceMesh) -> None:
    _saved_and_loaded(mesh, lambda: zoo.gpt2(layers=1)[0], ("zero", "tensor"), ("tensor", "data"))


def experts(mesh: DeviceMesh) -> None:
    """Exchanged between two and four ranks, and held by others after loading."""
    mixtral = partial(mixture, "mixtral")
    train(compiled_by(mixtral(), mesh, zoo.tokens(), ("expert", "tensor")), mixtral(), zoo.tokens(), steps=2)
    _saved_and_loaded(mesh, mixtral, ("zero", "expert"), ("expert", "expert"), _moved_and_back)


def _moved_and_back(compiled: Any, plain: nn.Module, inputs: dict[str, Any], optimizers: list[Any]) -> None:
    """A step while experts are held by other ranks: whatever would show their order is refused until they are back."""
    moves = compiled.rebalance_experts(optimizers[0], dry_run=False)
    assert moves.done and moves.layers and moves.seconds > 0 and "received by each rank" in str(moves)
    _step(compiled, plain, inputs, optimizers)
    with torch.no_grad():
        same(compiled(**inputs)["loss"], plain(**inputs)["loss"], "loss of other programs")
    with pytest.raises(InputError, match="another order than its own"):
        compiled.state_dict()
    with pytest.raises(InputError, match="cannot be copied while its experts"):
        copy.deepcopy(compiled)
    with pytest.raises(InputError, match="cannot be gathered while its experts"):
        galvatron_fx.gather(compiled)
    with pytest.raises(InputError, match="states of optimizers are saved and loaded in the model's own order"):
        optimizers[0].state_dict()
    compiled.restore_experts(optimizers[0])
    same_parameters(compiled, plain, "experts that are back")


def experts_move(mesh: DeviceMesh) -> None:
    """Gradients of several batches add up over a move, the loads become what was promised, and who has to know of the
    move is asked for.
    """
    x = torch.randn(8, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = Mixture(nn.functional.silu, 8)
    with torch.no_grad():
        plain.router.bias[:2] += 3.0
    plan = Plan.uniform(MESH, ("expert", "data"), capacity=0.5, pipelining=Pipelining(1, 2, "1f1b"))
    compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (x,), plan=plan)
    with pytest.raises(InputError, match="no rows of experts are counted yet"):
        compiled.rebalance_experts()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (compiled, plain)]
    for dry_run in (True, False, True):
        same(compiled.forward_backward(x), plain(x), "loss")
        plain(x).backward()
        loads = compiled.expert_loads()
        moves = compiled.rebalance_experts(optimizers[0], dry_run=dry_run)
        if dry_run is False:
            before, promised = loads, moves.layers[0]
    assert not moves.layers and moves.received_bytes == 0, moves
    assert loads.layers[0].rows == before.layers[0].rows
    assert loads.imbalance(2) == promised.imbalance < 1.1 < promised.imbalance_before == before.imbalance(2)
    assert before.further_rounds - loads.further_rounds == promised.rounds_saved > 0, promised
    for optimizer in optimizers:
        optimizer.step()
    compiled.forward_backward(x)
    compiled.restore_experts()
    with pytest.raises(InputError, match="Give all optimizers of the model"):
        optimizers[0].step()
    dense = galvatron_fx.compile(plain, mesh, (x,), plan=Plan.uniform(MESH, ("data", "tensor")))
    with pytest.raises(InputError, match="rebalance_experts is for plans with role 'expert'"):
        dense.rebalance_experts()
    compiled.zero_grad()
    copy.deepcopy(compiled)
    with pytest.raises(InputError, match="a copy was made of this model"):
        compiled.rebalance_experts()


def further_rounds(mesh: DeviceMesh) -> None:
    """Opposite routings take the same memory, as was predicted, and compute what one device does."""
    x = torch.randn(16, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plan, cluster = Plan.uniform(MESH, ("expert", "expert"), capacity=0.5), Cluster.from_mesh(mesh)
    peaks = []
    for crowded in ([0, 1], [2, 3]):
        plain = Mixture(nn.functional.silu)
        with torch.no_grad():
            plain.router.weight.zero_()
            plain.router.bias.zero_()[crowded] = 50.0
        graph = galvatron_fx.capture(plain, (x,))
        compiled = galvatron_fx.compile(copy.deepcopy(plain), mesh, (x,), plan=plan, compare_batches=0)
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (compiled, plain)]
        rows = rows_of_experts(plain, x)
        for _ in range(2):
            with TensorMemory([*held_tensors(compiled, optimizers[0]), x]) as memory:
                loss = compiled.forward_backward(x)
            expected = plain(x)
            expected.backward()
            same(loss, expected, "loss")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            loads = compiled.expert_loads()
            assert loads.layers[0].rows == rows and loads.further_rounds >= 3, loads
            rows = rows_of_experts(plain, x)
            same_parameters(compiled, plain, "parameters")
        peaks.append(memory.peak_bytes)
    lowered = lower(graph, plan, cluster)
    assert isinstance(lowered, Lowered)
    predicted = SimulateStep(cluster).run(lowered).peak_memory_bytes
    assert peaks[0] == peaks[1] and 0 <= peaks[0] - predicted < 64, (peaks, predicted)  # Adam's counts of steps


def rows_of_experts(model: Mixture, x: Tensor) -> tuple[int, ...]:
    """What the router of the plain model sends to each of its experts."""
    chosen = model.router(x.flatten(0, 1)).topk(2)[1]
    return tuple(chosen.flatten().bincount(minlength=len(model.up)).tolist())


def expert_loads(mesh: DeviceMesh) -> None:
    """Are the router's own counts, under plans that exchange rows and others; the module asks for them or never."""
    x = torch.randn(8, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Mixture(nn.functional.silu)
    rows = rows_of_experts(model, x)
    batches = Pipelining(1, 2, "1f1b")
    for roles, pipelining in (
        (("data", "tensor"), ONE_STAGE), (("expert", "tensor_sequence"), batches), (("zero", "expert"), ONE_STAGE)
    ):  # fmt: skip
        plan = Plan.uniform(MESH, roles, capacity=0.5, pipelining=pipelining)
        compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, (x,), plan=plan)
        for _ in range(2):
            same(compiled.forward_backward(x), model(x), "loss")
        loads = compiled.expert_loads()
        assert [layer.rows for layer in loads.layers] == [rows], (roles, loads)
        assert loads.imbalance(4) == 4 * max(rows) / sum(rows) and "further rounds" in str(loads)
    fresh = galvatron_fx.compile(copy.deepcopy(model), mesh, (x,), plan=plan)
    try:
        fresh.expert_loads()
    except InputError as error:
        assert "no rows of experts are counted yet: call forward_backward" in str(error)
    else:
        raise AssertionError("loads before the first step")


def context(mesh: DeviceMesh) -> None:
    """A ring of four ranks; and rings of two beside blocks that split the sequence in order, or the batch."""
    model, inputs = zoo.llama(layers=2)
    train(compiled_by(model, mesh, inputs, ("context", "context")), copy.deepcopy(model), inputs, steps=2)
    graph = galvatron_fx.capture(model, inputs)
    roles = ("context", "sequence", "context", "data")
    plan = Plan.from_roles(MESH, [Strategy(("data", roles[i % 4])) for i in range(num_blocks(graph))])
    train(galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=plan), copy.deepcopy(model), inputs, steps=1)


def _saved_and_loaded(
    mesh: DeviceMesh,
    build: Callable[[], nn.Module],
    roles: tuple[str, ...],
    other_roles: tuple[str, ...],
    between: Callable[..., None] = lambda *_: None,
) -> None:
    """A step by one plan, and the next by another; ``between``: before it is saved."""
    inputs, folder = zoo.tokens(), FOLDER / "-".join(("checkpoint", *roles))
    first, plain = compiled_by(build(), mesh, inputs, roles), build()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, plain)]
    _step(first, plain, inputs, optimizers)
    between(first, plain, inputs, optimizers)
    saved = {"model": first.state_dict(), "optimizer": get_optimizer_state_dict(first, optimizers[0])}
    dcp.save(saved, checkpoint_id=folder)

    second = compiled_by(build(), mesh, inputs, other_roles)
    optimizer = torch.optim.AdamW(second.parameters(), lr=1e-2)
    loaded = {"model": second.state_dict(), "optimizer": get_optimizer_state_dict(second, optimizer)}
    dcp.load(loaded, checkpoint_id=folder)
    second.load_state_dict(loaded["model"])
    set_optimizer_state_dict(second, optimizer, loaded["optimizer"])
    same_parameters(second, plain, "after loading")
    _step(second, plain, inputs, [optimizer, optimizers[1]])
    same_parameters(second, plain, "a step after loading")


def _step(compiled: nn.Module, plain: nn.Module, inputs: dict[str, Any], optimizers: list[Any]) -> None:
    same(compiled.forward_backward(**inputs)["loss"], plain(**inputs)["loss"], "loss")
    plain(**inputs)["loss"].backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def meta_device(mesh: DeviceMesh) -> None:
    """The weights are saved for test_torchrun.py to compare with those of one rank."""
    with torch.device("meta"):
        model, _ = zoo.llama(layers=2)
    inputs = zoo.tokens()
    weights = []
    for roles in (("data", "data"), ("zero", "tensor")):
        compiled = galvatron_fx.compile(model, mesh, inputs, plan=Plan.uniform(MESH, roles), seed=5)
        weights.append({name: full(value).detach() for name, value in compiled.named_parameters()})
        loss = compiled.forward_backward(**inputs)["loss"]
        assert torch.isfinite(loss)
        weights[-1]["loss"] = loss
    for name, value in weights[0].items():
        same(weights[1][name], value, name)
    assert float(weights[0]["model.layers.1.mlp.up_proj.weight"].std()) > 1e-3
    if dist.get_rank() == 0:
        torch.save(weights[1], FOLDER / "meta_weights.pt")


def lazy(mesh: DeviceMesh) -> None:
    model, inputs = untidy()
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, plan=Plan.uniform(MESH, ("zero", "tensor")))
    for ask in (
        lambda: list(compiled.parameters()),
        compiled.state_dict,
        lambda: torch.optim.AdamW(compiled.parameters()),
    ):
        try:
            ask()
        except InputError as error:
            assert "example_inputs" in str(error)
        else:
            raise AssertionError("parameters came out of a model that is not compiled")
    plain = copy.deepcopy(model)
    same(compiled.forward_backward(**inputs)["loss"], plain(**inputs)["loss"], "first loss")
    for parameter in compiled.parameters():
        parameter.grad = None
    train(compiled, plain, inputs, steps=2)


def plan_mismatch(mesh: DeviceMesh) -> None:
    model, inputs = untidy()
    roles = ("zero", "tensor") if dist.get_rank() == 2 else ("data", "tensor")
    try:
        compiled_by(model, mesh, inputs, roles)
    except PlanError as error:
        assert "2" in str(error) and "rank" in str(error)
    else:
        raise AssertionError("started with unlike plans")


def rank_0_searches_for_all(mesh: DeviceMesh) -> None:
    """What ends by the clock ends differently on each rank, so all take the plan of the first, or none starts."""
    model, inputs = untidy()
    options = {"roles": ("data", "zero"), "memory_budget": "1GiB"}
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, search_seconds=60.0, **options)
    assert (compiled.plan.report is not None) == (dist.get_rank() == 0)
    train(compiled, copy.deepcopy(model), inputs, steps=1)
    try:
        galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, search_seconds=1e-9, **options)
    except TimeLimitError as error:
        assert dist.get_rank() == 0 and "search_seconds" in str(error)
    except PlanError as error:
        assert dist.get_rank() > 0 and "rank 0" in str(error)
    else:
        raise AssertionError("found a plan in no time")


CHECKS: tuple[Check, ...] = (
    uniform_plans, gathers_ahead, compiled_kernels, stages, stages_evaluate_and_train, later_batches_fail_together,
    loss_backward, unlike_neighbours, searched_plan, flat_mesh, gradients_accumulate, evaluation,
    buffers_update, other_batch_shapes, state_dicts, checkpoint_to_another_plan, experts, context, further_rounds,
    meta_device, expert_loads, experts_move, lazy, plan_mismatch, rank_0_searches_for_all,
)  # fmt: skip


def main() -> None:
    """Run all checks, or those named after the folder."""
    fork_checks(
        MESH, {check.__name__: check for check in CHECKS}, sys.argv[2:], lambda: [captured(name) for name in STAGED]
    )


if __name__ == "__main__":
    main()
