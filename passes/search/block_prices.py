"""Time and memory of one block under every strategy, from one solved sharding a role and degree.

The intra-block solver runs once for every distinct block, role and degree. A strategy gives several axes to several
roles; its price
composes their solutions: an operator's work is divided by the degree of every role that splits it, and a
redistribution moves what the other roles left of the tensor. All strategies of a block are priced at once, as arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod

import numpy as np
from torch import fx

from cost_models.collectives import collective_s
from cost_models.ops import OpCost, is_matmul, op_time_s
from galvatron_fx.ir.annotations import TensorSpec, facts, output_ports, ports
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.placement import REPLICATE, Partial, Placement, Shard
from galvatron_fx.ir.strategy import RoleGroup, Strategy
from galvatron_fx.ir.symbols import BATCH
from passes.insert_collectives import AxisSharding
from passes.sharding.op_call import call_cost, input_nodes, is_getitem, op_call
from passes.sharding.prices import Prices, dtype_name, is_free
from passes.sharding.rules import OpRule

# Adam keeps two moments beside each parameter and its gradient, all of the parameter's dtype.
STATES_PER_PARAMETER = 4

Solutions = Mapping[tuple[str, int], AxisSharding]


@dataclass(frozen=True)
class BlockPrice:
    """A block under one strategy, on one rank.

    ``forward_s`` and ``backward_s``: of one micro-batch; ``once_s``: once a step, the optimizer's update and the
    gathers and reductions that wait for all micro-batches; ``static_bytes``: parameters, gradients, optimizer states
    and what is gathered for the whole step; ``saved_bytes``: kept from forward to backward of one micro-batch;
    ``transient_bytes``: the most that lives beside these while it runs.
    """

    forward_s: float
    backward_s: float
    once_s: float
    static_bytes: int
    saved_bytes: int
    transient_bytes: int

    @property
    def time_s(self) -> float:
        """Seconds of a step with one micro-batch."""
        return self.forward_s + self.backward_s + self.once_s


@dataclass(frozen=True)
class _Parts:
    """The terms of a block's price for one role table, in seconds and bytes."""

    forward_s: float
    backward_s: float
    gather_s: float
    scatter_s: float
    reduce_s: float
    update_s: float
    static_bytes: float
    saved_bytes: float
    entry_bytes: float
    gathered_bytes: float
    transient_bytes: float


@dataclass(frozen=True)
class GraphIndex:
    """What the pricers of all blocks look up in one graph: its blocks' nodes, parameters and their gradients."""

    blocks: Mapping[int, list[fx.Node]]
    parameters: frozenset[fx.Node]
    trained: frozenset[fx.Node]
    first_user: Mapping[fx.Node, fx.Node]
    gradients: tuple[tuple[fx.Node, fx.Node], ...]

    @classmethod
    def of(cls, graph: fx.GraphModule) -> GraphIndex:
        """Index ``graph`` in one pass."""
        named = {port.name: node for port, node in ports(graph) if port.kind == "param"}
        parameters = frozenset(named.values())
        blocks: dict[int, list[fx.Node]] = {}
        first: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "call_function":
                blocks.setdefault(max(facts(node).block, 0), []).append(node)
                for source in input_nodes(node):
                    if source in parameters:
                        first.setdefault(source, node)
        gradients = tuple(
            (named[port.name], node)
            for port, node in output_ports(graph)
            if port.kind == "grad" and node is not None and port.name in named
        )
        trained = frozenset(node for port, node in ports(graph) if port.kind == "param" and port.requires_grad)
        return cls(blocks, parameters, trained, first, gradients)


