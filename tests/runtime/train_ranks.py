"""Run by test_training_on_ranks.py: real processes, gloo, a compiled model beside the plain one.

Prints ``ok <check>`` once for each check that holds on every rank, ``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import Plan, Strategy
from galvatron_fx.compiling import compile_captured
from galvatron_fx.errors import InputError, PlanError, TimeLimitError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.kernels.chunked_products import CHUNKED_KERNELS
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.analysis.blocks import num_blocks
from tests.helpers import slow_products
from tests.ir.cluster.test_cluster import described
from tests.models import zoo
from tests.models.test_odd_sizes import Convolutions, untidy
from tests.runtime import expert_checks, order_checks, shard_checks
from tests.runtime.beside_plain import MESH, compiled_by, full, same, saved_and_loaded, train
from tests.runtime.launch import Check, fork_checks, runs
from tests.runtime.shared_lowerings import Compiled, compile_before_the_fork, lower_before_the_fork

FOLDER = Path(sys.argv[1] if __name__ == "__main__" else ".")
# By schedule: the model, roles of the first and of the last blocks, number of stages and of micro-batches.
STAGED = {
    "1f1b": ("gpt2", "data", "tensor", 2, 4),
    "zb_h1": ("t5", "zero", "data", 2, 2),
    "zbv": ("llama", "tensor_sequence", "zero", 4, 4),
    "dualpipev": ("bert", "data", "zero", 4, 4),
    "interleaved_1f1b": ("bert", "sequence", "data", 4, 2),
    "gpipe": ("vit", "zero", "tensor", 2, 4),
}


@cache
def captured(name: str) -> tuple[nn.Module, dict[str, Any], fx.GraphModule]:
    """A model, a batch with a sample for every rank, and the graph, captured once before the ranks are forked."""
    model, once = zoo.MODELS[name](layers=1 if name == "t5" else 2)
    inputs = {key: torch.cat([value, value.flip(0)]) for key, value in once.items()}
    return model, inputs, galvatron_fx.capture(model, inputs)


def trains_captured(name: str, mesh: DeviceMesh, plan: Plan, cluster: Cluster, steps: int = 3) -> Any:
    """Train a model of the zoo as :func:`train` does, from its captured graph, and return it."""
    model, inputs, graph = captured(name)
    compiled = compile_captured(copy.deepcopy(model), graph, mesh, plan, cluster)
    train(compiled, copy.deepcopy(model), inputs, steps=steps)
    return compiled


UNIFORM = (
    Plan.uniform(MESH, ("data", "tensor"), recompute=True),
    Plan.uniform(MESH, ("zero", "tensor_sequence")),
    Plan.uniform(MESH, ("sequence", "zero"), keep_gathered=True),
)


def uniform_plans(mesh: DeviceMesh) -> None:
    for plan in UNIFORM:
        trains_captured("llama", mesh, plan, Cluster.from_mesh(mesh))


GATHERING = (
    Plan.uniform(MESH, ("zero", "zero"), offload_states=True, offload_parameters=True),
    Plan.uniform(MESH, ("pipeline", "zero"), pipelining=Pipelining(2, 2, "1f1b")),
)


def overlapping(cluster: Cluster) -> Cluster:
    """Where computing and communicating at once gains something, as it does not here."""
    return replace(cluster, overlap=Overlap(1.0, 1.0))


def gathers_ahead(mesh: DeviceMesh) -> None:
    """Gathers start a block ahead, also of shards that come from the host."""
    for plan in GATHERING:
        trains_captured("llama", mesh, plan, overlapping(Cluster.from_mesh(mesh)))


CHUNKED = (
    Plan.uniform(MESH, ("zero", "tensor_sequence"), recompute=True),
    Plan.uniform(MESH, ("pipeline", "tensor"), pipelining=Pipelining(2, 2)),
)


def chunks_beside_products(mesh: DeviceMesh) -> None:
    """Gathers and reductions travel in chunks while matrices are multiplied, as slow products make worth it."""
    for plan in CHUNKED:
        compiled = trains_captured("llama", mesh, plan, slow_products(MESH), steps=2)
        nodes = (*compiled.forward_graph.graph.nodes, *compiled.backward_graph.graph.nodes)
        assert any(node.target in CHUNKED_KERNELS.values() for node in nodes)


def staged(schedule: str) -> Plan:
    """Uneven stages of unlike strategies."""
    name, first, second, count, parts = STAGED[schedule]
    blocks = num_blocks(captured(name)[2])
    half = blocks // 2
    cuts = (0, half) if count == 2 else (0, 1, half, half + 1)
    strategies = [Strategy(("pipeline", first), recompute=True)] * half
    strategies += [Strategy(("pipeline", second), keep_gathered=second == "zero")] * (blocks - half)
    return Plan.from_roles(MESH, strategies, Pipelining(count, parts, schedule, cuts))


def stages(mesh: DeviceMesh) -> None:
    """Every schedule, uneven stages, unlike strategies, tied embeddings in the first and last stage."""
    for schedule, (name, *_) in STAGED.items():
        trains_captured(name, mesh, staged(schedule), Cluster.from_mesh(mesh), steps=2)


EVALUATED = Plan.uniform(MESH, ("pipeline", "data"), pipelining=Pipelining(2, 2))


def stages_evaluate_and_train(mesh: DeviceMesh) -> None:
    """Every rank gets the loss, in evaluation and for ``loss.backward()``."""
    model, inputs = zoo.gpt2(layers=3)
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=EVALUATED)
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


def neighbours(graph: fx.GraphModule) -> Plan:
    tables = [("zero", "tensor"), ("tensor", "data"), ("data", "sequence")]
    return Plan.from_roles(MESH, [Strategy(tables[i % 3], recompute=i % 2 == 0) for i in range(num_blocks(graph))])


def unlike_neighbours(mesh: DeviceMesh) -> None:
    model, inputs = zoo.gpt2(layers=2)
    plan = neighbours(galvatron_fx.capture(model, inputs))
    train(galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=plan), copy.deepcopy(model), inputs)


def searched_plan(mesh: DeviceMesh) -> None:
    model, inputs = zoo.bert(layers=1)
    options = {"memory_budget": "1GiB", "roles": ("data", "zero", "tensor")}
    compiled = galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, **options)
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


FOLDING = [
    [Plan.uniform(MESH, roles, fold_gradients=folds) for folds in (True, False)]
    for roles in (("zero", "tensor"), ("data", "zero"))
]


def folds_gradients(mesh: DeviceMesh) -> None:
    """With shares that are scattered, sums over all ranks, tied and unused parameters: as the step behind backward."""
    for one, other in FOLDING:
        trained = []
        for plan in (one, other):
            model, inputs = untidy()
            compiled = galvatron_fx.compile(model, mesh, inputs, plan=plan)
            optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
            compiled.fold_gradients(optimizer)
            for _ in range(3):
                compiled.forward_backward(**inputs)
                optimizer.step()
                optimizer.zero_grad()
            trained.append(compiled)
        for (name, found), expected in zip(trained[0].named_parameters(), trained[1].parameters(), strict=True):
            assert torch.equal(found.to_local(), expected.to_local()), name


def dropping_gpt2() -> zoo.Case:
    return zoo.gpt2(layers=2, resid_pdrop=0.3, embd_pdrop=0.3)


def evaluation(mesh: DeviceMesh) -> None:
    model, inputs = dropping_gpt2()
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


def convolutions() -> zoo.Case:
    return zoo.build(Convolutions), {"image": zoo.images()["pixel_values"], "label": torch.tensor([0, 4, 2, 1])}


def buffers_update(mesh: DeviceMesh) -> None:
    model, inputs = convolutions()
    compiled, plain = compiled_by(model, mesh, inputs, ("data", "zero")), copy.deepcopy(model)
    for _ in range(2):
        compiled.forward_backward(**inputs)
        plain(**inputs)[0].backward()
    for name, buffer in plain.named_buffers():
        same(compiled.get_buffer(name).double(), buffer.double(), name)
    compiled.eval(), plain.eval()
    with torch.no_grad():
        same(compiled(**inputs)[1], plain(**inputs)[1], "logits in eval")


class Turned(nn.Module):
    """A layer that shares a module with a buffer with others, and has a buffer that is written and not read."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(8, 8)
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = torch.tanh(self.linear(x) * self.shared.angles)
        with torch.no_grad():
            self.last.copy_(turned.mean(0))
        return x + turned


