"""Nodes that are written or copied in bulk.

``fx.Graph.create_node`` looks through all arguments for symbolic sizes, of which our graphs have none; that takes three
times as long as making the node, so arguments are given afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx


def write_call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """Add a ``call_function`` node at the insertion point of ``graph``."""
    return _with_arguments(graph.create_node("call_function", target, name=name), args, kwargs or {})


def copy_node(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any] | None = None) -> fx.Node:
    """Add a copy of ``node`` at the insertion point of ``graph``; ``of`` says what stands there for its arguments."""
    made = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    args, kwargs = (node.args, node.kwargs) if of is None else fx.map_arg((node.args, node.kwargs), of)
    made.meta.update(node.meta)  # to assign it takes longer: nodes look at what is assigned
    return _with_arguments(made, args, kwargs)


def marks(node: fx.Node) -> dict[str, Any]:
    """What else is known of a node, for those that are written in its place: all but what its value looks like."""
    return {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}


def copy_graph(source: fx.Graph) -> fx.Graph:
    """Copy a graph with its output."""
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], copies.__getitem__)).meta.update(node.meta)
        else:
            copies[node] = copy_node(made, node, copies.__getitem__)
    return made


def _with_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    if args:
        node.args = args
    if kwargs:
        node.kwargs = dict(kwargs)
    return node
