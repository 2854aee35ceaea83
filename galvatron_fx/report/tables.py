"""Rows of the page's tables: blocks with links to their code and collectives, time by cause, memory by kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from galvatron_fx.ir.periods import periodic_runs
from galvatron_fx.ir.plan.plan_table import describe_keeps, describe_names, describe_places, describe_roles
from galvatron_fx.ir.plan.prediction import MEMORY_KINDS
from galvatron_fx.ir.plan.search_report_table import cause_name, cause_order
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report.bars import shown_ranks
from galvatron_fx.report.collective_rows import CollectiveRow
from galvatron_fx.report.explained import Explained
from galvatron_fx.report.module_times import by_module
from passes.simulation.short_model import Label

__all__ = ["Amounts", "Blocks", "block_rows", "block_times", "memory_table", "module_table", "time_table"]

_MOST_COLUMNS = 6
_MOST_PARTS = 3


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


def block_rows(explained: Explained) -> Blocks:
    """Return all that the page tells of blocks; kinds of blocks are numbered in the order of their first."""
    number = {label: i for i, label in enumerate(dict.fromkeys(explained.labels), 1)}
    names = {
        label: f"Kind {n}: {_where(explained, label)}, {_strategy(explained, label)}" for label, n in number.items()
    }
    groups: dict[Label | None, list[CollectiveRow]] = {}
    for collective in explained.collectives:
        groups.setdefault(collective.label, []).append(collective)
    rows = [
        _block_row(explained, place, f"code-{number[label]}", f"kind {number[label]}", indices)
        for place, (label, indices) in enumerate(_runs(explained), 1)
    ]
    first_row = {label: f"blocks-{place}" for place, (label, _) in reversed(list(enumerate(_runs(explained), 1)))}
    codes = [
        {
            "anchor": f"code-{number[code.label]}",
            "name": names[code.label],
            "index": code.index,
            "row": first_row[code.label],
            "collectives": f"collectives-{number[code.label]}" if code.label in groups else "",
            "tasks": code.tasks,
        }
        for code in explained.codes
    ]
    collectives = [
        {
            "anchor": f"collectives-{number[label] if label is not None else 'transfers'}",
            "name": names[label] if label is not None else "Between stages",
            "code": f"code-{number[label]}" if label is not None else "",
            "rows": group,
            "seconds": sum(row.total_s for row in group),
            "sent_bytes": sum(row.sent_bytes * row.count for row in group),
        }
        for label, group in groups.items()
    ]
    return Blocks(rows, codes, collectives)


def time_table(explained: Explained) -> Amounts:
    """Seconds by cause; the share is that of all pipeline ranks together."""
    shown = shown_ranks(explained.ranks, _MOST_COLUMNS)
    causes = sorted({c for use in explained.ranks for c, s in use.seconds.items() if s}, key=cause_order)
    rows = []
    for cause in causes:
        every = fmean(use.seconds.get(cause, 0.0) for use in explained.ranks)
        cells = [_seconds(explained.ranks[rank].seconds.get(cause, 0.0)) for rank in shown]
        rows.append((cause_name(cause), [*cells, f"{every / explained.step_s:.1%}" if explained.step_s else "-"]))
    sums = [_seconds(sum(explained.ranks[rank].seconds.values())) for rank in shown]
    return Amounts([*_headings(explained, shown), "share"], rows, "step", [*sums, ""])


def memory_table(explained: Explained) -> Amounts:
    """Bytes at the peak by kind."""
    shown = shown_ranks(explained.ranks, _MOST_COLUMNS)
    held = [explained.ranks[rank].memory for rank in shown]
    kinds = [kind for kind in MEMORY_KINDS if any(use.memory[kind] for use in explained.ranks)]
    rows = [(kind, [format_bytes(use[kind]) if use[kind] else "-" for use in held]) for kind in kinds]
    on_host = [explained.ranks[rank].host_bytes for rank in shown]
    if any(on_host):
        rows.append(("on the host, beside the peak", [format_bytes(size) if size else "-" for size in on_host]))
    return Amounts(_headings(explained, shown), rows, "peak", [format_bytes(sum(use.values())) for use in held])


def module_table(explained: Explained) -> Amounts:
    """Seconds of computing by module, all blocks and stages together."""
    modules = by_module(explained.modules)
    every = sum(row.total_s for row in modules)
    return Amounts(
        ["forward", "backward", "computed again", "in all", "share"],
        [
            (
                row.module,
                [*map(_seconds, (row.forward_s, row.backward_s, row.again_s, row.total_s)), _share(row.total_s, every)],
            )
            for row in modules
        ],
        "computing",
        [
            *(
                _seconds(sum(getattr(row, name) for row in modules))
                for name in ("forward_s", "backward_s", "again_s", "total_s")
            ),
            "",
        ],
    )


def block_times(explained: Explained) -> Amounts:
    """The same by kind of block."""
    every = sum(row.total_s for row in explained.modules)
    rows = []
    for label in dict.fromkeys(row.label for row in explained.modules):
        same = [row for row in explained.modules if row.label == label]
        total, count = sum(row.total_s for row in same), explained.labels.count(label)
        largest = ", ".join(f"{row.module} {_share(row.total_s, total)}" for row in same[:_MOST_PARTS])
        name = _where(explained, label)
        rows.append(
            (f"{name}: {largest}", [_seconds(total / count), str(count), _seconds(total), _share(total, every)])
        )
    return Amounts(["a block", "blocks", "in all", "share"], rows, "computing", ["", "", _seconds(every), ""])


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _runs(explained: Explained) -> list[tuple[Label, range]]:
    """Equal blocks that are neighbours, or come in turns: what they have in common, and their numbers."""
    runs = periodic_runs(explained.labels)
    return [(explained.labels[places[0]], places) for run in runs for places in run.places()]


def _block_row(explained: Explained, place: int, code: str, code_name: str, indices: range) -> dict[str, Any]:
    blocks = [explained.plan.blocks[index] for index in indices]
    cuts = explained.plan.pipelining.cuts(len(explained.labels))
    stages = [sum(cut <= index for cut in cuts) - 1 for index in (indices[0], indices[-1])]
    time_s, memory_bytes = sum(block.time_s for block in blocks), sum(block.memory_bytes for block in blocks)
    return {
        "anchor": f"blocks-{place}",
        "name": _places(indices) + (f" ({len(indices)}×)" if len(indices) > 1 else ""),
        "modules": _modules(explained, indices),
        "stages": _span(*stages),
        "roles": blocks[0].strategy.roles,
        "keeps": "-" if explained.plan.forward_only else describe_keeps(blocks[0].strategy),
        "time": _seconds(time_s),
        "memory": format_bytes(memory_bytes) if memory_bytes else "-",
        "code": code,
        "code_name": code_name,
    }


def _where(explained: Explained, label: Label) -> str:
    """The blocks of a kind: "blocks 1–80, 82 (model.layers.0–79, model.layers.81)"."""
    runs = [indices for other, indices in _runs(explained) if other == label]
    modules = ", ".join(filter(None, (_modules(explained, indices) for indices in runs)))
    where = f"block{'s' * (explained.labels.count(label) > 1)} {', '.join(map(_places, runs))}"
    return f"{where} ({modules})" if modules else where


def _modules(explained: Explained, indices: range) -> str:
    return describe_names([explained.names[index] for index in indices])


def _strategy(explained: Explained, label: Label) -> str:
    index = explained.labels.index(label)
    strategy = explained.plan.blocks[index].strategy
    roles = describe_roles(strategy, explained.plan.axis_sizes)
    return roles if explained.plan.forward_only else f"{roles}, keeps {describe_keeps(strategy)}"


def _places(places: range) -> str:
    return describe_places(places).replace("-", "–").replace(" .. ", " … ")


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _headings(explained: Explained, shown: Sequence[int]) -> list[str]:
    return ["every rank"] if len(explained.ranks) == 1 else [f"rank {rank}" for rank in shown]


def _seconds(seconds: float) -> str:
    return format_seconds(seconds) if seconds else "-"
