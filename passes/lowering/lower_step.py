"""From a planned graph to the forward and backward graph of every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.layout import Layout, layout
from galvatron_fx.ir.graph.pass_pipeline import PassControl, PassPipeline
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.dataflow import owning_blocks
from passes.lowering.communication.defer_output_waits import DeferOutputWaits
from passes.lowering.communication.pipeline import ScheduleCommunication
from passes.lowering.fetch_parameters import FetchParameters
from passes.lowering.fold_gradients import FoldGradients
from passes.lowering.offload_activations import OffloadActivations
from passes.lowering.place_states import PlaceStates
from passes.lowering.reduce_inputs_first import ReduceInputsFirst
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_forward_backward import ForwardBackward, SplitForwardBackward
from passes.lowering.split_gathers import SplitGathers
from passes.sharding.placed_calls import verify_placed
from passes.sharding.shard_graph import ShardGraph


@dataclass(frozen=True)
class Lowered:
    """Rank-agnostic forward and backward graphs and the layout of their inputs and outputs."""

    joint: fx.GraphModule
    halves: ForwardBackward
    layout: Layout


LOWERING = PassPipeline(
    "lowering",
    {
        ShardGraph: "lowered",
        PlaceStates: "lowered",
        Rematerialize: "lowered",
        SplitGathers: "lowered",
        OffloadActivations: "lowered",
        FetchParameters: "lowered",
        ReduceInputsFirst: "lowered",
        SplitForwardBackward: "scheduled",
        DeferOutputWaits: "scheduled",
        FoldGradients: "scheduled",
    },
    verify_placed,
)


@dataclass(frozen=True)
class Lower:
    """Apply a strategy per block: shard, insert collectives, place recomputation, split, schedule communication.

    ``fixed``: placements of parameters that exist already; ``cache``: solutions of blocks; ``control``: who sees the
    graph after each pass, and what else runs; ``folds``: gradients are folded into updates
    (:class:`passes.lowering.fold_gradients.FoldGradients`).
    """

    strategies: Sequence[Strategy]
    cluster: Cluster
    cache: dict[Any, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    control: PassControl = field(default_factory=PassControl)
    folds: bool = False

    @fewer_collections()
    def run(self, graph: fx.GraphModule) -> Lowered:
        """Return the lowered program; ``graph`` stays as it is."""
        apply = LOWERING.under(self.control)
        sharding = ShardGraph(
            self.strategies, self.cluster.axes, self.cluster.device, self.cache, self.fixed, self.control
        )
        sharded = apply(PlaceStates(self.strategies, owning_blocks(graph)), apply(sharding, graph))
        kept = apply(SplitGathers(self.strategies), apply(Rematerialize(self.strategies), sharded))
        fetched = apply(FetchParameters(self.folds), apply(OffloadActivations(self.strategies), kept))
        joint = apply(ReduceInputsFirst(), fetched)
        halves = apply.cut(SplitForwardBackward(), joint, ForwardBackward.graphs)
        for phase, half in halves.graphs().items():
            options = self.strategies, layout(sharded), self.cluster, phase, self.control, self.folds
            ScheduleCommunication(*options).run(half)
        LOWERING.under(self.control, "forward").in_place(DeferOutputWaits(len(halves.result_ports)), halves.forward)
        if self.folds:
            LOWERING.under(self.control, "backward").in_place(FoldGradients(halves), halves.backward)
        return Lowered(joint, halves, layout(sharded))
