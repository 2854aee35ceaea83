"""Decide when the collectives of a lowered graph start, and which go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.communication.bundle_collectives import BundleCollectives
from passes.lowering.communication.finish_reductions_late import FinishReductionsLate
from passes.lowering.communication.prefetch_gathers import PrefetchGathers
from passes.lowering.communication.start_reductions_early import StartReductionsEarly


@dataclass(frozen=True)
class ScheduleCommunication:
    """The passes over a forward or backward graph, or a stage's task, that lies on ``cluster`` as ``layout`` says.

    ``strategies``: one a block; ``on_pass`` sees the graph after each of them.
    """

    strategies: Sequence[Strategy]
    layout: Layout
    cluster: Cluster
    on_pass: Callable[[str, fx.GraphModule], None] | None = None

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        self._done(StartReductionsEarly().run(graph), "StartReductionsEarly")
        self._done(BundleCollectives.over(self.layout, self.cluster).run(graph), "BundleCollectives")
        self._done(FinishReductionsLate().run(graph), "FinishReductionsLate")
        if self.cluster.overlap.gains:
            self._done(PrefetchGathers(self.strategies).run(graph), "PrefetchGathers")
        return graph

    def _done(self, graph: fx.GraphModule, name: str) -> None:
        if self.on_pass is not None:
            self.on_pass(name, graph)
