"""Predict what strategies for all blocks really take: lowered and simulated, on a short model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from cost_models.optimizer import ADAM, OptimizerModel
from cost_models.streams import Event
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.graph.rewrite import copied
from galvatron_fx.ir.plan.prediction import MemoryUse
from galvatron_fx.ir.plan.schedule import Schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import wiring
from passes.lowering.lower_stages import LoweredStages, LowerStages
from passes.lowering.lower_step import Lower, Lowered
from passes.lowering.stages.split_microbatches import Microbatched
from passes.simulation.drop_blocks import DropBlocks
from passes.simulation.events import GraphEvents
from passes.simulation.short_model import Apart, ShortModel
from passes.simulation.stages import MeasuredTasks, SimulateStages, StagesReport
from passes.simulation.step import SimulateStep, StepReport
from passes.simulation.whole_memory import whole_memory

Row = Mapping[Any, float]
"""Seconds of a stage, by what they are of."""


class Measured(NamedTuple):
    """Seconds of every stage as if nothing ran at once, bytes of every rank, and the events of every stage's graphs."""

    seconds: Sequence[Row]
    memory: Sequence[MemoryUse]
    events: Sequence[Mapping[str, GraphEvents]]


class Whole(NamedTuple):
    """The same of the whole model, its events in one list a graph."""

    seconds: list[dict[Any, float]]
    memory: list[MemoryUse]
    events: list[Mapping[str, Sequence[Event]]]


class Reusable(NamedTuple):
    """What a short model is lowered to, the bytes that its ranks take (of stages), and what was measured of its tasks:
    on other links, too.
    """

    lowered: LoweredStages | Lowered
    memory: Sequence[MemoryUse]
    tasks: MeasuredTasks


_PARAMETER_BYTES = "parameter bytes"
_HELD = 6  # lowered short models: choices one after the other often differ in how many stages each stands for alone


@dataclass(frozen=True)
class Staging:
    """How stages run: the ``schedule``, one that holds as many micro-batches at once (``filled``, which may have fewer
    of them), and the mesh axes that hold the stages.
    """

    schedule: Schedule
    filled: Schedule
    axes: Sequence[Axis]


