"""Predict a lowered program: time from its operators and collectives, memory from the life of every tensor.

Memory is found by running the graphs, bound to a rank as code generation binds them, on fake tensors, which have
shapes, strides and storages but no data: views share storage and collectives copy as they do in a real run, so
nothing is estimated but what operators allocate inside.
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
from galvatron_fx.ir.op_call import op_call
from galvatron_fx.ir.torch_compat import new_fake_mode
from passes.call_cost import call_cost
from passes.codegen import BoundAxis, Codegen
from passes.lower import Lowered
from passes.sharding.prices import dtype_name, is_free

_WAIT = torch.ops._c10d_functional.wait_tensor.default
MOMENTS = 2  # Adam's, each as large as the parameter
# torch's AdamW updates one parameter after the other, with so many temporaries of its size (measured on torch 2.13 with
# benchmarks/tensor_memory.py).
UPDATE_COPIES = 3


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
        trained = _parameter_bytes(lowered, trained_only=True)
        meter = MemoryMeter([prod(a.size for a in group) for group in axes])
        peak = meter.peak(lowered, UPDATE_COPIES * max(trained, default=0))
        parameters = sum(_parameter_bytes(lowered, trained_only=False))
        return StepReport(compute, communication, MOMENTS * sum(trained) + peak, parameters)

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


def _parameter_bytes(lowered: Lowered, trained_only: bool) -> list[int]:
    """Of each parameter (of each that is trained)."""
    pairs = zip(_placeholders(lowered.halves.forward), lowered.halves.input_ports, strict=True)
    return [
        facts(node).spec.size_bytes
        for node, port in pairs
        if port.kind == "param" and (port.requires_grad or not trained_only)
    ]


def _placeholders(graph: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


class MemoryMeter:
    """Runs the two graphs on fake tensors and counts the bytes of storages that are alive."""

    def __init__(self, degrees: Sequence[int]) -> None:
        self._degrees = degrees
        self._live: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.bytes = 0
        self.most_bytes = 0

    def peak(self, lowered: Lowered, update_bytes: int) -> int:
        """The most bytes alive beside optimizer states: parameters, inputs, gradients and outputs included.

        ``update_bytes``: what the optimizer takes while it updates, when the gradients are all that backward left.
        """
        halves = lowered.halves
        count = len(halves.result_ports)
        with new_fake_mode():
            inputs = [_fake(node) for node in _placeholders(halves.forward)]
            self.hold(inputs)
            results = self.run(halves.forward, inputs, owned=set())
            saved, produced = results[count:], set(map(id, results[:count]))
            tangents = [_fake(node) for node in _placeholders(halves.backward)[len(saved) :]]
            self.hold([*tangents, *(value for value in saved if id(value) in produced)])
            borrowed = {i for i, source in enumerate(halves.saved_inputs) if source is not None}
            self.run(halves.backward, [*saved, *tangents], set(range(len(saved) + len(tangents))) - borrowed)
        return max(self.most_bytes, self.bytes + update_bytes)

    def hold(self, value: Any) -> None:
        for tensor in _tensors(value):
            key = tensor.untyped_storage()._cdata
            if not self._live[key]:
                self._sizes[key] = tensor.untyped_storage().nbytes()
                self.bytes += self._sizes[key]
                self.most_bytes = max(self.most_bytes, self.bytes)
            self._live[key] += 1

    def drop(self, value: Any) -> None:
        for tensor in _tensors(value):
            key = tensor.untyped_storage()._cdata
            if key not in self._sizes:
                continue
            self._live[key] -= 1
            if not self._live[key]:
                self.bytes -= self._sizes.pop(key)
                del self._live[key]

    def run(self, graph: fx.GraphModule, inputs: list[Any], owned: set[int]) -> list[Any]:
        """Run one graph; inputs in ``owned`` (already held) are dropped at their last use, outputs stay held."""
        values: dict[fx.Node, Any] = {}
        bound = self._bound(graph)
        last = _last_uses(bound)
        held: set[fx.Node] = set()
        for i, node in enumerate(bound.find_nodes(op="placeholder")):
            values[node] = inputs[i]
            if i in owned:
                held.add(node)
                if node not in last:
                    self.drop(values[node])
        for node in bound.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                outs = node.args[0]
                return [values[n] if isinstance(n, fx.Node) else None for n in outs]
            values[node] = self._evaluate(graph, node, values)
            self.hold(values[node])
            held.add(node)
            for used in {*node.all_input_nodes, node}:
                if used in held and last.get(used, node) is node:
                    self.drop(values.pop(used))
                    held.discard(used)
        raise AssertionError("the graph has no output")

    def _bound(self, graph: fx.GraphModule) -> fx.Graph:
        """A copy as the last rank of every axis runs it: collectives copy what their buffers need."""
        bound = fx.Graph()
        bound.output(bound.graph_copy(graph.graph, {}))
        Codegen([BoundAxis("", degree, degree - 1) for degree in self._degrees]).bind(bound)
        return bound

    def _evaluate(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            return torch.empty_like(getattr(graph, str(node.target)), device="cpu")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.target is _WAIT:
            return args[0]  # as it does; on fake tensors it would make another
        value = node.target(*args, **kwargs)  # type: ignore[operator]
        _check(node, value)
        return value


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


def _last_uses(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    return last
