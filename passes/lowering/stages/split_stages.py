"""Cut a lowered joint graph into pipeline stages: small graphs, and the names of the values that pass between them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import fx

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec, TensorSpec, meta_of, output_ports, ports
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.precision import cast_parameter
from galvatron_fx.ir.graph.rewrite import copied, eliminate_dead_code
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.dataflow import LINEAR_OPS, ancestors, input_only_ops, made_of_parameters
from passes.analysis.storages import is_view
from passes.lowering.stages.stage_tasks import Draft, Task, names_of, write_tasks

_REDUCES = (c.all_reduce, c.reduce_scatter)
_MAKES_USABLE = (c.all_gather, cast_parameter)


@dataclass(frozen=True)
class Gradient:
    """A gradient of a stage: ``term`` is what a micro-batch adds to it, ``total`` what finishing makes of the sum."""

    port: OutputSpec
    term: str
    total: str


@dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    ``write``: makes the ``tasks``, once, as a rank runs but few of the stages. These are, by name: ``start``, which
    runs once a step (parameters gathered for all micro-batches), ``finish``, once after the last (gradients reduced);
    ``backward`` is ``input_grad`` and ``weight_grad`` in one.
    ``ports``: the inputs of the graph that the stage takes, by name of value; ``receives`` and ``sends``: activations
    from the stage before and for the next; ``receives_back`` and ``sends_back``: gradients from the next and for the
    one before; ``results``: outputs of the graph made here; ``results_back``: gradients of inputs that its backward
    makes; ``specs``: local shapes of what passes and of results.
    """

    index: int
    write: Callable[[], dict[str, Task]]
    ports: dict[str, InputSpec]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    receives_back: tuple[str, ...]
    sends_back: tuple[str, ...]
    results: tuple[tuple[OutputSpec, str], ...]
    results_back: tuple[tuple[OutputSpec, str], ...]
    gradients: tuple[Gradient, ...]
    specs: dict[str, TensorSpec]

    @property
    def tasks(self) -> dict[str, Task]:
        """Its graphs, by name, which are written when they are first asked for."""
        return self.write()


@dataclass(frozen=True)
class SplitStages:
    """Make one set of graphs for every stage; all that crosses a cut is an explicit input or output.

    A value needed further on is relayed by the stages between; what follows from the inputs alone (masks, positions)
    is computed again where it is needed, as every rank has the inputs, unless it is one of those that ``relayed`` picks
    from the graph. Slicing is done before sending, gathering after receiving.

    Rewrite: one joint graph -> for each stage ``forward``, ``backward`` (whole and halved), ``start``, ``finish``.

    ``first_blocks``: the first block of every stage; ``strategies``: one a block.
    Raises PlanError where a value would have to travel backwards, naming it.
    """

    first_blocks: Sequence[int]
    strategies: Sequence[Strategy]
    relayed: Callable[[fx.GraphModule], set[fx.Node]] = lambda _: set()

    def run(self, graph: fx.GraphModule) -> tuple[Stage, ...]:
        """Return the stages in order; ``graph`` stays as it is."""
        graph = _copied_constants(_reuse_slices(graph, self.first_blocks))
        cut = _Cut(graph, self.first_blocks, self.strategies, self.relayed(graph))
        return tuple(cut.stage(index) for index in range(len(self.first_blocks)))


def stages_of_blocks(first_blocks: Sequence[int], num_blocks: int) -> tuple[int, ...]:
    """The stage of each block."""
    return tuple(sum(first <= block for first in first_blocks) - 1 for block in range(num_blocks))


def stage_of_node(node: fx.Node, first_blocks: Sequence[int]) -> int:
    """The stage of a node's block."""
    return bisect_right(first_blocks, max(meta_of(node).block, 0)) - 1


def _phase(node: fx.Node) -> str:
    """Outputs are taken apart where they are made: whole, all of them would be kept for the one that is needed."""
    source = node.args[0] if is_getitem(node) else node
    assert isinstance(source, fx.Node)
    return meta_of(source).phase


