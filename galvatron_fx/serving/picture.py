"""Ways to serve as a picture: latencies from the median to the 99th percentile, and tokens a second."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from galvatron_fx.figures import new_figure
from galvatron_fx.ir.plan.units import format_seconds
from galvatron_fx.serving.points import ServingPoint

_MOST_ROWS = 24
_COLUMNS = {"ttft": "to the first token", "gap": "between tokens", "e2e": "from arrival to the last token"}
# Okabe and Ito (2008): colours that people tell apart however they see colours.
_COLOURS = {"prefill_first": "#D55E00", "mixed": "#0072B2", "chunked": "#009E73"}


def draw(points: Sequence[ServingPoint], path: str | os.PathLike[str]) -> None:
    """Draw a row for each point that serves the trace, the best at the top, at most 24; a line from the 50th to the
    99th percentile with a dot at the 90th. Raises InputError where matplotlib is missing.
    """
    rows = [point for point in points if point.fits][:_MOST_ROWS]
    figure = new_figure(15.0, 1.6 + 0.34 * max(1, len(rows)))
    figure.set_layout_engine("constrained")
    axes = figure.subplots(1, len(_COLUMNS) + 1, sharey=True)
    for chart, (metric, title) in zip(axes, _COLUMNS.items(), strict=False):
        for place, point in enumerate(rows):
            _percentiles(chart, place, point, metric)
        _log_seconds(chart)
        chart.set_title(title, fontsize=10)
    rate = axes[-1]
    rate.barh(
        range(len(rows)), [p.tokens_per_s or 0 for p in rows], color=[_COLOURS[p.policy] for p in rows], height=0.6
    )
    rate.set_title("tokens a second", fontsize=10)
    for chart in axes:
        chart.grid(axis="x", alpha=0.3)
        chart.set_axisbelow(True)
    axes[0].set_yticks(range(len(rows)), [_name(point) for point in rows], fontsize=8)
    axes[0].set_ylim(len(rows) - 0.5, -0.5)
    axes[0].set_xlabel("p50 ─●─ p99, with a dot at p90", fontsize=8)
    figure.savefig(path, dpi=110)


def _log_seconds(chart: Any) -> None:
    """A logarithmic scale whose marks are 1, 2 and 5 of each power of ten, as people write times."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    chart.set_xscale("log")
    chart.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    chart.xaxis.set_minor_locator(NullLocator())
    chart.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    chart.tick_params(axis="x", labelsize=8)


def _percentiles(chart: Any, place: int, point: ServingPoint, metric: str) -> None:
    low, middle, high = (getattr(point, f"{metric}_p{percent}_s") for percent in (50, 90, 99))
    if not high:
        return  # no request makes two tokens
    colour = _COLOURS[point.policy]
    chart.plot([low, high], [place, place], color=colour, linewidth=2, solid_capstyle="butt")
    chart.plot([middle], [place], "o", color=colour, markersize=5)


def _name(point: ServingPoint) -> str:
    policy = point.policy.replace("_", " ") + (f" {point.chunk}" if point.chunk else "")
    return f"{point.plan}; {policy}{', halves' if point.halves else ''}"
