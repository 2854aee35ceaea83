"""What rows of padding do to an operator: which of its inputs they must leave, and where they stay zero."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from cost_models.ops import is_matmul
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.kernels.experts import combine, dispatch
from passes.analysis.dataflow import LINEAR_OPS

__all__ = ["LOSS_GRADIENTS", "MEANS", "counted_inputs", "ignored_labels", "stays_zero"]

aten = torch.ops.aten

# Means, and the sums that they are a share of.
MEANS: dict[Any, Any] = {aten.mean.default: aten.sum.default, aten.mean.dim: aten.sum.dim_IntList}

# Zero where the label is left out.
LOSS_GRADIENTS = (aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)

_SUMS = (aten.sum.default, aten.sum.dim_IntList)

# Those that add something to something else, and what that is called: rows of zeros add nothing.
_ADDING: dict[Any, str] = {
    aten.index_add.default: "source",
    aten.index_put.default: "values",
    aten.scatter_add.default: "src",
    aten.index_select_backward.default: "grad",
}

# A zero in the first input makes a zero.
_FROM_FIRST = (
    *LINEAR_OPS,
    *_SUMS,
    *MEANS,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.select.int,
    aten.slice.Tensor,
    aten.expand.default,
    aten.neg.default,
    aten.div.Tensor,
    aten.div.Scalar,
    aten.mul.Scalar,
    aten.relu.default,
    dispatch,
    combine,
)

# A zero in any input makes a zero.
_PRODUCTS = (aten.mul.Tensor,)

# Zeros in all inputs make a zero.
_TOGETHER = (aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.stack.default)


def counted_inputs(node: fx.Node, with_rows: Collection[fx.Node], zero: Collection[fx.Node]) -> list[fx.Node] | None:
    """Inputs whose padding has to be zero for ``node`` to sum over the batch without it; None where that is not known.

    ``with_rows``: values that have rows of padding; ``zero``: those whose rows of padding are zero already.
    """
    candidates = [source for source in dict.fromkeys(input_nodes(node)) if source in with_rows]
    if node.target in _SUMS or node.target in MEANS:
        return candidates
    gradients = [source for source in _gradients(node) if source in with_rows]
    if gradients:
        return gradients
    if node.target in _ADDING:
        added = _named(node)[_ADDING[node.target]]
        return [added] if added in with_rows else None
    if is_matmul(node.target):  # type: ignore[arg-type]
        return sorted(candidates, key=lambda source: (source not in zero, meta_of(source).phase == "forward"))[:1]
    return None


def ignored_labels(node: fx.Node) -> tuple[fx.Node, int] | None:
    """The labels of a loss that leaves some out, and the label of those; None for other operators."""
    named = _named(node)
    label, target = named.get("ignore_index"), named.get("target")
    return (target, label) if isinstance(target, fx.Node) and isinstance(label, int) else None


def stays_zero(node: fx.Node, zero: Collection[fx.Node]) -> bool:
    """Whether rows of padding are zero in the results of ``node``, given the values where they are."""
    sources = input_nodes(node)
    gradients = _gradients(node)
    if gradients:
        return all(source in zero for source in gradients)
    if node.target in _PRODUCTS or is_matmul(node.target):  # type: ignore[arg-type]
        return any(source in zero for source in sources)
    if node.target in _TOGETHER:
        return bool(sources) and len(sources) == _num_tensors(node) and all(source in zero for source in sources)
    return node.target in _FROM_FIRST and bool(sources) and sources[0] is node.args[0] and sources[0] in zero


def _num_tensors(node: fx.Node) -> int:
    """How many values are combined: numbers beside tensors count as well."""
    first = node.args[0]
    return len(first) if isinstance(first, (list, tuple)) else len([x for x in node.args[:2] if x is not None])


def _gradients(node: fx.Node) -> list[fx.Node]:
    """The gradients of its result that an operator of backward takes: all that it makes is linear in them."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or "backward" not in schema.name:
        return []
    return [x for name, x in _named(node).items() if name.startswith("grad") and isinstance(x, fx.Node)]


def _named(node: fx.Node) -> dict[str, Any]:
    target: Callable[..., Any] | Any = node.target
    schema = getattr(target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
