"""The pictures of a plan as PNG or SVG files, drawn with matplotlib from the same shapes as the page's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron_fx.figures import new_figure
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.prediction import RankUse
from galvatron_fx.report import bars, timelines
from galvatron_fx.report.alternatives import Alternative
from galvatron_fx.report.drawing import Band, Boxes, Line, Picture, Rect, Shape, Text
from galvatron_fx.report.palette import COLOURS
from galvatron_fx.report.schedule_trace import ScheduleReports, titled
from passes.simulation.step_timeline import MemoryTimeline, OperatorSpan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "draw",
    "draw_alternatives",
    "draw_memory",
    "draw_memory_timeline",
    "draw_operators",
    "draw_roles",
    "draw_time",
    "draw_timeline",
]

_PER_INCH = 96.0  # CSS pixels
_POINTS = 72.0 / _PER_INCH
_MARGIN = 12.0

PathLike = str | os.PathLike[str]


def draw_roles(plan: Plan, path: PathLike) -> None:
    """Draw the role of every mesh axis in every block, as PNG or SVG by the suffix of ``path``.

    This and the functions below give equal files for equal arguments, and raise InputError for another suffix and
    where matplotlib is missing.
    """
    draw(bars.roles_picture(plan), path)


def draw_time(ranks: Sequence[RankUse], path: PathLike) -> None:
    """Draw the seconds of a step by cause, a bar for each pipeline rank: ``plan.report.ranks``."""
    draw(bars.time_picture(ranks), path)


def draw_memory(ranks: Sequence[RankUse], budget_bytes: int | None, path: PathLike) -> None:
    """Draw the bytes at the peak by kind, a bar for each pipeline rank, against the budget."""
    draw(bars.memory_picture(ranks, budget_bytes), path)


def draw_memory_timeline(timeline: Sequence[MemoryTimeline], budget_bytes: int | None, path: PathLike) -> None:
    """Draw the bytes alive by kind over a step, for each pipeline rank, against the budget."""
    draw(timelines.memory_timeline_picture(timeline, range(len(timeline)), budget_bytes), path)


def draw_timeline(reports: ScheduleReports, path: PathLike) -> None:
    """Draw what every pipeline rank does when: one report, or several by title, over one axis of time."""
    draw(timelines.schedule_picture(titled(reports)), path)


def draw_operators(spans: Sequence[OperatorSpan], step_s: float, path: PathLike) -> None:
    """Draw when the blocks, operators and collectives of a plan with one stage run."""
    draw(timelines.operators_picture(spans, step_s), path)


def draw_alternatives(alternatives: Sequence[Alternative], path: PathLike) -> None:
    """Draw the step times of the chosen plan and of those that lost."""
    draw(bars.alternatives_picture(alternatives), path)


def draw(picture: Picture, path: PathLike) -> None:
    """Draw any picture as PNG or SVG by the suffix of ``path``; raises InputError for another."""
    suffix = Path(path).suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"a picture is drawn as .png or .svg, and {os.fspath(path)} has neither suffix")
    width, height = picture.width + 2 * _MARGIN, picture.height + 2 * _MARGIN
    figure = new_figure(width / _PER_INCH, height / _PER_INCH)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(-_MARGIN, picture.width + _MARGIN)
    axes.set_ylim(picture.height + _MARGIN, -_MARGIN)
    axes.set_axis_off()
    for order, shape in enumerate(picture.shapes):
        _add(axes, shape, order)
    _save(figure, path, suffix)


def _add(axes: Axes, shape: Shape, order: int) -> None:
    if isinstance(shape, Rect):
        spans = [(shape.x, shape.width)]
        axes.broken_barh(spans, (shape.y, shape.height), facecolor=_colour(shape.fill), zorder=order)
    elif isinstance(shape, Boxes):
        axes.broken_barh(shape.spans, (shape.y, shape.height), facecolor=_colour(shape.fill), zorder=order)
    elif isinstance(shape, Band):
        xs, ys = zip(*shape.corners, strict=True)
        axes.fill(xs, ys, facecolor=_colour(shape.fill), linewidth=0, zorder=order)
    elif isinstance(shape, Line):
        style = (0, (4, 3)) if shape.is_dashed else "solid"
        points = [shape.x1, shape.x2], [shape.y1, shape.y2]
        axes.plot(*points, color=_colour(shape.colour), linewidth=shape.width * _POINTS, linestyle=style, zorder=order)
    else:
        _write(axes, shape, order)


def _write(axes: Axes, text: Text, order: int) -> None:
    axes.text(
        text.x,
        text.y,
        text.text,
        ha={"start": "left", "middle": "center", "end": "right"}[text.anchor],
        va="center_baseline",
        color=_colour(text.colour),
        # DejaVu Sans is wider than the fonts of browsers.
        fontsize=text.size * _POINTS * 0.92,
        fontweight="bold" if text.is_bold else "normal",
        parse_math=False,
        zorder=order,
    )


def _colour(name: str) -> str:
    return COLOURS[name][0]


def _save(figure: Figure, path: PathLike, suffix: str) -> None:
    """Save without dates and random identifiers."""
    from matplotlib import rc_context

    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "galvatron-fx"}):
        figure.savefig(path, format=suffix[1:], dpi=150, metadata=metadata)