def buffers_of_stages(mesh: DeviceMesh) -> None:
    """Stages take a buffer by one of its names, and do not take what is only written; all have the values they hold."""
    torch.manual_seed(0)
    shared = nn.Module()
    shared.register_buffer("angles", torch.randn(8))
    model = nn.Sequential(*(Turned(shared) for _ in range(4)), nn.Linear(8, 1)).double()
    shared._buffers["angles"] = nn.Parameter(shared.angles, requires_grad=False)  # a buffer by where it is registered
    model = galvatron_fx.with_loss(model, nn.functional.mse_loss)
    inputs = torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    plan = Plan.uniform(MESH, ("pipeline", "zero"), pipelining=Pipelining(2, 1))
    plain = copy.deepcopy(model)
    for buffer in model.buffers():
        buffer += torch.distributed.get_rank()  # rank 0's are everybody's
    compiled = galvatron_fx.compile(model, mesh, inputs, plan=plan)
    for _ in range(2):
        for each in (compiled, plain):
            each(*inputs).loss.backward()
    held = dict(compiled.named_buffers())
    names: list[Any] = [None] * mesh.size()
    torch.distributed.all_gather_object(names, set(held))
    expected = dict(plain.named_buffers())
    assert set().union(*names) == expected.keys(), set().union(*names) ^ expected.keys()
    assert {name for name, _ in compiled.named_parameters()} < {name for name, _ in plain.named_parameters()}
    for name, value in held.items():
        same(value, expected[name], name)


