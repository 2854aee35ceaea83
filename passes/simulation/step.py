"""Predict a lowered program: time from its operators and collectives, memory from the life of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from torch import fx

from cost_models.host_states import FoldedStates, OptimizerStep, going_bytes
from cost_models.node_time import NodeTime
from cost_models.ops import op_time_s
from cost_models.optimizer import ADAM, OptimizerModel, ParameterShard
from cost_models.streams import Event, Work
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import InputSpec, OpCost, meta_of
from galvatron_fx.ir.graph.placement import Shard
from galvatron_fx.ir.plan.prediction import (
    COMPUTE,
    HOST,
    LOCAL_CAUSES,
    RECOMPUTE,
    STATE_COPIES,
    STATES,
    TRANSIENTS,
    UPDATE,
    Cause,
    MemoryUse,
    RankUse,
)
from passes.lowering.lower_step import Lowered
from passes.simulation.events import GraphEvents
from passes.simulation.exposed_time import added, exposed_and_hidden
from passes.simulation.implicit_copies import implicit_copies
from passes.simulation.live_memory import GraphMemory, UpdateBytes

Seconds = dict[Cause, float]

OF_UPDATE = (UPDATE, STATE_COPIES)
"""Causes of the optimizer's step, behind backward."""


@dataclass(frozen=True)
class StepReport:
    """One training step on one rank: seconds by cause, and bytes beside which nothing else is alive.

    ``seconds``: of a collective, by how much the step is longer for it; ``hidden``: what it takes beyond that, while
    the rank computes.
    """

    seconds: Mapping[Cause, float]
    memory: MemoryUse
    parameter_bytes: int
    hidden: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def compute_s(self) -> float:
        """Seconds of operators."""
        return sum(s for cause, s in self.seconds.items() if cause.kind in LOCAL_CAUSES and cause.kind not in OF_UPDATE)

    @property
    def communication_s(self) -> float:
        """Seconds by which the step is longer for its collectives."""
        return sum(s for cause, s in self.seconds.items() if cause.kind not in LOCAL_CAUSES)

    @property
    def step_time_s(self) -> float:
        """Seconds of forward, backward and update."""
        return sum(self.seconds.values())

    @property
    def peak_memory_bytes(self) -> int:
        """The most bytes alive."""
        return self.memory.peak_bytes

    @property
    def host_bytes(self) -> int:
        """The most bytes on the host."""
        return self.memory.host_bytes

    def ranks(self) -> tuple[RankUse, ...]:
        """The step by pipeline rank, of which there is one."""
        return (RankUse((0,), self.seconds, self.memory.at_peak, self.hidden, self.host_bytes),)


@dataclass(frozen=True)
class StepParts:
    """What a prediction is put together from.

    ``alone``: seconds by cause, as if nothing ran at once; ``events``: of the forward and the backward graph, by name.
    """

    alone: Seconds
    events: Mapping[str, GraphEvents]
    memory: MemoryUse
    parameter_bytes: int


