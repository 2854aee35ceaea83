"""Bytes alive over a step of one stage, by kind, and when each operator runs: from a short model's nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from cost_models.streams import StreamRun, Wait, Work
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.ir.graph.host_copies import arrived
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.plan.prediction import COMPUTE, MEMORY_KINDS, ON_HOST, PARAMETERS, STATES, UPDATE, Cause, Storage
from passes.lowering.lower_step import Lowered
from passes.simulation.events import blocks_by_place, node_events
from passes.simulation.live_memory import GraphMemory, UpdateBytes
from passes.simulation.short_program import Repeat, ShortProgram
from passes.simulation.step import OF_UPDATE, SimulateStep, StepReport

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

    Blocks in the middle of a run of equal periods repeat what those that stand for them do, later and on top of what
    those before have left.
    """

    spans: tuple[OperatorSpan, ...]
    memory: MemoryTimeline

    @classmethod
    def of(cls, program: ShortProgram, simulator: SimulateStep, step: StepReport) -> StepTimeline:
        """Run the short program on tensors without data; ``step``: the prediction for the whole model."""
        lowered = program.lowered
        assert isinstance(lowered, Lowered)
        recorder = _Recorder(lowered.layout.shape, simulator.update_bytes(lowered))
        recorder.use(lowered)
        graphs = (lowered.halves.forward, lowered.halves.backward)
        run = _run([graph.graph for graph in graphs], lowered, simulator)
        begins = np.append(run.begins_s, run.ends_s)
        place = {node: block for graph in graphs for node, block in blocks_by_place(graph.graph).items()}
        blocks = [place[node] for node in run.nodes]
        spans = _spans(program, run.nodes, blocks, run.causes, begins, run.delays_s, run.lengths_s)
        begun = {
            (n.graph, n.name): begin_and_block for n, *begin_and_block in zip(run.nodes, begins, blocks, strict=False)
        }
        behind = (UPDATE,) if lowered.halves.folded else OF_UPDATE
        update_at_s = step.step_time_s - sum(s for cause, s in step.seconds.items() if cause.kind in behind)
        return cls(spans, _memory(program, recorder, begun, step, update_at_s))


class _Run(NamedTuple):
    """The operators of graphs as they run, one behind the other.

    ``begins_s``: when computing comes to each; ``delays_s``: how much later it runs, as a collective; ``lengths_s``.
    """

    nodes: list[fx.Node]
    causes: list[Cause]
    begins_s: Floats
    delays_s: Floats
    lengths_s: Floats
    ends_s: float


def _run(graphs: Sequence[fx.Graph], lowered: Lowered, simulator: SimulateStep) -> _Run:
    price = partial(simulator.prices.price, layout=lowered.layout)
    states = simulator.folded_states(lowered)
    by_node = [pair for graph in graphs for pair in node_events(graph, price, states)]
    run = StreamRun.of([event for _, events in by_node for event in events], simulator.cluster.overlap)
    nodes, causes, times, count = [], [], [], 0
    for node, events in by_node:
        count += len(events)
        if node.op != "call_function":
            continue
        cause, begin = Cause(COMPUTE), run.begins_s[count]
        start, end = begin, begin
        if events and not isinstance(events[-1], Wait):
            cause, begin = events[-1].cause, run.begins_s[count - 1]
            start, end = run.spans_s.get(count - 1, (begin, run.begins_s[count]))
        computed = [count - len(events) + i for i, event in enumerate(events) if isinstance(event, Work)]
        if len(computed) > 1:  # in chunks, beside which others travel
            start = begin = run.begins_s[computed[0]]
        nodes.append(node)
        causes.append(cause)
        times.append((begin, start - begin, end - start))
    begins_s, delays_s, lengths_s = np.array(times).reshape(-1, 3).T
    return _Run(nodes, causes, begins_s, delays_s, lengths_s, run.now_s)