OTHER_SHAPES = ((4, 10), (3, 7))


def other_batch_shapes(mesh: DeviceMesh) -> None:
    model, inputs = zoo.llama(layers=1)
    compiled, plain = compiled_by(model, mesh, inputs, ("zero", "tensor")), copy.deepcopy(model)
    for batch, sequence in (*OTHER_SHAPES, OTHER_SHAPES[0]):
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
    saved_and_loaded(FOLDER, mesh, lambda: zoo.gpt2(layers=1)[0], ("zero", "tensor"), ("tensor", "data"))


def mixed_context(graph: fx.GraphModule) -> Plan:
    roles = ("context", "sequence", "context", "data")
    return Plan.from_roles(MESH, [Strategy(("data", roles[i % 4])) for i in range(num_blocks(graph))])


def context(mesh: DeviceMesh) -> None:
    """A ring of four ranks; and rings of two beside blocks that split the sequence in order, or the batch."""
    model, inputs = zoo.llama(layers=2)
    train(compiled_by(model, mesh, inputs, ("context", "context")), copy.deepcopy(model), inputs, steps=2)
    plan = mixed_context(galvatron_fx.capture(model, inputs))
    train(galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=plan), copy.deepcopy(model), inputs, steps=1)


DRAWN = (Plan.uniform(MESH, ("data", "data")), Plan.uniform(MESH, ("zero", "tensor")))


def on_meta() -> zoo.Case:
    with torch.device("meta"):
        model, _ = zoo.llama(layers=1)
    return model, zoo.tokens()


def meta_device(mesh: DeviceMesh) -> None:
    """The weights are saved for test_training_on_ranks.py to compare with those of one rank."""
    model, inputs = on_meta()
    weights = []
    for plan in DRAWN:
        compiled = galvatron_fx.compile(model, mesh, inputs, plan=plan, seed=5)
        weights.append({name: full(value).detach() for name, value in compiled.named_parameters()})
        loss = compiled.forward_backward(**inputs)["loss"]
        assert torch.isfinite(loss)
        weights[-1]["loss"] = loss
    for name, value in weights[0].items():
        same(weights[1][name], value, name)
    assert float(weights[0]["model.layers.0.mlp.up_proj.weight"].std()) > 1e-3
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


