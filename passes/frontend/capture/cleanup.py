"""Drop nodes that compute nothing (aliases, undone transposes, whole slices, dead code), and write some plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import Dim, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, inherited_meta, write_call

aten = torch.ops.aten

# A functional graph has no writes, so an alias or a copy of a value is the value. (The lowering uses ``reshape`` for
# ``view``, so memory formats need not be kept either.)
_ALIASES = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    aten.contiguous.default,
}

# What torch writes down in a tensor's flags, for whoever reads it to do: a graph of values does it at once.
_AT_ONCE = {aten._conj.default: aten._conj_physical.default, aten._neg_view.default: aten.neg.default}

_TRANSPOSES = (aten.t.default, aten.transpose.int)

# What is filled with a number (None: with the one that is given), and takes only a dtype from a tensor.
_FILLED_LIKE = {
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_empty.default: 0,
    aten.new_full.default: None,
}


@dataclass(frozen=True)
class CleanGraph:
    """Remove no-ops, so that costs, blocks and rules see computation only.

    Rewrite: ``y = detach(x); z = mul(y, 2)`` -> ``z = mul(x, 2)``;
    ``y = add(x, 0); z = mul(y, 2)`` -> ``z = mul(x, 2)``;
    ``y = cat([empty, x], -2); z = mul(y, 2)`` -> ``z = mul(x, 2)`` (``empty``: a new cache, of shape (0,));
    ``y = t(x); z = t(y); w = mul(z, 2)`` -> ``w = mul(x, 2)``, so that gradients lie as their weights do;
    ``y = new_zeros(x, size)`` -> ``y = full(size, 0)``, which neither keeps ``x`` nor asks how it is sharded;
    ``y = _conj(x)`` -> ``y = _conj_physical(x)``, as an alias that resolves it is dropped, too;
    ``y = _conj(1j); z = mul(x, y)`` -> ``z = mul(x, -1j)``;
    ``y = repeat(x, [3, 1])`` -> ``y = reshape(expand(reshape(x)))``, whose rules split what is repeated.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Clean ``graph`` in place and return it."""
        for node in list(graph.graph.nodes):
            if node.target is aten.cat.default:
                _drop_empty(node)
            if node.op == "call_function" and _is_noop(node):
                source = node.args[0]
                node.replace_all_uses_with(source[0] if isinstance(source, (list, tuple)) else source)
            elif _undoes(node):
                node.replace_all_uses_with(node.args[0].args[0])
            elif node.target in _AT_ONCE and isinstance(node.args[0], fx.Node):
                node.target = _AT_ONCE[node.target]
            elif node.target in _AT_ONCE:  # of a number, as backward has it of products with one
                _put_number(node, node.args[0].conjugate() if node.target is aten._conj.default else -node.args[0])
            elif node.target in _FILLED_LIKE:
                _fill_alone(node)
            elif node.target is aten._efficientzerotensor.default:
                node.target, node.args = aten.full.default, (node.args[0], 0)
            elif node.target is aten.repeat.default:
                _view_copies(node)
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


def _drop_empty(node: fx.Node) -> None:
    """Take operands without elements, of shape (0,) or with nothing along the dim of ``cat``, from one whose dtype does
    not need them.
    """
    operands, *dim = node.args
    along = int(dim[0] if dim else 0)  # type: ignore[arg-type]
    shapes = {source: meta_of(source).spec.shape for source in operands}  # type: ignore[union-attr, arg-type]
    kept = [source for source in operands if shapes[source] != (0,) and shapes[source][along] > 0]  # type: ignore[union-attr]
    if any(meta_of(source).spec.dtype == meta_of(node).spec.dtype for source in kept):  # type: ignore[arg-type]
        node.args = (kept, *dim)


def _put_number(node: fx.Node, number: complex) -> None:
    """Give whoever takes a node the number that it is."""
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda n: number if n is node else n)


def _fill_alone(node: fx.Node) -> None:
    """Fill without the tensor whose dtype it was."""
    number = _FILLED_LIKE[node.target]  # type: ignore[index]
    _, size, *given = node.args
    node.args = (size, given[0] if number is None else number)
    node.kwargs = {"dtype": meta_of(node).spec.dtype, "device": node.kwargs.get("device") or torch.device("cpu")}
    node.target = aten.full.default


def _view_copies(node: fx.Node) -> None:
    """Give every dim one of copies before it, and merge the two."""
    x, repeats = node.args
    before, after = meta_of(x).spec, meta_of(node).spec  # type: ignore[arg-type]
    ones = [1] * (len(after.shape) - len(before.shape))
    sizes = [*zip([*ones, *before.shape], [*ones, *before.symbolic], strict=True)]
    times = [
        (count, count if more == count * dim else sympy.cancel(more / dim))
        for count, (_, dim), more in zip(repeats, sizes, after.symbolic, strict=True)  # type: ignore[arg-type]
    ]
    apart = _written(node, aten.reshape.default, x, [size for each in sizes for size in ((1, 1), each)])
    copies = _written(
        node, aten.expand.default, apart, [size for pair in zip(times, sizes, strict=True) for size in pair]
    )
    node.target, node.args = aten.reshape.default, (copies, list(after.shape))


def _written(node: fx.Node, target: Any, x: Any, sizes: Sequence[tuple[int, Dim]]) -> fx.Node:
    """Write a view to ``sizes``, as numbers and expressions, in front of ``node``."""
    shape = [size for size, _ in sizes]
    with node.graph.inserting_before(node):
        view = write_call(node.graph, target, (x, shape))
    view.meta.update(inherited_meta(node))
    dims = tuple(dim for _, dim in sizes) if meta_of(node).spec.dims else ()
    set_meta(view, meta_of(node).having(specs=(TensorSpec(tuple(shape), meta_of(node).spec.dtype, dims),)))
    return view


def _is_noop(node: fx.Node) -> bool:
    if node.target in _ALIASES:
        return True
    if node.target is aten.cat.default:
        return len(node.args[0]) == 1  # type: ignore[arg-type]
    if not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if node.target is aten._to_copy.default:
        return meta_of(node).spec.dtype == meta_of(node.args[0]).spec.dtype and "device" not in node.kwargs
    if node.target is aten.add.Tensor and node.args[1] == 0:  # what sum() and "loss = 0" begin with
        return meta_of(node).spec.dtype == meta_of(node.args[0]).spec.dtype
    same_shape_is_noop = (aten.slice.Tensor, aten.view.default, aten._unsafe_view.default, aten.expand.default)
    if node.target in same_shape_is_noop:
        return meta_of(node).spec.shape == meta_of(node.args[0]).spec.shape
    return False


def _undoes(node: fx.Node) -> bool:
    """Whether a node transposes back what another has transposed."""
    source = node.args[0] if node.target in _TRANSPOSES else None
    return isinstance(source, fx.Node) and source.target is node.target and _dims(source) == _dims(node)


def _dims(node: fx.Node) -> set[int]:
    """What a node transposes."""
    rank = max(1, len(meta_of(node).spec.shape))
    return {int(dim) % rank for dim in node.args[1:]}  # type: ignore[arg-type]
