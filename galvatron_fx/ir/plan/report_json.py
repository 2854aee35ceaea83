"""The report of a search as JSON, in a file beside its plan: checked against ``report_schema.json``, never evaluated.

A report belongs to one plan, whose digest it names: beside any other it is not taken.
"""

from __future__ import annotations

import json
from dataclasses import fields
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.plan.prediction import MEMORY_KINDS, Cause, RankUse
from galvatron_fx.ir.plan.search_report import Contender, SearchReport
from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.ir.plan.tuning_report import TunedPlan, TuningReport
from galvatron_fx.ir.strict_json import MOST_BYTES, JsonFormat, read_text

if TYPE_CHECKING:
    import os

__all__ = ["read_report", "report_path", "write_report"]

_VERSION = 1
_FORMAT = JsonFormat(
    name="report",
    error=PlanError,
    schema_file="report_schema.json",
    version=_VERSION,
    too_long="a report of {size} characters; at most {most} are read: is it a report at all?",
    non_finite="{found} in the report, where a finite number was expected; search the plan again",
    other_version=f"report version {{found}}, where {_VERSION} was expected: search the plan again with this release",
    misfit="malformed report at {place}: {what}; remove the file, or search the plan again",
    nullable="a number",
)


def report_path(plan_path: str | os.PathLike[str]) -> Path:
    """Where the report of the plan at ``plan_path`` lies: ``plan.json`` has ``plan.report.json``."""
    path = Path(plan_path)
    return path.with_name(f"{path.name.removesuffix('.json')}.report.json")


def write_report(report: SearchReport, digest: str) -> str:
    """Return the report of the plan with this ``digest`` as JSON text."""
    tuning = report.tuning
    document = {
        **vars(report),
        "version": _VERSION,
        "plan": digest,
        "chosen": _contender(report.chosen),
        "runners_up": [_contender(contender) for contender in report.runners_up],
        "ranks": [_rank(use) for use in report.ranks],
        "with_more_memory": [[_finite(factor), seconds] for factor, seconds in report.with_more_memory.items()],
        "counts": dict(report.counts),
        "seconds": dict(report.seconds),
        "throughput": None if report.throughput is None else report.throughput.to_dict(),
        "tuning": None if tuning is None else {**vars(tuning), "plans": [vars(plan) for plan in tuning.plans]},
    }
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def read_report(plan_path: str | os.PathLike[str], digest: str) -> SearchReport | None:
    """Return the report beside the plan at ``plan_path``, None where there is none, or that of another plan.

    Raises PlanError, which names the file, for one that is no report.
    """
    path = report_path(plan_path)
    if not path.exists():
        return None
    text = read_text(path, "a report", MOST_BYTES, PlanError)
    try:
        document = _FORMAT.parse(text, MOST_BYTES)
        return _report(document) if document.pop("plan") == digest else None
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def _report(document: dict[str, Any]) -> SearchReport:
    del document["version"]
    tuning = document.pop("tuning")
    plans = () if tuning is None else tuple(TunedPlan(**{**p, "turns_s": tuple(p["turns_s"])}) for p in tuning["plans"])
    ranks = tuple(_use(rank) for rank in document.pop("ranks"))
    if not ranks or any(set(rank.memory) != set(MEMORY_KINDS) for rank in ranks):
        raise PlanError(f"malformed report at $.ranks: one or more with all of {', '.join(MEMORY_KINDS)} were expected")
    return SearchReport(
        **{
            **document,
            "chosen": _contender_of(document["chosen"]),
            "runners_up": tuple(_contender_of(contender) for contender in document["runners_up"]),
            "ranks": ranks,
            "with_more_memory": {inf if f is None else f: seconds for f, seconds in document["with_more_memory"]},
            "throughput": Throughput.from_dict(document["throughput"]),
            "tuning": None if tuning is None else TuningReport(**{**tuning, "plans": plans}),
        }
    )


def _contender(contender: Contender) -> dict[str, Any]:
    return {**{field.name: getattr(contender, field.name) for field in fields(contender)}} | {
        "time_s": _finite(contender.time_s)
    }


def _contender_of(document: dict[str, Any]) -> Contender:
    return Contender(**document | {"time_s": inf if document["time_s"] is None else document["time_s"]})


def _rank(use: RankUse) -> dict[str, Any]:
    return {
        "stages": list(use.stages),
        "seconds": [[cause.kind, list(cause.axes), seconds] for cause, seconds in use.seconds.items()],
        "memory": dict(use.memory),
        "hidden": [[cause.kind, list(cause.axes), seconds] for cause, seconds in use.hidden.items()],
        "host_bytes": use.host_bytes,
    }


def _use(document: dict[str, Any]) -> RankUse:
    def by_cause(entries: list[Any]) -> dict[Cause, float]:
        return {Cause(kind, tuple(axes)): seconds for kind, axes, seconds in entries}

    seconds, hidden = by_cause(document["seconds"]), by_cause(document["hidden"])
    return RankUse(tuple(document["stages"]), seconds, document["memory"], hidden, document.get("host_bytes", 0))


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
