"""Write into caches in place where nothing reads what they held before, instead of copying all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec

aten = torch.ops.aten

_IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
}


@dataclass(frozen=True)
class WriteCachesInPlace:
    """Let a bound graph write new keys and values into the caches that it is given.

    It is the last pass of a rank's graph, as the passes before take graphs that change nothing.

    ``inputs``: the ports that the graph takes; ``outputs``: of what it returns, those that are known. A port of kind
    "cache" among the outputs is the new value of that among the inputs.

    Rewrite: ``k1 = index_put(k, [i], new)`` -> ``k1 = index_put_(k, [i], new)``, where nothing else takes ``k``.
    """

    inputs: Sequence[InputSpec | None]
    outputs: Sequence[OutputSpec | None]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        placeholders = graph.graph.find_nodes(op="placeholder")
        caches = {p.name: node for p, node in zip(self.inputs, placeholders, strict=False) if p and p.kind == "cache"}
        values: Sequence[fx.Node] = graph.graph.output_node().args[0]  # type: ignore[assignment]
        for port, value in zip(self.outputs, values, strict=False):
            if port is not None and port.kind == "cache" and port.name in caches:
                for write in _writes(caches[port.name], value):
                    write.target = _IN_PLACE[write.target]
        graph.recompile()
        return graph


def is_write_in_place(node: fx.Node) -> bool:
    """Whether a node of a graph that the pass has rewritten writes into a cache."""
    return node.target in _IN_PLACE.values()


def written_values(node: fx.Node) -> list[fx.Node]:
    """What such a node reads: new values, and where they go."""
    return _others(node)


def _writes(cache: fx.Node, value: fx.Node) -> list[fx.Node]:
    """The writes by which ``value`` is made of ``cache``, each of which takes what only it takes; else none."""
    writes: list[fx.Node] = []
    while value is not cache:
        source = value.args[0] if value.target in _IN_PLACE else None
        if not isinstance(source, fx.Node) or len(source.users) > 1 or source in _others(value):
            return []
        writes.append(value)
        value = source
    return writes


def _others(write: fx.Node) -> list[fx.Node]:
    """What a write takes beside what it writes into."""
    others: list[fx.Node] = []
    fx.map_arg((write.args[1:], write.kwargs), others.append)
    return others
