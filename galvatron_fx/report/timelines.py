"""Pictures of a step over time: memory against the budget, the pipeline's schedule, the operators of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from cost_models.schedule_time import ScheduleReport
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.plan.prediction import LOCAL_CAUSES, MEMORY_KINDS
from galvatron_fx.ir.plan.schedule import ACTION_NAMES, SPREAD, Action
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report.bars import FAR
from galvatron_fx.report.drawing import WIDTH, Band, Boxes, Line, Picture, Rect, Shape, Text, merged, text_width, ticks
from passes.simulation.step_timeline import MemoryTimeline, OperatorSpan

__all__ = ["memory_timeline_picture", "operators_picture", "schedule_picture"]


_COLUMNS = 320
_LANE = 24.0
_CLOSE = 0.03  # pixels: what lies nearer together cannot be told apart, looked at ever so closely
_THIN = 0.5  # pixels: what strays from a block among the operators of another


def memory_timeline_picture(
    timelines: Sequence[MemoryTimeline], shown: Sequence[int], budget_bytes: int | None, width: float = WIDTH
) -> Picture:
    """Bytes alive by kind over the step, an area for each pipeline rank that is shown, against the budget."""
    picture = Picture("Bytes alive by kind over the step, against the budget", width=width)
    height = 220.0 if len(shown) == 1 else 110.0
    peak = max(timelines[rank].peak_bytes for rank in shown)
    is_near = budget_bytes is not None and budget_bytes <= FAR * peak
    most = (max(peak, budget_bytes) if is_near and budget_bytes is not None else peak) * 1.05
    if budget_bytes is not None and not is_near:
        said = f"budget {format_bytes(budget_bytes)}, far above ↑"
        picture.add(Text(picture.width - 30, 6, said, "end", "limit", 11, True))
        picture.height += 18
    end_s = max(timelines[rank].end_s for rank in shown)
    used = np.zeros(len(MEMORY_KINDS), dtype=np.bool_)
    for rank in shown:
        timeline = timelines[rank]
        used |= timeline.size_bytes.any(axis=0)
        _area(picture, timeline, "every rank" if len(timelines) == 1 else f"rank {rank}", height, most, end_s)
        if budget_bytes is not None and is_near:
            y = picture.height - height * budget_bytes / most
            picture.add(Line(picture.labels, y, picture.width - 30, y, "limit", 1.5, True))
            picture.add(
                Text(
                    picture.width - 34,
                    y - 7 if y > picture.height - height + 12 else y + 9,
                    f"budget {format_bytes(budget_bytes)}",
                    "end",
                    "limit",
                    11,
                    True,
                )
            )
        picture.height += 14
    picture.height -= 14
    picture.time_scale(picture.width - 30, picture.height, end_s)
    picture.legend((kind for kind, there in zip(MEMORY_KINDS, used, strict=True) if there))
    return picture


def schedule_picture(reports: Mapping[str, ScheduleReport], width: float = WIDTH) -> Picture:
    """What every pipeline rank does when: the reports one below the other, each under its title, over one axis.

    The number in a box is its micro-batch; light boxes are later stages of a rank. At the right stands the share of the
    step that a rank is idle.
    """
    names = ", ".join(dict.fromkeys(report.schedule.name for report in reports.values()))
    picture = Picture(f"When each pipeline rank works on which micro-batch, schedule {names}", width=width)
    tops: list[float] = []
    for title, report in reports.items():
        if title:
            said = f"{title}: {format_seconds(report.step_s)}"
            picture.add(Text(picture.labels, picture.height + 12, said, "start", "ink", 12, True))
            picture.height += _LANE
        tops.append(picture.height)
        picture.height += report.schedule.num_ranks * _LANE
    end_s = max(report.step_s for report in reports.values())
    place = picture.time_scale(picture.width - picture.margin, 0.0, end_s)
    lanes = (_lanes(picture, report, top, place) for top, report in zip(tops, reports.values(), strict=True))
    colours = [colour for each in lanes for colour in each]
    picture.legend([*sorted(dict.fromkeys(colours), key=lambda name: ("later" in name, name)), "idle"])
    return picture


def _lanes(picture: Picture, report: ScheduleReport, top: float, place: Callable[[float], float]) -> Iterator[str]:
    """A lane for each pipeline rank; gives the colours it takes."""
    right, end = picture.width - picture.margin, place(report.step_s)
    scale = (end - picture.labels) / report.step_s if report.step_s else 0.0
    for rank, idle_s in enumerate(report.idle_s):
        y = top + rank * _LANE
        picture.add(
            Text(picture.labels - 10, y + 11, f"pipeline rank {rank}" if picture.is_wide else f"rank {rank}", "end")
        )
        picture.add(Rect(picture.labels, y + 2, end - picture.labels, _LANE - 5, "idle"))
        spans = [(_action_colour(report, span.action), span) for span in report.spans if span.rank == rank]
        for colour in dict.fromkeys(colour for colour, _ in spans):
            same = [span for other, span in spans if other == colour]
            boxes = [(place(s.start_s), place(s.end_s) - _hairline(s.end_s - s.start_s, scale)) for s in same]
            picture.add(Boxes(y + 2, _LANE - 5, merged(boxes, 0.0), colour, f"rank {rank}"))
            yield colour
        for colour, span in spans:
            text, width = str(span.action.microbatch), (span.end_s - span.start_s) * scale
            if text_width(text, 10) + 2 < width:
                ink = "on light" if "later" in colour else "on colour"
                picture.add(Text((place(span.start_s) + place(span.end_s)) / 2, y + 12, text, "middle", ink, 10))
        share = idle_s / report.step_s if report.step_s else 0.0
        picture.add(
            Text(right + 8, y + 11, f"{share:.1%} idle" if picture.is_wide else f"{share:.0%}", "start", "muted", 11)
        )


def operators_picture(spans: Sequence[OperatorSpan], step_s: float, width: float = WIDTH) -> Picture:
    """Which block runs when, and what it does: operators in one lane, each kind of collective in one of its own."""
    picture = Picture("When each block runs, and when its operators and collectives do", width=width)
    kinds = [kind for kind in dict.fromkeys(s.cause.kind for s in spans) if kind not in LOCAL_CAUSES]
    place = _axis(picture, _LANE * (2 + len(kinds)), picture.width - picture.margin, step_s)
    picture.add(Text(picture.labels - 10, 11, "blocks", "end"), *_block_boxes(spans, place))
    lanes = ["operators", *kinds]
    for row, lane in enumerate(lanes, 1):
        y = row * _LANE
        lane_spans = [s for s in spans if (lane if s.cause.kind == lane else "operators") == lane]
        lane_spans = [s for s in lane_spans if lane != "operators" or s.cause.kind in LOCAL_CAUSES]
        picture.add(
            Text(picture.labels - 10, y + 11, lane, "end", size=12 if picture.is_wide else 10.5),
            Rect(picture.labels, y + 2, picture.width - picture.margin - picture.labels, _LANE - 5, "idle"),
        )
        for kind in dict.fromkeys(s.cause.kind for s in lane_spans):
            boxes = [(place(s.start_s), place(s.end_s)) for s in lane_spans if s.cause.kind == kind]
            picture.add(Boxes(y + 2, _LANE - 5, merged(boxes, _CLOSE), kind, lane))
        share = sum(s.end_s - s.start_s for s in lane_spans) / step_s if step_s else 0.0
        picture.add(Text(picture.width - picture.margin + 8, y + 11, f"{share:.1%}", "start", "muted", 11))
    local = [kind for kind in LOCAL_CAUSES if any(s.cause.kind == kind for s in spans)]
    picture.legend(["forward", "backward", *local, *kinds])
    return picture


def _axis(picture: Picture, height: float, right: float, end_s: float) -> Callable[[float], float]:
    """Room for lanes of so much height, over an axis of time."""
    picture.height = height
    return picture.time_scale(right, 0.0, end_s)


def _area(picture: Picture, timeline: MemoryTimeline, label: str, height: float, most: float, end_s: float) -> None:
    """Kinds of memory over one another, with a scale of bytes at the left."""
    if picture.is_wide:
        picture.add(Text(0, picture.height + 8, label))
    else:  # beside the scale there is no room
        picture.add(Text(0, picture.height + 8, label))
        picture.height += 20
    bottom = picture.height + height
    right = picture.width - 30
    for tick in ticks(most, 4 if height > 150 else 2):
        y = bottom - height * tick / most
        picture.add(
            Line(picture.labels, y, right, y), Text(picture.labels - 10, y, format_bytes(tick), "end", "muted", 11)
        )
    starts_s, sizes = _thinned(timeline)
    xs = tuple(float(picture.labels + (right - picture.labels) * s / end_s) for s in (*starts_s, timeline.end_s))
    tops = bottom - height * np.cumsum(sizes, axis=1) / most
    lower = np.full(len(sizes), bottom)
    for column, kind in enumerate(MEMORY_KINDS):
        if sizes[:, column].any():
            title = f"{kind}: at most {format_bytes(timeline.size_bytes[:, column].max())} on {label}"
            picture.add(Band(xs, tuple(lower.tolist()), tuple(tops[:, column].tolist()), kind, title, most / height))
        lower = tops[:, column]
    picture.height = bottom


def _thinned(timeline: MemoryTimeline) -> tuple[Floats, Floats]:
    """At most so many moments as can be told apart: of those that fall together, the one with most alive."""
    bins = np.minimum((timeline.starts_s / timeline.end_s * _COLUMNS).astype(np.int64), _COLUMNS - 1)
    order = np.lexsort((timeline.size_bytes.sum(axis=1), bins))
    fullest = order[np.flatnonzero(np.append(np.diff(bins[order]) > 0, True))]
    return bins[fullest] / _COLUMNS * timeline.end_s, timeline.size_bytes[fullest]


def _action_colour(report: ScheduleReport, action: Action) -> str:
    owner = report.schedule.rank_of_stage[action.stage]
    if owner == SPREAD:
        return f"{ACTION_NAMES[action.kind]}, all ranks"
    later = ", later stage" if action.stage != report.schedule.rank_of_stage.index(owner) else ""
    return ACTION_NAMES[action.kind] + later


def _hairline(seconds: float, scale: float) -> float:
    """A gap behind a box, where it is wide enough to have one."""
    return 0.8 if seconds * scale > 3 else 0.0


def _block_boxes(spans: Sequence[OperatorSpan], place: Callable[[float], float]) -> list[Shape]:
    """A box for every run of operators of one block in one direction, with the block's number."""
    runs: list[tuple[int, str, float, float]] = []
    computing = (span for span in spans if span.cause.is_local)
    for (block, phase), group in groupby(computing, lambda span: (span.block, span.phase)):
        block_spans = list(group)
        if place(block_spans[-1].end_s) - place(block_spans[0].start_s) < _THIN:
            continue
        if runs and runs[-1][:2] == (block, phase):
            runs[-1] = block, phase, runs[-1][2], block_spans[-1].end_s
        else:
            runs.append((block, phase, block_spans[0].start_s, block_spans[-1].end_s))
    shapes: list[Shape] = []
    for place_in_row, (block, phase, start_s, end_s) in enumerate(runs):
        x, end = place(start_s), place(end_s)
        colour = phase if place_in_row % 2 else f"{phase}, later stage"
        title = f"block {block}, {phase}: {format_seconds(end_s - start_s)}"
        shapes.append(Rect(x, 2, end - x, _LANE - 5, colour, title))
        text = str(block)
        if text_width(text, 10) + 2 < end - x:
            ink = "on colour" if place_in_row % 2 else "on light"
            shapes.append(Text((x + end) / 2, 12, text, "middle", ink, 10))
    return shapes
