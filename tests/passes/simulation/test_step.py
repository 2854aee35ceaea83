"""The predicted memory of small programs is what counting by hand gives; the predicted time the sum of its parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._C._distributed_c10d import FakeProcessGroup, _register_process_group, _unregister_process_group

from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from cost_models.collectives import collective_s
from cost_models.ops import op_time_s
from cost_models.optimizer import ADAM, ParameterShard
from galvatron_fx.errors import VerifierError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.bound_ops import BoundAxis
from galvatron_fx.ir.graph.layout import Layout, MergedAxis
from galvatron_fx.ir.graph.metadata import OpCost, TensorSpec, meta_of, set_meta, signature
from galvatron_fx.ir.plan.prediction import (
    ACTIVATIONS,
    BATCH,
    COMPUTE,
    GATHERED,
    GRADIENTS,
    MEMORY_KINDS,
    PARAMETERS,
    RECOMPUTE,
    STATES,
    TRANSIENTS,
    UPDATE,
    Cause,
    MemoryUse,
)
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.runtime.program import Program
from passes.lowering.batch_rows import rows_read
from passes.lowering.codegen import Codegen
from passes.lowering.lower_step import Lower, Lowered
from passes.lowering.split_forward_backward import SplitForwardBackward
from passes.simulation.live_memory import GraphMemory
from passes.simulation.step import SimulateStep, StepReport
from tests.graphs import Builder, Shape
from tests.helpers import captured, offloading, uniform

aten = torch.ops.aten
f64 = torch.float64
CLUSTER = Cluster.preset("2xA100-80GB")


def simulated(graph: fx.GraphModule, *columns: MergedAxis) -> StepReport:
    return SimulateStep(CLUSTER).run(Lowered(graph, SplitForwardBackward().run(graph), Layout(columns)))


def layer() -> fx.GraphModule:
    """``sum(exp(x @ w))`` in float64, and the gradient of ``w``."""
    build = Builder()
    x, w = build.input("x", (4, 8)), build.input("w", (8, 2), "param")
    e = build.call(aten.exp.default, build.call(aten.mm.default, x, w))
    loss = build.call(aten.sum.default, e)
    tangent = build.begin_backward()
    g = build.call(aten.mul.Tensor, e, tangent)
    grad = build.call(aten.mm.default, build.call(aten.t.default, x), g)
    return build.finish(("output", "0", loss), ("grad", "w", grad), loss=0)


def frozen(graph: fx.GraphModule) -> fx.GraphModule:
    """The same with parameters that an optimizer does not see."""
    record = graph.meta["galvatron"]
    inputs = tuple(replace(port, requires_grad=False) for port in record.inputs)
    graph.meta["galvatron"] = record.having(inputs=inputs)
    return graph


def test_memory_by_hand() -> None:
    parameter, x, e, loss, g, grad = 8 * 2 * 8, 4 * 8 * 8, 4 * 2 * 8, 8, 4 * 2 * 8, 8 * 2 * 8
    report = simulated(frozen(layer()))
    assert report.parameter_bytes == parameter
    # The last product: x (under its transpose), g and the new gradient; e died at its last use, the loss stays.
    assert report.peak_memory_bytes == parameter + x + loss + g + grad
    assert e == g


def test_memory_of_the_update() -> None:
    """When backward is done, the optimizer's moments and temporaries of the parameter."""
    parameter, x, loss = 8 * 2 * 8, 4 * 8 * 8, 8
    moments, gradient, temporaries = 2 * parameter, parameter, 2 * parameter
    assert simulated(layer()).peak_memory_bytes == parameter + moments + x + loss + gradient + temporaries