def _homes(graph: fx.GraphModule, first_blocks: Sequence[int], portable: set[fx.Node]) -> dict[fx.Node, int]:
    """The stage of every operator but the portable: its block's, or for a slice of what is sent, the sender's.

    What backward slices of another stage's activation is sliced where backward is, as it could not travel there.
    """
    homes: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function" or node in portable:
            continue
        stage = homes[node] = stage_of_node(node, first_blocks)
        if is_getitem(node) or node.target is c.shard:
            sender = homes.get(node.args[0], stage)
            if sender > stage or meta_of(node).phase == "forward" or meta_of(node.args[0]).phase == "backward":
                homes[node] = sender
    return homes


def _reuse_slices(graph: fx.GraphModule, first_blocks: Sequence[int]) -> fx.GraphModule:
    """Let recomputed blocks keep the slices that they received; slicing again would take the whole to the stage.

    Rewrite: ``s = shard(x); ...; s_again = shard(x); again = f(s_again)`` -> ``again = f(s)``, ``x`` of a stage before.
    """
    received: dict[tuple[object, ...], fx.Node] = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.target is not c.shard:
            continue
        stage = stage_of_node(node, first_blocks)
        if stage_of_node(_sliced(node), first_blocks) >= stage:
            continue
        key = (stage, twins.get(node.args[0], node.args[0]), *node.args[1:])
        if meta_of(node).phase == "forward":
            received[key] = node
        elif key in received:
            twins[node] = received[key]
    if not twins:
        return graph
    names = {node.name: twin.name for node, twin in twins.items()}
    result = copied(graph)
    nodes = {node.name: node for node in result.graph.nodes}
    for name, twin in names.items():
        nodes[name].replace_all_uses_with(nodes[twin])
    eliminate_dead_code(result)
    return result


def _copied_constants(graph: fx.GraphModule) -> fx.GraphModule:
    """Let a stage make the constants that the model returns: what it returns is made by an operator, or an input.

    Rewrite: ``return constant`` -> ``copy = clone(constant); return copy``.
    """
    if not any(node is not None and node.op == "get_attr" for _, node in output_ports(graph)):
        return graph
    result = copied(graph)
    output = result.graph.output_node()
    for constant in [node for node in output.all_input_nodes if node.op == "get_attr"]:
        with result.graph.inserting_before(output):
            copy = result.graph.call_function(torch.ops.aten.clone.default, (constant,))
        copy.meta = dict(constant.meta)
        output.replace_input_with(constant, copy)
    return result


def _sliced(node: fx.Node) -> fx.Node:
    """What a slice, or a slice of a slice, is taken of."""
    while node.target is c.shard:
        assert isinstance(node.args[0], fx.Node)
        node = node.args[0]
    return node


@dataclass
class _Flow:
    """What one stage exchanges with its neighbours."""

    receives: dict[fx.Node, None] = field(default_factory=dict)
    sends: dict[fx.Node, None] = field(default_factory=dict)
    receives_back: dict[fx.Node, None] = field(default_factory=dict)
    sends_back: dict[fx.Node, None] = field(default_factory=dict)