@dataclass
class BlockPricer:
    """Prices strategies of the block ``index`` of ``graph``; ``solutions``: a decision for every (role, degree).

    What does not depend on a strategy is looked up once, so one pricer serves all meshes and numbers of micro-batches.
    """

    graph: GraphIndex
    index: int
    cluster: Cluster
    solutions: Solutions
    parts: int = 1
    _nodes: list[fx.Node] = field(init=False)
    _known: dict[tuple[int, tuple[RoleGroup, ...]], _Parts] = field(default_factory=dict)
    _found_moves: dict[int, list[tuple[fx.Node, Placement, str, Placement]]] = field(default_factory=dict)
    _found_operators: dict[int, list[_Operator]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._nodes = self.graph.blocks.get(self.index, [])
        inside = set(self._nodes)
        self._parameters = self.graph.parameters
        self._trained = self.graph.trained
        self._owned = [n for n in self._parameters if self.graph.first_user.get(n) in inside]
        self._owned.sort(key=lambda n: n.name)
        self._weights = _parameter_side(self._nodes, self._parameters)
        self._used = [n for n in self._parameters if any(user in inside for user in n.users)]
        self._used.sort(key=lambda n: n.name)
        self._final_gradients = {node for _, node in self.graph.gradients if node in inside}
        self._lives = [self._life_spans(phase) for phase in ("forward", "backward")]

    def price(self, strategy: Strategy, parts: int = 1) -> BlockPrice:
        """The block's price with ``parts`` micro-batches, of which whatever has a batch is a part.

        It is composed, not lowered: :mod:`passes.search.plan_search` lowers what it chooses.
        """
        self.parts = parts
        terms = self._terms(strategy.groups(self.cluster.shape))
        keeps = strategy.keep_gathered and not strategy.recompute
        kept = terms.gathered_bytes if keeps else 0.0
        # A gradient that is reduced at the end of several micro-batches grows whole beside its kept share.
        whole_gradients = kept if parts > 1 else 0.0
        again = terms.forward_s + terms.gather_s if strategy.recompute else terms.gather_s
        held = terms.entry_bytes if strategy.recompute else terms.saved_bytes
        rebuilt = terms.saved_bytes - terms.entry_bytes if strategy.recompute else 0.0
        return BlockPrice(
            forward_s=terms.forward_s + (0.0 if keeps else terms.gather_s),
            backward_s=terms.backward_s + (0.0 if keeps else again + terms.scatter_s),
            once_s=terms.update_s + terms.reduce_s + (terms.gather_s + terms.scatter_s if keeps else 0.0),
            static_bytes=int(terms.static_bytes + kept + whole_gradients),
            saved_bytes=int(held),
            transient_bytes=int(max(terms.transient_bytes + terms.gathered_bytes - kept + rebuilt, 0.0)),
        )

    def _terms(self, groups: tuple[RoleGroup, ...]) -> _Parts:
        """What recomputation and keeping do not change, once a role table."""
        key = self.parts, groups
        if key not in self._known:
            view = _View([(group, self.solutions[group.role, group.degree]) for group in groups])
            forward, backward = self._compute(view)
            moves = self._moves(view)
            static, update = self._static(view)
            saved, entries = self._saved(view)
            gather, gathered = self._gathers(view)
            self._known[key] = _Parts(
                forward_s=forward + moves["forward"],
                backward_s=backward + moves["backward"],
                gather_s=gather,
                scatter_s=moves["scatter"],
                reduce_s=moves["reduce"],
                update_s=update,
                static_bytes=static,
                saved_bytes=saved,
                entry_bytes=entries,
                gathered_bytes=gathered,
                transient_bytes=self._transient(view),
            )
        return self._known[key]

    # ---- time ----

    def _compute(self, view: _View) -> tuple[float, float]:
        """Seconds of the operators in forward and in backward."""
        times = {"forward": 0.0, "backward": 0.0}
        for operator in self._operators():
            if operator.free:
                continue
            share, moved = 1.0, 0.0
            for group, sharding in view.chosen:
                share /= group.degree if sharding.rules[operator.node].splits_work else 1
            for position, size in enumerate(operator.input_bytes):
                moved += size * view.part(operator.node, "inputs", position)
            for position, size in enumerate(operator.output_bytes):
                moved += size * view.part(operator.node, "outputs", position)
            cost = OpCost(operator.flops * share, moved, 0)
            times[operator.phase] += float(op_time_s(cost, operator.dtype, self.cluster.device, operator.matmul))
        return times["forward"], times["backward"]

    def _moves(self, view: _View) -> dict[str, float]:
        """Seconds of redistributions: by phase, and of finished gradients that are scattered or all-reduced."""
        times = {"forward": 0.0, "backward": 0.0, "scatter": 0.0, "reduce": 0.0}
        for group, sharding in view.chosen:
            axes = [self.cluster.axes[i] for i in group.axes]
            for source, want, phase, have in self._redistributions(sharding):
                kind = _kind(have, want)
                if kind is None:
                    continue
                final = source in self._final_gradients and isinstance(have, Partial)
                if group.role == "zero" and final:
                    kind = "reduce_scatter"
                size = self._size(facts(source).spec) * view.part_of(source, without=group)
                time = float(collective_s(kind, size, axes))
                times[phase if not final else "reduce" if kind == "all_reduce" else "scatter"] += time
        return times

    def _size(self, spec: TensorSpec) -> float:
        """Bytes of a tensor of one micro-batch."""
        return spec.size_bytes / (self.parts if spec.dim_of(BATCH) is not None else 1)

    def _operators(self) -> list[_Operator]:
        if self.parts not in self._found_operators:
            self._found_operators[self.parts] = [_Operator.of(n, self._size) for n in self._nodes if not is_getitem(n)]
        return self._found_operators[self.parts]

    def _redistributions(self, sharding: AxisSharding) -> list[tuple[fx.Node, Placement, str, Placement]]:
        """(value, wanted placement, phase, placement it has), each once, as the lowering makes them."""
        if id(sharding) not in self._found_moves:
            self._found_moves[id(sharding)] = self._find_moves(sharding)
        return self._found_moves[id(sharding)]

    def _find_moves(self, sharding: AxisSharding) -> list[tuple[fx.Node, Placement, str, Placement]]:
        made: dict[tuple[fx.Node, Placement], tuple[fx.Node, Placement, str, Placement]] = {}
        for node in self._nodes:
            if is_getitem(node):
                continue
            rule = sharding.rules[node]
            for source, want in zip(input_nodes(node), rule.inputs, strict=True):
                have = self._entering(sharding, source)
                if have != want:
                    made.setdefault((source, want), (source, want, facts(node).phase, have))
        for node in self._nodes:
            leave = sharding.boundaries.get(node)
            if leave is not None and sharding.placement(node) != leave:
                made.setdefault((node, leave), (node, leave, facts(node).phase, sharding.placement(node)))
        for gradient, want in self._gradients(sharding):
            if sharding.placement(gradient) != want:
                key = (gradient, want)
                made.setdefault(key, (gradient, want, "backward", sharding.placement(gradient)))
        return list(made.values())

    def _entering(self, sharding: AxisSharding, source: fx.Node) -> Placement:
        if source.op != "call_function" or max(facts(source).block, 0) == self.index:
            return sharding.placement(source)
        return sharding.boundaries.get(source, REPLICATE)

    def _gradients(self, sharding: AxisSharding) -> list[tuple[fx.Node, Placement]]:
        """Gradients made in the block and the placement of the parameter that they belong to."""
        return [
            (node, sharding.inputs.get(parameter, REPLICATE))
            for parameter, node in self.graph.gradients
            if node in self._final_gradients
        ]

    # ---- memory ----

    def _static(self, view: _View) -> tuple[float, float]:
        """Bytes of parameters with gradients and optimizer states, and seconds of the update."""
        total = update = 0.0
        prices = Prices(self.cluster.device, ())
        for node in self._owned:
            part = view.part_of(node) / self._zero_degree(node, view)
            trained = node in self._trained
            total += facts(node).spec.size_bytes * part * (STATES_PER_PARAMETER if trained else 1)
            update += prices.update_s(facts(node).spec, REPLICATE) * part if trained else 0.0
        return total, update

    def _zero_degree(self, node: fx.Node, view: _View) -> int:
        """Ranks among which ``zero`` splits a parameter, 1 where none of its dims divides."""
        degree = prod(group.degree for group, _ in view.chosen if group.role == "zero")
        whole = prod(group.degree for group, sharding in view.chosen if isinstance(sharding.placement(node), Shard))
        divides = any(size % (degree * whole) == 0 for size in facts(node).spec.shape)
        return degree if divides else 1

    def _gathers(self, view: _View) -> tuple[float, float]:
        """(seconds, bytes) of making the block's parameters whole over the ``zero`` axes once."""
        time = size = 0.0
        for group, _ in view.chosen:
            if group.role != "zero":
                continue
            axes = [self.cluster.axes[i] for i in group.axes]
            for node in self._used:
                if self._zero_degree(node, view) > 1:
                    whole = facts(node).spec.size_bytes * view.part_of(node)
                    size += whole
                    time += float(collective_s("all_gather", whole, axes))
        return time, size

    def _saved(self, view: _View) -> tuple[float, float]:
        """(bytes kept from forward, of which values that enter the block)."""
        saved: dict[tuple[fx.Node, tuple[Placement, ...]], float] = {}
        for node in self._nodes:
            if is_getitem(node):
                continue
            for position, source in enumerate(input_nodes(node)):
                if source in self._weights:
                    continue
                if facts(node).phase == "backward" and facts(source).phase == "forward":
                    wants = tuple(sharding.rules[node].inputs[position] for _, sharding in view.chosen)
                    root = _root(source)
                    saved[root, wants] = self._size(facts(root).spec) * view.part_for(wants)
        entries = {
            key: size
            for key, size in saved.items()
            if key[0].op != "call_function" or max(facts(key[0]).block, 0) != self.index
        }
        return sum(saved.values()), sum(entries.values())

    def _transient(self, view: _View) -> float:
        """The most bytes of backward values (or of forward ones that are not saved) that live at once."""
        most = 0.0
        for lives in self._lives:
            change = np.zeros(2 + max((end for _, _, end in lives), default=0))
            for node, start, end in lives:
                size = self._size(facts(node).spec) * view.part_of(node)
                change[start] += size
                change[end + 1] -= size
            most = max(most, float(np.cumsum(change).max(initial=0.0)))
        return most

    def _life_spans(self, phase: str) -> list[tuple[fx.Node, int, int]]:
        """(value, where it is made, where it is last used, itself or through a view) of one phase."""
        nodes = [n for n in self._nodes if facts(n).phase == phase]
        position = {node: i for i, node in enumerate(nodes)}
        spans = []
        for node, start in position.items():
            if facts(node).multi_output or node in self._weights or _is_view(node):
                continue
            ends = [position[user] for user in _users_through_views(node) if user in position]
            spans.append((node, start, max(ends, default=start)))
        return spans


@dataclass(frozen=True)
class _Operator:
    node: fx.Node
    phase: str
    flops: float
    input_bytes: tuple[float, ...]
    output_bytes: tuple[float, ...]
    dtype: str
    matmul: bool
    free: bool

    @classmethod
    def of(cls, node: fx.Node, size: Callable[[TensorSpec], float]) -> _Operator:
        """``size``: bytes of a tensor in one micro-batch, of which the work is a like share."""
        call = op_call(node)
        cost = call_cost(call)
        specs = [s for s in (*call.inputs, *call.outputs) if s is not None]
        share = min((size(s) / s.size_bytes for s in specs if s.size_bytes), default=1.0)
        return cls(
            node,
            facts(node).phase,
            float(cost.flops) * share,
            tuple(size(s) for s in call.inputs),
            tuple(size(s) if s is not None else 0.0 for s in call.outputs),
            dtype_name(call),
            is_matmul(call.target),
            is_free(call),
        )


@dataclass(frozen=True)
class _View:
    """The decisions of a strategy's role groups, asked together."""

    chosen: Sequence[tuple[RoleGroup, AxisSharding]]

    def part(self, node: fx.Node, side: str, position: int) -> float:
        """The share of an operator's input or output that one rank holds."""
        share = 1.0
        for group, sharding in self.chosen:
            rule: OpRule = sharding.rules[node]
            if isinstance(getattr(rule, side)[position], Shard):
                share /= group.degree
        return share

    def part_of(self, node: fx.Node, without: RoleGroup | None = None) -> float:
        """The share of a value that one rank holds as it was produced."""
        share = 1.0
        for group, sharding in self.chosen:
            if group is without:
                continue
            try:
                placed = sharding.placement(node)
            except KeyError:
                placed = sharding.boundaries.get(node, REPLICATE)
            share /= group.degree if isinstance(placed, Shard) else 1
        return share

    def part_for(self, wants: Sequence[Placement]) -> float:
        """The share of a value that one rank holds in the placements ``wants``, one a role group."""
        share = 1.0
        for (group, _), want in zip(self.chosen, wants, strict=True):
            share /= group.degree if isinstance(want, Shard) else 1
        return share


def _kind(have: Placement, want: Placement) -> str | None:
    if isinstance(have, Partial):
        return "all_reduce" if want == REPLICATE else "reduce_scatter"
    if isinstance(have, Shard):
        return "all_to_all" if isinstance(want, Shard) and want.dim != have.dim else "all_gather"
    return None


def _is_view(node: fx.Node) -> bool:
    return not is_getitem(node) and not facts(node).multi_output and is_free(op_call(node))


def _root(node: fx.Node) -> fx.Node:
    """The value whose memory a view shares."""
    while node.op == "call_function" and _is_view(node) and input_nodes(node):
        node = input_nodes(node)[0]
    return node


def _users_through_views(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    pending = list(node.users)
    while pending:
        user = pending.pop()
        found.append(user)
        if user.op == "call_function" and _is_view(user):
            pending += list(user.users)
    return found


def _parameter_side(nodes: list[fx.Node], parameters: Set[fx.Node]) -> set[fx.Node]:
    """Parameters and what is made of them alone."""
    alone = set(parameters)
    for node in nodes:
        sources = input_nodes(node)
        if sources and facts(node).phase == "forward" and all(source in alone for source in sources):
            alone.add(node)
    return alone