@dataclass
class SimulateChoice:
    """Simulates choices of one graph; block solutions are shared among them, and short models that differ in nothing
    but how many blocks each of theirs stands for are measured once. ``block_fingerprints``: fingerprints of the blocks;
    ``optimizer``: what updates the parameters; ``folds``: whether gradients are folded into updates, where there is one
    stage and one micro-batch.
    """

    graph: fx.GraphModule
    cluster: Cluster
    block_fingerprints: Sequence[str]
    optimizer: OptimizerModel = ADAM
    folds: bool = False
    _cache: dict[Any, Any] = field(default_factory=dict)
    _graphs: dict[tuple[int, ...], fx.GraphModule] = field(default_factory=dict)
    _wired: dict[Hashable, fx.GraphModule] = field(default_factory=dict)
    _microbatched: dict[tuple[int, int], Microbatched] = field(default_factory=dict)
    _measured: dict[Hashable, Measured] = field(default_factory=dict)
    _held: dict[Hashable, tuple[LoweredStages, MeasuredTasks]] = field(default_factory=dict)
    _lowered: dict[Hashable, Reusable] | None = None
    # The chosen plan is lowered once more before it runs, and verified then.
    _control: PassControl = field(default_factory=lambda: PassControl(verifies=False))
    _simulator: SimulateStep = field(init=False)

    def __post_init__(self) -> None:
        self._simulator = SimulateStep(self.cluster, self.optimizer)

    def run(
        self, strategies: Sequence[Strategy], first_blocks: Sequence[int], staging: Staging | None
    ) -> StepReport | StagesReport:
        """Return the prediction of a step, for a strategy a block and the first block of every stage.

        ``staging``: None for one stage and one micro-batch.
        """
        short = ShortModel.of(self.block_fingerprints, strategies, first_blocks)
        return self._one_stage(short, strategies) if staging is None else self._stages(short, strategies, staging)

    def on_other_links(self) -> Callable[[Cluster], SimulateChoice]:
        """Return what makes simulators for the same devices with other links, which lower choices once for all.

        A choice is lowered as for this cluster, by whose links its blocks' operators are split.
        """
        kept: dict[Hashable, Reusable] = {}

        def linked(cluster: Cluster) -> SimulateChoice:
            return replace(self, cluster=cluster, _measured={}, _held={}, _lowered=kept)

        return linked

    def _once_lowered(self, key: Hashable, lower: Callable[[], Reusable]) -> Reusable:
        """What a model is lowered to, and the bytes that it takes: neither depends on links."""
        if self._lowered is None:
            return lower()
        if key not in self._lowered:
            self._lowered[key] = lower()
        return self._lowered[key]

    def _one_stage(self, short: ShortModel, strategies: Sequence[Strategy]) -> StepReport:
        def lower(model: ShortModel, kept: Sequence[Strategy]) -> Lowered:
            step = Lower(kept, self.cluster, self._cache, control=self._control, folds=self.folds)
            return step.run(self._graph(model))

        def measure(model: ShortModel, kept: Sequence[Strategy]) -> Measured:
            key = id(self._graph(model)), tuple(kept)
            lowered = self._once_lowered(key, lambda: Reusable(lower(model, kept), (), MeasuredTasks())).lowered
            assert isinstance(lowered, Lowered), "a model without stages is lowered without them"
            step = self._simulator.parts(lowered)
            seconds: dict[Any, float] = {**step.alone, _PARAMETER_BYTES: step.parameter_bytes}
            return Measured([seconds], [step.memory], [step.events])

        whole = _whole(short, self._once(measure, strategies), [[0]])
        (seconds,), (memory,), (events,) = whole
        parameter_bytes = round(seconds.pop(_PARAMETER_BYTES))
        return self._simulator.report(seconds, events.values(), memory, parameter_bytes)

    def _stages(self, short: ShortModel, strategies: Sequence[Strategy], staging: Staging) -> StagesReport:
        schedule = staging.schedule

        def simulate(under: Schedule, tasks: MeasuredTasks) -> SimulateStages:
            return SimulateStages(self.cluster, under, staging.axes, self.optimizer, tasks)

        def lowered_with_bytes(model: ShortModel, kept: Sequence[Strategy]) -> Reusable:
            few, tasks = self._few_stages(model, kept, schedule.num_microbatches)
            lowered = few.standing_for(model.stage_of)
            memory = simulate(staging.filled, tasks).memory(lowered)
            return Reusable(lowered, memory, tasks)

        def measure(model: ShortModel, kept: Sequence[Strategy]) -> Measured:
            key = id(self._graph(model)), tuple(kept), model.first_blocks, model.stage_of, schedule, staging.filled
            lowered, memory, tasks = self._once_lowered(key, lambda: lowered_with_bytes(model, kept))
            assert isinstance(lowered, LoweredStages), "a model of stages is lowered into them"
            timed = simulate(schedule, tasks)
            events = timed.events(lowered)
            return Measured(timed.alone(lowered, events), memory, events)

        ranks = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
        once = self._once(measure, strategies, schedule, staging.filled, tuple(staging.axes))
        whole = _whole(short, once, ranks)
        return simulate(schedule, MeasuredTasks()).report(whole.seconds, whole.events, whole.memory)

    def _few_stages(
        self, model: ShortModel, kept: Sequence[Strategy], num_microbatches: int
    ) -> tuple[LoweredStages, MeasuredTasks]:
        """The stages of a short model, whichever of the whole one each stands for, and what was measured of them; those
        that were asked for last are held.
        """
        key = id(self._graph(model)), tuple(kept), model.first_blocks, num_microbatches
        if key not in self._held:
            lower = LowerStages(
                kept,
                model.first_blocks,
                num_microbatches,
                self.cluster,
                self._cache,
                control=self._control,
                keep_outputs=False,
            )
            lowered = lower.lower(self._split(model, lower), signature(self._graph(model)))
            self._held[key] = lowered, MeasuredTasks()
        self._held[key] = self._held.pop(key)
        if len(self._held) > _HELD:
            del self._held[next(iter(self._held))]
        return self._held[key]

    def _once(
        self,
        measure: Callable[[ShortModel, Sequence[Strategy]], Measured],
        strategies: Sequence[Strategy],
        *setting: Any,
    ) -> Callable[[ShortModel], Measured]:
        """Measure short models, those that are equal once; ``setting``: what else that rests on."""

        def measured(model: ShortModel) -> Measured:
            kept = tuple(strategies[block] for block in model.keep)
            key = id(self._graph(model)), kept, model.first_blocks, model.stage_of, setting
            if key not in self._measured:
                self._measured[key] = measure(model, kept)
            return self._measured[key]

        return measured

    def _graph(self, model: ShortModel) -> fx.GraphModule:
        """The short model; the same for all that are equal but for names, whichever blocks they keep."""
        keep = tuple(model.keep)
        if keep not in self._graphs:
            graph = DropBlocks(keep, self.block_fingerprints).run(self.graph)
            wired = tuple(self.block_fingerprints[block] for block in keep), wiring(graph)
            self._graphs[keep] = self._wired.setdefault(wired, graph)
        return self._graphs[keep]

    def _split(self, model: ShortModel, lower: LowerStages) -> Microbatched:
        """Its batch cut, likewise; a copy, as stages untie the weights of what they are cut from."""
        key = id(self._graph(model)), lower.num_microbatches
        if key not in self._microbatched:
            self._microbatched[key] = lower.split(self._graph(model))
        return replace(self._microbatched[key], graph=copied(self._microbatched[key].graph))


def _whole(short: ShortModel, measure: Callable[[ShortModel], Measured], ranks: Sequence[Sequence[int]]) -> Whole:
    """What ``measure`` would find on the whole model; ``ranks``: the stages of each."""
    base, stages = measure(short), [[stage] for stage in range(len(short.whole))]
    longer = {apart: measure(short.longer(apart)) for apart in short.apart(ranks)}
    return Whole(
        _extrapolated(short, base.seconds, {apart: result.seconds for apart, result in longer.items()}, stages),
        whole_memory(short, base.memory, {apart: result.memory for apart, result in longer.items()}, ranks),
        [_unrolled(short, stage, base, longer) for (stage,) in stages],
    )


def _unrolled(
    short: ShortModel, stage: int, base: Measured, longer: Mapping[Apart, Measured]
) -> dict[str, Sequence[Event]]:
    """The events of every graph of a stage of the whole model."""
    return {
        name: short.unrolled(stage, events, {apart: result.events[stage][name] for apart, result in longer.items()})
        for name, events in base.events[stage].items()
    }


def _extrapolated(
    short: ShortModel, base: Sequence[Row], longer: Mapping[Apart, Sequence[Row]], rows: Sequence[Sequence[int]]
) -> list[dict[Any, float]]:
    """The amounts of the whole model; see :meth:`ShortModel.extrapolate`."""
    keys = list(dict.fromkeys(key for amounts in (base, *longer.values()) for row in amounts for key in row))

    def table(amounts: Sequence[Row]) -> Floats:
        return np.array([[row.get(key, 0.0) for key in keys] for row in amounts], dtype=np.float64)

    total = short.extrapolate(table(base), {apart: table(amounts) for apart, amounts in longer.items()}, rows)
    return [dict(zip(keys, row, strict=True)) for row in total.tolist()]
