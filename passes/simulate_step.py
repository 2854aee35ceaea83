"""Predict a lowered program: time from its operators and collectives, memory from the life of every tensor.

Memory is found by running the graphs on fake tensors, which have shapes, strides and storages but no data: views
share storage as they do in a real run, so nothing is estimated but what operators allocate inside.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from cost_models.collectives import collective_s
from cost_models.ops import is_matmul, op_time_s
from galvatron_fx.errors import VerifierError
from galvatron_fx.ir import collectives as c
from galvatron_fx.ir.annotations import facts, has_facts
from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.torch_compat import new_fake_mode
from passes.lower import Lowered
from passes.sharding.op_call import call_cost, op_call
from passes.sharding.prices import dtype_name, is_free

_MOMENTS = 2  # Adam's, each as large as the parameter


@dataclass(frozen=True)
class StepReport:
    """One training step on one rank: seconds of computing and communicating, and the most tensor bytes alive."""

    compute_s: float
    communication_s: float
    peak_memory_bytes: int
    parameter_bytes: int

    @property
    def step_time_s(self) -> float:
        """Seconds of forward and backward; collectives are waited for where they are issued."""
        return self.compute_s + self.communication_s


@dataclass
class SimulateStep:
    """Simulate the graphs of ``lowered`` on one device of ``cluster``."""

    cluster: Cluster
    _times: dict[Any, float] = field(default_factory=dict)

    def run(self, lowered: Lowered) -> StepReport:
        """Return the prediction. Raises VerifierError where a node's shape is not the one its facts say."""
        halves = lowered.halves
        axes = [[self.cluster.axes[i] for i in column.axes] for column in lowered.layout.columns]
        nodes = [*halves.forward.graph.nodes, *halves.backward.graph.nodes]
        compute, communication = self.times(nodes, axes)
        parameters = _bytes(lowered, trained_only=False)
        fixed = parameters + _MOMENTS * _bytes(lowered, trained_only=True)
        peak = _Memory([prod(a.size for a in group) for group in axes]).peak(lowered)
        return StepReport(compute, communication, fixed + peak, parameters)

    def times(self, nodes: Sequence[fx.Node], axes: Sequence[Sequence[Axis]]) -> tuple[float, float]:
        """(seconds of operators, seconds of collectives)."""
        compute = communication = 0.0
        for node in nodes:
            if node.op != "call_function" or not has_facts(node):
                continue
            if node.target in c.COLLECTIVES:
                communication += self._collective_s(node, axes[int(node.args[-1])])  # type: ignore[arg-type]
            elif getattr(node.target, "__name__", "") != "getitem":
                compute += self._operator_s(node)
        return compute, communication

    def _operator_s(self, node: fx.Node) -> float:
        call = op_call(node)
        if call not in self._times:
            cost = call_cost(call)
            device = self.cluster.device
            free = node.target in c.RANK_LOCAL or is_free(call)
            self._times[call] = (
                0.0 if free else float(op_time_s(cost, dtype_name(call), device, is_matmul(call.target)))
            )
        return self._times[call]

    def _collective_s(self, node: fx.Node, axes: Sequence[Axis]) -> float:
        name = node.target.__name__  # type: ignore[union-attr]
        degree = prod(axis.size for axis in axes)
        source = facts(node.args[0]).spec.size_bytes  # type: ignore[arg-type]
        whole = source * degree if name in ("all_gather", "all_to_all") else source
        key = (name, whole, tuple(axes))
        if key not in self._times:
            self._times[key] = float(collective_s(name, float(whole), list(axes)))
        return self._times[key]


def _bytes(lowered: Lowered, trained_only: bool) -> int:
    total = 0
    for node, port in zip(_placeholders(lowered.halves.forward), lowered.halves.input_ports, strict=True):
        if port.kind == "param" and (port.requires_grad or not trained_only):
            total += facts(node).spec.size_bytes
    return total


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


