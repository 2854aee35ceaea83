"""Slices that cover a dim: their gradients lie side by side, where autograd adds up tensors that are mostly zeros."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, inherited_meta, write_call

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
_KEEP_FEATURES = (*_VIEWS, aten.add.Tensor, aten.mul.Tensor, aten._to_copy.default)
_PARTS = (aten.slice_backward.default, aten.select_backward.default)


@dataclass(frozen=True)
class JoinSlices:
    """Put gradients of slices together by ``cat``, and take features of products apart by one split.

    Where a model takes a tensor apart by slices (halves of a rotary embedding; queries, keys and values of one
    product), autograd writes each gradient into zeros and adds these up: ``cat`` reads and writes each element once.
    What comes out differs in the sign of zeros at most. A split has rules for all its parts at once.

    Rewrite: ``a = slice_backward(x, [2, 8], 1, 0, 4, 1); b = slice_backward(y, [2, 8], 1, 4, 8, 1); z = add(a, b)`` ->
    ``z = cat([x, y], 1)``;
    ``q = slice(mm, 1, 0, 6); k = slice(mm, 1, 6, 8)`` -> ``q, k = split_with_sizes(mm, [6, 2], 1)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        for node in list(graph.graph.nodes):
            if any(user.target is aten.slice.Tensor for user in node.users):
                _split_features(node)
        order = {node: place for place, node in enumerate(graph.graph.nodes)}
        for node in list(order):
            if _is_sum(node) and not any(_is_sum(user) for user in node.users if len(node.users) == 1):
                terms = list(_terms(node))
                parts = [part for part in map(_part, terms) if part is not None]
                for cover in _covers(parts):
                    _join(cover, order)
                empty = [part.term for part in parts if part.start == part.stop]
                for term in empty[len(empty) == len(terms) :]:  # the sum is of something
                    _leave_out(term)
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


def _is_sum(node: fx.Node) -> bool:
    """Whether a node adds two tensors that are as large as their sum."""
    if node.target is not aten.add.Tensor or node.kwargs or len(node.all_input_nodes) != 2 or len(node.args) != 2:
        return False
    spec = meta_of(node).spec
    return all(
        (meta_of(term).spec.shape, meta_of(term).spec.dtype) == (spec.shape, spec.dtype)
        for term in node.all_input_nodes
    )


def _terms(total: fx.Node) -> Iterator[fx.Node]:
    """What a sum adds up, through sums that nothing else takes."""
    for term in total.all_input_nodes:
        yield from _terms(term) if len(term.users) == 1 and _is_sum(term) else (term,)


@dataclass(frozen=True)
class _Part:
    """A term that is zero but from ``start`` to ``stop`` along ``dim``: ``value`` is there, which may lack the dim."""

    term: fx.Node
    value: fx.Node
    dim: int
    start: int
    stop: int

    @property
    def is_selected(self) -> bool:
        return self.term.target is aten.select_backward.default


def _part(term: fx.Node) -> _Part | None:
    """A gradient of a slice without steps, or of a selected place, along a dim of fixed size, that only its sum takes;
    None for others.
    """
    if term.target not in _PARTS or len(term.users) > 1:
        return None
    value, sizes, dim, start, *rest = term.args
    dim = dim % len(sizes)  # type: ignore[operator, arg-type]
    size = sizes[dim]  # type: ignore[index]
    if not _is_fixed(meta_of(term).spec, dim) or meta_of(value).spec.dtype != meta_of(term).spec.dtype:  # type: ignore[arg-type]
        return None
    if term.target is aten.select_backward.default:
        return _Part(term, value, dim, start % size, start % size + 1)  # type: ignore[arg-type, operator]
    return _Part(term, value, dim, *_bounds(size, start, *rest[:1])) if rest[1:] in ([], [1]) else None  # type: ignore[arg-type]


def _is_fixed(spec: TensorSpec, dim: int) -> bool:
    return not getattr(spec.symbolic[dim], "free_symbols", ())


