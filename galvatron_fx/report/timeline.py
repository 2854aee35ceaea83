"""The timeline of a pipelined step, as a picture and as a trace to open in Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.schedule import KINDS, Action
from galvatron_fx.report.trace_events import TraceEvents

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_timeline", "write_trace"]

Rows = ScheduleReport | Mapping[str, ScheduleReport]
Colour = tuple[float, float, float]

_NAMES = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}
_COLOURS = {"F": (0.22, 0.42, 0.69), "B": (0.20, 0.55, 0.33), "I": (0.90, 0.55, 0.10), "W": (0.55, 0.35, 0.64)}
_IDLE_COLOUR = "0.94"
_SUFFIXES = (".png", ".svg")
_WIDTH_INCH = 14.0
_ROW_INCH = 0.34
_FONT_POINTS = 7.0
# Digits of DejaVu Sans are 0.64 of the font size wide; half a point of room is at both sides.
_DIGIT_POINTS = 0.64 * _FONT_POINTS
_ROOM_POINTS = 1.0
_POINTS_PER_INCH = 72.0
# The lightest box is mixed with so much white.
_MOST_WHITE = 0.6


def draw_timeline(rows: Rows, path: str | os.PathLike[str]) -> None:
    """Draw what every pipeline rank does when, as PNG or SVG by the suffix of ``path``.

    ``rows`` is one report, or several by title ("predicted", "measured"), which are stacked over one time axis in
    milliseconds. A box is an action, with its micro-batch where it fits; later stages of a rank are lighter. At
    the right stands the share of the step that a rank is idle. Equal reports give equal files.

    Raises InputError for another suffix, no reports, and where matplotlib is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise InputError(f"a timeline is drawn as {' or '.join(_SUFFIXES)}, and {os.fspath(path)} has neither suffix")
    reports = _titled(rows)
    figure = new_figure(_WIDTH_INCH, 0.9 + sum(_heights(reports)) * _ROW_INCH, "constrained")
    step_s = max(report.step_s for report in reports.values())
    axes = figure.subplots(len(reports), 1, squeeze=False, sharex=True, height_ratios=_heights(reports))
    for (title, report), row in zip(reports.items(), axes[:, 0], strict=True):
        _draw_report(row, title, report, step_s)
    axes[-1, 0].set_xlabel("time in ms", fontsize=_FONT_POINTS + 2)
    _draw_legend(figure, reports)
    save_figure(figure, path, suffix)


def write_trace(rows: Rows, path: str | os.PathLike[str]) -> None:
    """Write a trace in Chrome's trace-event format (JSON, microseconds) to ``path``, for Perfetto to open.

    Every report of ``rows`` (see :func:`draw_timeline`) is a process and every pipeline rank a thread in it; an event
    is an action, with its stage and micro-batch as arguments. Raises InputError for no reports, and OSError.
    """
    trace = TraceEvents()
    for title, report in _titled(rows).items():
        process = trace.process(title, [f"rank {rank}" for rank in range(report.schedule.num_ranks)])
        for span in report.spans:
            action = span.action
            told = {"stage": action.stage, "microbatch": action.microbatch}
            trace.span(process, span.rank, str(action), _NAMES[action.kind], span.start_s, span.end_s, told)
    trace.save(path)


def _titled(rows: Rows) -> dict[str, ScheduleReport]:
    reports = {rows.schedule.name: rows} if isinstance(rows, ScheduleReport) else dict(rows)
    if not reports:
        raise InputError("no reports to show; give one, or several by title")
    return reports