class _Cut:
    def __init__(
        self,
        graph: fx.GraphModule,
        first_blocks: Sequence[int],
        strategies: Sequence[Strategy],
        relayed: set[fx.Node],
    ) -> None:
        self.graph = graph
        self.strategies = strategies
        self.portable = input_only_ops(graph) - relayed
        self.of_parameters = made_of_parameters(graph)
        self.home = _homes(graph, first_blocks, self.portable)
        self.flows = [_Flow() for _ in first_blocks]
        self.members: list[list[fx.Node]] = [[] for _ in first_blocks]
        for node, stage in self.home.items():
            self.members[stage].append(node)
        self.results: list[list[tuple[OutputSpec, fx.Node]]] = [[] for _ in first_blocks]
        self.results_back: list[list[tuple[OutputSpec, fx.Node]]] = [[] for _ in first_blocks]
        self.gradients: list[list[tuple[OutputSpec, fx.Node]]] = [[] for _ in first_blocks]
        for port, value in output_ports(graph):
            if value is not None and port.kind != "grad":
                # What follows from the inputs alone is made in the last stage, a cache where it is held.
                last = len(first_blocks) - 1
                alone = stage_of_node(value, first_blocks) if port.kind == "cache" else last
                self.results[self.home.get(value, alone)].append((port, value))
            elif value in self.home:
                (self.results_back if port.is_input_gradient else self.gradients)[self.home[value]].append(
                    (port, value)
                )
        self.port_of = {node: port for port, node in ports(graph)}
        self._route()

    # ---- what crosses ----

    def _route(self) -> None:
        for node, stage in self.home.items():
            for source in input_nodes(node):
                if source in self.home and self.home[source] != stage:
                    self._cross(source, node, stage)

    def _cross(self, source: fx.Node, taker: fx.Node, stage: int) -> None:
        """Relay ``source`` from its stage to ``stage``, forward with forward or backward with backward."""
        home = self.home[source]
        ahead = home < stage
        if ahead and meta_of(source).phase == "forward":
            for hop in range(home, stage):
                self.flows[hop].sends[source] = None
                self.flows[hop + 1].receives[source] = None
        elif not ahead and meta_of(taker).phase == "backward":
            for hop in range(home, stage, -1):
                self.flows[hop].sends_back[source] = None
                self.flows[hop - 1].receives_back[source] = None
        else:
            raise PlanError(
                f"'{source.name}' (block {meta_of(source).block}, stage {home}) is taken by '{taker.name}' "
                f"(block {meta_of(taker).block}, stage {stage}), so it would have to travel against the pipeline: move "
                f"the cut so that both are in one stage"
            )

    # ---- one stage ----

    def stage(self, index: int) -> Stage:
        flow = self.flows[index]
        results, results_back, gradients = self.results[index], self.results_back[index], self.gradients[index]
        away = {**flow.sends_back, **dict.fromkeys(node for _, node in results_back)}
        forward = [n for n in self.members[index] if _phase(n) == "forward"]
        backward = [n for n in self.members[index] if _phase(n) == "backward"]
        finish = self._finish([n for _, n in gradients], [n for n in backward if n not in away])
        start = self._start(forward)
        lead = ancestors([n for n in away if n in set(backward)], set(backward) - finish)
        lead |= _made_along(lead, backward, finish)
        ways = {
            "start": [n for n in forward if n in start],
            "forward": [n for n in forward if n not in start],
            "backward": [n for n in backward if n not in finish],
            "input_grad": [n for n in backward if n in lead],
            "weight_grad": [n for n in backward if n not in lead and n not in finish],
            "finish": [n for n in backward if n in finish],
        }
        ways["forward"] = self._with_portable(ways["forward"], backward, [n for _, n in results])
        terms = self._terms(gradients, finish)
        ahead = {*flow.sends, *(n for _, n in results)}
        drafts = _drafts(ways, ahead, set(away), terms, self._sums_on_host(terms))
        ports_taken = self._ports(ways.values(), [*(n for _, n in results), *(term for _, _, term in terms)])
        passing = [*flow.receives, *flow.sends, *flow.receives_back, *away, *(node for _, node in results)]
        return Stage(
            index,
            cache(partial(write_tasks, self.graph, drafts)),
            ports_taken,
            names_of(flow.receives),
            names_of(flow.sends),
            names_of(flow.receives_back),
            names_of(flow.sends_back),
            tuple((port, node.name) for port, node in results),
            tuple((port, node.name) for port, node in results_back),
            tuple(Gradient(p, term.name, n.name) for p, n, term in terms),
            {node.name: meta_of(node).spec for node in passing},
        )

    def _start(self, forward: Sequence[fx.Node]) -> set[fx.Node]:
        """Gathers and casts of parameters that stay for all micro-batches, and what they need."""
        alone = [n for n in forward if n in self.of_parameters]
        kept = [
            n for n in alone if n.target in _MAKES_USABLE and self.strategies[max(meta_of(n).block, 0)].keep_gathered
        ]
        return ancestors(kept, set(alone))

    def _finish(self, gradients: Sequence[fx.Node], backward: Sequence[fx.Node]) -> set[fx.Node]:
        """Reductions of gradients that can wait for the last micro-batch, and the views behind them."""
        ends = set(gradients)
        late: set[fx.Node] = set()
        for node in reversed(backward):
            calls = [u for u in node.users if u.op == "call_function"]
            only_ends = bool(calls or node in ends) and all(u in late for u in calls)
            if only_ends and (self._waits(node) or (node.target in LINEAR_OPS or node.target is c.shard)):
                late.add(node)
        useful: set[fx.Node] = set()
        for node in backward:
            if node in late and (node.target in _REDUCES or any(n in useful for n in input_nodes(node))):
                useful.add(node)
        return useful

    def _waits(self, node: fx.Node) -> bool:
        """Whether a reduction is done once a step; ZeRO's that gathers for every micro-batch scatters for each, too."""
        if node.target is c.reduce_scatter:
            return self.strategies[max(meta_of(node).block, 0)].keep_gathered
        return node.target is c.all_reduce and node.args[1] == "sum"

    def _terms(
        self, gradients: Sequence[tuple[OutputSpec, fx.Node]], finish: set[fx.Node]
    ) -> list[tuple[OutputSpec, fx.Node, fx.Node]]:
        """Each gradient with the value that a micro-batch adds to it."""
        terms = []
        for port, node in gradients:
            term = node
            while term in finish:
                term = input_nodes(term)[0]
            terms.append((port, node, term))
        return terms

    def _sums_on_host(self, terms: Sequence[tuple[OutputSpec, fx.Node, fx.Node]]) -> set[fx.Node]:
        """Terms whose sums are on the host, as all parameters are that they are gradients of; and what these become."""
        away = {port.name for port in self.port_of.values() if port.on_host}
        here = {node for port, *both in terms if port.name not in away for node in both}
        return {node for port, *both in terms if port.name in away for node in both} - here

    def _with_portable(
        self, forward: Sequence[fx.Node], backward: Sequence[fx.Node], results: Sequence[fx.Node]
    ) -> list[fx.Node]:
        """``forward`` with the operators on inputs alone that the stage needs."""
        wanted = [n for node in (*forward, *backward) for n in input_nodes(node)] + list(results)
        needed = ancestors([n for n in wanted if n in self.portable], self.portable)
        return sorted({*forward, *needed})

    def _ports(self, ways: Iterable[Sequence[fx.Node]], others: Sequence[fx.Node]) -> dict[str, InputSpec]:
        used = {n for nodes in ways for node in nodes for n in input_nodes(node)} | set(others)
        return {node.name: port for node, port in self.port_of.items() if node in used}


