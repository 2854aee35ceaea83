"""Take side effects out of a traced graph: the checks of linear algebra, which torch orders by tokens."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import module_of, no_modes, with_effects

aten = torch.ops.aten


def drop_tokens(graph: fx.GraphModule) -> None:
    """Let what a failed check would have stopped be nan, and remove the tokens that order checks.

    ``torch.linalg.inv``, ``solve`` and ``cholesky`` raise for a matrix that is singular or not positive definite. A
    graph that runs on many ranks, and on GPUs without waiting for them, cannot stop there: its results are nan.

    Rewrite: ``y, info = inv_ex(x); check(info)`` -> ``y, info = inv_ex(x); y = where(info == 0, y, nan)``.

    Raises CaptureError for other operators with side effects.
    """
    effects = graph.graph.find_nodes(op="call_function", target=with_effects)
    if not effects:
        return
    for node in effects:
        _replace_check(graph.graph, node)
    _remove_tokens(graph.graph)
    for node in reversed(effects):
        for user in list(node.users):
            graph.graph.erase_node(user)
        graph.graph.erase_node(node)
    for placeholder in graph.graph.find_nodes(op="placeholder"):
        if _is_token(placeholder.meta["desc"]):
            graph.graph.erase_node(placeholder)


def _is_token(descriptor: Any) -> bool:
    return "TokenAOT" in type(descriptor).__name__


def _replace_check(graph: fx.Graph, node: fx.Node) -> None:
    target, info = node.args[1], node.args[2] if len(node.args) > 2 else None
    checked = isinstance(info, fx.Node) and info.target is operator.getitem
    if target is not aten._linalg_check_errors.default or not checked:
        raise CaptureError(
            f"operator {target} in module '{module_of(node)}' has a side effect, which no graph of values can say: "
            f"call it outside of forward"
        )
    assert isinstance(info, fx.Node)
    source = info.args[0]
    assert isinstance(source, fx.Node)
    for result in [user for user in source.users if user is not info]:
        value = result.meta.get("val")
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()) and value.numel():
            _poison(graph, result, info)


def _poison(graph: fx.Graph, result: fx.Node, info: fx.Node) -> None:
    """Put nan in place of those results whose check failed."""
    value: Tensor = result.meta["val"]
    later = max(result, info)
    with graph.inserting_after(later):
        works = _call(graph, info, aten.eq.Scalar, info, 0)
    last = works
    for _ in range(value.dim() - works.meta["val"].dim()):
        with graph.inserting_after(last):
            last = _call(graph, info, aten.unsqueeze.default, last, -1)
    with graph.inserting_after(last):
        whole = _call(graph, result, aten.where.ScalarOther, last, result, math.nan)
    result.replace_all_uses_with(whole, delete_user_cb=lambda user: user is not whole)


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A call with the marks of ``like``."""
    node = graph.call_function(target, args)
    node.meta = dict(like.meta)
    with no_modes():
        node.meta["val"] = target(*fx.map_arg(args, lambda source: source.meta["val"]))
    return node


def _remove_tokens(graph: fx.Graph) -> None:
    """Return no tokens."""
    output = graph.output_node()
    descriptors = output.meta["desc"]
    kept = [not (descriptor is not None and _is_token(descriptor)) for descriptor in descriptors]
    leaves = pytree.arg_tree_leaves(*output.args)
    output.args = (tuple(leaf for leaf, keep in zip(leaves, kept, strict=True) if keep),)
    output.meta["desc"] = [descriptor for descriptor, keep in zip(descriptors, kept, strict=True) if keep]
