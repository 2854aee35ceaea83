"""Bytes alive over a step of several stages or micro-batches, by kind, on every pipeline rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from cost_models.optimizer import ADAM, OptimizerModel
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.prediction import BATCH, MEMORY_KINDS, TRANSIENTS
from galvatron_fx.ir.plan.schedule import KINDS, Action
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.lower_stages import LowerStages
from passes.simulation.choice import Staging
from passes.simulation.drop_blocks import DropBlocks
from passes.simulation.persistent_memory import PersistentMemory
from passes.simulation.rank_memory import RankReplay
from passes.simulation.short_model import ShortModel
from passes.simulation.stages import SimulateStages, StagesReport
from passes.simulation.step_timeline import MemoryTimeline, kinds_array

__all__ = ["StageTimelines"]


@dataclass
class _Watched(RankReplay):
    """Also keeps what is alive before the first action, and of each action the most during it and what is left behind
    it; what arrives between two actions counts for the later one.
    """

    actions: list[Action] = field(default_factory=list)
    moments: list[Mapping[str, int]] = field(default_factory=list)

    def _act(self, index: int, kind: str, part: int) -> None:
        if not self.moments:
            self._note(self.live.most)
        super()._act(index, kind, part)
        if kind in KINDS:
            self.actions.append(Action(kind, index, part))
            self._note(self.live.most, self.live.now)

    def _note(self, *moments: Mapping[str, int]) -> None:
        self.moments += map(dict, moments)
        self.live.begin()


@dataclass(frozen=True)
class StageTimelines:
    """Replays the ranks of a plan on short models, and tells the bytes of the whole one; see
    :class:`passes.simulation.choice.SimulateChoice`, whose fields it shares.
    """

    graph: fx.GraphModule
    cluster: Cluster
    block_fingerprints: Sequence[str]
    optimizer: OptimizerModel = ADAM
    cache: dict[Any, Any] = field(default_factory=dict)

    def run(
        self,
        strategies: Sequence[Strategy],
        first_blocks: Sequence[int],
        staging: Staging,
        step: StagesReport,
    ) -> tuple[MemoryTimeline, ...]:
        """One timeline a pipeline rank; ``step``: the prediction for the whole model."""
        simulate = SimulateStages(self.cluster, staging.schedule, staging.axes, self.optimizer)
        actions: list[list[Action]] = []

        def measure(model: ShortModel) -> Floats:
            kept = [strategies[block] for block in model.keep]
            parts = staging.schedule.num_microbatches
            lower = LowerStages(kept, model.first_blocks, parts, self.cluster, self.cache, keep_outputs=False)
            lowered = lower.run(DropBlocks(model.keep, self.block_fingerprints).run(self.graph)).standing_for(
                model.stage_of
            )
            held = PersistentMemory.of(lowered, staging.schedule, self.optimizer)
            replays = simulate.replays(lowered, held, _Watched)
            actions[:] = [replay.actions for replay in replays]
            return _table(replays, held)

        short = ShortModel.of(self.block_fingerprints, strategies, first_blocks)
        base = measure(short)
        ranks = [staging.schedule.stages_of(rank) for rank in range(staging.schedule.num_ranks)]
        longer = {apart: measure(short.longer(apart)) for apart in short.apart(ranks)}
        table = short.extrapolate(base, longer, ranks)
        return tuple(
            _timeline(rank, rank_actions, row, step)
            for rank, (rank_actions, row) in enumerate(zip(actions, table, strict=True))
        )


def _table(replays: Sequence[_Watched], held: PersistentMemory) -> Floats:
    """``[rank, amount]``: the ranks' moments, finishing and updating among them, kind by kind; zeros where a rank has
    fewer actions than others.
    """
    rows = []
    for rank, replay in enumerate(replays):
        always = kinds_array(held.always(rank))
        hoisted = kinds_array({BATCH: held.hoisted_bytes(rank)})
        step = [kinds_array(moment) + always + hoisted for moment in (*replay.moments, replay.live.most)]
        update = {TRANSIENTS: held.update(rank).most_bytes}
        rows.append(np.concatenate([*step, kinds_array(replay.live.now) + always + kinds_array(update)]))
    table = np.zeros((len(rows), max(map(len, rows))))
    for row, amounts in zip(table, rows, strict=True):
        row[: len(amounts)] = amounts
    return table


def _timeline(rank: int, actions: Sequence[Action], amounts: Floats, step: StagesReport) -> MemoryTimeline:
    spans = {span.action: span for span in step.spans.spans}
    start_s, finish_s, update_s = (step.once_s(rank, task) for task in ("start", "finish", "update"))
    starts = [0.0]
    for action in actions:
        starts += [start_s + spans[action].start_s, start_s + spans[action].end_s]
    starts += [step.step_time_s - finish_s - update_s, step.step_time_s - update_s]
    size_bytes = amounts[: len(starts) * len(MEMORY_KINDS)].reshape(len(starts), len(MEMORY_KINDS))
    return MemoryTimeline(np.maximum.accumulate(starts), size_bytes, step.step_time_s)
