"""Whole-model exactness: a plan's loss, gradients and buffers against the plain model on one device."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from galvatron_fx.ir.annotations import Port, facts, ports, signature
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.collectives import join_runs, split_runs
from galvatron_fx.ir.overlap import Overlap
from galvatron_fx.ir.placement import Placement, Shard
from galvatron_fx.ir.schedule import Action, Schedule
from galvatron_fx.ir.strategy import Strategy, original_name
from galvatron_fx.runtime.microbatches import hoisted_values, merge_outputs
from galvatron_fx.runtime.simulator import Simulator
from galvatron_fx.runtime.stage_runner import StageRunner
from passes.capture import FlatInputs
from passes.find_blocks import num_blocks
from passes.frontend import Frontend
from passes.lower import Lower
from passes.lower_stages import LoweredStages, LowerStages
from passes.split_stages import Stage
from passes.stage_tasks import Task

DEVICE = Cluster.preset("8xA100-80GB").device
SEED = 20


def axes(sizes: Sequence[int]) -> tuple[Axis, ...]:
    """Mesh axes of the given sizes with NVLink-like links."""
    return tuple(Axis(f"a{i}", size, 1e-5, 1e11) for i, size in enumerate(sizes))


def cluster_for(sizes: Sequence[int], strategies: Sequence[Strategy]) -> Cluster:
    """Mesh axes of the given sizes; for half of all plans on devices that gain nothing by communicating early."""
    is_even = zlib.crc32(repr(strategies).encode()) % 2 == 0
    return Cluster(DEVICE, axes(sizes), Overlap(2.0, 2.0) if is_even else Overlap())


def captured(model: nn.Module, inputs: Any) -> fx.GraphModule:
    """Capture and find blocks."""
    return Frontend().run(model, inputs)


def distribute(whole: torch.Tensor, placements: Sequence[Placement], shape: Sequence[int]) -> list[torch.Tensor]:
    """What every rank holds of a tensor."""
    held = [whole]
    for placement, degree in zip(placements, shape, strict=True):
        if isinstance(placement, Shard):
            held = [part for x in held for part in split_runs(x, placement.dim, placement.outer, degree)]
        else:
            held = [x for x in held for _ in range(degree)]
    return held


def collect(held: Sequence[torch.Tensor], placements: Sequence[Placement], shape: Sequence[int]) -> torch.Tensor:
    """Put together what the ranks hold, checking that replicas agree."""
    held = list(held)
    for placement, degree in reversed(list(zip(placements, shape, strict=True))):
        groups = [held[i : i + degree] for i in range(0, len(held), degree)]
        if isinstance(placement, Shard):
            held = [join_runs(group, placement.dim, placement.outer) for group in groups]
        else:
            for group in groups:
                for other in group[1:]:
                    torch.testing.assert_close(other, group[0], rtol=0, atol=0, equal_nan=True)
            held = [group[0] for group in groups]
    return held[0]


def simulate(
    graph: fx.GraphModule,
    model: nn.Module,
    inputs: Any,
    sizes: Sequence[int],
    strategies: Sequence[Strategy],
    cache: Any,
) -> dict[str, torch.Tensor]:
    """Lower ``graph`` by a plan, run one step on all ranks, and return outputs, buffers and gradients by name."""
    lowered = Lower(strategies, cluster_for(sizes, strategies), cache).run(graph)
    joint, halves, how = lowered.joint, lowered.halves, lowered.layout
    simulator = Simulator(how.shape)
    flat = FlatInputs.of(inputs)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    fed = []
    for (port, _), placements in zip(ports(joint), how.inputs, strict=True):
        if port.kind == "tangent":
            continue
        if port.kind == "seed":
            value = torch.tensor(SEED)
        else:
            value = flat.tensors[int(port.name)] if port.kind == "input" else tensors[port.name].detach()
        fed.append(distribute(value, placements, how.shape))
    out = simulator.run(halves.forward, fed)
    count = len(halves.result_ports)
    results, saved = out[:count], out[count:]
    tangents = [
        [torch.ones_like(results[_position(halves.result_ports, p.name)][0])] * len(simulator.coordinates)
        for p in halves.tangent_ports
    ]
    gradients = simulator.run(halves.backward, [*saved, *tangents])
    named: dict[str, torch.Tensor] = {}
    pairs = [*zip(halves.result_ports, results, strict=True), *zip(halves.gradient_ports, gradients, strict=True)]
    placed = dict(zip(((p.kind, p.name) for p in joint.meta["galvatron"].outputs), how.outputs, strict=True))
    for port, values in pairs:
        if values[0] is not None:
            named[f"{port.kind} {port.name}"] = collect(values, placed[port.kind, port.name], how.shape)
    return named


def simulate_stages(
    graph: fx.GraphModule,
    model: nn.Module,
    inputs: Any,
    sizes: Sequence[int],
    strategies: Sequence[Strategy],
    first_blocks: Sequence[int],
    schedule: Schedule,
) -> dict[str, torch.Tensor]:
    """As :func:`simulate`, for a plan with stages and micro-batches, in the order of ``schedule``."""
    cluster = cluster_for(sizes, strategies)
    count = schedule.num_microbatches
    lowered = LowerStages(strategies, first_blocks, count, cluster).run(graph)
    shape = lowered.layout.shape
    simulator = Simulator(shape)
    flat = FlatInputs.of(inputs)
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }

    def whole(port: Port) -> torch.Tensor:
        if port.kind == "tangent":
            return torch.ones((), dtype=torch.float64)
        if port.kind == "seed":
            return torch.tensor(SEED)
        return flat.tensors[int(port.name)] if port.kind == "input" else tensors[original_name(port.name)].detach()

    known = signature(lowered.joint).inputs
    placed = dict(zip(known, lowered.layout.inputs, strict=True))
    hoisted = hoisted_values(lowered.microbatched, whole)
    dtypes = {port: facts(node).spec.dtype for port, node in ports(lowered.joint)}

    def value(port: Port) -> list[torch.Tensor]:
        given = whole(port)
        return distribute(given.to(dtypes[port]) if port.kind == "tangent" else given, placed[port], shape)

    def own(stage: Stage, index: int) -> dict[str, Any]:
        ours = {name: port for name, port in stage.ports.items() if port.kind == "hoisted"}
        return {n: distribute(hoisted[int(p.name)][index], placed[p], shape) for n, p in ours.items()}

    def run_task(task: Task, arguments: list[Any]) -> list[list[Any]]:
        ranks = len(simulator.coordinates)
        return simulator.run(task.graph, [[None] * ranks if value is None else value for value in arguments])

    runners = []
    for stage in lowered.stages:
        shared = {name: value(port) for name, port in stage.ports.items() if port.kind != "hoisted"}
        runners.append(StageRunner(stage, run_task, shared, partial(own, stage)))
    replay(schedule, runners)
    return _gathered(lowered, runners)


def replay(schedule: Schedule, runners: Sequence[StageRunner]) -> None:
    """Run all actions in an order that respects the ranks' orders and what stages wait for."""
    for runner in runners:
        runner.start()
    passed: dict[tuple[str, int, int], list[Any]] = {}
    pending = [list(order) for order in schedule.orders]
    last = len(runners) - 1
    while any(pending):
        before = sum(map(len, pending))
        for order in pending:
            while order and _is_ready(order[0], passed, last):
                _act(order.pop(0), runners, passed, last)
        assert sum(map(len, pending)) < before, f"deadlock before {[order[0] for order in pending if order]}"


