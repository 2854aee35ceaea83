"""Where a graph writes into caches that it is given, and nothing reads what they held before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from galvatron_fx.ir.graph.metadata import InputSpec, OutputSpec
from galvatron_fx.ir.graph.op_call import IN_PLACE

__all__ = ["cache_writes"]


def cache_writes(
    graph: fx.GraphModule, inputs: Sequence[InputSpec | None], outputs: Sequence[OutputSpec | None]
) -> list[fx.Node]:
    """The writes of rows by which caches become their new values, and that may as well write into the caches.

    ``inputs``: the ports that the graph takes; ``outputs``: of what it returns, those that are known. A port of kind
    "cache" among the outputs is the new value of that among the inputs.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    caches = {p.name: node for p, node in zip(inputs, placeholders, strict=False) if p and p.kind == "cache"}
    values: Sequence[fx.Node] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    return [
        write
        for port, value in zip(outputs, values, strict=False)
        if port is not None and port.kind == "cache" and port.name in caches
        for write in _writes(caches[port.name], value)
    ]


def _writes(cache: fx.Node, value: fx.Node) -> list[fx.Node]:
    """The writes by which ``value`` is made of ``cache``, each of which takes what only it takes; else none."""
    writes: list[fx.Node] = []
    while value is not cache:
        source = value.args[0] if value.target in IN_PLACE else None
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