def _bounds(size: int, start: int | None = None, stop: int | None = None) -> tuple[int, int]:
    """Of a slice, as places from the front."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


def _covers(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts that lie side by side from one end of a dim to the other, in order."""
    dims: dict[int, dict[int, list[_Part]]] = defaultdict(lambda: defaultdict(list))
    for part in parts:
        if part.start < part.stop:
            dims[part.dim][part.start].append(part)
    for dim, by_start in dims.items():
        size, at = meta_of(parts[0].term).spec.shape[dim], 0
        cover: list[_Part] = []
        while by_start[at]:
            cover.append(by_start[at].pop())
            at = cover[-1].stop
            if at == size:
                if len(cover) > 1:
                    yield cover
                cover, at = [], 0


def _join(parts: Sequence[_Part], order: dict[fx.Node, int]) -> None:
    """Write the parts as one term in front of the last sum that takes one of them, and leave them out of the others."""
    takers = [next(iter(part.term.users)) for part in parts]
    last = max(takers, key=order.__getitem__)
    like = parts[takers.index(last)].term
    graph = last.graph
    with graph.inserting_before(last):
        values = [_with_dim(part) for part in parts]
        joined = _written(like, aten.cat.default, (values, parts[0].dim), meta_of(like).spec)
    like.replace_all_uses_with(joined)
    for part in parts:
        if part.term is not like:
            _leave_out(part.term)


def _leave_out(term: fx.Node) -> None:
    """Take a term out of its sum."""
    (taker,) = term.users
    (other,) = (each for each in taker.all_input_nodes if each is not term)
    taker.replace_all_uses_with(other)
    taker.graph.erase_node(taker)


def _with_dim(part: _Part) -> fx.Node:
    """The value of a part, with the dim from which it was selected."""
    if not part.is_selected:
        return part.value
    spec = meta_of(part.value).spec.unsqueezed(part.dim)
    return _written(part.term, aten.unsqueeze.default, (part.value, part.dim), spec)


def _written(of: fx.Node, target: Any, args: tuple[Any, ...], *specs: TensorSpec) -> fx.Node:
    """Write an operator where the graph writes now, of the module and phase of another."""
    node = write_call(of.graph, target, args)
    node.meta.update(inherited_meta(of))
    set_meta(node, meta_of(of).having(specs=specs, multi_output=len(specs) > 1))
    return node


def _split_features(source: fx.Node) -> None:
    """Take the features of a product apart by one split, where slices do."""
    spec = meta_of(source).spec
    dim = len(spec.shape) - 1
    slices: dict[tuple[int, int], list[fx.Node]] = defaultdict(list)
    for user in sorted(source.users):
        if _is_slice(user, dim):
            slices[_bounds(spec.shape[dim], *user.args[2:4])].append(user)  # type: ignore[arg-type]
    cuts = sorted(slices)
    ends = [0, *(stop for _, stop in cuts)]
    if len(cuts) < 2 or [start for start, _ in cuts] != ends[:-1] or ends[-1] != spec.shape[dim]:
        return
    if any(meta_of(same[0]).phase != meta_of(source).phase for same in slices.values()):
        return  # backward alone takes it apart
    if not _is_fixed(spec, dim) or not _is_of_product(source, spec.shape[dim]):
        return
    sizes = [stop - start for start, stop in cuts]
    first = next(iter(slices.values()))[0]
    with first.graph.inserting_before(first):
        specs = [spec.resized(dim, size) for size in sizes]
        split = _written(first, aten.split_with_sizes.default, (source, sizes, dim), *specs)
        parts = [
            _written(slices[cut][0], operator.getitem, (split, place), specs[place]) for place, cut in enumerate(cuts)
        ]
    for cut, part in zip(cuts, parts, strict=True):
        for each in slices[cut]:
            each.replace_all_uses_with(part)


def _is_of_product(node: fx.Node, size: int) -> bool:
    """Whether features are a product's, as they came, cast, scaled or with others added (a bias, an adapter's)."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        if value.target in _PRODUCTS:
            return True
        if value.target in _KEEP_FEATURES:
            fresh = [each for each in value.all_input_nodes if each not in seen and _width(each) == size]
            seen.update(fresh)
            pending += fresh
    return False


def _width(node: fx.Node) -> int:
    spec = meta_of(node).specs[0]
    return spec.shape[-1] if spec is not None and spec.shape else 0


def _is_slice(node: fx.Node, dim: int) -> bool:
    return (
        node.target is aten.slice.Tensor
        and len(node.args) > 1
        and int(node.args[1]) % (dim + 1) == dim  # type: ignore[arg-type]
        and list(node.args[4:]) in ([], [1])
    )