def _made_along(lead: set[fx.Node], backward: Sequence[fx.Node], finish: set[fx.Node]) -> set[fx.Node]:
    """What operators make along with gradients of inputs, and gradients that are this, seen otherwise or reduced: kept
    for the gradients of weights it would be held whole, and spare no work.
    """
    ending: set[fx.Node] = set()  # gradients, and what leads to nothing else
    for node in reversed(backward):
        if all(user in ending for user in node.users if user.op == "call_function"):
            ending.add(node)
    along: set[fx.Node] = set()
    for node in backward:
        source = next(iter(input_nodes(node)), None)  # constants that backward makes have none
        same = node in ending and node not in finish and (is_view(node) or node.target in _REDUCES)
        if (is_getitem(node) and source in lead) or (same and source in along):
            along.add(node)
    return along


def _drafts(
    ways: dict[str, list[fx.Node]],
    ahead: set[fx.Node],
    back: set[fx.Node],
    terms: Sequence[tuple[OutputSpec, fx.Node, fx.Node]],
    away: set[fx.Node],
) -> dict[str, Draft]:
    """What every task computes, adds up and gives away: ``ahead`` after forward, ``back`` after backward; sums that are
    ``away`` are on the host.
    """
    added = dict.fromkeys(term for _, _, term in terms)
    lead = set(ways["input_grad"])
    return {
        "start": Draft(ways["start"]),
        "forward": Draft(ways["forward"], leaving=ahead),
        "backward": Draft(ways["backward"], tuple(added), back, away),
        "input_grad": Draft(ways["input_grad"], tuple(term for term in added if term in lead), back, away),
        "weight_grad": Draft(ways["weight_grad"], tuple(term for term in added if term not in lead), set(), away),
        "finish": Draft(ways["finish"], (), {total for _, total, _ in terms}, away, takes_sums=True),
    }
