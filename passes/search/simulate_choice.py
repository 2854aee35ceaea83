"""Predict what a choice of the search really takes: lowered and simulated, on a short model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
from torch import fx

from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.strategy import Strategy
from passes.drop_blocks import DropBlocks
from passes.lower import Lower
from passes.lower_stages import LowerStages
from passes.search.block_terms import Floats
from passes.search.short_model import ShortModel
from passes.search.stage_search import StageChoice, StageSearch
from passes.simulate_stages import SimulateStages, StageTimes
from passes.simulate_step import SimulateStep


@dataclass
class SimulateChoice:
    """Simulates choices of one graph; block solutions are shared among them."""

    graph: fx.GraphModule
    cluster: Cluster
    marks: Sequence[str]
    _cache: dict[Any, Any] = field(default_factory=dict)
    _simulator: SimulateStep = field(init=False)

    def __post_init__(self) -> None:
        self._simulator = SimulateStep(self.cluster)

    def run(self, search: StageSearch, choice: StageChoice) -> tuple[float, int]:
        """(seconds of a step without the optimizer's update, peak bytes of a rank)."""
        strategies = [search.chain.strategies[pick] for pick in choice.picks]
        short = ShortModel.of(self.marks, strategies, choice.first_blocks)
        if search.configuration.is_trivial:
            return self._one_stage(short, strategies)
        return self._stages(short, strategies, search)

    def _one_stage(self, short: ShortModel, strategies: Sequence[Strategy]) -> tuple[float, int]:
        def measure(model: ShortModel) -> Floats:
            lowered = Lower([strategies[b] for b in model.keep], self.cluster, self._cache).run(self._graph(model))
            step = self._simulator.run(lowered)
            return np.array([[step.step_time_s, step.peak_memory_bytes]])

        longer = {label: measure(short.longer(label)) for label in short.labels}
        (time_s, peak), *_ = short.extrapolate(measure(short), longer)
        return float(time_s), round(peak)

    def _stages(self, short: ShortModel, strategies: Sequence[Strategy], search: StageSearch) -> tuple[float, int]:
        setting = search.configuration
        simulate = SimulateStages(self.cluster, search.schedule, self.cluster.axes[: setting.pipeline_axes])
        filled = SimulateStages(self.cluster, search.filled, self.cluster.axes[: setting.pipeline_axes])

        def measure(model: ShortModel) -> tuple[Floats, Floats]:
            kept = [strategies[b] for b in model.keep]
            parts = setting.num_microbatches
            lower = LowerStages(kept, model.first_blocks, parts, self.cluster, self._cache, keep_outputs=False)
            lowered = lower.run(self._graph(model)).standing_for(model.stage_of)
            times = np.array([astuple(time) for time in simulate.times(lowered)])
            return times, np.array(filled.peaks(lowered), dtype=np.float64)[:, None]

        base_times, base_peaks = measure(short)
        longer = {label: measure(short.longer(label)) for label in short.labels}
        times = short.extrapolate(base_times, {label: found for label, (found, _) in longer.items()})
        ranks = [search.schedule.stages_of(rank) for rank in range(search.num_ranks)]
        peaks = short.extrapolate(base_peaks, {label: found for label, (_, found) in longer.items()}, ranks)
        report = simulate.report([StageTimes(*row) for row in times.tolist()], [round(peak) for peak in peaks[:, 0]])
        return report.step_time_s, report.peak_memory_bytes

    def _graph(self, model: ShortModel) -> fx.GraphModule:
        return DropBlocks(model.keep, self.marks).run(self.graph)
