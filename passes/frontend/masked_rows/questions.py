"""What code asks of the rows that masks choose, while they are computed with as if there were some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.trace_again import RowsNotTaken
from passes.frontend.capture.trace_errors import calling_frame
from passes.frontend.chosen_rows.choice import RowCount, RowTensor
from passes.frontend.chosen_rows.functions import is_in_place
from passes.frontend.chosen_rows.without_rows import Span, loops_by, none_needed

__all__ = ["RowQuestions"]

_OF_ANY = ("mul", "multiply")
_OF_FIRST = (
    *("neg", "abs", "square", "sum", "mean", "to", "float", "double", "clone", "contiguous"),
    *("view", "reshape", "flatten", "squeeze", "unsqueeze", "expand"),
)
_QUOTIENTS = ("div", "divide")
_SUMS = ("add", "sub", "subtract", "rsub")
_JOINS = ("stack", "cat")


class Rooted(Protocol):
    """A mask's choice: ``mask[R]`` says which rows, and ``root`` is the choice that it repeats, or itself."""

    mask: Tensor

    @property
    def root(self) -> Rooted:
        """The choice that it repeats."""

    def refuse(self, what: str = "") -> NoReturn:
        """Raise that code does ``what``."""


class RowQuestions:
    """Code that asks whether a mask chooses rows goes on as if it does. Where more hangs on it than what is done to
    the rows, values have to be zero for that to be right without any; where they are not seen to be, outputs are nan.

    ``taken``: numbers of rows that were taken for sizes, by whom is not known yet; ``lines``: where more hangs on it;
    ``failures``: takes how often there were no rows, then.
    """

    def __init__(self, failures: list[Tensor]) -> None:
        self.taken: list[RowCount] = []
        self.lines: dict[str, None] = {}
        self._failures = failures
        self._zeros: dict[int, tuple[Tensor, Rooted]] = {}
        self._divisors: dict[int, Tensor] = {}
        self._needed: dict[tuple[Any, ...], tuple[Span, Rooted, Callable[[], None]]] = {}
        self._doubted: dict[int, Rooted] = {}

    def ask(self, choice: Rooted) -> None:
        """Note that the code that runs asks whether there are rows that it took before."""
        frame = calling_frame()
        if loops_by(frame):
            choice.refuse("loops for as long as a mask chooses rows")
        spans, line = none_needed(), f"{frame.filename}:{frame.lineno}"

        def doubt() -> None:
            self.lines.setdefault(line)
            self._doubted[id(choice.root)] = choice.root

        if spans is None:
            doubt()
        self._need(spans or (), choice, doubt)

    def need(self, spans: tuple[Span, ...], choice: Rooted) -> None:
        """Note what has to be zero where there are no rows, for code that has not taken them: else it is not told."""

        def refuse() -> None:
            raise RowsNotTaken

        self._need(spans, choice, refuse)

    def _need(self, spans: tuple[Span, ...], choice: Rooted, otherwise: Callable[[], None]) -> None:
        for span in spans:
            if span.place in self._needed and self._needed[span.place][1] is not choice.root:
                self._settle(span.place)
            self._needed[span.place] = span, choice.root, otherwise

    def _settle(self, place: tuple[Any, ...]) -> None:
        """Let what had to be zero in a place, and was not seen to be, be told of."""
        if place in self._needed:
            self._needed.pop(place)[2]()

    def is_zero(self, made: Tensor, choice: Rooted) -> Tensor:
        """Note that a sum over rows is zero where there are none."""
        self._zeros[id(made)] = made, choice.root
        return made

    def is_divisor(self, number: Tensor) -> Tensor:
        """Note that a number of rows is one where there are none."""
        self._divisors[id(number)] = number
        return number

    def note(self, made: Any, func: Any, name: str, args: Any, kwargs: Any) -> None:
        """See whether what a function made is zero without rows, and whether it has to be."""
        if self._zeros and isinstance(made, Tensor) and not isinstance(made, RowTensor):
            choice = self._zero_by(name, args, kwargs)
            if choice is not None:
                self._zeros[id(made)] = made, choice
            elif is_in_place(func):
                self._zeros.pop(id(made), None)
        if not self._needed:
            return
        frame = calling_frame()
        place = frame.filename, frame.lineno, frame.colno, frame.end_lineno, frame.end_colno
        if place not in self._needed:
            return
        span, choice, _ = self._needed[place]
        value = made
        if span.term is not None:
            terms = args[1::-1] if getattr(func, "__name__", "").startswith("__r") else args[:2]
            value = terms[span.term] if name in _SUMS and len(terms) == 2 else None
        if self._choice(value) is choice and kwargs.get("alpha") is None:
            del self._needed[place]

    def finish(self) -> None:
        """Count how many masks chose no rows where code would have done more than is known; raise RowsNotTaken where
        it took none.
        """
        for place in list(self._needed):
            self._settle(place)
        for choice in self._doubted.values():
            self._failures.append(choice.mask.any().logical_not().sum())

    def _choice(self, value: Any) -> Rooted | None:
        return self._zeros[id(value)][1] if id(value) in self._zeros else None

    def _divides(self, divisor: Any) -> bool:
        """Whether a divisor is no zero without rows: no number of them that code counted itself."""
        return not isinstance(divisor, Tensor) or divisor.requires_grad or id(divisor) in self._divisors

    def _zero_by(self, name: str, args: Any, kwargs: Any) -> Rooted | None:
        """The mask without whose rows the result of a function is zero."""
        given = [self._choice(leaf) for leaf in pytree.tree_leaves(args)]
        if not any(given):
            return None
        if name in _OF_ANY:
            return next(choice for choice in given if choice is not None)
        if name in _OF_FIRST or (name in _QUOTIENTS and self._divides(args[1])):
            return given[0]
        leaves = pytree.tree_leaves(args)
        terms = [leaf for leaf in leaves if isinstance(leaf, Tensor) or (name in _SUMS and leaf)]
        choices = {id(self._choice(term)) for term in terms}
        return self._choice(terms[0]) if name in (*_SUMS, *_JOINS) and len(choices) == 1 else None
