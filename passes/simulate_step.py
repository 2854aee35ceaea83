"""Predict a lowered program: time from its operators and collectives, memory from the life of every tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from torch import fx

from cost_models.collectives import collective_s
from cost_models.ops import OpCost, kind_of, op_time_s
from galvatron_fx.ir import collectives as c
from galvatron_fx.ir.annotations import facts, has_facts
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.op_call import OpCall, call_key, op_call
from galvatron_fx.ir.predicted import (
    ACCUMULATE,
    COMPUTE,
    LOCAL_CAUSES,
    RECOMPUTE,
    STATES,
    UPDATE,
    Cause,
    MemoryUse,
    RankUse,
)
from passes.call_cost import call_cost
from passes.lower import Lowered
from passes.memory_meter import MemoryMeter
from passes.real_copies import real_copies
from passes.sharding.prices import dtype_name, is_free, update_traffic_s
from passes.stage_tasks import plus

MOMENTS = 2  # Adam's, each as large as the parameter
# torch's AdamW updates one parameter after the other, with so many temporaries of its size (measured on torch 2.13 with
# benchmarks/tensor_memory.py).
UPDATE_COPIES = 3

Seconds = dict[Cause, float]


@dataclass(frozen=True)
class StepReport:
    """One training step on one rank: seconds by cause, and bytes beside which nothing else is alive."""

    seconds: Mapping[Cause, float]
    memory: MemoryUse
    parameter_bytes: int

    @property
    def compute_s(self) -> float:
        """Seconds of operators."""
        return sum(s for cause, s in self.seconds.items() if cause.kind in LOCAL_CAUSES and cause.kind != UPDATE)

    @property
    def communication_s(self) -> float:
        """Seconds of collectives."""
        return sum(s for cause, s in self.seconds.items() if cause.kind not in LOCAL_CAUSES)

    @property
    def step_time_s(self) -> float:
        """Seconds of forward, backward and update; collectives are waited for where they are issued."""
        return sum(self.seconds.values())

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes alive."""
        return self.memory.peak_bytes

    def ranks(self) -> tuple[RankUse, ...]:
        """The step by pipeline rank, of which there is one."""
        return (RankUse((0,), self.seconds, self.memory.at_peak),)


@dataclass
class SimulateStep:
    """Simulate the graphs of ``lowered`` on one device of ``cluster``."""

    cluster: Cluster
    _known: dict[Any, float] = field(default_factory=dict)

    def run(self, lowered: Lowered) -> StepReport:
        """Return the prediction. Raises VerifierError where a node's shape is not the one its facts say."""
        halves = lowered.halves
        nodes = [*halves.forward.graph.nodes, *halves.backward.graph.nodes]
        trained = _parameter_bytes(lowered, trained_only=True)
        memory = MemoryMeter(lowered.layout.shape).use(lowered, UPDATE_COPIES * max(trained, default=0))
        memory = MemoryUse(*({**held, STATES: MOMENTS * sum(trained)} for held in (memory.step, memory.update)))
        seconds = self.times(nodes, [column.axes for column in lowered.layout.columns])
        for half in (halves.forward, halves.backward):
            self.add_copies(seconds, half, lowered.layout.shape)
        seconds |= {Cause(UPDATE): self.update_s(trained)}
        return StepReport(seconds, memory, sum(_parameter_bytes(lowered, trained_only=False)))

    def times(self, nodes: Sequence[fx.Node], columns: Sequence[tuple[int, ...]]) -> Seconds:
        """Seconds by cause; ``columns``: the mesh axes that each collective's last argument stands for."""
        seconds: Seconds = {}
        for node in nodes:
            if node.op != "call_function" or not has_facts(node):
                continue
            if node.target in c.COLLECTIVES:
                axes = columns[int(node.args[-1])]  # type: ignore[arg-type]
                cause = Cause(node.target.__name__, axes)
                spent = self._collective_s(node, [self.cluster.axes[i] for i in axes])
            elif getattr(node.target, "__name__", "") != "getitem":
                cause, spent = Cause(_local_kind(node)), self._operator_s(node)
            else:
                continue
            if spent:
                seconds[cause] = seconds.get(cause, 0.0) + spent
        return seconds

    def add_copies(self, seconds: Seconds, graph: fx.GraphModule, degrees: Sequence[int]) -> None:
        """Add what copies take that are no operators of their own; only measured prices are worth the run on fakes."""
        device = self.cluster.device
        if not device.curves:
            return
        for record, size in real_copies(graph, degrees):
            cause = Cause(RECOMPUTE if record.again else COMPUTE)
            spent = float(op_time_s(OpCost(0, size, size), record.spec.dtype, device, "contiguous"))
            seconds[cause] = seconds.get(cause, 0.0) + spent

    def update_s(self, parameter_bytes: Sequence[int]) -> float:
        """Seconds of the optimizer's update of parameters, one after the other."""
        return float(update_traffic_s(self.cluster.device, np.array(parameter_bytes, dtype=np.float64)).sum())

    def _operator_s(self, node: fx.Node) -> float:
        call = op_call(node)
        if call not in self._known:
            self._known[call] = self._call_s(call)
        return self._known[call]

    def _call_s(self, call: OpCall) -> float:
        device = self.cluster.device
        if call.target in c.RANK_LOCAL or is_free(call):
            return device.view_s
        measured = device.measured_calls.get(call_key(call)) if device.calls else None
        if measured is not None:
            return measured
        return float(op_time_s(call_cost(call), dtype_name(call), device, kind_of(call.target)))

    def _collective_s(self, node: fx.Node, axes: Sequence[Axis]) -> float:
        name = node.target.__name__  # type: ignore[union-attr]
        degree = prod(axis.size for axis in axes)
        source = facts(node.args[0]).spec.size_bytes  # type: ignore[arg-type]
        whole = source * degree if name in ("all_gather", "all_to_all") else source
        key = (name, whole, tuple(axes))
        if key not in self._known:
            self._known[key] = float(collective_s(name, float(whole), list(axes)))
        return self._known[key]


def _local_kind(node: fx.Node) -> str:
    if node.target is plus:
        return ACCUMULATE
    return RECOMPUTE if facts(node).again else COMPUTE


def _parameter_bytes(lowered: Lowered, trained_only: bool) -> list[int]:
    """Of each parameter (of each that is trained)."""
    nodes = lowered.halves.forward.graph.find_nodes(op="placeholder")
    return [
        facts(node).spec.size_bytes
        for node, port in zip(nodes, lowered.halves.input_ports, strict=True)
        if port.kind == "param" and (port.requires_grad or not trained_only)
    ]
