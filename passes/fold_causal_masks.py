"""Replace causal attention masks that a model builds as tensors by the attention kernel's own causal mode."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.annotations import facts
from galvatron_fx.ir.op_call import input_nodes
from passes.clean_graph import eliminate_dead_code

aten = torch.ops.aten

# Position of ``is_causal`` among the arguments, and of the query (whose length must be the key's, one behind it).
_KERNELS: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (4, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (7, 1),
}
_MOST_ELEMENTS = 2**27


@dataclass(frozen=True)
class FoldCausalMasks:
    """Use ``is_causal`` where a mask made of constants says just that, and no mask where it masks nothing.

    Models traced without padding build ``[batch, 1, sequence, sequence]`` masks of ``arange``, ``index`` and ``where``.
    They cost memory on every device, and kernels do half the work if causality is told by the flag.

    Rewrite: ``attention(q, k, v, attn_mask=where(i >= j, 0, -inf))`` -> ``attention(q, k, v, 0.0, True)``, and so its
    backward.

    A mask that depends on an input, a parameter or a buffer stays, as does one of another form (sliding window,
    padding) and one whose evaluation would hold a tensor of more than ``most_elements`` elements.
    """

    most_elements: int = _MOST_ELEMENTS

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        constants = _Constants(graph, self.most_elements)
        for node in list(graph.graph.nodes):
            mask = node.kwargs.get("attn_mask") if node.target in _KERNELS else None
            if mask is None:
                continue
            kind = constants.kind(mask)
            if kind == "causal" and _is_square(node):
                _set_causal(node)
            elif kind != "open":
                continue
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "attn_mask"}
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


def _is_square(node: fx.Node) -> bool:
    """Whether there are as many queries as keys."""
    query = _KERNELS[node.target][1]
    lengths = [facts(node.args[at]).spec.shape[-2] for at in (query, query + 1)]  # type: ignore[arg-type]
    return lengths[0] == lengths[1]


def _set_causal(node: fx.Node) -> None:
    """Set ``is_causal``, spelling out the dropout before it where that was left to its default."""
    at = _KERNELS[node.target][0]
    args = list(node.args)
    if len(args) < at:
        args.append(0.0)
    node.args = (*args[:at], True, *args[at + 1 :])


@dataclass
class _Constants:
    """Evaluates nodes that depend on no placeholder, each distinct computation once.

    Layers repeat the same mask, so nodes are numbered by what they compute (``numbers``), and verdicts kept by number.
    """

    graph: fx.GraphModule
    most_elements: int
    numbers: dict[Any, int] = field(default_factory=dict)
    number_of: dict[fx.Node, int | None] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.graph.graph.nodes:
            self.number_of[node] = self._number(node)

    def kind(self, mask: fx.Node) -> str:
        """Tell what ``mask`` is: "causal", "open" (nothing is masked) or "other"."""
        number = self.number_of[mask]
        if number is None:
            return "other"
        if number not in self.kinds:
            value = self._evaluated(mask)
            self.kinds[number] = "other" if value is None else _kind(value)
        return self.kinds[number]

    def _number(self, node: fx.Node) -> int | None:
        """The number of what ``node`` computes; None for what is not a constant of the graph."""
        if node.op == "get_attr":
            return self.numbers.setdefault(("get_attr", str(node.target)), len(self.numbers))
        tags = getattr(node.target, "tags", None)
        if node.op != "call_function" or tags is None or torch.Tag.nondeterministic_seeded in tags:
            return None
        if facts(node).multi_output or any(self.number_of[source] is None for source in input_nodes(node)):
            return None
        frozen = fx.map_arg((node.args, node.kwargs), lambda source: f"%{self.number_of[source]}")
        return self.numbers.setdefault((node.target, repr(frozen)), len(self.numbers))

    def _evaluated(self, mask: fx.Node) -> Tensor | None:
        """The value of ``mask``, its equal rows folded to one; None where that would take too much memory."""
        order = _ancestors(mask)
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
        return _compact(values[mask])

    def _value(self, node: fx.Node, values: dict[fx.Node, Tensor]) -> Tensor | None:
        if node.op == "get_attr":
            held = getattr(self.graph, str(node.target))
            return held if type(held) in (Tensor, torch.nn.Parameter) and held.device.type != "meta" else None
        shape = facts(node).spec.shape
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
        result: Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
        return result


def _ancestors(node: fx.Node) -> list[fx.Node]:
    """``node`` behind all that it is made of, in graph order."""
    found: dict[fx.Node, None] = {node: None}
    pending = [node]
    while pending:
        for source in input_nodes(pending.pop()):
            if source not in found:
                found[source] = None
                pending.append(source)
    return sorted(found)


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


def _kind(mask: Tensor) -> str:
    """Tell a causal mask and one that masks nothing from others; ``mask`` is [.., queries, keys], repeats folded."""
    if mask.dim() < 2 or any(size != 1 for size in mask.shape[:-2]):
        return "other"
    rows = mask.reshape(mask.shape[-2:])
    if rows.dtype == torch.bool:
        keeps, plain = rows, True
    else:
        keeps = rows == 0
        plain = bool((keeps | (rows < torch.finfo(rows.dtype).min / 2)).all())
    if not plain:
        return "other"
    if bool(keeps.all()):
        return "open"
    square = keeps.shape[0] == keeps.shape[1]
    return "causal" if square and torch.equal(keeps, torch.ones_like(keeps).tril()) else "other"
