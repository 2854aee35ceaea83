"""Bytes alive over a step of one stage, by kind, and when each operator runs: from a short model's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from galvatron_fx.ir.annotations import facts
from galvatron_fx.ir.predicted import COMPUTE, MEMORY_KINDS, PARAMETERS, STATES, UPDATE, Cause, Storage
from passes.lower import Lowered
from passes.memory_meter import MemoryMeter
from passes.search.block_terms import Floats
from passes.search.short_program import Repeat, ShortProgram
from passes.simulate_step import SimulateStep, StepReport

__all__ = ["MemoryTimeline", "OperatorSpan", "StepTimeline", "kinds_array"]


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes alive on one rank: from ``starts_s[i]`` on ``size_bytes[i]``, a column for each of MEMORY_KINDS, until the
    next start; the last moment lasts until ``end_s``. What is alive for an instant counts for the whole moment.
    """

    starts_s: Floats
    size_bytes: Floats
    end_s: float

    @property
    def peak_bytes(self) -> int:
        """The most alive at once."""
        return round(float(self.size_bytes.sum(axis=1).max()))


class OperatorSpan(NamedTuple):
    """An operator or collective of a block (by its number in the whole model) as it runs in a step of one stage."""

    block: int
    phase: str
    cause: Cause
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """A step of a plan with one stage: every operator of the whole model in order, and the memory beside it.

    Blocks in the middle of a run of equal ones repeat what the one that stands for them does, later and on top of
    what those before have left.
    """

    spans: tuple[OperatorSpan, ...]
    memory: MemoryTimeline

    @classmethod
    def of(cls, program: ShortProgram, simulator: SimulateStep, step: StepReport) -> StepTimeline:
        """Run the short program on tensors without data; ``step``: the prediction for the whole model."""
        lowered = program.lowered
        assert isinstance(lowered, Lowered)
        columns = [column.axes for column in lowered.layout.columns]
        recorder = _Recorder(lowered.layout.shape)
        recorder.use(lowered, 0)
        graphs = (lowered.halves.forward, lowered.halves.backward)
        nodes = [node for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        spent = [next(iter(simulator.times([node], columns).items()), (Cause(COMPUTE), 0.0)) for node in nodes]
        starts = np.cumsum([0.0, *(seconds for _, seconds in spent)])
        spans = _spans(program, nodes, [cause for cause, _ in spent], starts)
        begun = {(node.graph, node.name): start for node, start in zip(nodes, starts, strict=False)}
        return cls(spans, _memory(program, recorder, begun, step))


class _Recorder(MemoryMeter):
    """Notes what comes and goes at which node; what a storage turns out to be is known at the end only."""

    def __init__(self, degrees: Sequence[int]) -> None:
        super().__init__(degrees)
        self.nodes: list[fx.Node] = []
        self.names: list[tuple[fx.Graph, str]] = []
        self.events: list[tuple[Storage, int]] = []
        self.first_events: list[int] = []

    def _came(self, storage: Storage) -> None:
        super()._came(storage)
        self.events.append((storage, storage.size_bytes))

    def _went(self, storage: Storage) -> None:
        super()._went(storage)
        self.events.append((storage, -storage.size_bytes))

    def _evaluate(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        self.nodes.append(node)
        self.names.append((graph.graph, node.name))
        self.first_events.append(len(self.events))
        return super()._evaluate(graph, node, values)

    def levels(self) -> Floats:
        """``[node, kind]``: bytes when most is alive at each node."""
        changes = np.zeros((len(self.events) + 1, len(MEMORY_KINDS)))
        for row, (storage, size) in enumerate(self.events, 1):
            changes[row, MEMORY_KINDS.index(storage.kind)] = size
        alive = changes.cumsum(axis=0)
        totals = alive.sum(axis=1)
        ends = [*self.first_events[1:], len(self.events)]
        fullest = [a + int(totals[a : b + 1].argmax()) for a, b in zip(self.first_events, ends, strict=True)]
        return alive[fullest]


def _spans(
    program: ShortProgram, nodes: Sequence[fx.Node], causes: Sequence[Cause], starts: Floats
) -> tuple[OperatorSpan, ...]:
    numbers = [block.index for block in program.blocks]
    found = []
    for index, further, (start,) in _unrolled(nodes, program.repeats, starts[:, None]):
        record = facts(nodes[index])
        length_s = starts[index + 1] - starts[index]
        number = numbers[max(record.block, 0)] + further
        found.append(OperatorSpan(number, record.phase, causes[index], float(start), float(start + length_s)))
    return tuple(found)


def _memory(
    program: ShortProgram, recorder: _Recorder, begun: Mapping[tuple[fx.Graph, str], float], step: StepReport
) -> MemoryTimeline:
    moments, now = [], 0.0
    for name in recorder.names:
        now = begun.get(name, now)  # what stands for a collective begins with what comes before it
        moments.append(now)
    levels, update = recorder.levels(), kinds_array(step.memory.update)
    always = np.array([kind in (PARAMETERS, STATES) for kind in MEMORY_KINDS])
    levels[:, always] = update[always]
    values = np.column_stack([moments, levels])
    rows = np.array([row for _, _, row in _unrolled(recorder.nodes, program.repeats, np.vstack([values, values[-1:]]))])
    update_s = step.step_time_s - step.seconds[Cause(UPDATE)]
    rows = np.vstack([rows, [update_s, *update]])
    return MemoryTimeline(rows[:, 0], rows[:, 1:], step.step_time_s)


def _unrolled(nodes: Sequence[fx.Node], repeats: Sequence[Repeat], values: Floats) -> Iterator[tuple[int, int, Floats]]:
    """The nodes of the whole model in order: for each the one of the short model, how many blocks its own lies behind
    that one's, and its row of ``values``, which change with each block as they do from one to the next.

    ``values``: a row for every node and one for the end.
    """
    late = np.zeros(values.shape[1])
    done = 0
    for first, end, repeat in sorted(sweep for each in repeats for sweep in _sweeps(nodes, each)):
        yield from ((index, 0, values[index] + late) for index in range(done, first))
        block = max(facts(nodes[first]).block, 0)
        ahead = 1 if block == repeat.first else -1
        for turn in range(repeat.times + 1):
            yield from ((index, ahead * turn, values[index] + late) for index in range(first, end))
            if turn < repeat.times:
                late = late + values[end] - values[first]
        done = end
    yield from ((index, 0, values[index] + late) for index in range(done, len(nodes)))


def _sweeps(nodes: Sequence[fx.Node], repeat: Repeat) -> Iterator[tuple[int, int, Repeat]]:
    """Where the two blocks follow one another: from a node of the one to before its twin in the other.

    Forward goes from the first to the second, backward back, and what is done with the gradients at the end of it may
    go either way. A new sweep begins at a node that comes after the twin of the one before it.
    """
    places: dict[int, list[int]] = {repeat.first: [], repeat.second: []}
    for index, node in enumerate(nodes):
        if (block := max(facts(node).block, 0)) in places:
            places[block].append(index)
    twins = [(min(pair), max(pair)) for pair in zip(*places.values(), strict=False)]
    for before, (here, there) in zip([(-1, -1), *twins], twins, strict=False):
        if here > before[1]:
            yield here, there, repeat


def kinds_array(held: Any) -> Floats:
    """Bytes by kind as an array in the order of MEMORY_KINDS."""
    return np.array([float(held.get(kind, 0)) for kind in MEMORY_KINDS])
