"""What a subcommand hands back, and predictions as plain JSON values."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any

from galvatron_fx.cli.exits import OK

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.prediction import RankUse
    from galvatron_fx.ir.plan.search_report import Contender, SearchReport
    from galvatron_fx.report.progress import SearchProgress, StepsProgress

__all__ = ["SILENT", "Result", "describe_cluster", "progress", "ranks_document", "report_document", "steps"]


@dataclass(frozen=True)
class Result:
    """``text`` for people, ``document`` for ``--json``, and the code to exit with."""

    text: str
    document: dict[str, Any] = field(default_factory=dict)
    exit_code: int = OK


SILENT = Result("")
"""What a rank hands back that leaves the telling to another."""


def progress() -> AbstractContextManager[SearchProgress]:
    """One line on stderr, where that is a terminal; stdout stays clean."""
    from rich.console import Console

    from galvatron_fx.report.progress import SearchProgress

    return SearchProgress(Console(stderr=True))


def steps() -> AbstractContextManager[StepsProgress]:
    """A bar on stderr, where that is a terminal."""
    from rich.console import Console

    from galvatron_fx.report.progress import StepsProgress

    return StepsProgress(Console(stderr=True))


def describe_cluster(cluster: Cluster) -> str:
    """Return a line that says what the cluster is."""
    from galvatron_fx.ir.cluster.cluster_table import describe

    return f"cluster  {describe(cluster)}"


def report_document(report: SearchReport) -> dict[str, Any]:
    """The report of a search; what is infinite or unknown is None."""
    rates = report.throughput
    return {
        "simulated_s": report.simulated_s,
        "bound_s": report.bound_s,
        "tokens_per_s": rates.per_s(report.simulated_s) if rates is not None and rates.tokens else None,
        "mfu": rates.mfu(report.simulated_s) if rates is not None else None,
        "budget_bytes": report.budget_bytes,
        "is_memory_bound": report.is_memory_bound,
        "is_cut_short": report.is_cut_short,
        "bottleneck": report.bottleneck,
        "ranks": ranks_document(report.ranks),
        "chosen": _contender(report.chosen),
        "runners_up": [_contender(contender) for contender in report.runners_up],
        "counts": dict(report.counts),
        "seconds": dict(report.seconds),
    }


def ranks_document(ranks: Iterable[RankUse]) -> list[dict[str, Any]]:
    """Seconds by cause and bytes by kind of every pipeline rank."""
    return [
        {
            "stages": list(use.stages),
            "seconds": [
                {"cause": cause.kind, "axes": list(cause.axes), "seconds": seconds}
                for cause, seconds in use.seconds.items()
            ],
            "hidden": [
                {"cause": cause.kind, "axes": list(cause.axes), "seconds": seconds}
                for cause, seconds in use.hidden.items()
            ],
            "memory_bytes": dict(use.memory),
        }
        for use in ranks
    ]


def _contender(contender: Contender) -> dict[str, Any]:
    return {**vars(contender), "time_s": contender.time_s if isfinite(contender.time_s) else None}