@pytest.mark.parametrize("sizes", [(4096,), (4096, 4), (4, 4096), (4096, 4096), (4096, 2048, 1024, 4096)])
def test_the_update_takes_what_adamw_takes(sizes: tuple[int, ...]) -> None:
    parameters = nn.ParameterList(torch.randn(size, dtype=torch.float32) for size in sizes)
    optimizer = torch.optim.AdamW(parameters.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()  # makes the moments
    with TensorMemory(held_tensors(parameters, optimizer)) as memory:
        before = memory.bytes
        optimizer.step()
    scalars = 64  # of the step counts
    expected = ADAM.temporary_bytes([ParameterShard((size,), 4 * size, 4) for size in sizes])
    assert memory.peak_bytes - before == pytest.approx(expected, abs=scalars)


def test_memory_by_kind() -> None:
    parameter, x, e, loss = 8 * 2 * 8, 4 * 8 * 8, 4 * 2 * 8, 8
    memory = simulated(layer()).memory
    update = {PARAMETERS: parameter, STATES: 2 * parameter, GRADIENTS: parameter, TRANSIENTS: 2 * parameter}
    assert memory.at_peak == dict.fromkeys(MEMORY_KINDS, 0) | update | {ACTIVATIONS: loss, BATCH: x}
    # The last product: g is on the way to the gradient.
    step = {PARAMETERS: parameter, STATES: 2 * parameter, GRADIENTS: parameter, TRANSIENTS: e}
    assert memory.step == dict.fromkeys(MEMORY_KINDS, 0) | step | {ACTIVATIONS: loss, BATCH: x}


def test_views_of_parameters_are_no_memory() -> None:
    build = Builder()
    x, w = build.input("x", (4, 8)), build.input("w", (2, 8), "param")
    y = build.call(aten.mm.default, x, build.call(aten.t.default, w))
    graph = frozen(build.finish(("output", "0", y)))
    assert simulated(graph).peak_memory_bytes == (4 * 8 + 2 * 8 + 4 * 2) * 8


def test_an_output_that_backward_takes_stays() -> None:
    """The caller has it: it does not die with its last use in backward."""
    build = Builder()
    x = build.input("x", (100,))
    y = build.call(aten.exp.default, x)
    build.phase = "backward"
    tangent = build.input("tangent", (100,), "tangent")
    g = build.call(aten.mul.Tensor, y, tangent)
    h = build.call(aten.neg.default, g)
    graph = build.finish(("output", "0", y), ("grad", "x", build.call(aten.neg.default, h)))
    assert simulated(graph).peak_memory_bytes == 4 * 800, "x, y and two of what follows"


def chain(*targets: Any, size: int = 100) -> fx.GraphModule:
    """Operators one after the other on ``size`` numbers; nothing is saved."""
    build = Builder()
    x = build.input("x", (size,))
    for target in targets:
        x = build.call(target, x)
    return build.finish(("output", "0", x))


def test_a_chain_holds_its_input_and_two_values() -> None:
    """Inputs belong to the caller and stay; of the rest, what is read and what is written."""
    assert simulated(chain(aten.exp.default)).peak_memory_bytes == 2 * 800
    for length in (2, 3, 8):
        assert simulated(chain(*[aten.exp.default] * length)).peak_memory_bytes == 3 * 800


def test_views_share_memory() -> None:
    build = Builder()
    x = build.input("x", (10, 10))
    y = build.call(aten.exp.default, x)
    parts = [build.call(aten.slice.Tensor, build.call(aten.t.default, y), 0, i, i + 1) for i in range(10)]
    total = build.call(aten.cat.default, parts, 0)
    graph = build.finish(("output", "0", total))
    assert simulated(graph).peak_memory_bytes == 3 * 800


def test_a_value_that_nothing_uses_dies_at_once() -> None:
    build = Builder()
    x = build.input("x", (100,))
    build.call(aten.exp.default, x)
    build.call(aten.sin.default, x)
    graph = build.finish(("output", "0", build.call(aten.neg.default, x)))
    assert simulated(graph).peak_memory_bytes == 2 * 800


def test_frozen_parameters_are_not_updated() -> None:
    build = Builder()
    x, w = build.input("x", (10,)), build.input("w", (10,), "param")
    graph = build.finish(("output", "0", build.call(aten.mul.Tensor, x, w)))
    trained = simulated(graph).peak_memory_bytes
    moments, temporaries = 2 * 80, 2 * 80
    assert trained - simulated(frozen(graph)).peak_memory_bytes == moments + temporaries


def communicating(target: Any, before: Shape, after: Shape, *args: Any) -> fx.GraphModule:
    build = Builder()
    x = build.input("x", before)
    return build.finish(("output", "0", build.write(target, x, *args, 0, specs=[TensorSpec(after, f64)])))


COLUMN = MergedAxis((0,), ("data",), 2)
# target, shape before and after, arguments, bytes of the whole tensor, bytes of copies that are alive beside both.
COLLECTIVES = [
    (c.all_reduce, (4, 8), (4, 8), ("sum",), 256, 0),
    (c.all_gather, (4, 8), (8, 8), (0, 1), 512, 0),
    (c.reduce_scatter, (4, 8), (2, 8), ("sum", 0, 1), 256, 0),
    (c.all_gather, (4, 8), (4, 16), (1, 1), 512, 512),  # received along dim 0, then put together
    (c.reduce_scatter, (4, 8), (4, 4), ("sum", 1, 1), 256, 256),  # cut, and laid along dim 0
    (c.all_to_all, (4, 8), (8, 4), (0, 1, 1, 1), 512, 256),
]
Communication = tuple[Any, Shape, Shape, tuple[Any, ...], int, int]


@pytest.mark.parametrize("case", COLLECTIVES, ids=lambda case: f"{case[0].__name__}{case[3]}")
def test_the_time_of_a_collective(case: Communication) -> None:
    target, before, after, args, size_bytes, _ = case
    report = simulated(communicating(target, before, after, *args), COLUMN)
    assert report.communication_s == collective_s(target.__name__, size_bytes, CLUSTER.axes)
    assert report.compute_s == 0.0


@pytest.mark.parametrize("case", COLLECTIVES, ids=lambda case: f"{case[0].__name__}{case[3]}")
def test_the_memory_of_a_collective(case: Communication) -> None:
    target, before, after, args, _, copies = case
    report = simulated(communicating(target, before, after, *args), COLUMN)
    assert report.peak_memory_bytes == 256 + after[0] * after[1] * 8 + copies


@pytest.mark.parametrize(
    ("target", "args"),
    [(c.shard, (0, 1)), (c.only_first, ()), (c.local_index, (4,))],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_local_nodes_take_no_time(target: Any, args: tuple[Any, ...]) -> None:
    after = (2, 8) if target is c.shard else (4, 8)
    assert simulated(communicating(target, (4, 8), after, *args), COLUMN).step_time_s == 0.0


def test_the_time_of_operators() -> None:
    """Forward and backward, each at its roofline; the transpose is free."""
    device = CLUSTER.device
    parts = [
        op_time_s(OpCost(2 * 4 * 8 * 2, 256 + 128, 64), "float64", device, "matmul"),
        op_time_s(OpCost(8, 64, 64), "float64", device, "pointwise"),
        op_time_s(OpCost(8, 64, 8), "float64", device, "pointwise"),
        op_time_s(OpCost(8, 64 + 8, 64), "float64", device, "pointwise"),
        op_time_s(OpCost(2 * 8 * 4 * 2, 256 + 64, 128), "float64", device, "matmul"),
    ]
    report = simulated(layer())
    assert report.compute_s == pytest.approx(sum(float(part) for part in parts), rel=1e-12)
    assert report.communication_s == 0.0


def test_the_step_is_the_sum() -> None:
    seconds = {Cause(COMPUTE): 1.5, Cause(RECOMPUTE): 0.5, Cause("all_gather", (0, 1)): 2.5, Cause(UPDATE): 0.5}
    report = StepReport(seconds, MemoryUse({}, {}), 5)
    assert report.step_time_s == 5.0
    assert (report.compute_s, report.communication_s) == (2.0, 2.5)


def test_a_shape_that_is_not_what_its_facts_say() -> None:
    graph = layer()
    node = next(node for node in graph.graph.nodes if node.name == "exp")
    set_meta(node, meta_of(node).having(specs=(TensorSpec((4, 3), f64),)))
    with pytest.raises(VerifierError, match=r"node 'exp' \(aten.exp.default\) makes shape \(4, 2\) .* say \(4, 3\)"):
        simulated(graph)


# ---- plans -----------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual layer whose insides are four times as wide as what crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def stack() -> fx.GraphModule:
    return captured(nn.Sequential(*(Layer() for _ in range(4)), nn.Linear(32, 1)), (torch.ones(256, 32),))


def report_of(graph: fx.GraphModule, role: str, **options: bool) -> StepReport:
    return SimulateStep(CLUSTER).run(Lower(uniform(graph, role, **options), CLUSTER).run(graph))


def test_recomputation_takes_time_and_saves_memory(stack: fx.GraphModule) -> None:
    kept, again = report_of(stack, "data"), report_of(stack, "data", recompute=True)
    assert again.peak_memory_bytes < kept.peak_memory_bytes
    assert again.compute_s > kept.compute_s
    assert again.parameter_bytes == kept.parameter_bytes


def test_causes_of_time_and_memory(stack: fx.GraphModule) -> None:
    """Recomputation and its share of the gathers; what is gathered is there as long as it is kept."""
    plain, again = report_of(stack, "zero"), report_of(stack, "zero", recompute=True)
    assert Cause(RECOMPUTE) not in plain.seconds
    assert 0 < again.seconds[Cause(RECOMPUTE)] < again.seconds[Cause(COMPUTE)]
    # Bundles are packed alike but not the same.
    assert again.seconds[Cause(COMPUTE)] == pytest.approx(plain.seconds[Cause(COMPUTE)], rel=0.05)
    assert {cause.kind for cause in plain.seconds if cause.axes == (0,)} == {"all_gather", "reduce_scatter"}
    assert again.memory.step[ACTIVATIONS] < plain.memory.step[ACTIVATIONS]
    kept = report_of(stack, "zero", keep_gathered=True)
    assert kept.memory.step[GATHERED] > plain.memory.step[GATHERED] > 0
    assert report_of(stack, "data").memory.step[GATHERED] == 0


def test_zero_halves_the_parameters(stack: fx.GraphModule) -> None:
    whole, halved = report_of(stack, "data"), report_of(stack, "zero")
    alone = 4  # the last bias, which does not divide
    assert halved.parameter_bytes == (whole.parameter_bytes - alone) / 2 + alone
    assert halved.communication_s > 0


def test_what_is_recomputed_is_gathered_again(stack: fx.GraphModule) -> None:
    both = report_of(stack, "zero", recompute=True, keep_gathered=True)
    assert both == report_of(stack, "zero", recompute=True) != report_of(stack, "zero", keep_gathered=True)


def test_equal_programs_have_equal_reports(stack: fx.GraphModule) -> None:
    assert report_of(stack, "zero") == report_of(stack, "zero")
    strategies = [Strategy(("data",))] * len(uniform(stack, "data"))
    simulate = SimulateStep(CLUSTER)
    lowered = Lower(strategies, CLUSTER).run(stack)
    assert simulate.run(lowered) == simulate.run(lowered), "nothing is left over from an earlier run"


@pytest.fixture
def fake_groups() -> Iterator[dict[int, BoundAxis]]:
    """By size, a mesh axis seen from its last rank; its collectives allocate what real ones do and move nothing."""
    made = {}
    for size in (2, 4):
        group = dist.ProcessGroup(dist.HashStore(), size - 1, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(size - 1, size))
        group._set_group_name(f"fake group of {size}")
        _register_process_group(group.group_name, group)
        made[size] = group
    yield {size: BoundAxis(group.group_name, size, size - 1) for size, group in made.items()}
    for group in made.values():
        _unregister_process_group(group.group_name)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"keep_gathered": True}], ids=str)