def compiled_models() -> Iterator[Compiled]:
    """What all ranks compile, or evaluate."""
    data_tensor, zero_tensor = (Plan.uniform(MESH, (role, "tensor")) for role in ("data", "zero"))
    yield *zoo.gpt2(layers=1), (data_tensor, zero_tensor, Plan.uniform(MESH, ("tensor", "data")))
    model, inputs = zoo.gpt2(layers=2)
    yield model, inputs, (zero_tensor, neighbours(galvatron_fx.capture(model, inputs)))
    yield *zoo.bert(layers=1), ()
    yield *untidy(), (*[zero_tensor] * 6, *FOLDING[0], *FOLDING[1])
    llama = zoo.llama(layers=1)[0]
    yield llama, zoo.tokens(), (zero_tensor,)
    for batch, sequence in OTHER_SHAPES if runs("other_batch_shapes") else ():
        yield llama, zoo.tokens(batch, sequence), ()
    yield *on_meta(), DRAWN
    model, inputs = zoo.llama(layers=2)
    around = Plan.uniform(MESH, ("context", "context"))
    yield model, inputs, (around, mixed_context(galvatron_fx.capture(model, inputs)))
    for (model, inputs), plan in (
        (zoo.gpt2(layers=3), EVALUATED),
        (dropping_gpt2(), data_tensor),
        (convolutions(), Plan.uniform(MESH, ("data", "zero"))),
    ):
        yield model.train(), inputs, (plan,)
        yield model.eval(), inputs, ()


def before_the_fork() -> None:
    """Capture what is trained, and lower the plans."""
    others = [module for module in (order_checks, expert_checks, shard_checks) if runs(*vars(module))]
    compile_before_the_fork(MESH, chain(compiled_models(), *(module.compiled() for module in others)))
    cluster = described(MESH)
    for schedule, (name, *_) in STAGED.items() if runs("stages") else ():
        lower_before_the_fork(captured(name)[2], staged(schedule), cluster)
    for plan in UNIFORM if runs("uniform_plans") else ():
        lower_before_the_fork(captured("llama")[2], plan, cluster)
    for plan in GATHERING if runs("gathers_ahead") else ():
        lower_before_the_fork(captured("llama")[2], plan, overlapping(cluster))
    for plan in CHUNKED if runs("chunks_beside_products") else ():
        lower_before_the_fork(captured("llama")[2], plan, slow_products(MESH))


_CHECKS: tuple[Check, ...] = (
    uniform_plans, gathers_ahead, chunks_beside_products, stages, stages_evaluate_and_train,
    later_batches_fail_together,
    loss_backward, unlike_neighbours, searched_plan, flat_mesh, gradients_accumulate, folds_gradients, evaluation,
    buffers_update, buffers_of_stages, other_batch_shapes, state_dicts, shard_checks.draws_into_shards,
    shard_checks.writes_into_shards,
    shard_checks.losses_of_shards, shard_checks.anomalies_are_found, shard_checks.outputs_are_inputs,
    checkpoint_to_another_plan, context,
    meta_device, lazy, plan_mismatch, rank_0_searches_for_all, order_checks.ranks_in_another_order,
    order_checks.rows_of_ranks_in_another_order, order_checks.a_mesh_in_another_order, expert_checks.further_rounds,
    expert_checks.expert_loads, expert_checks.experts_move, expert_checks.listed_experts_move,
    expert_checks.experts_have_shadows,
)  # fmt: skip
CHECKS = {check.__name__: check for check in _CHECKS} | {
    "experts": partial(expert_checks.experts, FOLDER),
    "checkpoints_of_another_order": partial(order_checks.checkpoints_of_another_order, FOLDER),
}


def main() -> None:
    """Run all checks, or those named after the folder."""
    fork_checks(MESH, CHECKS, sys.argv[2:], before_the_fork)


if __name__ == "__main__":
    main()