class _Memory:
    """Runs the two graphs on fake tensors and counts the bytes of storages that are alive."""

    def __init__(self, degrees: Sequence[int]) -> None:
        self._degrees = degrees
        self._live: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        self._peak = 0

    def peak(self, lowered: Lowered) -> int:
        """The most bytes alive beside parameters and optimizer states, gradients included."""
        halves = lowered.halves
        with new_fake_mode():
            inputs = [_fake(node) for node in _placeholders(halves.forward)]
            counted = [i for i, port in enumerate(halves.input_ports) if port.kind not in ("param",)]
            for i in counted:
                self._hold(inputs[i])
            out = self._run(halves.forward, list(inputs), owned=set())
            count = len(halves.result_ports)
            saved = list(out[count:])
            positions = {i for i, source in enumerate(halves.saved_inputs) if source is not None}
            tangents = [_fake(node) for node in _placeholders(halves.backward)[len(saved) :]]
            self._run(halves.backward, [*saved, *tangents], owned=set(range(len(saved))) - positions)
        return self._peak

    def _hold(self, value: Any) -> None:
        for tensor in _tensors(value):
            key = tensor.untyped_storage()._cdata
            if not self._live[key]:
                self._sizes[key] = tensor.untyped_storage().nbytes()
                self._bytes += self._sizes[key]
                self._peak = max(self._peak, self._bytes)
            self._live[key] += 1

    def _drop(self, value: Any) -> None:
        for tensor in _tensors(value):
            key = tensor.untyped_storage()._cdata
            if key not in self._sizes:
                continue
            self._live[key] -= 1
            if not self._live[key]:
                self._bytes -= self._sizes.pop(key)
                del self._live[key]

    def _run(self, graph: fx.GraphModule, inputs: list[Any], owned: set[int]) -> list[Any]:
        """Run one graph; inputs in ``owned`` (already held) are dropped at their last use, outputs stay held."""
        values: dict[fx.Node, Any] = {}
        last = _last_uses(graph)
        held: set[fx.Node] = set()
        for i, node in enumerate(_placeholders(graph)):
            values[node] = inputs[i]
            if i in owned:
                held.add(node)
                if node not in last:
                    self._drop(values[node])
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                outs = node.args[0]
                result = [values[n] if isinstance(n, fx.Node) else None for n in outs]
                for n in outs:
                    if isinstance(n, fx.Node) and n.op == "placeholder":
                        continue
                return result
            values[node] = self._evaluate(graph, node, values)
            self._hold(values[node])
            held.add(node)
            for used in {*node.all_input_nodes, node}:
                if used in held and last.get(used, node) is node:
                    self._drop(values.pop(used))
                    held.discard(used)
        raise AssertionError("the graph has no output")

    def _evaluate(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return torch.empty_like(getattr(graph, str(node.target)), device="cpu")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.target in c.COLLECTIVES or node.target in c.RANK_LOCAL:
            return self._communicate(node, args[0])  # type: ignore[arg-type]
        value = node.target(*args, **kwargs)  # type: ignore[operator]
        _check(node, value)
        return value

    def _communicate(self, node: fx.Node, source: Tensor) -> Tensor:
        """What a collective returns; where it moves another dim than the first, its buffer is alive for a moment
        too.
        """
        result = torch.empty(facts(node).spec.shape, dtype=source.dtype)
        strided = node.target in (c.all_gather, c.reduce_scatter, c.all_to_all) and node.args[1:3] != (0, 1)
        if strided:
            buffer = torch.empty_like(result if node.target is not c.reduce_scatter else source)
            self._hold(buffer)
            self._drop(buffer)
        return result


def _check(node: fx.Node, value: Any) -> None:
    """Thunder's habit: recompute every shape after a transformation and compare."""
    if not has_facts(node):
        return
    found = [tuple(v.shape) if isinstance(v, Tensor) else None for v in _outputs(value)]
    said = [spec.shape if spec is not None else None for spec in facts(node).specs]
    for position, (have, want) in enumerate(zip(found, said, strict=False)):
        if want is not None and have is not None and have != want:
            raise VerifierError(
                f"node '{node.name}' ({node.target}) makes shape {have} as output {position}, its facts say {want}: "
                f"the rule "
                f"that placed it, or its sizes in passes/sharding/local_args.py, is wrong"
            )


def _outputs(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _tensors(value: Any) -> list[Tensor]:
    return [v for v in _outputs(value) if isinstance(v, Tensor)]


def _fake(node: fx.Node) -> Tensor:
    spec = facts(node).spec
    return torch.empty(spec.shape, dtype=spec.dtype)


def _last_uses(graph: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    return last
