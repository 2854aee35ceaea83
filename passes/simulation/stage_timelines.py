"""Bytes alive over a step of several stages or micro-batches, by kind, on every pipeline rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import fx

from cost_models.optimizer import ADAM, OptimizerModel
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.prediction import BATCH, TRANSIENTS, MemoryUse
from galvatron_fx.ir.plan.schedule import KINDS, Action
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.lower_stages import LowerStages
from passes.simulation.choice import Staging
from passes.simulation.drop_blocks import DropBlocks
from passes.simulation.persistent_memory import PersistentMemory
from passes.simulation.rank_memory import RankReplay
from passes.simulation.short_model import ShortModel
from passes.simulation.stages import SimulateStages, StagesReport, with_bytes
from passes.simulation.step_timeline import MemoryTimeline, kinds_array
from passes.simulation.whole_memory import whole_memory

__all__ = ["StageTimelines"]


@dataclass
class _Watched(RankReplay):
    """Also keeps what is alive before the first action, and of each action what is alive at its moments and left behind
    it; what arrives between two actions counts for the later one.
    """

    actions: list[Action] = field(default_factory=list)
    uses: list[MemoryUse] = field(default_factory=list)

    def _act(self, index: int, kind: str, part: int) -> None:
        if not self.uses:
            self._note()
        super()._act(index, kind, part)
        if kind in KINDS:
            self.actions.append(Action(kind, index, part))
            self._note()

    def finish(self, shared: frozenset[str]) -> None:
        super().finish(shared)
        self._note()

    def _note(self) -> None:
        self.live.passing({})  # what is alive now is a moment, too
        self.uses.append(MemoryUse.of(self.live.moments, self.live.now))
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

        def measure(model: ShortModel) -> list[list[MemoryUse]]:
            kept = [strategies[block] for block in model.keep]
            parts = staging.schedule.num_microbatches
            lower = LowerStages(kept, model.first_blocks, parts, self.cluster, self.cache, keep_outputs=False)
            lowered = lower.run(DropBlocks(model.keep, self.block_fingerprints).run(self.graph)).standing_for(
                model.stage_of
            )
            held = PersistentMemory.of(lowered, staging.schedule, self.optimizer)
            replays = simulate.replays(lowered, held, _Watched)
            actions[:] = [replay.actions for replay in replays]
            return [_with_held(replay.uses, held, rank) for rank, replay in enumerate(replays)]

        short = ShortModel.of(self.block_fingerprints, strategies, first_blocks)
        base = measure(short)
        ranks = [staging.schedule.stages_of(rank) for rank in range(staging.schedule.num_ranks)]
        longer = {apart: measure(short.longer(apart)) for apart in short.apart(ranks)}
        return tuple(
            _timeline(
                rank,
                rank_actions,
                [
                    whole_memory(short, [use], {apart: [uses[rank][at]] for apart, uses in longer.items()}, [stages])[0]
                    for at, use in enumerate(base[rank])
                ],
                step,
            )
            for rank, (rank_actions, stages) in enumerate(zip(actions, ranks, strict=True))
        )


def _with_held(uses: Sequence[MemoryUse], held: PersistentMemory, rank: int) -> list[MemoryUse]:
    """The same with what a rank holds beside its tasks, and behind the last of them what the update takes."""
    always, hoisted = held.always(rank), {BATCH: held.hoisted_bytes(rank)}
    behind = [hoisted] * (len(uses) - 1) + [{TRANSIENTS: held.update(rank).most_bytes}]
    return [
        MemoryUse.of(
            {moment: with_bytes(alive, always, hoisted) for moment, alive in use.moments.items()},
            with_bytes(use.update, always, more),
        )
        for use, more in zip(uses, behind, strict=True)
    ]


def _timeline(rank: int, actions: Sequence[Action], uses: Sequence[MemoryUse], step: StagesReport) -> MemoryTimeline:
    spans = {span.action: span for span in step.spans.spans}
    start_s, finish_s, update_s = (step.once_s(rank, task) for task in ("start", "finish", "update"))
    starts = [0.0]
    for action in actions:
        starts += [start_s + spans[action].start_s, start_s + spans[action].end_s]
    starts += [step.step_time_s - finish_s - update_s, step.step_time_s - update_s]
    levels = [uses[0].step, *(level for use in uses[1:] for level in (use.step, use.update))]
    return MemoryTimeline(np.maximum.accumulate(starts), np.array(list(map(kinds_array, levels))), step.step_time_s)
