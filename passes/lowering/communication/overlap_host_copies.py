"""Let copies between device and host run beside computing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph.host_copies import arrived, from_host, to_host
from galvatron_fx.ir.graph.metadata import meta_of


@dataclass(frozen=True)
class OverlapHostCopies:
    """Wait later for what goes to the host, and fetch earlier what comes back.

    As many bytes are under way, or there ahead of their use, as the block of the copy in question copies: the device
    holds what a block copies twice. Copies run one after the other.

    Rewrite: ``c = to_host(a); c = arrived(c, a); y = f(a)`` -> ``c = to_host(a); y = f(a); ...; c = arrived(c, a)``;
    ``y = f(x); d = from_host(c); d = arrived(d, c)`` -> ``d = from_host(c); y = f(x); d = arrived(d, c)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it, recompiled."""
        nodes = graph.graph
        self._wait_later(nodes, nodes.find_nodes(op="call_function", target=to_host))
        self._fetch_earlier(nodes, nodes.find_nodes(op="call_function", target=from_host))
        graph.recompile()
        return graph

    def _wait_later(self, graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
        """A copy is waited for in front of the first that there is no room for beside it."""
        sizes, room = _sizes(starts), _block_bytes(starts)
        waits = [_wait_of(start) for start in starts]
        for i, wait in enumerate(waits):
            end = next((j for j in range(i + 1, len(starts)) if sum(sizes[i : j + 1]) > room[i]), None)
            (starts[end] if end is not None else graph.output_node()).prepend(wait)

    def _fetch_earlier(self, graph: fx.Graph, starts: Sequence[fx.Node]) -> None:
        """A copy starts behind the first use of the last that there is no room for beside it, and behind the one before
        it.
        """
        sizes, room = _sizes(starts), _block_bytes(starts)
        waits = [_wait_of(start) for start in starts]
        place = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
        for i, start in enumerate(starts):
            used = next((j for j in range(i - 1, -1, -1) if sum(sizes[j : i + 1]) > room[i]), None)
            if used is not None:
                place = max(place, waits[used].next)
            if place < start:
                place.prepend(start)
            place = start.next


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if user.target is arrived)
    return wait


def _sizes(starts: Sequence[fx.Node]) -> list[int]:
    return [meta_of(start).spec.size_bytes for start in starts]


def _block_bytes(starts: Sequence[fx.Node]) -> list[int]:
    """Of each copy, the bytes that its block copies."""
    total: dict[int, int] = {}
    for start in starts:
        total[meta_of(start).block] = total.get(meta_of(start).block, 0) + meta_of(start).spec.size_bytes
    return [total[meta_of(start).block] for start in starts]