def new_figure(width_inch: float, height_inch: float, layout: str | None = None) -> Figure:
    """Make a figure apart from what other code draws; raises InputError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(f"a picture is drawn with matplotlib, and there is none here: {error}; install it") from error
    return Figure(figsize=(width_inch, height_inch), layout=layout)  # type: ignore[arg-type]


def _heights(reports: Mapping[str, ScheduleReport]) -> list[float]:
    """Return the height of each report in rows: its ranks, and some for title and axis."""
    return [report.schedule.num_ranks + 1.5 for report in reports.values()]


def _draw_report(axes: Axes, title: str, report: ScheduleReport, step_s: float) -> None:
    ranks = report.schedule.num_ranks
    # The axes take about five sixths of the figure; the rest is for the labels at both sides.
    points_per_s = _WIDTH_INCH * 5 / 6 * _POINTS_PER_INCH / step_s if step_s else 0.0
    _draw_boxes(axes, report, points_per_s)
    _draw_numbers(axes, report, points_per_s)
    for rank, idle_s in enumerate(report.idle_s):
        share = idle_s / report.step_s if report.step_s else 0.0
        axes.text(
            1.008,
            rank,
            f"{share:.1%} idle",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=_FONT_POINTS + 1,
        )
    axes.set_title(f"{title}: {report.step_s * 1e3:.4g} ms", loc="left", fontsize=_FONT_POINTS + 3)
    axes.set_xlim(0, step_s * 1e3 or 1.0)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)], fontsize=_FONT_POINTS + 1)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=_FONT_POINTS + 1)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_boxes(axes: Axes, report: ScheduleReport, points_per_s: float) -> None:
    """Draw one collection per rank, so that thousands of boxes stay quick, over a bar for the idle time."""
    mean_points = points_per_s * sum(report.busy_s) / len(report.spans)
    for rank in range(report.schedule.num_ranks):
        axes.barh(rank, report.step_s * 1e3, height=0.84, color=_IDLE_COLOUR)
        spans = [span for span in report.spans if span.rank == rank]
        axes.broken_barh(
            [(span.start_s * 1e3, (span.end_s - span.start_s) * 1e3) for span in spans],
            (rank - 0.42, 0.84),
            facecolors=[_colour(report, span.action) for span in spans],
            edgecolor="white",
            linewidth=min(0.5, 0.05 * mean_points),
        )


def _draw_numbers(axes: Axes, report: ScheduleReport, points_per_s: float) -> None:
    """Write the micro-batch into every box that is wide enough for it."""
    for span in report.spans:
        text = str(span.action.microbatch)
        if (span.end_s - span.start_s) * points_per_s < len(text) * _DIGIT_POINTS + _ROOM_POINTS:
            continue
        axes.text(
            (span.start_s + span.end_s) / 2 * 1e3,
            span.rank,
            text,
            ha="center",
            va="center_baseline",
            fontsize=_FONT_POINTS,
            color="white" if _whiteness(report, span.action) < _MOST_WHITE / 2 else "black",
        )


def _whiteness(report: ScheduleReport, action: Action) -> float:
    """Return 0 for the first stage of a rank, up to ``_MOST_WHITE`` for the last."""
    stages = report.schedule.stages_of(report.schedule.rank_of_stage[action.stage])
    return _MOST_WHITE * stages.index(action.stage) / max(1, len(stages) - 1)


def _colour(report: ScheduleReport, action: Action) -> Colour:
    return _lighter(_COLOURS[action.kind], _whiteness(report, action))


def _lighter(colour: Colour, white: float) -> Colour:
    red, green, blue = ((1 - white) * part + white for part in colour)
    return red, green, blue


def _draw_legend(figure: Figure, reports: Mapping[str, ScheduleReport]) -> None:
    """Explain the kinds that occur, in one line at the top right."""
    from matplotlib.patches import Patch

    used = {span.action.kind for report in reports.values() for span in report.spans}
    handles = [Patch(facecolor=_COLOURS[kind], label=_NAMES[kind]) for kind in KINDS if kind in used]
    if any(report.schedule.num_stages > report.schedule.num_ranks for report in reports.values()):
        handles.append(Patch(facecolor=_lighter(_COLOURS["F"], _MOST_WHITE), label="lighter: later stages of a rank"))
    handles.append(Patch(facecolor=_IDLE_COLOUR, label="idle"))
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), frameon=False, fontsize=8)


def save_figure(figure: Figure, path: str | os.PathLike[str], suffix: str) -> None:
    """Save without dates and random identifiers."""
    from matplotlib import rc_context

    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    with rc_context({"svg.hashsalt": "galvatron-fx"}):
        figure.savefig(path, format=suffix[1:], dpi=150, metadata=metadata)
