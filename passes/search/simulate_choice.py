"""Predict what strategies for all blocks really take: lowered and simulated, on a short model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.predicted import MemoryUse
from galvatron_fx.ir.schedule import Schedule
from galvatron_fx.ir.strategy import Strategy
from passes.drop_blocks import DropBlocks
from passes.lower import Lower
from passes.lower_stages import LowerStages
from passes.search.block_terms import Floats
from passes.search.short_model import Label, ShortModel
from passes.search.stage_search import StageChoice, StageSearch
from passes.simulate_stages import SimulateStages, StagesReport
from passes.simulate_step import SimulateStep, StepReport

Row = Mapping[Any, float]
"""Seconds or bytes of a stage or rank, by what they are of."""

Measured = tuple[Sequence[Row], Sequence[Row]]
"""Seconds of every stage, and bytes of every rank."""

_PARAMETER_BYTES = "parameter bytes"


@dataclass(frozen=True)
class Staging:
    """How stages run: the ``schedule``, one that holds as many micro-batches at once (``filled``, which may have fewer
    of them), and the mesh axes that hold the stages.
    """

    schedule: Schedule
    filled: Schedule
    axes: Sequence[Axis]

    @classmethod
    def of(cls, search: StageSearch) -> Staging | None:
        """That of a configuration; None for one stage and one micro-batch."""
        setting = search.configuration
        axes = search.cluster.axes[: setting.pipeline_axes]
        return None if setting.is_trivial else cls(search.schedule, search.filled, axes)


@dataclass
class SimulateChoice:
    """Simulates choices of one graph; block solutions are shared among them. ``marks``: fingerprints of the blocks."""

    graph: fx.GraphModule
    cluster: Cluster
    marks: Sequence[str]
    _cache: dict[Any, Any] = field(default_factory=dict)
    _simulator: SimulateStep = field(init=False)

    def __post_init__(self) -> None:
        self._simulator = SimulateStep(self.cluster)

    def run(self, search: StageSearch, choice: StageChoice) -> StepReport | StagesReport:
        """Return the prediction of a step."""
        strategies = [search.chain.strategies[pick] for pick in choice.picks]
        return self.of(strategies, choice.first_blocks, Staging.of(search))

    def of(
        self, strategies: Sequence[Strategy], first_blocks: Sequence[int], staging: Staging | None
    ) -> StepReport | StagesReport:
        """The same for a strategy a block and the first block of every stage."""
        short = ShortModel.of(self.marks, strategies, first_blocks)
        return self._one_stage(short, strategies) if staging is None else self._stages(short, strategies, staging)

    def _one_stage(self, short: ShortModel, strategies: Sequence[Strategy]) -> StepReport:
        def measure(model: ShortModel) -> Measured:
            lowered = Lower([strategies[b] for b in model.keep], self.cluster, self._cache).run(self._graph(model))
            step = self._simulator.run(lowered)
            return [{**step.seconds, _PARAMETER_BYTES: step.parameter_bytes}], [_row(step.memory)]

        (times,), (memory,) = _whole(short, measure)
        parameter_bytes = round(times.pop(_PARAMETER_BYTES))
        return StepReport(times, _memory(memory), parameter_bytes)

    def _stages(self, short: ShortModel, strategies: Sequence[Strategy], staging: Staging) -> StagesReport:
        schedule = staging.schedule
        simulate = SimulateStages(self.cluster, schedule, staging.axes)
        filled = SimulateStages(self.cluster, staging.filled, staging.axes)

        def measure(model: ShortModel) -> Measured:
            kept = [strategies[b] for b in model.keep]
            parts = schedule.num_microbatches
            lower = LowerStages(kept, model.first_blocks, parts, self.cluster, self._cache, keep_outputs=False)
            lowered = lower.run(self._graph(model)).standing_for(model.stage_of)
            return simulate.times(lowered), [_row(use) for use in filled.memory(lowered)]

        ranks = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
        times, memory = _whole(short, measure, ranks)
        return simulate.report(times, [_memory(row) for row in memory])

    def _graph(self, model: ShortModel) -> fx.GraphModule:
        return DropBlocks(model.keep, self.marks).run(self.graph)


def _whole(
    short: ShortModel, measure: Callable[[ShortModel], Measured], ranks: Sequence[Sequence[int]] | None = None
) -> tuple[list[dict[Any, float]], list[dict[Any, float]]]:
    """What ``measure`` would find on the whole model; ``ranks``: the stages of each."""
    base = measure(short)
    longer = {label: measure(short.longer(label)) for label in short.labels}
    times = _extrapolated(short, base[0], {label: found[0] for label, found in longer.items()})
    return times, _extrapolated(short, base[1], {label: found[1] for label, found in longer.items()}, ranks)


def _extrapolated(
    short: ShortModel,
    base: Sequence[Row],
    longer: Mapping[Label, Sequence[Row]],
    rows: Sequence[Sequence[int]] | None = None,
) -> list[dict[Any, float]]:
    """The amounts of the whole model; see :meth:`ShortModel.extrapolate`."""
    keys = list(dict.fromkeys(key for found in (base, *longer.values()) for row in found for key in row))

    def table(found: Sequence[Row]) -> Floats:
        return np.array([[row.get(key, 0.0) for key in keys] for row in found], dtype=np.float64)

    total = short.extrapolate(table(base), {label: table(found) for label, found in longer.items()}, rows)
    return [dict(zip(keys, row, strict=True)) for row in total.tolist()]


def _row(memory: MemoryUse) -> Row:
    moments = {"step": memory.step, "update": memory.update}
    return {(moment, kind): size for moment, held in moments.items() for kind, size in held.items()}


def _memory(row: Row) -> MemoryUse:
    held: dict[str, dict[str, int]] = {"step": {}, "update": {}}
    for (moment, kind), size in row.items():
        held[moment][kind] = round(size)
    return MemoryUse(held["step"], held["update"])
