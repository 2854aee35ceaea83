"""Give every gradient memory of its own: optimizers, clipping and accumulation write into it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, output_ports, set_meta
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.graph.rewrite import write_call
from passes.analysis.alias_analysis import infer_strides

Range = tuple[int, int]


@dataclass(frozen=True)
class UnaliasGradients:
    """Copy gradients that lie where something else does.

    The gradients of ``a`` and ``b`` in ``x + a + b`` are one value, as are those of equal biases of branches that are
    added up; a gradient may also be an input, a value of forward, or a view that repeats elements.

    Rewrite: ``return (g, g)`` -> ``g_1 = clone(g); return (g, g_1)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        outputs = output_ports(graph)
        laid = _laid_values(graph)
        lying = {node: _place(node, laid) for _, node in outputs if node is not None}
        taken: dict[fx.Node, list[Range]] = {}
        for port, node in outputs:
            if port.kind != "grad" and node is not None:
                taken.setdefault(lying[node].root, []).append(lying[node].elements)
        results = [node for _, node in outputs]
        for position, (port, node) in enumerate(outputs):
            if port.kind != "grad" or node is None:
                continue
            place = lying[node]
            others = taken.setdefault(place.root, [])
            if place.is_free and not any(_overlap(place.elements, other) for other in others):
                others.append(place.elements)
            else:
                results[position] = _clone(graph, node)
        graph.graph.output_node().args = (tuple(results),)
        graph.recompile()
        return graph


@dataclass(frozen=True)
class _Place:
    """Where a value may lie: in the memory of ``root``, from the first to behind the last of ``elements``; ``is_free``:
    whether backward alone has made it, in the order of a dense parameter (fused optimizers rely on it).
    """

    root: fx.Node
    elements: Range
    is_free: bool


def _laid_values(graph: fx.GraphModule) -> dict[fx.Node, Any]:
    """How the values of ``graph`` lie: sums of transposed products are transposed, too."""
    laid: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op != "output":
            laid[node] = infer_strides(graph, node, laid)
    return laid


def _place(node: fx.Node, laid: Mapping[fx.Node, Any]) -> _Place:
    """Follow a value through views."""
    chain: list[fx.Node] = []
    root = node
    while (source := _viewed(root)) is not None:
        chain.append(root)
        root = source
    lies = laid[root].strided
    value: Any = torch.empty_strided(lies.shape, lies.stride, dtype=lies.dtype, device="meta")
    for view in reversed(chain):
        value = view.target(value, *view.args[1:], **view.kwargs)  # type: ignore[operator]
    start = value.storage_offset()
    end = start + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
    is_made = root.op == "call_function" and meta_of(root).phase == "backward"
    return _Place(root, (start, end), is_made and value.is_contiguous())


def _viewed(node: fx.Node) -> fx.Node | None:
    """What a value may be a view of."""
    if is_getitem(node):
        source = node.args[0]
        return source if isinstance(source, fx.Node) and _is_view(source.target) else None
    if node.op != "call_function" or not _is_view(node.target):
        return None
    source = node.args[0]
    return source if isinstance(source, fx.Node) else None


def _is_view(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _overlap(a: Range, b: Range) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _clone(graph: fx.GraphModule, node: fx.Node) -> fx.Node:
    dense: dict[str, Any] = {"memory_format": torch.contiguous_format}
    with graph.graph.inserting_before(graph.graph.output_node()):
        clone = write_call(graph.graph, torch.ops.aten.clone.default, (node,), dense)
    set_meta(clone, meta_of(node).having(specs=(meta_of(node).spec,), phase="backward", multi_output=False, step=None))
    return clone
