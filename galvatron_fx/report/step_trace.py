"""The step of a plan with one stage as a trace to open in Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from galvatron_fx.ir.plan_json import write
from galvatron_fx.ir.plan_report_table import cause_name
from galvatron_fx.ir.predicted import LOCAL_CAUSES, MEMORY_KINDS
from passes.search.memory_timeline import MemoryTimeline, OperatorSpan

__all__ = ["write_step_trace"]

_OPERATORS = "operators"


def write_step_trace(spans: Sequence[OperatorSpan], memory: MemoryTimeline, path: str | os.PathLike[str]) -> None:
    """Write a trace in Chrome's trace-event format (JSON, microseconds) to ``path``, for Perfetto to open.

    Operators are one thread, each kind of collective with its axes another; an event has its block and direction as
    arguments, and a counter the bytes alive by kind. Format as of :func:`galvatron_fx.report.timeline.write_trace`.
    Raises OSError.
    """
    lanes = [_OPERATORS, *dict.fromkeys(cause_name(s.cause) for s in spans if s.cause.kind not in LOCAL_CAUSES)]
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": "a step of every rank"}},
        *({"ph": "M", "pid": 0, "tid": i, "name": "thread_name", "args": {"name": n}} for i, n in enumerate(lanes)),
    ]
    for span in spans:
        name = cause_name(span.cause)
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": lanes.index(_OPERATORS if span.cause.kind in LOCAL_CAUSES else name),
                "name": name,
                "cat": span.phase,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"block": span.block, "direction": span.phase},
            }
        )
    for start_s, held in zip(memory.starts_s.tolist(), memory.size_bytes.tolist(), strict=True):
        sizes = dict(zip(MEMORY_KINDS, held, strict=True))
        events.append({"ph": "C", "pid": 0, "name": "memory in bytes", "ts": start_s * 1e6, "args": sizes})
    write(path, json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, allow_nan=False) + "\n")
