"""The report of a search as tables of plain text, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean
from textwrap import wrap
from typing import TYPE_CHECKING, Protocol

from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.prediction import (
    ACCUMULATE,
    COMPUTE,
    HOST_COPIES,
    IDLE,
    MEMORY_KINDS,
    RECOMPUTE,
    STATE_COPIES,
    TRANSFER,
    UPDATE,
    Cause,
    RankUse,
)
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from galvatron_fx.ir.plan.search_report import Contender, SearchReport

__all__ = ["Simulated", "cause_name", "cause_order", "render", "render_use"]

# Then come collectives, then what is waited for.
_ORDER = (COMPUTE, RECOMPUTE, ACCUMULATE, UPDATE, STATE_COPIES, HOST_COPIES)
_LAST = (TRANSFER, IDLE)
_WIDTH = 100
_INDENT = 13
_MOST_COLUMNS = 6  # pipeline ranks that are shown
_MARKS = {"bound": ("≥ ", "bound"), "estimate": ("~ ", "estimate"), "searched": ("", "searched")}


class Simulated(Protocol):
    """A simulated step: its seconds, what takes them and the memory on every pipeline rank, and the busiest of them."""

    @property
    def simulated_s(self) -> float: ...

    @property
    def ranks(self) -> tuple[RankUse, ...]: ...

    @property
    def bottleneck(self) -> int: ...


def render(report: SearchReport) -> str:
    """Return what stands in a report in at most 100 columns; of many pipeline ranks some are shown."""
    lines = [
        "Why this plan",
        "",
        *_summary(report),
        "",
        *render_use(report),
        "",
        *text_table.render(
            ("plan", "stages", "schedule", "micro-batches", "step time", "slower by", "peak", "known by"),
            [_contender_row(report.chosen, None), *(_contender_row(c, report.chosen) for c in report.runners_up)],
            4,
        ),
        "",
        *_effort(report),
        *(["", str(report.tuning)] if report.tuning is not None else []),
    ]
    return "\n".join(lines)


def render_use(simulated: Simulated) -> list[str]:
    """Return the tables of time by cause and of memory by kind."""
    shown = _shown(simulated)
    return [
        *text_table.render(_headings("time of a step", simulated, shown, "share"), _time_rows(simulated, shown), 1),
        "",
        *text_table.render(_headings("memory at the peak", simulated, shown), _memory_rows(simulated, shown), 1),
    ]


# ---- in words ----


def _summary(report: SearchReport) -> list[str]:
    chosen = report.chosen
    estimated, apart = format_seconds(chosen.time_s), chosen.time_s / report.simulated_s - 1
    slowest = report.ranks[report.bottleneck]
    busy = slowest.busy_s / report.simulated_s if report.simulated_s else 0.0
    left = f"so this one is at most {report.gap:.1%} slower than the best" if report.gap else "so this one is the best"
    cut = "; the search was cut short" if report.is_cut_short else ""
    return [
        *_worded(
            "step time",
            f"{format_seconds(report.simulated_s)}, simulated on the lowered graphs; the search's estimate was "
            f"{estimated} ({apart:+.1%})",
        ),
        *(_worded("throughput", report.throughput.describe(report.simulated_s)) if report.throughput else []),
        *_worded("bound", f"{format_seconds(report.bound_s)}: by the search's prices no plan is faster, {left}{cut}"),
        *_worded("memory", _memory(report)),
        *_worded("bottleneck", f"{_rank_name(report, report.bottleneck)}, busy for {busy:.0%} of the step"),
    ]


def _worded(what: str, text: str) -> list[str]:
    return wrap(text, _WIDTH, initial_indent=what.ljust(_INDENT), subsequent_indent=" " * _INDENT)


def _memory(report: SearchReport) -> str:
    peak = report.chosen.peak_bytes or 0
    share = peak / report.budget_bytes if report.budget_bytes else 0.0
    text = f"{format_bytes(peak)} of a budget of {format_bytes(report.budget_bytes)} ({share:.0%})"
    if not report.is_memory_bound:
        return f"{text}: more would not make this configuration faster"
    gains = [
        f"{1 - seconds / report.chosen.time_s:.1%} faster {_factor(factor)}"
        for factor, seconds in sorted(report.with_more_memory.items())
    ]
    return f"{text}: the budget binds, this configuration would be {', '.join(gains)}"


def _factor(factor: float) -> str:
    return f"with {factor - 1:.0%} more" if isfinite(factor) else "without a budget"


def _rank_name(report: SearchReport, rank: int) -> str:
    if len(report.ranks) == 1:
        return "every rank"
    stages = report.ranks[rank].stages
    return f"pipeline rank {rank} ({'stages' if len(stages) > 1 else 'stage'} {', '.join(map(str, stages))})"


def _effort(report: SearchReport) -> list[str]:
    counts = ", ".join(f"{what} {count}" for what, count in report.counts.items() if count)
    phases = ", ".join(f"{phase} {format_seconds(seconds)}" for phase, seconds in report.seconds.items())
    return [*_worded("counted", counts), *_worded("took", phases)]


# ---- tables ----


def _shown(simulated: Simulated) -> list[int]:
    """Pipeline ranks to show: all, or of many the busiest and others as far apart as can be."""
    count = len(simulated.ranks)
    if count <= _MOST_COLUMNS:
        return list(range(count))
    others = [round(i * (count - 1) / (_MOST_COLUMNS - 2)) for i in range(_MOST_COLUMNS - 1)]
    return sorted({*others, simulated.bottleneck})


def _headings(what: str, simulated: Simulated, shown: Sequence[int], *more: str) -> list[str]:
    if len(simulated.ranks) == 1:
        return [what, "every rank", *more]
    return [what, *(f"rank {rank}" for rank in shown), *more]


def _time_rows(simulated: Simulated, shown: Sequence[int]) -> list[list[str]]:
    """A row a cause; the share is that of all ranks together."""
    every = {cause for use in simulated.ranks for cause, seconds in use.seconds.items() if seconds}
    rows = []
    for cause in sorted(every, key=cause_order):
        total = fmean(use.seconds.get(cause, 0.0) for use in simulated.ranks)
        cells = [_seconds(simulated.ranks[rank].seconds.get(cause, 0.0)) for rank in shown]
        rows.append([cause_name(cause), *cells, f"{total / simulated.simulated_s:.1%}"])
    rows.append(["step", *(_seconds(sum(simulated.ranks[rank].seconds.values())) for rank in shown), ""])
    if any(use.hidden_s for use in simulated.ranks):
        rows.append(["hidden communication", *(_seconds(simulated.ranks[rank].hidden_s) for rank in shown), ""])
    return rows


def _memory_rows(simulated: Simulated, shown: Sequence[int]) -> list[list[str]]:
    uses: list[RankUse] = [simulated.ranks[rank] for rank in shown]
    kinds = [kind for kind in MEMORY_KINDS if any(use.memory[kind] for use in simulated.ranks)]
    rows = [[kind, *(_bytes(use.memory, kind) for use in uses)] for kind in kinds]
    rows.append(["peak", *(format_bytes(sum(use.memory.values())) for use in uses)])
    if any(use.host_bytes for use in simulated.ranks):
        rows.append(["on the host", *(format_bytes(use.host_bytes) for use in uses)])
    return rows


def _contender_row(contender: Contender, chosen: Contender | None) -> list[str]:
    mark, known = _MARKS.get(contender.known, ("", "simulated"))
    slower = "chosen" if chosen is None else f"{mark}{contender.lost_by(chosen):.1%}"
    fits = [f"{mark}{format_seconds(contender.step_s)}", slower] if contender.fits else ["", "too large"]
    return [
        contender.name or ("this one" if chosen is None else "searched"),
        _stages(contender),
        contender.schedule if contender.num_stages > 1 else "-",
        str(contender.num_microbatches),
        *fits,
        format_bytes(contender.peak_bytes) if contender.peak_bytes is not None else "-",
        known,
    ]


def _stages(contender: Contender) -> str:
    """The stages, and on how many ranks they are where a rank has several."""
    if contender.num_stages == contender.pipeline_ranks:
        return str(contender.num_stages)
    return f"{contender.num_stages} on {contender.pipeline_ranks}"


def cause_order(cause: Cause) -> tuple[int, Cause]:
    """Sort causes by this: what a rank computes, then collectives, then what it waits for."""
    if cause.kind in _ORDER:
        return _ORDER.index(cause.kind), cause
    return len(_ORDER) + (1 + _LAST.index(cause.kind) if cause.kind in _LAST else 0), cause


def cause_name(cause: Cause) -> str:
    """The cause in words: "all_gather, axes 1, 2"."""
    if not cause.axes:
        return cause.kind
    return f"{cause.kind}, {'axes' if len(cause.axes) > 1 else 'axis'} {', '.join(map(str, cause.axes))}"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"


def _bytes(memory: Mapping[str, int], kind: str) -> str:
    return format_bytes(memory[kind]) if memory[kind] else "-"
