"""Send small tensors together: gathers of parameters and reductions of gradients that nothing in between waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any

from torch import fx

from cost_models.bundles import bundle_bytes
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from passes.analysis.collective_schedule import collectives_among, hoistable_gathers, sinkable_reductions
from passes.lowering.communication.pack_bundle import PackBundle


@dataclass(frozen=True)
class BundleCollectives:
    """Make one collective of several small ones over the same ranks.

    Starting a collective takes as long as sending many bytes; tensors far smaller than that are sent with others of
    their block. What a graph can gather before it computes (parameters, values saved in shards) is gathered where the
    first of them is needed; gradients are reduced where the last of them is there. Where computing and communicating at
    once gains nothing, small gradients are all-reduced with those of other blocks, at the end of the graph.

    Rewrite: ``a1 = all_reduce(a, "sum", 0); b1 = all_reduce(b, "sum", 0); return a1, b1`` ->
    ``both = all_reduce(cat([a.reshape(-1), b.reshape(-1)]), "sum", 0); return both[:n].reshape(...), ...``.

    ``columns``: the mesh axes that the last argument of a collective stands for; ``across_blocks``: whether all-reduces
    of several blocks go together.
    """

    columns: Sequence[Sequence[Axis]]
    across_blocks: bool = False

    @classmethod
    def over(cls, layout: Layout, cluster: Cluster) -> BundleCollectives:
        """The pass for graphs that lie on ``cluster`` as ``layout`` says."""
        columns = [[cluster.axes[i] for i in column.axes] for column in layout.merged_axes]
        return cls(columns, across_blocks=not cluster.overlap.gains)

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        for level in count():
            gathers = hoistable_gathers(graph.graph)
            for bundle in self._bundles({n: chain for n, chain in gathers.items() if _gathers_of(chain) == level}):
                self._gather(graph.graph, bundle, gathers)
            if all(_gathers_of(chain) <= level for chain in gathers.values()):
                break
        late = sinkable_reductions(graph.graph)
        for level in sorted({collectives_among(after) for after in late.values()}, reverse=True):
            late = sinkable_reductions(graph.graph)
            for bundle in self._bundles({n: after for n, after in late.items() if collectives_among(after) == level}):
                self._reduce(graph.graph, bundle, late)
        graph.recompile()
        return graph

    def _bundles(self, linked: Mapping[fx.Node, Sequence[fx.Node]]) -> list[list[fx.Node]]:
        """Collectives that go together, in order, until their bytes are worth one of their own; ``linked``: each with
        what leads to it, or follows.
        """
        filling: dict[tuple[Any, ...], list[fx.Node]] = {}
        full: list[list[fx.Node]] = []
        for node, links in linked.items():
            axes = tuple(self.columns[_column(node)])
            enough = bundle_bytes(node.target.__name__, axes)  # type: ignore[union-attr]
            if _whole_bytes(node) >= enough or meta_of(node).stays:
                continue
            key = self._key(node, links)
            bundle = filling.setdefault(key, [])
            bundle.append(node)
            if sum(map(_whole_bytes, bundle)) >= enough:
                full.append(filling.pop(key))
        return [bundle for bundle in (*full, *filling.values()) if len(bundle) > 1]

    def _gather(self, graph: fx.Graph, bundle: list[fx.Node], chains: dict[fx.Node, list[fx.Node]]) -> None:
        """Bundle gathers where the first is; what the others gather is made there, too."""
        first = bundle[0]
        for node in bundle[1:]:
            for link in chains[node]:
                if first < link:
                    first.prepend(link)
        PackBundle(graph, self._degree(first)).gather(bundle)

    def _reduce(self, graph: fx.Graph, bundle: list[fx.Node], late: dict[fx.Node, list[fx.Node]]) -> None:
        """Bundle reductions where the last is, or at the end; what follows from the others is done after it."""
        last = bundle[-1]
        if self._across(last, late[last]):
            for link in (last, *sorted({link for node in bundle for link in late[node]})):
                graph.output_node().prepend(link)
        after = last
        for node in bundle[:-1]:
            for link in late[node]:
                if link < last:
                    after.append(link)
                    after = link
        PackBundle(graph, self._degree(last)).reduce(bundle)

    def _across(self, node: fx.Node, links: Sequence[fx.Node]) -> bool:
        """Whether it goes with collectives of other blocks: not what is to be scattered, lest it stay whole so long."""
        scatters = any(link.target is c.reduce_scatter for link in links)
        return self.across_blocks and node.target is c.all_reduce and not scatters

    def _key(self, node: fx.Node, links: Sequence[fx.Node]) -> tuple[Any, ...]:
        """What collectives of one bundle have in common."""
        record = meta_of(node)
        op = None if node.target is c.all_gather else node.args[1]
        block = None if self._across(node, links) else record.block
        return node.target, op, _column(node), record.spec.dtype, block

    def _degree(self, node: fx.Node) -> int:
        return prod(axis.size for axis in self.columns[_column(node)])


def _gathers_of(chain: Sequence[fx.Node]) -> int:
    return sum(node.target is c.all_gather for node in chain)


def _column(node: fx.Node) -> int:
    return int(node.args[-1])  # type: ignore[arg-type]


def _whole_bytes(node: fx.Node) -> int:
    """Of the full tensor: what a gather makes, what a reduction takes."""
    whole = node if node.target is c.all_gather else input_nodes(node)[0]
    return meta_of(whole).spec.size_bytes
