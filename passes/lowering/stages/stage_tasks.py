"""The tasks of a pipeline stage: small graphs, and the names of the values that pass between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from galvatron_fx.ir.graph.bound_ops import plus
from galvatron_fx.ir.graph.layout import lay_part
from galvatron_fx.ir.graph.local_program import record_step
from galvatron_fx.ir.graph.metadata import has_meta, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copy_node, write_call
from galvatron_fx.ir.torch_compat.graphs import graph_module
from passes.lowering.write_host_copies import fetch, own_block, send

# The tasks, each with those that may take its values later.
LATER: dict[str, tuple[str, ...]] = {
    "start": ("forward", "backward", "input_grad", "weight_grad"),
    "forward": ("backward", "input_grad", "weight_grad"),
    "backward": (),
    "input_grad": ("weight_grad",),
    "weight_grad": (),
    "finish": (),
}


@dataclass(frozen=True)
class Task:
    """One graph of a stage: ``graph(*inputs, *sums)`` returns ``(*outputs, *sums)``; all are names of values.

    ``sums``: terms of gradients that are added up over micro-batches; the graph takes what they came to so far, None
    before the first, and returns what they come to now. ``dies``: the inputs that no later task, of this micro-batch or
    another, takes.
    """

    graph: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sums: tuple[str, ...]
    dies: frozenset[str] = frozenset()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to run."""
        return not self.outputs and not self.sums


@dataclass(frozen=True)
class Draft:
    """What a task computes (``nodes`` of the joint graph), which ``terms`` it adds to their sums, and which values are
    wanted outside of the stage's tasks (``leaving``).

    ``on_host``: terms whose sums are on the host, and the gradients that are made of these. ``takes_sums``: they are
    what comes from outside.
    """

    nodes: Sequence[fx.Node]
    terms: Sequence[fx.Node] = ()
    leaving: set[fx.Node] = field(default_factory=set)
    on_host: set[fx.Node] = field(default_factory=set)
    takes_sums: bool = False

    @property
    def needs(self) -> list[fx.Node]:
        """Values that come from outside."""
        inside = set(self.nodes)
        wanted = [n for node in self.nodes for n in input_nodes(node)] + list(self.terms)
        return [n for n in dict.fromkeys(wanted) if n not in inside and n.op != "get_attr"]


def write_tasks(graph: fx.GraphModule, drafts: Mapping[str, Draft]) -> dict[str, Task]:
    """The graphs of all tasks, by name as the drafts."""
    needs = {name: draft.needs for name, draft in drafts.items()}
    once = set(drafts["start"].nodes)
    tasks = {}
    for name, draft in drafts.items():
        wanted = draft.leaving | {node for other in LATER[name] for node in needs[other]}
        task = _Writer(graph, draft).task(needs[name], [node for node in draft.nodes if node in wanted])
        dies = (node for node in set(needs[name]) - wanted - once if node.op != "placeholder")
        tasks[name] = replace(task, dies=frozenset(names_of(dies)))
    return tasks


@dataclass
class _Writer:
    """Writes the graph of one task."""

    joint: fx.GraphModule
    draft: Draft
    _graph: fx.Graph = field(default_factory=fx.Graph)
    _copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _sums: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def task(self, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Task:
        for node in inputs:
            self._copies[node] = self._placeholder(node.name, node)
        for term in self.draft.terms:
            self._sums[term] = self._placeholder(f"{term.name}_so_far", term)
        for term in self.draft.terms:
            if term in self._copies:
                self._add(term)
        used = [n for node in self.draft.nodes for n in input_nodes(node)]
        constants = {n for n in (*used, *self.draft.terms) if n.op == "get_attr"}
        results: dict[fx.Node, fx.Node] = {}
        for node in sorted([*self.draft.nodes, *constants]):
            for source in filter(self._is_away, input_nodes(node)):
                if self._copies[source].op == "placeholder":
                    self._copies[source] = fetch(self._graph, self._copies[source], "backward", own_block(source))
            copy = self._copies[node] = copy_node(self._graph, node, lambda n: self._copies[n])
            results[node] = send(self._graph, copy, "backward", own_block(node)) if self._is_away(node) else copy
            if node in self._sums:
                self._add(node)
        self._graph.output((*(results[node] for node in outputs), *self._sums.values()))
        graph = graph_module(self.joint, self._graph)
        lay_part(graph, self.joint)
        return Task(graph, names_of(inputs), names_of(outputs), names_of(self._sums))

    def _is_away(self, node: fx.Node) -> bool:
        """Whether a sum that comes from outside, or what is made of one, is on the host."""
        return self.draft.takes_sums and node in self.draft.on_host

    def _placeholder(self, name: str, like: fx.Node) -> fx.Node:
        node = self._graph.placeholder(name)
        node.meta = dict(like.meta)
        return node

    def _add(self, term: fx.Node) -> None:
        """As soon as the term is there, so that it need not live to the end of the task."""
        so_far, is_away = self._sums[term], term in self.draft.on_host
        here = fetch(self._graph, so_far, "backward", own_block(term)) if is_away else so_far
        total = write_call(self._graph, plus, (here, self._copies[term]))
        total.meta = dict(term.meta)
        if has_meta(term):
            set_meta(total, meta_of(term).having(step=None, cost=None))
            if meta_of(term).placements:
                record_step(total, "sum over micro-batches", len(meta_of(term).placements[0]))
        self._sums[term] = send(self._graph, total, "backward", own_block(term)) if is_away else total


def names_of(nodes: Iterable[fx.Node]) -> tuple[str, ...]:
    """The nodes' names."""
    return tuple(node.name for node in nodes)
