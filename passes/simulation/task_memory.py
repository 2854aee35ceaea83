"""What the tasks of one pipeline stage do to memory, found by running each on tensors without data."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.bound_ops import plus
from galvatron_fx.ir.graph.host_copies import HOST_COPIES
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.plan.prediction import ACTIVATIONS, GATHERED, GRADIENTS, HOST, TRANSIENTS, Moment, by_kind
from passes.analysis.strided_values import Buffer, StridedTensor
from passes.lowering.stages.split_stages import Stage
from passes.lowering.stages.stage_tasks import Task
from passes.simulation.live_memory import GraphMemory, kind_of_port


@dataclass(frozen=True)
class TaskMemory:
    """What one run of a task does.

    ``peaks``: for each block by kind, the most beside what was alive before it, less what dies until then, and the most
    on the host (:data:`HOST`) beside what was there; ``fresh``: bytes and kind of every storage that it makes and that
    outlives it; ``outputs``: for each output, then each sum, its storage: one of the fresh by number, or that of an
    input or sum by name; ``strided``: outputs that are not contiguous.
    """

    peaks: Mapping[int | None, Mapping[str, int]]
    fresh: tuple[tuple[int, str], ...]
    outputs: tuple[int | str, ...]
    strided: frozenset[str]


@dataclass(frozen=True)
class StageMemory:
    """Memory of a stage on one rank.

    ``port_bytes``: of the graph's inputs that it takes, by name of value; ``tasks``: by name, and by whether they add
    to sums that are there: those of the first micro-batch do not.
    """

    port_bytes: Mapping[str, int]
    tasks: Mapping[tuple[str, bool], TaskMemory]

    @classmethod
    def of(cls, stage: Stage, degrees: Sequence[int], kinds: Collection[str]) -> StageMemory:
        """Measure ``stage`` under schedules with actions of these kinds (F, B, I, W); ``degrees``: ranks along each
        column of the layout.

        Raises VerifierError where a node's shape is not the one its facts say.
        """
        return _Measurement(stage, _TaskRuns(degrees)).run(kinds)


# What the values are that outlive a task.
_MADE_BY = {"start": GATHERED, "forward": ACTIVATIONS, "finish": GRADIENTS}


class _TaskRuns(GraphMemory):
    """Binds a task and runs its operators once, however often it is measured: counting is what differs."""

    def __init__(self, degrees: Sequence[int]) -> None:
        super().__init__(degrees)
        self._results: dict[tuple[int, str], Any] = {}
        self._bound_graphs: dict[int, fx.Graph] = {}
        self._of_sums: dict[int, set[str]] = {}

    def branch(self) -> _TaskRuns:
        """Memory that counts on from here."""
        other = copy.copy(self)
        other._holders, other._storages = self._holders.copy(), self._storages.copy()
        return other

    def _bound(self, graph: fx.GraphModule) -> fx.Graph:
        if id(graph) not in self._bound_graphs:
            bound = self._bound_graphs[id(graph)] = super()._bound(graph)
            self._of_sums[id(graph)] = {node.name for node in _of_sums(bound)}
        return self._bound_graphs[id(graph)]

    def _evaluate(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        key = id(graph), node.name
        if node.name in self._of_sums[id(graph)] or key not in self._results:
            self._results[key] = super()._evaluate(graph, node, values)
        return self._results[key]


@dataclass
class _Measurement:
    """The values of one micro-batch, and what counts them."""

    stage: Stage
    memory: _TaskRuns
    values: dict[str, Any] = field(default_factory=dict)
    sums: dict[str, Any] = field(default_factory=dict)
    found: dict[tuple[str, bool], TaskMemory] = field(default_factory=dict)

    def run(self, kinds: Collection[str]) -> StageMemory:
        stage, specs = self.stage, _port_specs(self.stage)
        for name, spec in specs.items():
            self._receive({name: spec}, kind_of_port(stage.ports[name]))
        self._task("start")
        self._receive({name: stage.specs[name] for name in stage.receives}, ACTIVATIONS)
        self._task("forward")
        self._receive({name: stage.specs[name] for name in stage.receives_back}, TRANSIENTS)
        ways = {"B": ("backward",), "I": ("input_grad", "weight_grad")}
        for way in (tasks for kind, tasks in ways.items() if kind in kinds):
            first = self._branch({}, way)
            # Other tensors than the terms, which are evaluated once.
            again = self._branch(
                {
                    name: StridedTensor(value.strided, Buffer(value.buffer.size_bytes))
                    for name, value in first.sums.items()
                },
                way,
                {name: first.memory.kind_of(value) for name, value in first.sums.items()},
            )
        again._task("finish")
        return StageMemory({name: spec.size_bytes for name, spec in specs.items()}, self.found)

    def _branch(
        self, sums: dict[str, Any], tasks: Sequence[str], kinds: Mapping[str, str] = MappingProxyType({})
    ) -> _Measurement:
        """Run the tasks from here on, with sums of such kinds that are there, and leave this moment as it is."""
        other = _Measurement(self.stage, self.memory.branch(), dict(self.values), sums, self.found)
        for name, value in sums.items():
            other.memory.hold_values(value, kinds[name])
        for name in tasks:
            other._task(name)
        return other

    def _receive(self, specs: Mapping[str, TensorSpec], kind: str) -> None:
        tensors = {name: StridedTensor.empty(spec) for name, spec in specs.items()}
        self.values |= tensors
        self.memory.hold_values(list(tensors.values()), kind)

    def _task(self, name: str) -> None:
        """Run a task as :class:`galvatron_fx.runtime.stage_runner.StageRunner` does."""
        task = self.stage.tasks[name]
        if task.is_empty:
            return
        values = self.sums if name == "finish" else self.values
        named = {n: values[n] for n in task.inputs} | {f"sum {n}": self.sums.get(n) for n in task.sums}
        owned = {i for i, n in enumerate(named) if n in task.dies or i >= len(task.inputs)}
        added = any(term in self.sums for term in task.sums)
        count = len(task.outputs)
        self.memory.moment = Moment(name)
        before = {**by_kind(self.memory.begin()), HOST: self.memory.host_bytes}
        outputs = self.memory.run(task.graph, list(named.values()), owned)
        self.memory.label(outputs[:count], _MADE_BY.get(name, TRANSIENTS))
        self.memory.label(outputs[count:], GRADIENTS)
        self.found[name, added] = self._effect(task, named, outputs, before)
        for dead in task.dies:
            del values[dead]
        values |= dict(zip(task.outputs, outputs[:count], strict=True))
        self.sums |= dict(zip(task.sums, outputs[count:], strict=True))

    def _effect(
        self, task: Task, named: Mapping[str, Any], values: Sequence[Any], before: Mapping[str, int]
    ) -> TaskMemory:
        """What a run made, by storage."""
        known = {value.buffer: name for name, value in named.items() if value is not None}
        fresh: dict[Buffer, tuple[int, str]] = {}
        outputs: list[int | str] = []
        for value in values:
            key = value.buffer
            if key in known:
                outputs.append(known[key])
            else:
                outputs.append(list(fresh).index(key) if key in fresh else len(fresh))
                fresh[key] = key.size_bytes, self.memory.kind_of(value)
        strided = {name for name, value in zip(task.outputs, values, strict=False) if not value.is_contiguous}
        peaks = {
            moment.block: {kind: size - before[kind] for kind, size in held.items()}
            for moment, held in self.memory.moments.items()
        }
        return TaskMemory(peaks, tuple(fresh.values()), tuple(outputs), frozenset(strided))


def _of_sums(graph: fx.Graph) -> set[fx.Node]:
    """Sums over micro-batches, as they come and as they go: the first has nothing to come."""
    found: set[fx.Node] = set()
    for node in graph.find_nodes(op="call_function", target=plus):
        chain = [node, *node.all_input_nodes[:1], *node.users]
        while chain:
            each = chain.pop()
            if each.op == "call_function" and each not in found:
                found.add(each)
                chain += [*(n for n in each.all_input_nodes if each.target in HOST_COPIES), *each.users]
    return found


def _port_specs(stage: Stage) -> dict[str, TensorSpec]:
    """Local specs of the graph's inputs that the stage's tasks take."""
    nodes = [node for task in stage.tasks.values() for node in task.graph.graph.find_nodes(op="placeholder")]
    return {node.name: meta_of(node).spec for node in nodes if node.name in stage.ports}
