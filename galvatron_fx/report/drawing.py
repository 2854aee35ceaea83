"""Pictures as lists of shapes, which a page shows as inline SVG and :mod:`galvatron_fx.report.pictures` draws.

Lengths are in CSS pixels, y goes down, colours are names of :data:`galvatron_fx.report.palette.COLOURS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10
from typing import TypeAlias

from galvatron_fx.ir.plan.units import format_seconds

__all__ = ["NARROW_WIDTH", "WIDTH", "Band", "Boxes", "Line", "Picture", "Rect", "Shape", "Text", "TimeAxis"]
__all__ += ["fitting", "text_width", "ticks"]

WIDTH = 1080.0
NARROW_WIDTH = 380.0
"""Of the same pictures on a screen that is narrow."""
_NARROW = 700.0
_LETTER = 0.6  # of the size: how wide a letter of a sans-serif font is, with room to spare


@dataclass(frozen=True)
class Rect:
    """A box; ``title`` is what a pointer on it shows."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


@dataclass(frozen=True)
class Boxes:
    """Many boxes of one colour and height, each with its left end and its width; ``lane``: the name of their row."""

    y: float
    height: float
    spans: tuple[tuple[float, float], ...]
    fill: str
    lane: str = ""


@dataclass(frozen=True)
class Band:
    """What lies between two stepped lines: from ``xs[i]`` to ``xs[i + 1]`` it reaches from ``lower[i]`` up to
    ``upper[i]``; a pixel stands for ``pixel`` bytes.
    """

    xs: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    fill: str
    title: str = ""
    pixel: float = 0.0

    @property
    def corners(self) -> list[tuple[float, float]]:
        """The outline."""
        top = [(x, y) for i, y in enumerate(self.upper) for x in (self.xs[i], self.xs[i + 1])]
        bottom = [(x, y) for i, y in enumerate(self.lower) for x in (self.xs[i], self.xs[i + 1])]
        return top + bottom[::-1]


@dataclass(frozen=True)
class Line:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str = "rule"
    width: float = 1.0
    is_dashed: bool = False


@dataclass(frozen=True)
class Text:
    """A line of text; ``y`` is its middle, ``anchor`` "start", "middle" or "end" says what ``x`` is."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = "ink"
    size: float = 12.0
    is_bold: bool = False


Shape: TypeAlias = Rect | Boxes | Band | Line | Text


@dataclass(frozen=True)
class TimeAxis:
    """Where a picture shows seconds: from 0 at ``left`` to ``end_s`` at ``right``, down to ``bottom``."""

    left: float
    right: float
    bottom: float
    end_s: float

    def holds(self, x: float, end: float, y: float) -> bool:
        """Whether a shape from ``x`` to ``end`` that begins at ``y`` is of what happens."""
        return self.left - 0.5 <= x and end <= self.right + 0.5 and y < self.bottom + 5


@dataclass
class Picture:
    """Shapes, later ones over earlier ones; ``title`` says in a sentence what is to be seen.

    ``time``: of pictures over time, which a page lets people look at closely.
    """

    title: str
    height: float = 0.0
    width: float = WIDTH
    shapes: list[Shape] = field(default_factory=list)
    time: TimeAxis | None = None

    @property
    def is_wide(self) -> bool:
        """Whether there is room beside what is drawn: on a desk, not on a telephone."""
        return self.width > _NARROW

    @property
    def labels(self) -> float:
        """Room at the left for names of rows."""
        return 132.0 if self.is_wide else 96.0

    @property
    def margin(self) -> float:
        """Room at the right for amounts of rows."""
        return 84.0 if self.is_wide else 48.0

    def add(self, *shapes: Shape) -> None:
        """Draw over what is there."""
        self.shapes += shapes

    def legend(self, colours: Iterable[str], names: Mapping[str, str] | None = None) -> None:
        """Explain colours by their ``names``, else by what they are called, in as many lines as it takes, below what is
        there.
        """
        left = x = self.labels if self.is_wide else 0.0
        self.height += 10
        for colour in colours:
            name = colour if names is None else names.get(colour, colour)
            needed = 18 + text_width(name, 12) + 18
            if left + needed > self.width and left > x:
                left, self.height = x, self.height + 20
            self.add(Rect(left, self.height + 3, 12, 12, colour), Text(left + 18, self.height + 9, name))
            left += needed
        self.height += 22

    def scale(
        self, left: float, right: float, top: float, most: float, write: Callable[[float], str], what: str
    ) -> Callable[[float], float]:
        """Rule an axis from 0 to ``most`` below what is there, with lines up to ``top``; returns where amounts lie."""

        def place(amount: float) -> float:
            return left + (right - left) * amount / most if most else left

        bottom = self.height
        lines: list[Shape] = []
        for tick in ticks(most, 6 if self.is_wide else 3):
            lines.append(Line(place(tick), top, place(tick), bottom + 4))
            self.add(Text(place(tick), bottom + 14, write(tick), "middle", "muted", 11))
        self.add(Text(right, bottom + 32, what, "end", "muted", 11))
        self.shapes[:0] = lines
        self.height += 42
        return place

    def time_scale(self, right: float, top: float, end_s: float) -> Callable[[float], float]:
        """As :meth:`scale`, of the seconds of a step, from the labels to ``right``."""
        self.time = TimeAxis(self.labels, right, self.height, end_s)
        return self.scale(self.labels, right, top, end_s, format_seconds, "time in the step")


def ticks(most: float, count: int = 6) -> list[float]:
    """About ``count`` round numbers from 0 to ``most``."""
    if not most > 0:
        return [0.0]
    rough = most / count
    power = 10.0 ** floor(log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    return [step * i for i in range(floor(most / step * (1 + 1e-9)) + 1)]


def text_width(text: str, size: float) -> float:
    """How wide a text is at most, about."""
    return _LETTER * size * len(text)


def fitting(text: str, size: float, width: float) -> str:
    """The text, or so much of it as has room."""
    letters = int(width / (_LETTER * size))
    return text if len(text) <= letters else text[: max(1, letters - 1)].rstrip() + "…"


def merged(spans: Sequence[tuple[float, float]], gap: float) -> tuple[tuple[float, float], ...]:
    """Spans (start, end), ascending, as (start, width), those less than ``gap`` apart in one."""
    runs: list[list[float]] = []
    for start, end in spans:
        if runs and start - runs[-1][1] < gap:
            runs[-1][1] = max(end, runs[-1][1])
        else:
            runs.append([start, end])
    return tuple((start, end - start) for start, end in runs)
