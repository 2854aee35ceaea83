"""Rows of the page's tables: blocks with links to their code and collectives, time by cause, memory by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean
from typing import Any

from galvatron_fx.ir.plan.plan_table import describe_keeps, describe_roles
from galvatron_fx.ir.plan.prediction import MEMORY_KINDS
from galvatron_fx.ir.plan.search_report_table import cause_name, cause_order
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report.bars import shown_ranks
from galvatron_fx.report.collective_rows import CollectiveRow
from galvatron_fx.report.explained import Explained
from passes.simulation.short_model import Label

__all__ = ["Amounts", "Blocks", "block_rows", "memory_table", "time_table"]

_MOST_COLUMNS = 6


@dataclass(frozen=True)
class Amounts:
    """A table of amounts that add up: a row a cause or kind, a column a pipeline rank."""

    headings: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    sum_label: str
    sums: Sequence[str]


@dataclass(frozen=True)
class Blocks:
    """Rows of blocks, the code of each kind, and groups of collectives, with anchors that lead from one to another."""

    rows: Sequence[Mapping[str, Any]]
    codes: Sequence[Mapping[str, Any]]
    collectives: Sequence[Mapping[str, Any]]


def block_rows(told: Explained) -> Blocks:
    """Return all that the page tells of blocks; kinds of blocks are numbered in the order of their first."""
    number = {label: i for i, label in enumerate(dict.fromkeys(told.labels), 1)}
    names = {label: f"Kind {n}: {_where(told, label)}, {_strategy(told, label)}" for label, n in number.items()}
    groups: dict[Label | None, list[CollectiveRow]] = {}
    for collective in told.collectives:
        groups.setdefault(collective.label, []).append(collective)
    rows = [
        _block_row(told, place, f"code-{number[label]}", f"kind {number[label]}", own)
        for place, (label, own) in enumerate(_runs(told), 1)
    ]
    first_row = {label: f"blocks-{place}" for place, (label, _) in reversed(list(enumerate(_runs(told), 1)))}
    codes = [
        {
            "anchor": f"code-{number[code.label]}",
            "name": names[code.label],
            "index": code.index,
            "row": first_row[code.label],
            "collectives": f"collectives-{number[code.label]}" if code.label in groups else "",
            "tasks": code.tasks,
        }
        for code in told.codes
    ]
    collectives = [
        {
            "anchor": f"collectives-{number[label] if label is not None else 'transfers'}",
            "name": names[label] if label is not None else "Between stages",
            "code": f"code-{number[label]}" if label is not None else "",
            "rows": own,
        }
        for label, own in groups.items()
    ]
    return Blocks(rows, codes, collectives)


def time_table(told: Explained) -> Amounts:
    """Seconds by cause; the share is that of all pipeline ranks together."""
    shown = shown_ranks(told.ranks, _MOST_COLUMNS)
    causes = sorted({c for use in told.ranks for c, s in use.seconds.items() if s}, key=cause_order)
    rows = []
    for cause in causes:
        every = fmean(use.seconds.get(cause, 0.0) for use in told.ranks)
        cells = [_seconds(told.ranks[rank].seconds.get(cause, 0.0)) for rank in shown]
        rows.append((cause_name(cause), [*cells, f"{every / told.step_s:.1%}" if told.step_s else "-"]))
    sums = [_seconds(sum(told.ranks[rank].seconds.values())) for rank in shown]
    return Amounts([*_headings(told, shown), "share"], rows, "step", [*sums, ""])


def memory_table(told: Explained) -> Amounts:
    """Bytes at the peak by kind."""
    shown = shown_ranks(told.ranks, _MOST_COLUMNS)
    held = [told.ranks[rank].memory for rank in shown]
    kinds = [kind for kind in MEMORY_KINDS if any(use.memory[kind] for use in told.ranks)]
    rows = [(kind, [format_bytes(use[kind]) if use[kind] else "-" for use in held]) for kind in kinds]
    return Amounts(_headings(told, shown), rows, "peak", [format_bytes(sum(use.values())) for use in held])


def _runs(told: Explained) -> list[tuple[Label, list[int]]]:
    """Equal neighbours: what they have in common, and their numbers."""
    runs = groupby(enumerate(told.labels), lambda item: item[1])
    return [(label, [index for index, _ in run]) for label, run in runs]


def _block_row(told: Explained, place: int, code: str, code_name: str, own: Sequence[int]) -> dict[str, Any]:
    blocks = [told.plan.blocks[index] for index in own]
    cuts = told.plan.pipelining.cuts(len(told.labels))
    stages = [sum(cut <= index for cut in cuts) - 1 for index in (own[0], own[-1])]
    time_s, memory_bytes = sum(block.time_s for block in blocks), sum(block.memory_bytes for block in blocks)
    return {
        "anchor": f"blocks-{place}",
        "name": _span(own[0], own[-1]) + (f" ({len(own)}×)" if len(own) > 1 else ""),
        "stages": _span(*stages),
        "roles": blocks[0].strategy.roles,
        "keeps": describe_keeps(blocks[0].strategy),
        "time": _seconds(time_s),
        "memory": format_bytes(memory_bytes) if memory_bytes else "-",
        "code": code,
        "code_name": code_name,
    }


def _where(told: Explained, label: Label) -> str:
    """The blocks of a kind: "blocks 1–80, 82"."""
    spans = [_span(own[0], own[-1]) for other, own in _runs(told) if other == label]
    return f"block{'s' * (told.labels.count(label) > 1)} {', '.join(spans)}"


def _strategy(told: Explained, label: Label) -> str:
    index = told.labels.index(label)
    strategy = told.plan.blocks[index].strategy
    return f"{describe_roles(strategy, told.plan.axis_sizes)}, keeps {describe_keeps(strategy)}"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _headings(told: Explained, shown: Sequence[int]) -> list[str]:
    return ["every rank"] if len(told.ranks) == 1 else [f"rank {rank}" for rank in shown]


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"
