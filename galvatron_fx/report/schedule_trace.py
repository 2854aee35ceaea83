"""The schedule of a pipelined step as a trace to open in Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import os
from collections.abc import Mapping

from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.schedule import ACTION_NAMES
from galvatron_fx.report.trace_events import TraceEvents

__all__ = ["ScheduleReports", "schedule_trace", "titled", "write_trace"]

ScheduleReports = ScheduleReport | Mapping[str, ScheduleReport]
"""One report, or several by title ("predicted", "measured")."""


def write_trace(reports: ScheduleReports, path: str | os.PathLike[str]) -> None:
    """Write a trace in Chrome's trace-event format (JSON, microseconds) to ``path``, for Perfetto to open.

    Raises InputError for no reports, and OSError.
    """
    schedule_trace(reports).save(path)


def schedule_trace(reports: ScheduleReports) -> TraceEvents:
    """The events of schedules: every report is a process and every pipeline rank a thread in it.

    An event is an action, with its stage and micro-batch as arguments. Raises InputError for no reports.
    """
    trace = TraceEvents()
    for title, report in titled(reports).items():
        process = trace.process(title, [f"rank {rank}" for rank in range(report.schedule.num_ranks)])
        for span in report.spans:
            action = span.action
            arguments = {"stage": action.stage, "microbatch": action.microbatch}
            trace.span(process, span.rank, str(action), ACTION_NAMES[action.kind], span.start_s, span.end_s, arguments)
    return trace


def titled(reports: ScheduleReports) -> dict[str, ScheduleReport]:
    """The reports by title, one alone under its schedule's name. Raises InputError where there are none."""
    named = {reports.schedule.name: reports} if isinstance(reports, ScheduleReport) else dict(reports)
    if not named:
        raise InputError("no reports to show; give one, or several by title")
    return named
