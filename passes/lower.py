"""From a planned graph to the forward and backward graph of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.layout import Layout, layout
from galvatron_fx.ir.placement import Placement
from galvatron_fx.ir.strategy import Strategy
from galvatron_fx.ir.verifier import verify
from passes.bundle_collectives import BundleCollectives
from passes.partition import Halves, Partition
from passes.place_recompute import PlaceRecompute
from passes.shard_graph import ShardGraph


@dataclass(frozen=True)
class Lowered:
    """Rank-agnostic forward and backward graphs and the layout of their inputs and outputs."""

    joint: fx.GraphModule
    halves: Halves
    layout: Layout


@dataclass(frozen=True)
class Lower:
    """Apply a strategy per block: shard, insert collectives, place recomputation, split forward from backward.

    ``fixed``: placements of parameters that exist already; ``cache``: solutions of blocks; ``on_pass`` sees every
    stage.
    """

    strategies: Sequence[Strategy]
    cluster: Cluster
    cache: dict[Any, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    on_pass: Callable[[str, fx.GraphModule], None] | None = None

    def run(self, graph: fx.GraphModule) -> Lowered:
        """Return the lowered program; ``graph`` stays as it is."""
        sharding = ShardGraph(self.strategies, self.cluster.axes, self.cluster.device, self.cache, self.fixed)
        sharded = sharding.run(graph)
        self._done("ShardGraph", sharded)
        joint = PlaceRecompute(self.strategies).run(sharded)
        self._done("PlaceRecompute", joint)
        halves = Partition().run(joint)
        bundle = BundleCollectives.over(layout(sharded), self.cluster)
        for phase, half in {"forward": halves.forward, "backward": halves.backward}.items():
            bundle.run(half)
            if self.on_pass is not None:
                self.on_pass(f"BundleCollectives.{phase}", half)
        return Lowered(joint, halves, layout(sharded))

    def _done(self, name: str, graph: fx.GraphModule) -> None:
        verify(graph, "lowered", name)
        if self.on_pass is not None:
            self.on_pass(name, graph)
