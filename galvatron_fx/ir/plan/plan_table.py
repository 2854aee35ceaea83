"""A plan as a table of plain text, for people: equal blocks that are neighbours, or come in turns, share one row."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby, pairwise
from math import prod
from typing import TYPE_CHECKING

from galvatron_fx.ir.periods import describe_ranks, periodic_runs
from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.precision_policy import describe_policy
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from galvatron_fx.ir.plan.plan import BlockPlan, Plan

__all__ = [
    "choice_name",
    "describe_blocks",
    "describe_keeps",
    "describe_names",
    "describe_offloaded",
    "describe_places",
    "describe_recomputed",
    "describe_roles",
    "device_kinds_of_blocks",
    "plan_name",
    "render",
]

_KEEPS = "keeps for backward"
_HEADINGS = ("blocks", "roles, outermost axis first", _KEEPS, "time", "memory/rank")
_UNPRICED = "-"
_NUMBERED = re.compile(r"block[ _]\d+")  # names of blocks without modules
_DIGITS = re.compile(r"(\d+)")


def render(plan: Plan) -> str:
    """Return ``plan`` as a table of at most 100 columns, followed by its totals, without colour codes.

    Times and memory of a row are the sums over its blocks. Numbers that were not predicted show as "-".
    """
    casts = plan.mixed_precision is not None and plan.mixed_precision.param_dtype is not None
    headings = [heading for heading in _HEADINGS if not (plan.forward_only and heading == _KEEPS)]
    rows = [
        (
            "all" if plan.is_wildcard else describe_blocks(places, [block.name for block in blocks]),
            describe_roles(blocks[0].strategy, plan.axis_sizes, plan.axis_names),
            *([] if plan.forward_only else [describe_keeps(blocks[0].strategy, casts)]),
            _seconds(sum(block.time_s for block in blocks)),
            _bytes(sum(block.memory_bytes for block in blocks)),
        )
        for places, blocks in _rows(plan)
    ]
    lines = [
        _title(plan),
        "",
        *text_table.render(headings, rows, numbers_from=len(headings) - 2),
        "",
        *_totals(plan),
    ]
    return "\n".join(lines)


def plan_name(plan: Plan) -> str:
    """Return what a plan does in few words: "2 stages, 4 micro-batches (1f1b), data×4 in 30 of 32 blocks"."""
    pipelining = plan.pipelining
    strategies = [block.strategy for block in plan.blocks]
    return choice_name(
        strategies, plan.axis_sizes, pipelining.num_stages, pipelining.num_microbatches, pipelining.schedule
    )


def choice_name(
    strategies: Sequence[Strategy], axis_sizes: tuple[int, ...], stages: int, microbatches: int, schedule: str
) -> str:
    """The same of what a plan consists of: strategies of all blocks, axes and the pipeline."""
    strategy, count = Counter(strategies).most_common(1)[0]
    parts = [] if stages == 1 and microbatches == 1 else [f"{microbatches} micro-batches ({schedule})"]
    if stages > 1:
        parts = [f"{stages} stages, {parts[0]}"]
    elif parts:
        parts = [f"{microbatches} micro-batches"]
    where = "" if count == len(strategies) else f" in {count} of {len(strategies)} blocks"
    again = ", recomputed in part" if strategy.keeps else ", recomputed" if strategy.recompute else ""
    return ", ".join([*parts, f"{describe_roles(strategy, axis_sizes)}{again}{where}"])


def describe_roles(strategy: Strategy, axis_sizes: tuple[int, ...], axis_names: tuple[str, ...] = ()) -> str:
    """Return the roles and their degrees, outermost first, neighbouring axes of one role together, but for those of
    unlike dims of the user's mesh; and the capacity with which experts are exchanged, and how many have shadows.

    ``axis_sizes`` has the ranks along each mesh axis: ``data×4 · tensor×2``; ``axis_names``: those of a mesh whose dims
    have names: ``dp data×4 · tp tensor×2``.
    """
    dims = [name.partition(".")[0] for name in axis_names] or [""] * len(axis_sizes)
    runs = groupby(zip(dims, strategy.roles, axis_sizes, strict=True), key=lambda axis: axis[:2])
    parts = [f"{dim} {role}×{prod(size for *_, size in run)}".lstrip() for (dim, role), run in runs]
    roles = " · ".join(parts) or "one device"
    if not strategy.splits_experts:
        return roles
    shadows = f", {strategy.shadows} shadow expert{'s'[: strategy.shadows > 1]}" if strategy.shadows else ""
    return f"{roles} (capacity {strategy.capacity:g}{shadows})"


def describe_keeps(strategy: Strategy, casts: bool = False) -> str:
    """Return what a block keeps for backward, and whether parameters too that ``zero`` axes gathered or, without such
    axes, that mixed precision cast (``casts``).

    A block that is computed again as a whole gathers again, whatever ``keep_gathered`` says.
    """
    keeps = (describe_recomputed(strategy) or "all") + describe_offloaded(strategy)
    kept = strategy.keep_gathered and not strategy.recomputes_all
    if "zero" not in strategy.roles:
        return f"{keeps}, casts {'kept' if kept else 'again'}" if casts else keeps
    late = " and late" if strategy.gather_late else ""
    if kept:
        return f"{keeps}, gathered kept"
    slices = f" in {strategy.split_gathers} slices" if strategy.split_gathers > 1 else ""
    return f"{keeps}, gathered again{late}{slices}"


def describe_recomputed(strategy: Strategy) -> str:
    """Return "recompute" for a block that is computed again as a whole, "3 of 11" for one that keeps so many of its
    values, and nothing for one that keeps all.
    """
    if strategy.keeps:
        return f"{len(strategy.keeps)} of {strategy.num_values}"
    return "recompute" if strategy.recompute else ""


def describe_offloaded(strategy: Strategy) -> str:
    """Return ", 2, inputs, parameters and states on the host" where two values, what enters the block, its parameters
    and their optimizer states are there, ", states on disk" where these are, or nothing.
    """
    values = [str(len(strategy.offloads))] if strategy.offloads else []
    entering = ["inputs"] if strategy.offload_entering else []
    parameters = ["parameters"] if strategy.offload_parameters else []
    on_host = strategy.offload_states and not strategy.states_on_disk
    on_disk = ", states on disk" if strategy.states_on_disk else ""
    *first, last = *values, *entering, *parameters, *(["states"] if on_host else []), ""
    if not first:
        return on_disk
    *first, last = first
    return f", {' and '.join([*([', '.join(first)] if first else []), last])} on the host{on_disk}"


def _rows(plan: Plan) -> list[tuple[range, list[BlockPlan]]]:
    """Return where equal blocks stand, and these, of every run of periods with equal fingerprints and strategies."""
    runs = periodic_runs([(block.fingerprint, block.strategy) for block in plan.blocks])
    return [(places, [plan.blocks[i] for i in places]) for run in runs for places in run.places()]


def describe_blocks(places: range, names: Sequence[str]) -> str:
    """Return where blocks stand and what they are called: "1-80 model.layers.0-79"; without names "1-80 (80x)"."""
    count = f"({len(places)}x)" if len(places) > 1 else ""
    return f"{describe_places(places)} {describe_names(names) or count}".rstrip()


def describe_names(names: Sequence[str]) -> str:
    """Return the modules of blocks: "model.layers.0-79"; nothing for blocks that have numbers alone."""
    known = [name for name in names if not _NUMBERED.fullmatch(name)]
    if not known:
        return ""
    parts = [_DIGITS.split(name) for name in known]
    if len({tuple(part[::2]) for part in parts}) > 1:
        return f"{known[0]} .. {known[-1]}"
    texts = [list(dict.fromkeys(place)) for place in zip(*parts, strict=True)]
    return "".join(text[0] if len(text) == 1 else f"{text[0]}-{text[-1]}" for text in texts)


def describe_places(places: range) -> str:
    """Return "4-7" for neighbours, "4, 6 .. 10" for every second."""
    if len(places) == 1:
        return str(places[0])
    return f"{places[0]}-{places[-1]}" if places.step == 1 else f"{places[0]}, {places[1]} .. {places[-1]}"


def _title(plan: Plan) -> str:
    kind = "Forward-only plan" if plan.forward_only else "Plan"
    if not plan.axis_sizes:
        return f"{kind} for one device"
    return f"{kind} for {prod(plan.axis_sizes)} ranks on a mesh of {'×'.join(map(str, plan.axis_sizes))}"


def _totals(plan: Plan) -> list[str]:
    budget = "none" if plan.memory_budget_bytes is None else f"{format_bytes(plan.memory_budget_bytes)} per rank"
    peak = f"{_bytes(plan.peak_memory_bytes)} per rank" if plan.peak_memory_bytes else _UNPRICED
    totals = [
        *_stages(plan),
        *_kinds(plan),
        *([f"rank order           {describe_ranks(plan.rank_order)}"] if plan.rank_order else []),
        f"predicted step time  {_seconds(plan.step_time_s)}",
        *([f"throughput           {plan.throughput.describe(plan.step_time_s)}"] if plan.throughput else []),
        f"predicted peak       {peak}",
        f"memory budget        {budget}",
    ]
    if not plan.forward_only:
        totals.append(f"optimizer            {plan.optimizer}")
    if plan.fold_gradients:
        totals.append("gradients            folded into the update while backward computes")
    if plan.mixed_precision is not None:
        totals.append(f"mixed precision      {describe_policy(plan.mixed_precision)}")
    return totals + [f"note                 {note}" for note in plan.notes]


def device_kinds_of_blocks(plan: Plan) -> list[str]:
    """The kind of device that each block lies on; empty for a plan of one kind, and for a wildcard one."""
    if not plan.device_kinds or plan.is_wildcard:
        return []
    table, count = plan.pipelining.table(plan.num_pipeline_ranks), len(plan.blocks)
    firsts = [*plan.pipelining.cuts(count), count]
    kinds: list[str] = []
    for stage, (first, end) in enumerate(pairwise(firsts)):
        kinds += [plan.device_kinds[table.ranks_of(stage)[0]]] * (end - first)
    return kinds


def _kinds(plan: Plan) -> list[str]:
    """Return a line for each kind of device, with the stages and blocks that lie on it."""
    if not plan.device_kinds:
        return []
    table, lines = plan.pipelining.table(plan.num_pipeline_ranks), []
    blocks = len(plan.blocks)
    firsts = [] if plan.is_wildcard else [*plan.pipelining.cuts(blocks), blocks]
    runs = groupby(range(len(plan.device_kinds)), lambda rank: plan.device_kinds[rank])
    for number, (kind, run) in enumerate(runs):
        ranks = list(run)
        stages = sorted(stage for rank in ranks for stage in table.stages_of(rank))
        held = [block for stage in stages for block in range(firsts[stage], firsts[stage + 1])] if firsts else []
        where = f"stages {describe_ranks(stages)}" + (f", blocks {describe_ranks(held)}" if held else "")
        lines.append(f"{'devices' if not number else '':<20} {kind}: {where}")
    return lines


def _stages(plan: Plan) -> list[str]:
    """Return what the stages and micro-batches are, nothing for one of each."""
    pipelining = plan.pipelining
    if pipelining.is_trivial:
        return []
    cuts = (
        "cut evenly" if not pipelining.first_blocks else f"from blocks {', '.join(map(str, pipelining.first_blocks))}"
    )
    return [
        f"stages               {pipelining.num_stages} on {plan.num_pipeline_ranks} pipeline ranks, {cuts}",
        *(["vocabulary           first and last block spread over all pipeline ranks"] if pipelining.is_spread else []),
        f"micro-batches        {pipelining.num_microbatches}, schedule {pipelining.schedule}",
        *(["rows                 sums over blocks that lie on several ranks"] if plan.num_pipeline_ranks > 1 else []),
    ]


def _seconds(value: float) -> str:
    return format_seconds(value) if value else _UNPRICED


def _bytes(value: int) -> str:
    return format_bytes(value) if value else _UNPRICED