class _Recorder(GraphMemory):
    """Notes what comes and goes at which node; what a storage turns out to be is known at the end only."""

    def __init__(self, degrees: Sequence[int], update_bytes: UpdateBytes) -> None:
        super().__init__(degrees, update_bytes)
        self.names: list[tuple[fx.Graph, str]] = []
        self.events: list[tuple[Storage, int]] = []
        self.first_events: list[int] = []

    def _came(self, storage: Storage) -> None:
        super()._came(storage)
        self.events.append((storage, storage.size_bytes))

    def _went(self, storage: Storage) -> None:
        super()._went(storage)
        self.events.append((storage, -storage.size_bytes))

    def passing(self, more: Mapping[str, int], more_on_host: int = 0) -> None:
        super().passing(more, more_on_host)
        for kind, size in more.items():
            storage = Storage(size, kind)
            self.events += [(storage, size), (storage, -size)]

    def _evaluate(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.target not in (finished, arrived):  # waits make nothing; what they let go counts for what came before
            self.names.append((graph.graph, node.name))
            self.first_events.append(len(self.events))
        return super()._evaluate(graph, node, values)

    def levels(self) -> Floats:
        """``[node, kind]``: bytes when most is alive at each node."""
        changes = np.zeros((len(self.events) + 1, len(MEMORY_KINDS)))
        for row, (storage, size) in enumerate(self.events, 1):
            if storage.kind not in ON_HOST:
                changes[row, MEMORY_KINDS.index(storage.kind)] = size
        alive = changes.cumsum(axis=0)
        totals = alive.sum(axis=1)
        ends = [*self.first_events[1:], len(self.events)]
        fullest = [a + int(totals[a : b + 1].argmax()) for a, b in zip(self.first_events, ends, strict=True)]
        return alive[fullest]


def _spans(
    program: ShortProgram,
    nodes: Sequence[fx.Node],
    blocks: Sequence[int],
    causes: Sequence[Cause],
    begins: Floats,
    delays: Floats,
    lengths: Floats,
) -> tuple[OperatorSpan, ...]:
    numbers = [block.index for block in program.blocks]
    spans = []
    for index, further, (begin,) in _unrolled(blocks, program.repeats, begins[:, None]):
        record = meta_of(nodes[index])
        number = numbers[blocks[index]] + max(record.block, 0) - blocks[index] + further
        start = float(begin + delays[index])
        spans.append(OperatorSpan(number, record.phase, causes[index], start, start + float(lengths[index])))
    return tuple(spans)


def _memory(
    program: ShortProgram,
    recorder: _Recorder,
    begun: Mapping[tuple[fx.Graph, str], list[Any]],
    step: StepReport,
    update_at_s: float,
) -> MemoryTimeline:
    moments, now = [], 0.0
    for name in recorder.names:
        now = begun[name][0] if name in begun else now  # what stands for a collective begins with what comes before it
        moments.append(now)
    blocks, block = [], 0
    for name in reversed(recorder.names):  # and has its place before what comes behind it
        block = begun[name][1] if name in begun else block
        blocks.append(block)
    blocks.reverse()
    levels, update = recorder.levels(), kinds_array(step.memory.update)
    always = np.array([kind in (PARAMETERS, STATES) for kind in MEMORY_KINDS])
    levels[:, always] = update[always]
    values = np.column_stack([moments, levels])
    rows = np.array([row for _, _, row in _unrolled(blocks, program.repeats, np.vstack([values, values[-1:]]))])
    rows = np.vstack([rows, [update_at_s, *update]])
    return MemoryTimeline(rows[:, 0], rows[:, 1:], step.step_time_s)


def _unrolled(blocks: Sequence[int], repeats: Sequence[Repeat], values: Floats) -> Iterator[tuple[int, int, Floats]]:
    """The nodes of the whole model in order: for each the one of the short model, how many blocks its own lies behind
    that one's, and its row of ``values``, which change with each block as they do from one to the next.

    ``blocks``: in whose place each node stands; ``values``: a row for every node and one for the end.
    """
    late = np.zeros(values.shape[1])
    done = 0
    for first, end, repeat in sorted(sweep for each in repeats for sweep in _sweeps(blocks, each)):
        yield from ((index, 0, values[index] + late) for index in range(done, first))
        ahead = repeat.period if blocks[first] < repeat.second else -repeat.period
        for turn in range(repeat.times + 1):
            yield from ((index, ahead * turn, values[index] + late) for index in range(first, end))
            if turn < repeat.times:
                late = late + values[end] - values[first]
        done = end
    yield from ((index, 0, values[index] + late) for index in range(done, len(blocks)))


def _sweeps(blocks: Sequence[int], repeat: Repeat) -> Iterator[tuple[int, int, Repeat]]:
    """Where the two periods follow one another: from a node of the one to before its twin in the other.

    Forward goes from the first to the second, backward back, and what is done with the gradients at the end of it may
    go either way. A new sweep begins at a node that comes after the twin of the one before it.
    """
    places: dict[int, list[int]] = {0: [], 1: []}
    for index, block in enumerate(blocks):
        if (turn := (block - repeat.first) // repeat.period) in places:
            places[turn].append(index)
    twins = [(min(pair), max(pair)) for pair in zip(*places.values(), strict=False)]
    for before, (here, there) in zip([(-1, -1), *twins], twins, strict=False):
        if here > before[1]:
            yield here, there, repeat


def kinds_array(held: Any) -> Floats:
    """Bytes by kind as an array in the order of MEMORY_KINDS."""
    return np.array([float(held.get(kind, 0)) for kind in MEMORY_KINDS])
