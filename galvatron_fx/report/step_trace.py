"""The step of a plan with one stage as a trace to open in Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import os
from collections.abc import Sequence

from galvatron_fx.ir.plan.prediction import LOCAL_CAUSES, MEMORY_KINDS
from galvatron_fx.ir.plan.search_report_table import cause_name
from galvatron_fx.report.trace_events import TraceEvents
from passes.simulation.step_timeline import MemoryTimeline, OperatorSpan

__all__ = ["step_trace", "write_step_trace"]

_OPERATORS = "operators"


def write_step_trace(spans: Sequence[OperatorSpan], memory: MemoryTimeline, path: str | os.PathLike[str]) -> None:
    """Write a trace in Chrome's trace-event format (JSON, microseconds) to ``path``, for Perfetto to open.

    Raises OSError.
    """
    step_trace(spans, memory).save(path)


def step_trace(spans: Sequence[OperatorSpan], memory: MemoryTimeline) -> TraceEvents:
    """The events of a step.

    Operators are one thread, each kind of collective with its axes another; an event has its block and direction as
    arguments, and a counter the bytes alive by kind.
    """
    lanes = [_OPERATORS, *dict.fromkeys(cause_name(s.cause) for s in spans if s.cause.kind not in LOCAL_CAUSES)]
    trace = TraceEvents()
    process = trace.process("a step of every rank", lanes)
    for span in spans:
        name = cause_name(span.cause)
        lane = lanes.index(_OPERATORS if span.cause.kind in LOCAL_CAUSES else name)
        arguments = {"block": span.block, "direction": span.phase}
        trace.span(process, lane, name, span.phase, span.start_s, span.end_s, arguments)
    for start_s, held in zip(memory.starts_s.tolist(), memory.size_bytes.tolist(), strict=True):
        trace.counter(process, "memory in bytes", start_s, dict(zip(MEMORY_KINDS, held, strict=True)))
    return trace
