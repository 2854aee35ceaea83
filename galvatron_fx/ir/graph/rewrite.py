"""Nodes that are written or copied in bulk.

``fx.Graph.create_node`` looks through all arguments for symbolic sizes, of which our graphs have none; that takes three
times as long as making the node, so arguments are given afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.precision import cast_gradient
from galvatron_fx.ir.torch_compat.graphs import graph_module


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
    copy = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
    args, kwargs = (node.args, node.kwargs) if of is None else fx.map_arg((node.args, node.kwargs), of)
    copy.meta.update(node.meta)  # to assign it takes longer: nodes look at what is assigned
    return _with_arguments(copy, args, kwargs)


def inherited_meta(node: fx.Node) -> dict[str, Any]:
    """What else is known of a node, for those that are written in its place: all but what its value looks like."""
    return {key: value for key, value in node.meta.items() if key not in ("val", "tensor_meta")}


def copy_graph(source: fx.Graph) -> fx.Graph:
    """Copy a graph with its output."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op == "output":
            graph.output(fx.map_arg(node.args[0], copies.__getitem__)).meta.update(node.meta)
        else:
            copies[node] = copy_node(graph, node, copies.__getitem__)
    return graph


def _with_arguments(node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
    # ``fx.Node`` enters a node anew in its graph's table of targets whatever is assigned, which takes longer than that.
    if args:
        object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", dict(kwargs))
    return node


def copied(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes can be changed; their facts are shared, as they never change."""
    result = graph_module(graph, copy_graph(graph.graph))
    result.meta.update(graph.meta)
    return result


def eliminate_dead_code(graph: fx.GraphModule) -> None:
    """Erase nodes that nothing uses (random ones too: nothing can see them)."""
    for node in reversed(list(graph.graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.graph.erase_node(node)


def replace_outputs(graph: fx.GraphModule, node: fx.Node, outputs: Sequence[fx.Node | None]) -> None:
    """Put ``outputs`` in place of ``node`` (of what picks its outputs, if there are several), and erase it."""
    takers = [(node, outputs[0])]
    if meta_of(node).multi_output:
        takers = [(user, outputs[user.args[1]]) for user in node.users]  # type: ignore[index]
    for old, new in takers:
        if new is None:
            raise AssertionError(f"'{old.name}' takes an output of '{node.name}' that nothing replaces")
        old.replace_all_uses_with(new)
        graph.graph.erase_node(old)
    if meta_of(node).multi_output:
        graph.graph.erase_node(node)


def cast_behind(graph: fx.GraphModule, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    output = graph.graph.output_node()
    with graph.graph.inserting_before(node.next if node.op == "call_function" else output):
        cast = write_call(graph.graph, cast_gradient, (node, dtype))
    spec = with_dtype(meta_of(node).spec, dtype)
    set_meta(cast, meta_of(node).having(specs=(spec,), phase="backward", multi_output=False, cost=None, step=None))
    return cast


def with_dtype(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(spec.shape, dtype, spec.dims, spec.batch_split_factors)


def set_output(graph: fx.GraphModule, position: int, node: fx.Node) -> None:
    output = graph.graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    values[position] = node
    output.args = (tuple(values),)
