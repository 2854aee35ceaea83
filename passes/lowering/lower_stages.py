"""From a planned graph to the graphs of every pipeline stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from torch import fx

from cost_models.collectives import collective_s
from cost_models.node_time import NodeTime
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.graph.layout import Layout, layout
from galvatron_fx.ir.graph.metadata import InputSpec, Signature, signature
from galvatron_fx.ir.graph.pass_pipeline import PassControl, PassPipeline
from galvatron_fx.ir.graph.placement import Placement
from galvatron_fx.ir.plan.strategy import Strategy, stand_in_name
from passes.analysis.dataflow import owning_blocks
from passes.lowering.communication.pipeline import ScheduleCommunication
from passes.lowering.fetch_parameters import FetchParameters
from passes.lowering.offload_activations import OffloadActivations
from passes.lowering.place_states import PlaceStates
from passes.lowering.rematerialize import Rematerialize
from passes.lowering.split_gathers import SplitGathers
from passes.lowering.stages.relay_or_recompute import RelayOrRecompute
from passes.lowering.stages.split_microbatches import Microbatched, SplitMicrobatches
from passes.lowering.stages.split_stages import SplitStages, Stage, stage_of_node, stages_of_blocks
from passes.lowering.stages.spread_stages import check_alone, check_copies, spread_stages
from passes.lowering.stages.stage_tasks import Task
from passes.lowering.stages.untie_weights import UntieWeights
from passes.sharding.placed_calls import verify_placed
from passes.sharding.shard_graph import ShardGraph

_STATE = ("param", "buffer")


@dataclass(frozen=True)
class LoweredStages:
    """Rank-agnostic graphs of all stages, what surrounds the micro-batches, and the layout of inputs and outputs.

    ``joint``: the whole lowered graph of one micro-batch; ``signature``: of the whole batch's graph. The graphs of a
    stage are written, verified and shown when they are asked for: each rank runs its own. (All are at once for whoever
    looks at passes or inserts some.)
    """

    joint: fx.GraphModule
    stages: tuple[Stage, ...]
    microbatched: Microbatched
    layout: Layout
    signature: Signature

    def standing_for(self, stage_of: Sequence[int]) -> LoweredStages:
        """The stages of a longer model, of which number i equals ``stages[stage_of[i]]`` with parameters of its own;
        what several stages take (a buffer of all layers) all others take, too.
        """
        uses: Counter[int] = Counter()
        stages = []
        takers = Counter(port.name for stage in self.stages for port in stage.ports.values() if port.kind in _STATE)
        shared = {name for name, count in takers.items() if count > 1}
        for index, stand_in in enumerate(stage_of):
            stages.append(_another(self.stages[stand_in], index, uses[stand_in], shared))
            uses[stand_in] += 1
        return replace(self, stages=tuple(stages))


STAGING = PassPipeline(
    "lowering by stages",
    {
        SplitMicrobatches: "lowered",
        UntieWeights: "lowered",
        ShardGraph: "lowered",
        PlaceStates: "lowered",
        Rematerialize: "lowered",
        SplitGathers: "lowered",
        OffloadActivations: "lowered",
        FetchParameters: "lowered",
        SplitStages: "scheduled",
    },
    verify_placed,
)


@dataclass(frozen=True)
class LowerStages:
    """Cut the batch into micro-batches, shard as the strategies say, and cut the model into stages.

    ``strategies``: one a block, equal in where they play ``pipeline``; ``first_blocks``: of every stage;
    ``fixed``, ``cache``, ``control``: as of :class:`passes.lowering.lower_step.Lower`; ``keep_outputs``: outputs other
    than numbers, too, which several micro-batches would have to keep to the end of the step; of what is forward alone
    they are what it is run for, and always kept.
    """

    strategies: Sequence[Strategy]
    first_blocks: Sequence[int]
    num_microbatches: int
    cluster: Cluster
    cache: dict[Any, Any] = field(default_factory=dict)
    fixed: Mapping[str, tuple[Placement, ...]] = field(default_factory=dict)
    control: PassControl = field(default_factory=PassControl)
    keep_outputs: bool = True

    @fewer_collections()
    def run(self, graph: fx.GraphModule) -> LoweredStages:
        """Return the lowered stages; ``graph`` stays as it is."""
        return self.lower(self.split(graph), signature(graph))

    def split(self, graph: fx.GraphModule) -> Microbatched:
        """Cut the batch alone, which rests on the number of micro-batches and not on strategies."""
        keep_outputs = self.keep_outputs or signature(graph).forward_only
        solved = self.cache.setdefault(SplitMicrobatches, {})
        verifies = self.control.verifies
        split = SplitMicrobatches(self.num_microbatches, self.cluster.device, keep_outputs, solved, verifies)
        microbatched: Microbatched = STAGING.under(self.control).cut(split, graph, lambda parts: {"": parts.graph})
        return microbatched

    def lower(self, microbatched: Microbatched, whole: Signature) -> LoweredStages:
        """Return the lowered stages of a batch that is cut; ``whole``: the signature of its graph before that."""
        apply = STAGING.under(self.control)
        self._check_epilogue(microbatched)
        stage_of = stages_of_blocks(self.first_blocks, len(self.strategies))
        untied = apply(UntieWeights(stage_of), microbatched.graph)
        spread = spread_stages(self.strategies, self.first_blocks)
        if spread:
            _refuse_caches(untied)
        check_copies(untied, stage_of, spread)
        sharding = ShardGraph(
            self.strategies, self.cluster.axes, self.cluster.device, self.cache, self.fixed, self.control
        )
        places = PlaceStates(self.strategies, owning_blocks(microbatched.graph))
        sharded = apply(places, apply(sharding, untied))
        kept = apply(SplitGathers(self.strategies), apply(Rematerialize(self.strategies), sharded))
        offloaded = apply(OffloadActivations(self.strategies, stage_of.__getitem__), kept)
        joint = apply(FetchParameters(gradients_stay=True), offloaded)
        cut = SplitStages(self.first_blocks, self.strategies, self._relay(layout(sharded)).relayed)
        drafts = cut.run(joint)
        check_alone([stage for stage in drafts if spread and stage.index not in spread], layout(sharded))
        stages = tuple(
            replace(stage, write=cache(partial(self._write, cut, stage, layout(sharded)))) for stage in drafts
        )
        if self.control.on_pass is not None or self.control.inserted:
            for stage in stages:
                stage.write()
        return LoweredStages(joint, stages, microbatched, layout(sharded), whole)

    @fewer_collections()
    def _write(self, cut: SplitStages, stage: Stage, placed: Layout) -> dict[str, Task]:
        """The finished tasks of a stage."""
        part = f"stage{stage.index}"
        tasks = STAGING.under(self.control, part).cut_by(cut, stage.write, _graphs)
        for name, graph in _graphs(tasks).items():
            ScheduleCommunication(self.strategies, placed, self.cluster, f"{part}.{name}", self.control).run(graph)
        return tasks

    def _check_epilogue(self, split: Microbatched) -> None:
        """Raise PlanError where what all samples change would have to be put together from several stages."""
        buffers = [port.name for port in split.epilogue_ports if port.kind == "buffer"]
        if buffers and len(self.first_blocks) > 1:
            raise PlanError(
                f"forward makes the new value of '{buffers[0]}' of all samples, which {self.num_microbatches} "
                f"micro-batches in several stages do not see together: use num_microbatches=1, or one stage"
            )

    def _relay(self, placed: Layout) -> RelayOrRecompute:
        prices = NodeTime(self.cluster)

        def compute_s(node: fx.Node) -> float:
            price = prices.price(node, placed)
            return 0.0 if price is None else price.seconds

        def send_s(size_bytes: int) -> float:
            return float(collective_s("send_recv", float(size_bytes), [self.cluster.axes[0]]))

        return RelayOrRecompute(lambda node: stage_of_node(node, self.first_blocks), compute_s, send_s)


def _refuse_caches(graph: fx.GraphModule) -> None:
    caches = [port.name for port in signature(graph).outputs if port.kind == "cache"]
    if caches:
        raise PlanError(
            f"forward changes the cache '{caches[0]}', of which ranks that all compute the vocabulary would not know "
            f"who holds it: plan with vocabulary='ends'"
        )


def _graphs(tasks: Mapping[str, Task]) -> dict[str, fx.GraphModule]:
    return {name: task.graph for name, task in tasks.items()}


def _another(stage: Stage, index: int, number: int, shared: Collection[str]) -> Stage:
    """A stage that does the same with other parameters, but for those that are ``shared``."""

    def renamed(port: InputSpec) -> InputSpec:
        is_own = port.kind in _STATE and port.name not in shared
        return replace(port, name=stand_in_name(port.name, number)) if is_own else port

    gradients = tuple(
        replace(g, port=replace(g.port, name=stand_in_name(g.port.name, number))) for g in stage.gradients
    )
    ports = {name: renamed(port) for name, port in stage.ports.items()}
    return replace(stage, index=index, ports=ports, gradients=gradients)
