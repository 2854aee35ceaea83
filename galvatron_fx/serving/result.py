"""All that a simulation of serving found, as a table, files and a picture."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.units import format_seconds
from galvatron_fx.serving.picture import draw
from galvatron_fx.serving.points import ServingPoint
from galvatron_fx.table_files import csv_text, json_text, save_table

__all__ = ["Serving"]

_WIDTH = 160
_HEADINGS = (
    "plan", "policy", "tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "gap p99", "e2e p50", "p90", "p99", "busy",
    "cache", "why not",
)  # fmt: skip


@dataclass(frozen=True)
class Serving:
    """Every layout and policy, the best first; ``print`` it.

    ``subject``: the model, cluster and trace in words; ``rank_by``: the field of :class:`ServingPoint` that orders
    them; ``plans``: of each layout the plan of one replica, by the words of its point.
    """

    subject: str
    rank_by: str
    points: tuple[ServingPoint, ...]
    plans: Mapping[str, Plan] = field(repr=False)

    def __str__(self) -> str:
        """Return the table as plain text."""
        has_reasons = any(point.reason for point in self.points)
        count = len(_HEADINGS) - (not has_reasons)
        rows = [_row(point)[:count] for point in self.points]
        lines = text_table.render(_HEADINGS[:count], rows, 2, words=(len(_HEADINGS) - 1,), width=_WIDTH)
        return "\n".join(
            [
                self.subject,
                "",
                *lines,
                "",
                f"Ranked by {self.rank_by}. tokens/s: those that are made; TTFT: from arrival to the first of them;",
                "TPOT: a request's mean between two; gap: all times between two; e2e: from arrival to the last; busy:",
                "share of the time in which stages work; cache: most of the room for keys and values that was taken.",
            ]
        )

    @property
    def best(self) -> ServingPoint:
        """The first."""
        return self.points[0]

    def plan(self, point: ServingPoint) -> Plan:
        """The plan of one replica, for :func:`galvatron_fx.compile` on a mesh of ``stages * tensor`` devices."""
        return self.plans[point.plan]

    def to_csv(self) -> str:
        """Return a line for each point under a line of names; what is unknown is empty."""
        return csv_text(ServingPoint, self.points)

    def to_json(self) -> str:
        """Return the points as a JSON list of objects; what is unknown is null."""
        return json_text(self.points)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the points as JSON where ``path`` ends in .json, else as CSV; raises OSError."""
        save_table(path, ServingPoint, self.points)

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw latencies over throughput into ``path``, PNG or SVG by its ending; raises OSError."""
        draw(self.points, path)


def _row(point: ServingPoint) -> list[str]:
    def seconds(value: float | None) -> str:
        return "-" if value is None else format_seconds(value)

    latencies = [
        point.ttft_p50_s, point.ttft_p99_s, point.tpot_p50_s, point.tpot_p99_s, point.gap_p99_s, point.e2e_p50_s,
        point.e2e_p90_s, point.e2e_p99_s,
    ]  # fmt: skip
    policy = point.policy + (f" {point.chunk}" if point.chunk else "") + (", halves" if point.halves else "")
    return [
        point.plan,
        policy,
        "-" if point.tokens_per_s is None else f"{point.tokens_per_s:,.0f}",
        *map(seconds, latencies),
        "-" if point.busy is None else f"{point.busy:.0%}",
        "-" if point.cache_used is None else f"{point.cache_used:.0%}",
        point.reason,
    ]