@dataclass
class SimulateStep:
    """Simulate the graphs of ``lowered`` on one device of ``cluster``, and the update of ``optimizer`` behind them."""

    cluster: Cluster
    optimizer: OptimizerModel = ADAM
    prices: NodeTime = field(init=False)

    def __post_init__(self) -> None:
        self.prices = NodeTime(self.cluster)

    def run(self, lowered: Lowered) -> StepReport:
        """Return the prediction. Raises VerifierError where a node's shape is not the one its facts say."""
        parts = self.parts(lowered)
        events = [half.all for half in parts.events.values()]
        return self.report(parts.alone, events, parts.memory, parts.parameter_bytes)

    def report(
        self, alone: Seconds, events: Iterable[Sequence[Event]], memory: MemoryUse, parameter_bytes: int
    ) -> StepReport:
        """Let the ``events`` of both graphs overlap, which take the seconds ``alone`` as if nothing ran at once."""
        seconds, hidden = exposed_and_hidden(alone, [list(chain.from_iterable(events))], self.cluster.overlap)
        return StepReport(seconds, memory, parameter_bytes, hidden)

    def parts(self, lowered: Lowered) -> StepParts:
        """Look at the two graphs, without letting anything overlap."""
        halves, named = lowered.halves, _parameters(lowered, trained_only=True)
        trained, folded = list(named.values()), halves.folded

        use = GraphMemory(lowered.layout.shape, self.update_bytes(lowered)).use(lowered)
        later = [shard for name, shard in named.items() if name not in folded or self.optimizer.accumulates]
        at_end = OptimizerStep(self.optimizer, later)
        memory = _with_states(use, OptimizerStep(self.optimizer, trained), at_end.most_bytes)
        graphs = {"forward": halves.forward, "backward": halves.backward}
        states = self.folded_states(lowered)
        events = {name: self.graph_events(graph, lowered.layout, states) for name, graph in graphs.items()}
        alone = added([*(half.seconds for half in events.values()), self.update_s(trained, bool(folded))])
        held = sum(shard.size_bytes for shard in _parameters(lowered, trained_only=False).values())
        return StepParts(alone, events, memory, held)

    def update_bytes(self, lowered: Lowered) -> UpdateBytes:
        """What an optimizer that is handed gradients takes of the device's memory: for updates, which one that
        accumulates does later.
        """
        named = _parameters(lowered, trained_only=True)

        def takes(name: str) -> int:
            update = self.optimizer.update(named[name].shape)
            return 0 if self.optimizer.accumulates else update.workspace_bytes(named[name])

        groups = self.folded_states(lowered).groups
        return UpdateBytes(takes, lambda name: going_bytes(self.optimizer, named[name]), groups)

    def folded_states(self, lowered: Lowered | None = None) -> FoldedStates:
        """Those that come to the device while backward computes; none of a stage."""
        named = {} if lowered is None else _parameters(lowered, trained_only=True)
        away = {name: shard for name, shard in named.items() if shard.states_away}
        return FoldedStates(self.optimizer, away, self.cluster)

    def graph_events(self, graph: fx.GraphModule, layout: Layout, states: FoldedStates | None = None) -> GraphEvents:
        """The events of a graph that lies on the cluster as ``layout`` says; ``states``: that come while it runs."""
        price, copies = partial(self.prices.price, layout=layout), self._copies(graph, layout.shape)
        return GraphEvents.of(graph.graph, price, states or self.folded_states(), copies)

    def _copies(self, graph: fx.GraphModule, degrees: Sequence[int]) -> Iterator[tuple[int, Work]]:
        """Copies that are no operators of their own, by block; only measured prices are worth the run on fakes."""
        device = self.cluster.device
        for record, size in implicit_copies(graph, degrees) if device.curves else ():
            spent = float(op_time_s(OpCost(0, size, size), record.spec.dtype, device, "contiguous"))
            yield max(record.block, 0), Work(spent, Cause(RECOMPUTE if record.again else COMPUTE))

    def update_s(self, trained: Sequence[ParameterShard], folded: bool = False) -> Seconds:
        """Seconds of the optimizer's update of parameters, one after the other, and of copies for it, by cause; these
        are in the graphs where gradients are ``folded``.
        """
        update = OptimizerStep(self.optimizer, trained)
        copies_s = 0.0 if folded else update.copies_s(self.cluster.device)
        seconds = {Cause(UPDATE): update.update_s(self.cluster.device)}
        return seconds | ({Cause(STATE_COPIES): copies_s} if copies_s else {})


def _with_states(memory: MemoryUse, update: OptimizerStep, most_bytes: int) -> MemoryUse:
    """The ``memory`` of forward and backward with what the optimizer holds, and the ``most_bytes`` that it takes for
    itself behind them.
    """
    states, most = {STATES: update.device_bytes}, memory.update.get(TRANSIENTS, 0) + most_bytes
    moments = {
        moment: {**held, **states, HOST: held[HOST] + update.host_bytes} for moment, held in memory.moments.items()
    }
    return MemoryUse.of(moments, {**memory.update, TRANSIENTS: most, **states})


def shard_of(port: InputSpec, node: fx.Node, degrees: Sequence[int]) -> ParameterShard:
    """What a rank holds of a lowered graph's parameter; ``degrees``: ranks along each column of the layout."""
    record = meta_of(node)
    shape = list(record.spec.shape)
    placements = record.placements[0] if record.placements else ()
    for placement, degree in zip(placements, degrees, strict=False):
        if isinstance(placement, Shard):
            shape[placement.dim] *= degree
    itemsize = record.spec.dtype.itemsize
    away = port.states_on_host, port.states_on_disk, port.on_host
    return ParameterShard(tuple(shape), record.spec.size_bytes, itemsize, *away)


def _parameters(lowered: Lowered, trained_only: bool) -> dict[str, ParameterShard]:
    """Each parameter (each that is trained), by name."""
    nodes = lowered.halves.forward.graph.find_nodes(op="placeholder")
    return {
        port.name: shard_of(port, node, lowered.layout.shape)
        for node, port in zip(nodes, lowered.halves.input_ports, strict=True)
        if port.kind == "param" and (port.requires_grad or not trained_only)
    }