def _is_ready(action: Action, passed: dict[Any, Any], last: int) -> bool:
    if action.kind == "F":
        return action.stage == 0 or ("F", action.stage - 1, action.microbatch) in passed
    if action.kind == "W":
        return True
    return action.stage == last or ("B", action.stage + 1, action.microbatch) in passed


def _act(action: Action, runners: Sequence[StageRunner], passed: dict[Any, Any], last: int) -> None:
    stage, index = action.stage, action.microbatch
    runner = runners[stage]
    if action.kind == "F":
        passed["F", stage, index] = runner.forward(index, passed.pop(("F", stage - 1, index)) if stage else [])
    elif action.kind == "W":
        runner.weight_grad(index)
    else:
        received = passed.pop(("B", stage + 1, index)) if stage < last else []
        passed["B", stage, index] = runner.backward(index, received, whole=action.kind == "B")


def _gathered(lowered: LoweredStages, runners: Sequence[StageRunner]) -> dict[str, torch.Tensor]:
    """Outputs and gradients of the whole step, copies of tied parameters added up."""
    shape = lowered.layout.shape
    out_placed = dict(zip(signature(lowered.joint).outputs, lowered.layout.outputs, strict=True))
    named: dict[str, torch.Tensor] = {}
    by_microbatch: list[dict[Port, torch.Tensor]] = [{} for _ in range(lowered.microbatched.num_microbatches)]
    for runner in runners:
        assert not runner._live
        for index, results in runner.results.items():
            by_microbatch[index] |= {port: collect(v, out_placed[port], shape) for port, v in results.items()}
        for name, held in runner.finish().items():
            port = next(g.port for g in runner.stage.gradients if g.port.name == name)
            key = f"grad {original_name(name)}"
            value = collect(held, out_placed[port], shape)
            named[key] = named[key] + value if key in named else value
    for port, value in merge_outputs(lowered.microbatched, by_microbatch).items():
        named[f"{port.kind} {port.name}"] = value
    return named


def _position(result_ports: Sequence[Any], name: str) -> int:
    return next(i for i, p in enumerate(result_ports) if p.kind == "output" and p.name == name)


def one_device(model: nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """The same names from plain eager training."""
    flat = FlatInputs.of(inputs)
    args, kwargs = flat.call(flat.tensors)
    model.zero_grad()
    result = model(*args, **kwargs)
    leaves = [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
    scalars = [x for x in leaves if x.dim() == 0 and x.requires_grad]
    sum(scalars).backward() if scalars else sum(x.sum() for x in leaves if x.requires_grad).backward()
    named = {f"output {i}": x.detach() for i, x in enumerate(leaves)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            named[f"grad {name}"] = parameter.grad.clone()
    return named


def assert_exact(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], context: str = "", tolerance: float = 1e-10
) -> None:
    """Every expected value is there and equal to ``tolerance`` relative to its largest element.

    Some gradients are zero but for rounding (an attention key's bias moves no softmax), so a value counts as at least a
    millionth of the largest gradient.
    """
    largest = max((float(v.abs().max()) for n, v in expected.items() if n.startswith("grad")), default=1.0)
    for name, value in expected.items():
        if name not in got:
            raise AssertionError(f"{context}: no value for {name}; there are {sorted(got)[:5]} ...")
        scale = max(float(value.abs().max()), 1e-6 * largest) or 1.0
        error = float((got[name] - value).abs().max()) / scale
        assert error < tolerance, f"{context}: {name} differs by {error:.2e}"


def uniform(graph: fx.GraphModule, *roles: str, **options: bool) -> list[Strategy]:
    """One strategy for every block."""
    return [Strategy(tuple(roles), **options)] * num_blocks(graph)
