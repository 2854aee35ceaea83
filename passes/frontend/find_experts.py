"""Experts written by hand: rows that are sorted by expert, multiplied in groups and put back, whatever wrote them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code, inherited_meta, write_call
from galvatron_fx.ir.kernels.experts import collect, combine, dispatch, route, spread
from passes.frontend.id_values import INTEGERS, Values, are_places, followers, root_of, values_of_ids

__all__ = ["FindExperts"]

aten = torch.ops.aten

_SORTS = (aten.sort.default, aten.sort.stable)
_GROUPED = (
    "aten._grouped_mm.default",
    "transformers.grouped_mm_fallback.default",
    "transformers.grouped_mm_fallback_backward.default",
)
_LOOKUPS = (aten.index.Tensor, aten.index_select.default, aten.gather.default)
_WRITES = (aten.index_put.default, aten.index_add.default, aten.scatter_add.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)


@dataclass(frozen=True)
class FindExperts:
    """Turn what sorts rows by expert, multiplies them in groups and puts them back into the operators of
    :mod:`galvatron_fx.ir.kernels.experts`, which can be split with their tokens.

    What follows from the ids of experts alone (orders, places, ends of groups) is recognised by its values for a few
    draws of ids, however it is computed. Where anything else is done with one of these, all stays as it is.

    Rewrite: ``order = sort(ids)[1]; rows = index(x, [order // k]); y = grouped_mm(rows, w, cumsum(histc(ids)))`` ->
    ``place, order, ends = route(ids); rows = dispatch(x, place, order, k); y = grouped_mm(rows, w, ends)``.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        sorts = [node for node in graph.graph.nodes if node.target in _SORTS]
        grouped = [node for node in graph.graph.nodes if _offsets(node) is not None] if sorts else []
        routings = [_Routing.of(graph, sort, grouped) for sort in sorts] if grouped else []
        for routing in routings:
            if routing is not None:
                routing.write()
        if any(routings):
            eliminate_dead_code(graph)
            graph.recompile()
        return graph


@dataclass
class _Routing:
    """One sorting of rows by expert; ``ids``: what is sorted, ``values``: of all that follows from it alone, for each
    draw of ids; ``ends``: those that say where the rows of each expert end.
    """

    graph: fx.Graph
    sort: fx.Node
    ids: fx.Node
    ends: list[fx.Node]
    values: Values
    moves: dict[fx.Node, tuple[Any, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: fx.GraphModule, sort: fx.Node, grouped: Sequence[fx.Node]) -> _Routing | None:
        """The routing that ``sort`` is part of; None where it is none, or where one use of it is not understood."""
        ids = sort.args[0]
        assert isinstance(ids, fx.Node)
        spec = meta_of(ids).spec
        if len(spec.shape) != 1 or spec.dtype not in INTEGERS:
            return None
        root = root_of(ids)
        for experts in dict.fromkeys(meta_of(_offsets(node)).spec.shape[0] for node in grouped):
            try:
                values = values_of_ids(root, experts)
            except (IndexError, RuntimeError):
                continue  # something cannot be computed from ids as they are drawn
            ends = [offsets for node in grouped if (offsets := _offsets(node)) in values]
            if ends and all(meta_of(end).spec.shape == (experts,) for end in ends):
                routing = cls(graph.graph, sort, ids, list(dict.fromkeys(ends)), values)
                holds = routing._is_understood() and (are_places(root, experts) or routing._holds_for_strays(root))
                return routing if holds else None
        return None

    @property
    def rows(self) -> int:
        """How many are sorted."""
        return meta_of(self.ids).spec.shape[0]

    @property
    def experts(self) -> int:
        """How many there are."""
        return meta_of(self.ends[0]).spec.shape[0]

    def _is_understood(self) -> bool:
        """Whether each use of what follows from the ids is one of ours; notes what each is."""
        in_order = all(map(torch.equal, self._sorted(), self._in_order()))
        if not in_order or not all(self._are(end, self._ends()) for end in self.ends):
            return False
        after_sort = followers(self.values, {self.sort, *self.ends})
        for node in after_sort:
            for user in node.users:
                if user in self.values or (node in self.ends and _offsets(user) is node):
                    continue
                move = self._move(user, node)
                if move is None:
                    return False
                self.moves[user] = move
        return bool(self.moves)

    def _holds_for_strays(self, root: fx.Node) -> bool:
        """Whether ids of no expert are treated as :func:`route` does: those below go first, those behind go last."""
        for stray in (-1, self.experts):
            try:
                values = values_of_ids(root, self.experts, stray)
            except (IndexError, RuntimeError):
                continue  # the model fails at such ids
            looks_up = any(target in (spread, collect) for target, _ in self.moves.values())
            if (stray < 0 and looks_up) or not replace(self, values=values, moves={})._is_understood():
                return False  # a lookup counts ids below zero from behind
        return True

    def _move(self, user: fx.Node, index: fx.Node) -> tuple[Any, int] | None:
        """The operator that stands for a lookup or a write at ``index``, and the copies of each token."""
        table = user.args[0]
        if not isinstance(table, fx.Node) or index is table or _index(user) is not index or not _is_by_row(user, index):
            return None
        size = meta_of(table).spec.shape[0]
        if user.target in _WRITES and (user.kwargs or (not _adds(user) and size != self.rows)):
            return None
        is_lookup = user.target in _LOOKUPS
        if self._are(index, self._place()) and size == self.rows:
            return (combine, 1) if is_lookup else (dispatch, 1)
        if size and self.rows % size == 0 and self._are(index, [o // (self.rows // size) for o in self._order()]):
            return (dispatch, self.rows // size) if is_lookup else (combine, self.rows // size)
        if size == self.experts and (is_lookup or _adds(user)) and self._are(index, self._sorted()):
            return (spread, 1) if is_lookup else (collect, 1)
        return None

    # ---- the values of ids, by draw ----

    def _order(self) -> list[Tensor]:
        return [value[1] for value in self.values[self.sort]]

    def _place(self) -> list[Tensor]:
        return [order.argsort() for order in self._order()]

    def _in_order(self) -> list[Tensor]:
        return [ids[order] for ids, order in zip(self.values[self.ids], self._order(), strict=True)]

    def _sorted(self) -> list[Tensor]:
        return [ids.sort().values for ids in self.values[self.ids]]

    def _ends(self) -> list[Tensor]:
        return [torch.searchsorted(ids, torch.arange(self.experts), right=True) for ids in self._sorted()]

    def _are(self, node: fx.Node, expected: Sequence[Tensor]) -> bool:
        """Whether a value is that for every draw, if need be repeated along further dims."""
        for value, want in zip(self.values[node], expected, strict=True):
            if value.dim() == 0 or len(value) != len(want):
                return False
            if not torch.equal(value.double(), want.double().reshape(-1, *(1,) * (value.dim() - 1)).expand_as(value)):
                return False
        return True

    # ---- writing ----

    def write(self) -> None:
        """Put the operators of experts in place of what was understood."""
        with self.graph.inserting_after(self.ids):
            routed = write_call(self.graph, route, (self.ids, self.experts))
        rows = meta_of(self.ids).spec
        order = TensorSpec(rows.shape, torch.int64, rows.dims)
        specs = (order, order, TensorSpec((self.experts,), torch.int32))
        routed.meta.update(inherited_meta(self.sort))
        set_meta(routed, meta_of(self.sort).having(specs=specs, multi_output=True))
        parts: list[fx.Node] = []
        before = routed
        for i, spec in enumerate(specs):
            with self.graph.inserting_after(before):
                before = _written(self.graph, operator.getitem, (routed, i), spec, self.sort)
            parts.append(before)
        place, by_expert, ends = parts
        for end in self.ends:
            for user in list(end.users):
                if _offsets(user) is end:
                    user.replace_input_with(end, ends)
        for user, (target, copies) in self.moves.items():
            with self.graph.inserting_before(user):
                user.replace_all_uses_with(self._moved(user, target, copies, (place, by_expert, ends)))

    def _moved(self, user: fx.Node, target: Any, copies: int, routed: Sequence[fx.Node]) -> fx.Node:
        place, order, ends = routed
        spec = meta_of(user).spec
        value = user.args[0] if user.target in _LOOKUPS else _put(user)
        rest = meta_of(user.args[0]).spec  # type: ignore[arg-type]
        if user.target not in _LOOKUPS:
            value = self._reshaped(user, value, meta_of(order).spec, rest)
        args = {
            dispatch: (value, place, order, copies),
            combine: (value, place, order, copies),
            spread: (value, ends, order),
            collect: (value, ends),
        }[target]
        rows = rest if user.target not in _LOOKUPS else _stacked(meta_of(order).spec, rest)
        moved = _written(self.graph, target, args, rows, user)
        if rows.shape != spec.shape:
            return _written(self.graph, aten.reshape.default, (moved, list(spec.shape)), spec, user)
        if user.target in _WRITES and _adds(user) and not _is_zero(user.args[0]):
            return _written(self.graph, aten.add.Tensor, (user.args[0], moved), spec, user)
        return moved

    def _reshaped(self, user: fx.Node, value: Any, rows: TensorSpec, table: TensorSpec) -> fx.Node:
        """What is written, a row for each of the sorted ones."""
        wanted = _stacked(rows, table, meta_of(value).spec.dtype)
        if meta_of(value).spec.shape == wanted.shape:
            return value  # type: ignore[no-any-return]
        return _written(self.graph, aten.reshape.default, (value, list(wanted.shape)), wanted, user)


def _stacked(rows: TensorSpec, table: TensorSpec, dtype: torch.dtype | None = None) -> TensorSpec:
    """As many rows as ``rows`` has, each as those of ``table``."""
    shape = (rows.shape[0], *table.shape[1:])
    return TensorSpec(shape, dtype or table.dtype, (rows.symbolic[0], *table.symbolic[1:]))


def _written(graph: fx.Graph, target: Any, args: tuple[Any, ...], spec: TensorSpec, like: fx.Node) -> fx.Node:
    node = write_call(graph, target, args)
    node.meta.update(inherited_meta(like))
    set_meta(node, meta_of(like).having(specs=(spec,), multi_output=False))
    return node


# ---- lookups and writes --------------------------------------------------------------------------------------------


def _offsets(node: fx.Node) -> Any:
    """The ends of groups that a product of groups takes; None for other operators."""
    if str(node.target) not in _GROUPED:
        return None
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")


def _index(user: fx.Node) -> Any:
    """Where along the first dim alone a lookup or a write is; None for others."""
    if user.target in (aten.index.Tensor, aten.index_put.default):
        places = user.args[1]
        return places[0] if len(places) == 1 else None  # type: ignore[index, arg-type]
    if user.target in (*_LOOKUPS, *_WRITES) and user.args[1] == 0:
        return user.args[2]
    return None


def _is_by_row(user: fx.Node, index: fx.Node) -> bool:
    """Whether a place is that of a row: one for each, or repeated for all that the row holds."""
    places, table = meta_of(index).spec, meta_of(user.args[0]).spec  # type: ignore[arg-type]
    if user.target in (aten.gather.default, aten.scatter_add.default):
        return places.shape[1:] == table.shape[1:]
    return places.numel == places.shape[0]


def _put(user: fx.Node) -> Any:
    """What is written."""
    return user.args[2] if user.target is aten.index_put.default else user.args[3]


def _adds(user: fx.Node) -> bool:
    """Whether a write adds to what is there."""
    return user.target is not aten.index_put.default or (len(user.args) > 3 and bool(user.args[3]))


def _is_zero(table: Any) -> bool:
    if table.target is aten.full.default:
        return bool(table.args[1] == 0)
    return table.target in _ZEROS
