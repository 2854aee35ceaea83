"""Traces in Chrome's trace-event format (Google's "Trace Event Format", JSON), for Perfetto to open."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from galvatron_fx.ir.plan.plan_json import write

__all__ = ["TraceEvents", "TraceProcess"]


@dataclass(frozen=True)
class TraceProcess:
    """A group of lanes: its number, and those of its lanes in order."""

    number: int
    lanes: tuple[int, ...]


@dataclass
class TraceEvents:
    """The events of one trace; processes, which are groups of lanes, stand in the order in which they are added."""

    events: list[dict[str, object]] = field(default_factory=list)
    _used: int = 0

    def process(self, name: str, lanes: Sequence[str]) -> TraceProcess:
        """Add a group of lanes.

        No number is given twice: Perfetto takes threads of one number for one thread, whatever their processes, and a
        thread that has its process's for the main one.
        """
        process = TraceProcess(self._used + 1, tuple(range(self._used + 2, self._used + 2 + len(lanes))))
        self._used += 1 + len(lanes)
        self._describe("process", process.number, process.number, name)
        for lane, title in zip(process.lanes, lanes, strict=True):
            self._describe("thread", process.number, lane, title)
        return process

    def span(
        self,
        process: TraceProcess,
        lane: int,
        name: str,
        category: str,
        start_s: float,
        end_s: float,
        args: Mapping[str, object],
    ) -> None:
        """Add what lane number ``lane`` of ``process`` does from ``start_s`` to ``end_s``.

        Times are whole nanoseconds, and a nanosecond stays free behind: readers round to those, and drop an event that
        begins before the last one ends.
        """
        start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
        self.events.append(
            {
                "ph": "X",
                "pid": process.number,
                "tid": process.lanes[lane],
                "name": name,
                "cat": category,
                "ts": start_ns / 1e3,
                "dur": max(end_ns - start_ns - 1, 0) / 1e3,
                "args": dict(args),
            }
        )

    def counter(self, process: TraceProcess, name: str, at_s: float, values: Mapping[str, object]) -> None:
        """Add what counters of ``process`` stand at from ``at_s`` on."""
        event = {"ph": "C", "pid": process.number, "name": name, "ts": round(at_s * 1e9) / 1e3, "args": dict(values)}
        self.events.append(event)

    def to_json(self) -> str:
        """The trace as text."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": self.events}, allow_nan=False) + "\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace; raises OSError."""
        write(path, self.to_json())

    def _describe(self, what: str, process: int, number: int, name: str) -> None:
        at = {"ph": "M", "pid": process, "tid": number}
        self.events.append({**at, "name": f"{what}_name", "args": {"name": name}})
        self.events.append({**at, "name": f"{what}_sort_index", "args": {"sort_index": number}})
