"""Pictures of what a plan decides and what it takes: roles of blocks, time by cause, memory by kind, alternatives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_table import describe_names, describe_recomputed, device_kinds_of_blocks
from galvatron_fx.ir.plan.prediction import MEMORY_KINDS, RECOMPUTE, RankUse
from galvatron_fx.ir.plan.search_report_table import cause_name, cause_order
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report.alternatives import Alternative
from galvatron_fx.report.drawing import WIDTH, Line, Picture, Rect, Text, fitting, text_width
from galvatron_fx.report.module_times import ModuleTime
from galvatron_fx.report.palette import kind_colours

__all__ = [
    "FAR",
    "alternatives_picture",
    "memory_picture",
    "modules_picture",
    "roles_picture",
    "shown_ranks",
    "time_picture",
]

_ROW = 24.0
_BAR = 17.0
_SUMS = 84.0
_MOST_ROWS = 16
_LEFT = 14.0  # of bars below their labels: half of the first number of the axis

FAR = 3.0
"""A budget of more than so many times what is used is told of and not drawn, or nothing else could be seen."""


def shown_ranks(ranks: Sequence[RankUse], most: int = _MOST_ROWS) -> list[int]:
    """All pipeline ranks, or of many the busiest, the fullest, and others as far apart as can be."""
    count = len(ranks)
    if count <= most:
        return list(range(count))
    busiest = max(range(count), key=lambda rank: ranks[rank].busy_s)
    fullest = max(range(count), key=lambda rank: sum(ranks[rank].memory.values()))
    spread = [round(i * (count - 1) / (most - 3)) for i in range(most - 2)]
    return sorted({*spread, busiest, fullest})


def roles_picture(plan: Plan, width: float = WIDTH, axis_names: Sequence[str] = ()) -> Picture:
    """Every block as a column, every mesh axis as a row, outermost first; below, stages, the kinds of device that they
    lie on, and what is computed again.

    ``axis_names``: as the user calls them, if at all.
    """
    count, axes = len(plan.blocks), plan.axis_sizes
    picture = Picture(f"The role of each of {len(axes)} mesh axes in each of {count} blocks", width=width)
    left, width = picture.labels, (picture.width - picture.labels) / count
    names: list[Text] = []
    for position, size in enumerate(axes):
        axis = axis_names[position] if axis_names else str(position)
        picture.add(
            Text(
                left - 10,
                picture.height + _ROW / 2,
                f"axis {axis}, {size} ranks",
                "end",
                size=12 if picture.is_wide else 10.5,
            )
        )
        roles = [block.strategy.roles[position] for block in plan.blocks]
        names += _row(picture, plan, f"axis {axis}", roles, {role: role for role in roles}, width)
    kinds = device_kinds_of_blocks(plan)
    colours = kind_colours(plan.device_kinds)
    if kinds:
        picture.add(Text(left - 10, picture.height + _ROW / 2, "devices", "end", size=12 if picture.is_wide else 10.5))
        names += _row(picture, plan, "devices", kinds, colours, width)
    for first in range(1, count):
        if width >= 16:
            picture.add(Line(left + first * width, 0, left + first * width, picture.height - 2, "paper", 0.6))
    picture.add(*names)
    _strip(
        picture,
        "computed again" if picture.is_wide else "again",
        [_again(block.strategy) for block in plan.blocks],
        width,
    )
    if plan.pipelining.num_stages > 1:
        cuts = [] if plan.is_wildcard else plan.pipelining.cuts(count)
        _strip(picture, "stages", [f"{sum(c <= b for c in cuts) - 1}" for b in range(count)], width)
    _block_numbers(picture, count, width)
    shown = dict.fromkeys(role for block in plan.blocks for role in block.strategy.roles)
    picture.legend(shown)
    if kinds:
        picture.height -= 10
        picture.legend(colours.values(), {colour: kind for kind, colour in colours.items()})
    return picture


def _row(
    picture: Picture, plan: Plan, what: str, values: Sequence[str], colours: Mapping[str, str], width: float
) -> list[Text]:
    """A row with a box for each run of equal values; returns the names of those with room for one."""
    names = []
    for value, first, end in _runs(values):
        where = f"{what}, {_blocks(first, end)}{_modules(plan, first, end)}: {value}"
        x, wide = picture.labels + first * width, (end - first) * width
        picture.add(Rect(x, picture.height, wide, _ROW - 2, colours[value], where))
        if text_width(value, 11) < wide:
            names.append(Text(x + wide / 2, picture.height + _ROW / 2 - 1, value, "middle", "on colour", 11))
    picture.height += _ROW
    return names


def _again(strategy: Strategy) -> str:
    recomputed = describe_recomputed(strategy)
    return f"keeps {recomputed}" if strategy.keeps else recomputed


def time_picture(ranks: Sequence[RankUse], width: float = WIDTH) -> Picture:
    """Seconds of a step by cause, a bar for each pipeline rank."""
    shown = shown_ranks(ranks)
    causes = sorted({c for rank in shown for c, s in ranks[rank].seconds.items() if s}, key=cause_order)
    picture = Picture("Seconds of a step by cause, for each pipeline rank", width=width)
    rows = [
        (
            _rank_label(ranks, rank),
            [(c.kind, cause_name(c), ranks[rank].seconds.get(c, 0.0)) for c in causes],
        )
        for rank in shown
    ]
    _bars(picture, rows, format_seconds, "time of a step")
    picture.legend(dict.fromkeys(cause.kind for cause in causes))
    return picture


def memory_picture(ranks: Sequence[RankUse], budget_bytes: int | None, width: float = WIDTH) -> Picture:
    """Bytes at the peak by kind, a bar for each pipeline rank, against the budget."""
    shown = shown_ranks(ranks)
    kinds = [kind for kind in MEMORY_KINDS if any(ranks[rank].memory[kind] for rank in shown)]
    picture = Picture("Bytes at the peak by kind, for each pipeline rank", width=width)
    rows = [(_rank_label(ranks, rank), [(k, k, float(ranks[rank].memory[k])) for k in kinds]) for rank in shown]
    _bars(picture, rows, format_bytes, "memory of a rank when it is fullest", budget_bytes)
    picture.legend(kinds)
    return picture


def alternatives_picture(alternatives: Sequence[Alternative], width: float = WIDTH) -> Picture:
    """Seconds of a step of the chosen plan and of what lost to it."""
    picture = Picture("Seconds of a step of the chosen plan and of the alternatives", width=width)
    known = [a for a in alternatives if a.time_s is not None]
    labels = max(text_width(a.name, 12) for a in known) + 12
    rows = [(a.name, [(a.colour, f"{a.name}: {a.verdict}", a.time_s or 0.0)]) for a in known]
    _bars(
        picture, rows, format_seconds, "time of a step", labels=min(labels, width / 2), sums=[a.verdict for a in known]
    )
    return picture


def modules_picture(modules: Sequence[ModuleTime], width: float = WIDTH) -> Picture:
    """Seconds of computing by module: forward, backward, and what is computed again."""
    picture = Picture("Seconds of computing by module, forward, backward and computed again", width=width)
    rows = [
        (
            row.module,
            [
                ("forward", "forward", row.forward_s),
                ("backward", "backward", row.backward_s),
                (RECOMPUTE, RECOMPUTE, row.again_s),
            ],
        )
        for row in modules
    ]
    labels = min(max(text_width(name, 12) for name, _ in rows) + 12, width / 2.5)
    _bars(picture, rows, format_seconds, "computing, a rank of each stage added up", labels=labels)
    used = {colour for _, parts in rows for colour, _, amount in parts if amount}
    picture.legend([colour for colour in ("forward", "backward", RECOMPUTE) if colour in used])
    return picture


def _bars(
    picture: Picture,
    rows: Sequence[tuple[str, Sequence[tuple[str, str, float]]]],
    write: Callable[[float], str],
    what: str,
    limit: float | None = None,
    labels: float | None = None,
    sums: Sequence[str] = (),
) -> None:
    """Stacked bars: of each row its label and its parts (colour, name, amount); at the right what they come to."""
    totals = [sum(amount for _, _, amount in parts) for _, parts in rows]
    said = sums or [write(total) for total in totals]
    room = max(_SUMS, max(text_width(text, 12) for text in said) + 10)
    picture.height += 18 if limit is not None else 0  # for the limit's name
    # On narrow pictures labels stand above their bars.
    above = 0.0 if picture.is_wide else 16.0
    labels = _LEFT if above else picture.labels if labels is None else labels
    top, row_height = picture.height, _ROW + above
    picture.height += len(rows) * row_height
    is_near = limit is not None and limit <= FAR * max(totals)
    most = max([*totals, limit if is_near and limit is not None else 0.0]) * 1.02
    place = picture.scale(labels, picture.width - room, top, most, write, what)
    for row, ((label, parts), text) in enumerate(zip(rows, said, strict=True)):
        y, amount_before = top + row * row_height + above, 0.0
        name_of_row = fitting(label, 12, picture.width) if above else fitting(label, 12, labels - 10)
        at = (0.0, y - 6) if above else (labels - 10, y + _BAR / 2 + 2)
        picture.add(Text(*at, name_of_row, "start" if above else "end"))
        for colour, name, amount in parts:
            x, end = place(amount_before), place(amount_before + amount)
            if end - x > 0.05:
                picture.add(
                    Rect(x, y + 2, end - x, _BAR, colour, f"{label}, {name}: {write(amount)}" if not sums else name)
                )
            amount_before += amount
        end = place(amount_before)
        if limit is not None and is_near and end - 2 <= place(limit) < end + 6 + text_width(text, 12):
            end = place(limit)  # whose line would cross the text
        picture.add(Text(end + 6, y + _BAR / 2 + 2, text))
    if limit is not None and is_near:
        x = place(limit)
        picture.add(Line(x, top - 4, x, top + len(rows) * row_height + 4, "limit", 2, True))
        picture.add(Text(x, top - 12, f"budget {write(limit)}", "middle", "limit", 11, True))
    elif limit is not None:
        picture.add(
            Text(picture.width - room, top - 12, f"budget {write(limit)}, far to the right →", "end", "limit", 11, True)
        )


def _runs(values: Sequence[str]) -> list[tuple[str, int, int]]:
    """Each value with where it begins and before where it ends."""
    runs, first = [], 0
    for value, group in groupby(values):
        end = first + len(list(group))
        runs.append((value, first, end))
        first = end
    return runs


def _strip(picture: Picture, label: str, values: Sequence[str], width: float) -> None:
    """A thin row below the axes, a box for each run of equal values; nothing where all are empty."""
    if not any(values):
        return
    picture.add(Text(picture.labels - 10, picture.height + 8, label, "end", "muted", 11))
    for place, (value, first, end) in enumerate(run for run in _runs(values) if run[0]):
        x, wide = picture.labels + first * width, (end - first) * width
        fill = "recompute" if value == "recompute" else ("idle", "rule")[place % 2]
        picture.add(Rect(x, picture.height, wide, 15, fill, f"{label}: {value}, {_blocks(first, end)}"))
        if value != "recompute" and text_width(value, 10) < wide:
            picture.add(Text(x + wide / 2, picture.height + 8, value, "middle", "ink", 10))
    picture.height += 18


def _block_numbers(picture: Picture, count: int, width: float) -> None:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, count) if step * width > 26)
    for block in range(0, count, every):
        picture.add(Text(picture.labels + (block + 0.5) * width, picture.height + 8, str(block), "middle", "muted", 11))
    picture.add(Text(picture.labels - 10, picture.height + 8, "block", "end", "muted", 11))
    picture.height += 16


def _blocks(first: int, end: int) -> str:
    return f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"


def _modules(plan: Plan, first: int, end: int) -> str:
    names = describe_names([block.name for block in plan.blocks[first:end]])
    return f" ({names})" if names else ""


def _rank_label(ranks: Sequence[RankUse], rank: int) -> str:
    return "every rank" if len(ranks) == 1 else f"pipeline rank {rank}"