@pytest.mark.parametrize(
    "roles",
    [("data", "data"), ("zero", "zero"), ("tensor", "tensor_sequence"), ("sequence", "zero"), ("zero", "tensor")],
    ids=" ".join,
)
def test_what_is_measured(
    stack: fx.GraphModule,
    fake_groups: dict[int, BoundAxis],
    roles: tuple[str, ...],
    options: dict[str, bool],
    offloads: bool,
) -> None:
    """The predicted peaks of forward and backward, on the device and on the host, are, to the byte, what a rank that
    runs the program has alive.
    """
    cluster = Cluster.preset("4xA100-80GB")
    strategies = uniform(stack, *roles, **options)
    lowered = Lower(offloading(stack, strategies) if offloads else strategies, cluster).run(stack)
    degrees = [column.degree for column in lowered.layout.merged_axes]
    predicted = GraphMemory(degrees).use(lowered)
    ports = lowered.halves.input_ports
    nodes = lowered.halves.forward.graph.find_nodes(op="placeholder")
    inputs = {port: torch.ones(meta_of(n).spec.shape) for port, n in zip(ports, nodes, strict=True)}
    for half in (lowered.halves.forward, lowered.halves.backward):
        Codegen([fake_groups[degree] for degree in degrees]).run(half)
    program = Program(lowered.halves, lowered.layout, signature(lowered.joint), rows_read(lowered.joint, ()))
    with torch.no_grad(), TensorMemory(inputs.values()) as measured:
        kept = program.train(inputs.__getitem__)
    assert kept[1] and predicted.peak_bytes == measured.peak_bytes
    assert predicted.host_bytes == measured.host_peak_bytes and bool(predicted.host_bytes) == offloads
