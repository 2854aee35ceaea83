"""What a graph computes from nothing but itself: the values of its constants."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes

aten = torch.ops.aten

MOST_ELEMENTS = 2**25
_VIEWS = (aten.view.default, aten._unsafe_view.default)


@dataclass
class Constants:
    """Evaluates nodes that depend on no placeholder.

    Layers repeat the same constants, so nodes are numbered by what they compute (``number_of``, None for what is no
    constant): who asks for a value can keep what was found by its number. No tensor of more than ``most_elements``
    elements is made.
    """

    graph: fx.GraphModule
    most_elements: int = MOST_ELEMENTS
    numbers: dict[Any, int] = field(default_factory=dict)
    number_of: dict[fx.Node, int | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.graph.nodes:
            self.number_of[node] = self._number(node)

    def value(self, constant: fx.Node) -> Tensor | None:
        """The value of ``constant``, with size 1 where it repeats along a dim in memory, or equal rows along its first;
        None where making it would take too much memory.
        """
        order = _ancestors(constant)
        last = {source: node for node in order for source in input_nodes(node)}
        values: dict[fx.Node, Tensor] = {}
        for node in order:
            value = self._value(node, values)
            if value is None:
                return None
            values[node] = _folded(value)
            for source in input_nodes(node):
                if last[source] is node:
                    values.pop(source, None)
        return _compact(values[constant])

    def _number(self, node: fx.Node) -> int | None:
        """The number of what ``node`` computes; None for what is not a constant of the graph."""
        if node.op == "get_attr":
            return self.numbers.setdefault(("get_attr", str(node.target)), len(self.numbers))
        tags = getattr(node.target, "tags", None)
        if node.op != "call_function" or tags is None or torch.Tag.nondeterministic_seeded in tags:
            return None
        if meta_of(node).multi_output or any(self.number_of[source] is None for source in input_nodes(node)):
            return None
        frozen = fx.map_arg((node.args, node.kwargs), lambda source: f"%{self.number_of[source]}")
        return self.numbers.setdefault((node.target, repr(frozen)), len(self.numbers))

    def _value(self, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor | None:
        if node.op == "get_attr":
            held = getattr(self.graph, str(node.target))
            return held if type(held) in (Tensor, torch.nn.Parameter) and held.device.type != "meta" else None
        shape = meta_of(node).spec.shape
        pointwise = _is_pointwise(node)
        folded = [_compact(values[source]).shape for source in input_nodes(node)]
        size = prod(torch.broadcast_shapes(*folded)) if pointwise else prod(shape)
        if size > self.most_elements and not _is_view(node):
            return None
        value = self._call(node, values, pointwise)
        return value.expand(shape) if pointwise else value

    def _call(self, node: fx.Node, values: dict[fx.Node, Tensor], pointwise: bool) -> Tensor:
        """Run a node; a pointwise one on operands folded along the dims in which they repeat."""
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda source: _compact(values[source]) if pointwise else values[source]
        )
        # What repeats has other strides than in the trace.
        target: Any = aten.reshape.default if node.target in _VIEWS else node.target
        result: Tensor = target(*args, **kwargs)
        return result


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """``node`` behind all that it is made of, in graph order."""
    nodes: dict[fx.Node, None] = {node: None}
    pending = [node]
    while pending:
        for source in input_nodes(pending.pop()):
            if source not in nodes:
                nodes[source] = None
                pending.append(source)
    return sorted(nodes)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the result comes of the operands' elements at its place, after broadcasting."""
    pointwise = node.target is aten._to_copy.default or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
    return pointwise and bool(input_nodes(node))


def _is_view(node: fx.Node) -> bool:
    """Whether a call moves no data."""
    return bool(node.target.is_view)  # type: ignore[union-attr]


def _compact(value: Tensor) -> Tensor:
    """Keep one index of every dim along which the memory repeats."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride == 0:
            value = value.narrow(dim, 0, 1)
    return value


def _folded(value: Tensor) -> Tensor:
    """The same tensor with its first dim repeating one row in memory where all rows are equal."""
    if value.dim() < 2 or value.shape[0] < 2 or value.stride(0) == 0:
        return value
    first = value[:1]
    return first.expand(value.shape) if bool((value == first).all()) else value
