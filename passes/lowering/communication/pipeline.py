"""Decide when the collectives of a lowered graph start, and which go together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.pass_pipeline import PassControl, PassPipeline
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.communication.bundle_collectives import BundleCollectives
from passes.lowering.communication.chunk_collectives import ChunkCollectives
from passes.lowering.communication.finish_reductions_late import FinishReductionsLate
from passes.lowering.communication.overlap_host_copies import OverlapHostCopies
from passes.lowering.communication.prefetch_gathers import PrefetchGathers
from passes.lowering.communication.start_reductions_early import StartReductionsEarly
from passes.sharding.placed_calls import verify_placed

COMMUNICATION = PassPipeline(
    "communication",
    dict.fromkeys(
        (
            ChunkCollectives,
            StartReductionsEarly,
            BundleCollectives,
            FinishReductionsLate,
            PrefetchGathers,
            OverlapHostCopies,
        ),
        "scheduled",
    ),
    verify_placed,
)


@dataclass(frozen=True)
class ScheduleCommunication:
    """The passes over a forward or backward graph, or a stage's task, that lies on ``cluster`` as ``layout`` says.

    ``strategies``: one a block; ``part``: which graph of the program it is; ``control``: as of
    :class:`passes.lowering.lower_step.Lower`; ``folds``: gradients are taken as soon as they are complete.
    """

    strategies: Sequence[Strategy]
    layout: Layout
    cluster: Cluster
    part: str = ""
    control: PassControl = field(default_factory=PassControl)
    folds: bool = False

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        apply = COMMUNICATION.under(self.control, self.part)
        apply.in_place(ChunkCollectives(self.layout, self.cluster), graph)
        apply.in_place(StartReductionsEarly(), graph)
        apply.in_place(BundleCollectives.over(self.layout, self.cluster), graph)
        apply.in_place(FinishReductionsLate(promptly=self.folds), graph)
        if self.cluster.overlap.gains:
            apply.in_place(PrefetchGathers(self.strategies), graph)
            if any(strategy.is_offloaded or strategy.offload_parameters for strategy in self.strategies):
                apply.in_place(OverlapHostCopies(), graph)
        return graph
