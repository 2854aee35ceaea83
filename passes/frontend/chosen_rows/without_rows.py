"""What code does that asks whether a mask chooses rows, where it chooses none: as its source shows it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import FrameSummary
from typing import Any, TypeGuard

from passes.frontend.capture.trace_errors import running_frame, summary_of
from passes.frontend.capture.value_reads import calls, decides, enclosing
from passes.frontend.chosen_rows.choice import RowTensor

__all__ = ["Span", "loops_by", "none_needed"]

_ADDS = (ast.Add, ast.Sub)
_ZEROS = ("zeros", "new_zeros", "zeros_like")
_ADDS_ROWS = ("index_add_", "index_copy_", "scatter_add_")
_JOINS = ("cat", "concat")


@dataclass(frozen=True)
class Span:
    """Code whose value has to be zero; or, of a sum, its ``term``, 0 or 1. ``place``: file, line, column, end line and
    end column.
    """

    place: tuple[Any, ...]
    term: int | None


def none_needed(keeps_rows: bool = False) -> tuple[Span, ...] | None:
    """What has to be zero where a mask chooses no rows, so that the code that asks now if it does may go on as if it
    does, as all else that hangs on it writes at the rows' places or computes what is read nowhere else; None where
    more hangs on it.

    ``keeps_rows``: what is computed of rows is known to be rows, as many: then code may put it together with others.
    """
    running = running_frame()
    frame = summary_of(running)
    inside = list(enclosing(frame))
    asking = [node for node in inside if isinstance(node, (ast.If, ast.IfExp)) and decides(node, inside)]
    functions = [node for node in inside if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    if len(asking) != 1 or not functions:
        return None
    values = running.f_locals if keeps_rows else None
    needed = _Asking(asking[0], functions[-1], inside, values).needed()
    return None if needed is None else tuple(_span(frame.filename, node, term) for node, term in needed)


def loops_by(frame: FrameSummary) -> bool:
    """Whether code loops for as long as what it asks at ``frame`` is so."""
    inside = list(enclosing(frame))
    return any(isinstance(node, ast.While) and decides(node, inside) for node in inside)


class _Asking:
    """An ``if`` of a function that asks whether there are rows. Statements and values need not know which way it goes:
    what has to be zero counts only where it was computed. ``values``: of names, where rows are kept as rows.
    """

    def __init__(
        self, node: ast.If | ast.IfExp, function: ast.AST, inside: Sequence[ast.AST], values: Mapping[str, Any] | None
    ) -> None:
        self.node, self.function, self.inside, self.values = node, function, inside, values
        self.everywhere = list(ast.walk(function))
        loops = (each.target for each in self.everywhere if isinstance(each, (ast.For, ast.comprehension)))
        self.no_rows = {"self", "torch", *(name for target in loops for name in _names(target))}
        self.rows = _names(node.test)
        if self.rows - {"torch"} <= self.no_rows:  # a loop over masks
            self.no_rows -= self.rows - {"torch", "self"}
        asked = [each for each in ast.walk(node.test) if isinstance(each, (ast.Name, ast.Compare))]
        self.counts = {each.id for each in (node.test, *(getattr(a, "left", a) for a in asked)) if _is_name(each)}
        assigned = [each for each in self.everywhere if isinstance(each, ast.Assign)]
        self.rows |= _names(*(each.value for each in assigned if _names(*each.targets) & self.rows))
        self.ends = {name: each.value for each in assigned for name in _names(*each.targets) if self._adds(each.value)}

    def needed(self) -> _Needed | None:
        """What has to be zero; None where that is not enough."""
        node = self.node
        if isinstance(node, ast.IfExp):
            named = [self.values.get(each.id) for each in (node.body, node.orelse) if self.values and _is_name(each)]
            if any(isinstance(value, RowTensor) for value in named):
                return []  # layer(rows) if there are any else rows
            return _the_other(node.body, node.orelse)
        if node.orelse:
            return self._either(node.body, node.orelse)
        if isinstance(node.body[-1], ast.Return):
            is_outermost = node in getattr(self.function, "body", ())
            return self._either(node.body, self._behind()) if is_outermost else None
        passes_over = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
        guarded = self._behind() if passes_over else node.body
        return self._done(guarded, guarded)

    def _behind(self) -> list[ast.stmt]:
        """What follows in the block that the statement stands in."""
        blocks: list[Any] = [getattr(outer, name, []) for outer in self.inside for name in ("body", "orelse")]
        block: list[Any] = next((b for b in blocks if isinstance(b, list) and self.node in b), [self.node])
        return block[block.index(self.node) + 1 :]

    def _either(self, one: Sequence[ast.stmt], other: Sequence[ast.stmt]) -> _Needed | None:
        """Of two ways, one of which makes zero of what the other computes."""
        if not one or not other:
            return None
        (*first, last), (*second, ends) = one, other
        if isinstance(last, ast.Assign) and isinstance(ends, ast.Assign):
            is_same = [ast.dump(target) for target in last.targets] == [ast.dump(target) for target in ends.targets]
        else:
            is_same = isinstance(last, ast.Return) and isinstance(ends, ast.Return)
        values = _computed(last, first), _computed(ends, second)
        needed = _the_other(*values) if is_same else None
        before = [self._done(first, one), self._done(second, other)]
        if needed is None or any(each is None for each in before):
            return None
        return [*needed, *(span for each in before for span in each or ())]

    def _done(self, statements: Sequence[ast.stmt], own: Sequence[ast.stmt]) -> _Needed | None:
        """Of statements; what they compute in names may be read among ``own``."""
        inner = {node for each in own for node in ast.walk(each)}
        elsewhere = [node for node in self.everywhere if _is_name(node) and node not in inner and _reads(node)]
        needed: _Needed = []
        for statement in statements:
            if isinstance(statement, (ast.If, ast.With)):  # whichever way it goes
                terms = self._done([*statement.body, *getattr(statement, "orelse", ())], own)
            else:
                terms = self._terms(statement, {node.id for node in elsewhere})
            if terms is None and not self._appends_rows(statement, elsewhere):
                return None
            needed += terms or []
        return needed

    def _terms(self, statement: ast.stmt, read_elsewhere: set[str]) -> _Needed | None:
        """What has to be zero for a statement to change nothing but places of rows and names that nothing else reads;
        None where that is not enough.
        """
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if isinstance(statement, (ast.Assign, ast.AugAssign)) and all(
            isinstance(target, ast.Subscript) and self._is_at_rows(target.slice) for target in targets
        ):
            return []
        if isinstance(statement, ast.AugAssign):
            if not isinstance(statement.op, _ADDS):
                return None
            return [] if self._is_count(statement.value) else [(statement, 1)]
        if isinstance(statement, ast.Assign):
            if any(isinstance(target, (ast.Subscript, ast.Attribute)) for target in targets):
                return None
            if _names(*targets) & read_elsewhere:
                (name,) = names if len(names := _names(*targets)) == 1 else ("",)
                return [] if self._is_end(name, statement.value) else _added(name, statement.value)
            self.rows |= _names(*targets)
            return []
        call = statement.value if isinstance(statement, ast.Expr) else None
        adds = isinstance(call, ast.Call) and calls(call, _ADDS_ROWS) and len(call.args) > 1
        return [] if adds and self._is_at_rows(call.args[1]) else None  # type: ignore[union-attr]

    def _is_at_rows(self, index: ast.AST) -> bool:
        names = _names(index)
        return bool(names & (self.rows - self.no_rows)) and not names & (self.no_rows - {"torch"})

    def _is_count(self, value: ast.AST) -> bool:
        return _is_name(value) and value.id in self.counts

    def _adds(self, value: ast.AST) -> bool:
        """``start + count``."""
        is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
        return is_sum and _is_name(value.left) and self._is_count(value.right)  # type: ignore[attr-defined]

    def _is_end(self, name: str, value: ast.AST) -> bool:
        """``start = end``, where ``end = start + count``."""
        return _is_name(value) and value.id in self.ends and name in _names(self.ends[value.id])

    def _appends_rows(self, statement: ast.stmt, elsewhere: Sequence[ast.Name]) -> bool:
        """``parts.append(rows)``, of a list that is put together again."""
        call = statement.value if isinstance(statement, ast.Expr) and self.values is not None else None
        if not isinstance(call, ast.Call) or not calls(call, ("append",)):
            return False
        if not _names(*call.args) & {*self.rows, *self.ends}:
            return False
        joined = {node for call in self.everywhere if calls(call, _JOINS) for node in ast.walk(call)}
        tests = (each.test for each in self.everywhere if isinstance(each, (ast.If, ast.IfExp)))
        joined |= {node for test in tests if calls(test, ("len",)) for node in ast.walk(test)}
        (name,) = _names(call.func) or ("",)
        return all(node in joined for node in elsewhere if node.id == name)


_Needed = list[tuple[ast.AST, "int | None"]]


def _the_other(one: ast.AST | None, other: ast.AST | None) -> _Needed | None:
    """Of two values one of which is zero, the other."""
    if one is None or other is None or not (_is_zero(one) or _is_zero(other)):
        return None
    return [(one if _is_zero(other) else other, None)]


def _computed(statement: ast.stmt, before: Sequence[ast.stmt]) -> ast.AST | None:
    """The value of a statement, or, if that is a name, what statements before it put there."""
    value: ast.AST | None = getattr(statement, "value", None)
    if not _is_name(value):
        return value
    named = [each.value for each in before if isinstance(each, ast.Assign) and _names(*each.targets) == {value.id}]
    return named[-1] if named else None


def _added(name: str, value: ast.AST) -> _Needed | None:
    """What is added to ``name``."""
    needed: _Needed = []
    while isinstance(value, ast.BinOp) and isinstance(value.op, _ADDS):
        is_last = _is_name(value.right) and value.right.id == name and isinstance(value.op, ast.Add)
        needed.append((value, 0 if is_last else 1))
        value = value.right if is_last else value.left
    return needed if _is_name(value) and value.id == name else None


def _is_zero(value: ast.AST) -> bool:
    """Whether a value is zero, whatever the names in it hold."""
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float) and not value.value
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return _is_zero(value.left) or _is_zero(value.right)
    if calls(value, ("tensor",)):
        return bool(value.args) and _is_zero(value.args[0])  # type: ignore[attr-defined]
    if calls(value, ("sum", "mean", "to")):
        inner = getattr(value.func, "value", None)  # type: ignore[attr-defined]
        return inner is not None and _is_zero(inner)
    return calls(value, _ZEROS)


def _is_name(node: ast.AST | None) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name)


def _reads(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _names(*nodes: ast.AST) -> set[str]:
    return {inner.id for node in nodes for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _span(filename: str, node: Any, term: int | None) -> Span:
    return Span((filename, node.lineno, node.col_offset, node.end_lineno, node.end_col_offset), term)
