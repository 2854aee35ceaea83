"""One training step of a lowered program on simulated ranks: every collective is computed in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from galvatron_fx.checking.whole_tensors import Whole, collect, distribute
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec, Signature, meta_of, ports, signature
from galvatron_fx.ir.plan.schedule import Action, Schedule
from galvatron_fx.ir.plan.strategy import original_name
from galvatron_fx.runtime.lockstep import Simulator
from galvatron_fx.runtime.microbatches import hoisted_values, merge_outputs
from galvatron_fx.runtime.stage_runner import StageRunner
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered
from passes.lowering.stages.split_stages import Stage
from passes.lowering.stages.stage_tasks import Task

__all__ = ["Results", "ValueOf", "replay", "run_stages", "run_step"]

ValueOf = Callable[[InputSpec], Tensor]
"""The whole value of an input of the joint graph; of a tangent, that of the output."""

Results = dict[OutputSpec, Whole]
"""Outputs, updated buffers and gradients; a gradient's port has the parameter's own name, also under stages."""


def run_step(lowered: Lowered, value_of: ValueOf) -> Results:
    """Run forward and backward of a plan without stages on all ranks of its lowering mesh, in lockstep."""
    halves, layout = lowered.halves, lowered.layout
    simulator = Simulator(layout.shape)
    inputs = dict(zip(signature(lowered.joint).inputs, layout.inputs, strict=True))
    outputs = dict(zip(signature(lowered.joint).outputs, layout.outputs, strict=True))

    padded = signature(lowered.joint).padded

    def held(port: InputSpec) -> list[Tensor]:
        value = value_of(port)
        if port.kind == "tangent" and port.name in padded:
            value = padded[port.name].padded(value)
        return distribute(value, inputs[port], layout.shape)

    forward = simulator.run(halves.forward, [held(port) for port in halves.input_ports])
    count = len(halves.result_ports)
    saved = forward[count:]
    gradients = simulator.run(halves.backward, [*saved, *map(held, halves.tangent_ports)])
    values = [
        *zip(halves.result_ports, forward[:count], strict=True),
        *zip(halves.gradient_ports, gradients, strict=True),
    ]
    results = {port: collect(value, outputs[port], layout.shape) for port, value in values if value[0] is not None}
    return _without_padding(results, signature(lowered.joint))


def run_stages(lowered: LoweredStages, schedule: Schedule, value_of: ValueOf) -> Results:
    """As :func:`run_step`, for a plan with stages and micro-batches, in the order of ``schedule``."""
    shape = lowered.layout.shape
    simulator = Simulator(shape)
    placed = dict(zip(signature(lowered.joint).inputs, lowered.layout.inputs, strict=True))
    hoisted = hoisted_values(lowered.microbatched, value_of)
    dtypes = {port: meta_of(node).spec.dtype for port, node in ports(lowered.joint)}

    def value(port: InputSpec) -> list[Tensor]:
        given = value_of(port)
        return distribute(given.to(dtypes[port]) if port.kind == "tangent" else given, placed[port], shape)

    def hoisted_of(stage: Stage, index: int) -> dict[str, Any]:
        ours = {name: port for name, port in stage.ports.items() if port.kind == "hoisted"}
        return {n: distribute(hoisted[int(p.name)][index], placed[p], shape) for n, p in ours.items()}

    def run_task(task: Task, arguments: list[Any]) -> list[list[Any]]:
        ranks = len(simulator.coordinates)
        return simulator.run(task.graph, [[None] * ranks if value is None else value for value in arguments])

    runners = []
    for stage in lowered.stages:
        shared = {name: value(port) for name, port in stage.ports.items() if port.kind != "hoisted"}
        runners.append(StageRunner(stage, run_task, shared, partial(hoisted_of, stage)))
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
                action, together = order[0], [pending[rank] for rank in schedule.ranks_of(order[0].stage)]
                if any(other[:1] != [action] for other in together):
                    break
                for other in together:
                    other.pop(0)
                _act(action, runners, passed, last)
        assert sum(map(len, pending)) < before, f"deadlock before {[order[0] for order in pending if order]}"


def _is_ready(action: Action, passed: Mapping[Any, Any], last: int) -> bool:
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


def _gathered(lowered: LoweredStages, runners: Sequence[StageRunner]) -> Results:
    """Outputs and gradients of the whole step, copies of tied parameters added up."""
    shape = lowered.layout.shape
    placed = dict(zip(signature(lowered.joint).outputs, lowered.layout.outputs, strict=True))
    spreads: dict[OutputSpec, float] = {}
    results: Results = {}
    by_microbatch: list[dict[OutputSpec, Tensor]] = [{} for _ in range(lowered.microbatched.num_microbatches)]
    for runner in runners:
        assert not runner._live, "values of a micro-batch are left"
        for index, outputs in runner.results.items():
            for port, value in outputs.items():
                whole = collect(value, placed[port], shape)
                by_microbatch[index][port] = whole.value
                spreads[port] = max(whole.spread, spreads.get(port, 0.0))
        known = {gradient.port.name: gradient.port for gradient in runner.stage.gradients}
        for name, held in runner.finish().items():
            whole, port = collect(held, placed[known[name]], shape), OutputSpec("grad", original_name(name))
            other = results.get(port)
            if other is not None:
                whole = Whole(other.value + whole.value, max(other.spread, whole.spread))
            results[port] = whole
    merged = merge_outputs(lowered.microbatched, by_microbatch)
    results |= {port: Whole(value, spreads.get(port, 0.0)) for port, value in merged.items()}
    return _without_padding(results, lowered.signature)


def _without_padding(results: Results, of: Signature) -> Results:
    """Outputs, and gradients of inputs, of the batch itself."""
    padded = [port for port in results if port.kind == "output" or port.is_input_gradient]
    return results | {
        port: Whole(of.without_padding(port, results[port].value), results[port].spread) for port in padded
    }
