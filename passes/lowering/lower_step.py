"""From a planned graph to the forward and backward graph of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.layout import Layout, layout
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.plan.strategy import Strategy
from passes.lowering.communication.defer_output_waits import DeferOutputWaits
from passes.lowering.communication.pipeline import ScheduleCommunication
from passes.lowering.reduce_inputs_first import ReduceInputsFirst
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_forward_backward import ForwardBackward, SplitForwardBackward
from passes.sharding.placed_calls import verify_placed
from passes.sharding.shard_graph import ShardGraph


@dataclass(frozen=True)
class Lowered:
    """Rank-agnostic forward and backward graphs and the layout of their inputs and outputs."""

    joint: fx.GraphModule
    halves: ForwardBackward
    layout: Layout


@dataclass(frozen=True)
class Lower:
    """Apply a strategy per block: shard, insert collectives, place recomputation, split, schedule communication.

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
        joint = Rematerialize(self.strategies).run(sharded)
        self._done("Rematerialize", joint)
        self._done("ReduceInputsFirst", ReduceInputsFirst().run(joint))
        halves = SplitForwardBackward().run(joint)
        for half in (halves.forward, halves.backward):
            verify_placed(half, "scheduled", "SplitForwardBackward")
        for phase, half in {"forward": halves.forward, "backward": halves.backward}.items():
            seen = partial(self._scheduled, phase)
            ScheduleCommunication(self.strategies, layout(sharded), self.cluster, seen).run(half)
        DeferOutputWaits(len(halves.result_ports)).run(halves.forward)
        verify_placed(halves.forward, "scheduled", "DeferOutputWaits")
        return Lowered(joint, halves, layout(sharded))

    def _scheduled(self, phase: str, name: str, graph: fx.GraphModule) -> None:
        verify_placed(graph, "scheduled", f"{name}.{phase}")
        if self.on_pass is not None:
            self.on_pass(f"{name}.{phase}", graph)

    def _done(self, name: str, graph: fx.GraphModule) -> None:
        verify_placed(graph, "lowered", name)
        if self.on_pass is not None:
            self.on_pass(name, graph)
