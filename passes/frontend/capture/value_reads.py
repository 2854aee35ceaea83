"""What code wanted of a tensor's value when tracing stopped at it, and what to write instead."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from traceback import FrameSummary

__all__ = ["calls", "decides", "enclosing", "remedy_for_picks", "remedy_for_read", "remedy_for_shape"]

_LOG_IT = "return the tensor as one more output and print or log it after the step"
_BRANCH = (
    "compute both sides and choose by torch.where, decide by a Python value or a shape, or decide outside of forward"
)
_DRAW = (
    "; where a random number decides, as of layers that are dropped, set its probability to 0 (config.layerdrop = 0) "
    "and draw none then (`if p > 0 and torch.rand([]) < p`)"
)
_LOOP = "loop a fixed number of times and stop by torch.where, or move the loop out of forward"
_ASSERT = (
    "check the batch before the step, or write it as `if not torch.compiler.is_compiling(): assert ...`, which plain "
    "PyTorch still checks"
)
_NUMBER = (
    "compute with the tensor itself; return a value to log as one more output, and read it after the step; pass one "
    "that sets a size or a count as a Python number"
)
_EXPERTS = "of experts: sort their rows and multiply them in groups (torch.nn.functional.grouped_mm)"
_COUNTS = "keep what says how many rows there are of each kind as a tensor, and mask, or look up, all rows; " + _EXPERTS
_MASK = (
    "keep all rows and leave some out by torch.where(mask, x, 0), as in (x * mask).sum() / mask.sum(); "
    "x[mask] = value and masked_fill work as they are; " + _EXPERTS
)
_PLACES = "use the condition itself as a mask, with torch.where, or topk for a fixed number of places; " + _EXPERTS
# Operators whose result has a shape that depends on values: how people call them, and what to write instead.
_SHAPES = {
    "masked_select": _MASK,
    "nonzero": _PLACES,
    "unique": "list the distinct values where batches are made, and pass them as an input",
    "repeat_interleave": "give repeats as a Python number, or expand to a fixed length and mask what is too many",
    "bincount": "say how many classes there are: torch.bincount(x, minlength=classes)",
    "linalg_lstsq": "use torch.linalg.pinv(a) @ b",
}
_ANY_SHAPE = (
    "use an operator whose result has a fixed shape, or compute it where batches are made and pass it as an input"
)

_LISTS = ("tolist", "numpy", "split", "split_with_sizes")
_PRINTS = ("print", "log", "debug", "info", "warning", "format", "append", "write", "add_scalar", "update")
_LOOPS = (ast.While, ast.For, ast.comprehension)


def remedy_for_read(frame: FrameSummary) -> tuple[str, str]:
    """What the line of ``frame`` does with the value of a tensor, and what to do instead."""
    inside = list(enclosing(frame))
    if any(isinstance(node, ast.Assert) for node in inside):
        return "asserts something of the value of a tensor", _ASSERT
    if any(isinstance(node, ast.FormattedValue) or calls(node, _PRINTS) for node in inside):
        return "reads the value of a tensor to print or keep it", _LOG_IT
    if any(isinstance(node, _LOOPS) and decides(node, inside) for node in inside):
        return "loops by the value of a tensor", _LOOP
    if any(isinstance(node, (ast.If, ast.IfExp, ast.BoolOp)) and decides(node, inside) for node in inside):
        return "decides by the value of a tensor", _BRANCH + _DRAW * _draws(inside)
    if any(calls(node, _LISTS) for node in inside):
        return "turns the values of a tensor into Python numbers", _COUNTS
    return "turns the value of a tensor into a Python number", _NUMBER + _DRAW * _draws(inside)


def remedy_for_shape(operator: str, frame: FrameSummary) -> tuple[str, str]:
    """Why the result of an operator has no fixed shape at the line of ``frame``, and what to do instead."""
    what = f"makes a tensor whose shape depends on values ({operator})"
    indexed = any(isinstance(node, ast.Subscript) for node in enclosing(frame))
    if "nonzero" in operator and indexed:
        return "indexes by a mask, which makes a tensor whose shape depends on values", _MASK
    return what, next((remedy for name, remedy in _SHAPES.items() if name in operator), _ANY_SHAPE)


def remedy_for_picks() -> str:
    """What to write instead of rows that masks pick, where these are not those of one expert each."""
    return _PLACES


def enclosing(frame: FrameSummary) -> Iterator[ast.AST]:
    """The pieces of code around what ``frame`` runs, and that, outermost first; none where there is no source."""
    line, column = frame.lineno, getattr(frame, "colno", None)
    if line is None or column is None:
        return
    end = (frame.end_lineno, frame.end_colno) if frame.end_lineno and frame.end_colno else (line, column)
    try:
        pending: list[ast.AST] = [ast.parse("".join(linecache.getlines(frame.filename)))]
    except (SyntaxError, ValueError):  # code that was changed since, or never was a file
        return
    while pending:
        inside = [child for child in ast.iter_child_nodes(pending.pop()) if _holds(child, line, column, *end)]
        yield from inside
        pending += inside


def _holds(node: ast.AST, line: int, column: int, end_line: int, end_column: int) -> bool:
    if isinstance(node, ast.comprehension):
        return any(_holds(part, line, column, end_line, end_column) for part in (node.iter, *node.ifs))
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        return False
    ends: tuple[int, int] = last, node.end_col_offset  # type: ignore[attr-defined]
    begins = (first, node.col_offset)  # type: ignore[attr-defined]
    return begins <= (line, column) < ends and (end_line, end_column) <= ends


def _draws(inside: list[ast.AST]) -> bool:
    """Whether the function around it names something random."""
    around = next((node for node in reversed(inside) if isinstance(node, ast.FunctionDef)), None)
    named = ast.walk(around) if around is not None else ()
    return any("rand" in str(getattr(node, "attr", getattr(node, "id", ""))) for node in named)


def calls(node: ast.AST, names: tuple[str, ...]) -> bool:
    """Whether it is a call of a function or method by one of the names."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    return (called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")) in names


def decides(node: ast.AST, inside: list[ast.AST]) -> bool:
    """Whether the place lies in what ``node`` decides by, and not in what it does then."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        return node.test in inside or inside[-1] is node  # the truth of a call is asked by the statement
    if isinstance(node, ast.For):
        return node.iter in inside
    return isinstance(node, (ast.BoolOp, ast.comprehension))
