"""What the page says in words: sentences over its pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite, prod

from galvatron_fx.ir.cluster.cluster_table import describe_devices
from galvatron_fx.ir.graph.decisions import Decision
from galvatron_fx.ir.plan.prediction import IDLE, TRANSFER, busiest
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report.alternatives import OTHER
from galvatron_fx.report.explained import Explained
from passes.frontend.capture.module_state import quoted

__all__ = ["Card"]

_LONGEST_VALUES = 60  # characters
_DECIDED_BY = {
    "number": "values",
    "rows": "rows that a mask chooses",
    "each": "the least and the most rows that a mask chooses of a sample",
}


@dataclass(frozen=True)
class Card:
    """A number at a glance: what it is, how much, and a remark."""

    name: str
    value: str
    more: str = ""


def decided(explained: Explained) -> list[str]:
    """By what values of its inputs forward decided: a sentence for each line of code."""
    lines: dict[str, list[Decision]] = {}
    for decision in explained.decisions:
        lines.setdefault(decision.line, []).append(decision)
    sentences = []
    for line, decisions in lines.items():
        names = sorted(frozenset[str]().union(*(decision.computation.inputs for decision in decisions)))
        values = ", ".join(str(decision.value) for decision in decisions)
        shown = values if len(values) <= _LONGEST_VALUES else f"{values[:_LONGEST_VALUES]}..."
        what = _DECIDED_BY[decisions[0].kind]
        sentences.append(
            f"Forward decides by {what} of {quoted(names)}, {shown}: {line}. A batch of which they are others is "
            f"another program, which this page does not tell of."
        )
    if explained.is_fixed:
        sentences.append(
            "The program is one of this batch alone: ranks share the work in which operators keep samples apart, and "
            "all do the rest."
        )
    return sentences


def lead(explained: Explained) -> str:
    """What the page is about."""
    shape = " × ".join(map(str, explained.plan.axis_sizes)) or "1"
    sizes = f"a batch of {explained.batch} samples" if explained.batch else "the given batch"
    sizes += f" of {explained.sequence} tokens" if explained.sequence else ""
    step = "forward pass, for inference" if explained.plan.forward_only else "training step"
    return (
        f"The plan of one {step}: {len(explained.labels)} layer blocks on a mesh of {shape} "
        f"({explained.cluster.num_devices} devices), {sizes}. All of it is predicted, on lowered graphs that "
        f"did not run."
    )


def cards(explained: Explained) -> list[Card]:
    """The plan in numbers."""
    plan, pipelining = explained.plan, explained.plan.pipelining
    budget = plan.memory_budget_bytes
    share = f"{explained.peak_bytes / budget:.0%} of the budget" if budget else "no budget"
    plan_cards = [
        Card("step time", format_seconds(explained.step_s), _searched(explained)),
        Card("peak memory of a rank", format_bytes(explained.peak_bytes), share),
        Card("memory budget", format_bytes(budget) if budget is not None else "none", "per rank"),
    ]
    if explained.batch and explained.step_s:
        plan_cards.append(
            Card("throughput", f"{_rate(explained.batch / explained.step_s)} samples/s", _tokens(explained))
        )
    if explained.throughput is not None and explained.step_s and len(explained.cluster.kinds) == 1:
        peak = explained.cluster.device.name
        plan_cards.append(Card("MFU", f"{explained.throughput.mfu(explained.step_s):.1%}", f"of the peak of {peak}"))
    plan_cards += [
        Card("devices", str(explained.cluster.num_devices), describe_devices(explained.cluster)),
        Card("stages", str(pipelining.num_stages), _ranks(explained)),
        Card(
            "micro-batches",
            str(pipelining.num_microbatches),
            f"schedule {pipelining.schedule}" if pipelining.num_stages > 1 else "",
        ),
    ]
    if not plan.forward_only:
        plan_cards.append(Card("optimizer", plan.optimizer))
    if plan.report is not None and isfinite(plan.report.gap):
        bound = f"by the search's prices no plan takes less than {format_seconds(plan.report.bound_s)}"
        plan_cards.append(Card("at most slower than the best", f"{plan.report.gap:.1%}", bound))
    return plan_cards


def axes(explained: Explained) -> list[Mapping[str, object]]:
    """The mesh axes that the plan has roles for; neighbours that are as fast and play the same roles, together."""
    real_axes = [axis for axis in explained.cluster.axes if axis.size > 1]
    roles = [tuple(block.strategy.roles[i] for block in explained.plan.blocks) for i in range(len(real_axes))]
    groups = groupby(range(len(real_axes)), lambda i: (roles[i], real_axes[i].bandwidth_bytes_per_s))
    rows: list[Mapping[str, object]] = []
    for (_, speed), group in groups:
        members = list(group)
        ranks = prod(real_axes[i].size for i in members)
        rows.append(
            {
                "first": members[0],
                "name": name_axes(members, axis_names(explained)),
                "ranks": f"{ranks} ranks",
                "speed": f"{format_bytes(speed)}/s",
            }
        )
    return rows


def time(explained: Explained) -> str:
    """Who is busy, and who waits."""
    rank = busiest(explained.ranks)
    use = explained.ranks[rank]
    hidden = f" {format_seconds(use.hidden_s)} of collectives are hidden behind computing." if use.hidden_s else ""
    if len(explained.ranks) == 1:
        return (
            f"Every rank does the same. A step takes {_step(explained)}; collectives count with what they add.{hidden}"
        )
    waits = max(use.seconds.get(cause, 0.0) for use in explained.ranks for cause in use.seconds if cause.kind == IDLE)
    moved = any(cause.kind == TRANSFER and s for use in explained.ranks for cause, s in use.seconds.items())
    spared = "; transfers count as far as faster links would spare them" if moved else ""
    return (
        f"Pipeline rank {rank} (stages {', '.join(map(str, use.stages))}) is busy longest, for "
        f"{use.busy_s / explained.step_s:.0%} of the step of {_step(explained)}. A rank waits for others for up to "
        f"{format_seconds(waits)}{spared}.{hidden}"
    )


def memory(explained: Explained) -> str:
    """Whether the budget binds."""
    report, budget = explained.plan.report, explained.plan.memory_budget_bytes
    if budget is None:
        return "The plan has no memory budget."
    left = f"The fullest rank leaves {format_bytes(max(0, budget - explained.peak_bytes))} of the budget."
    if report is None:
        return left
    if not report.is_memory_bound:
        return f"{left} More memory would not make this configuration faster."
    gains = [
        f"{1 - seconds / report.chosen.time_s:.1%} faster "
        + (f"with {factor - 1:.0%} more" if isfinite(factor) else "without a budget")
        for factor, seconds in sorted(report.with_more_memory.items())
    ]
    return f"{left} The budget binds: this configuration would be {', '.join(gains)}."


def timeline(explained: Explained) -> str:
    """What the areas are made of."""
    if explained.schedule is None:
        steps = "forward" if explained.plan.forward_only else "forward, backward and the optimizer's update"
        return (
            f"Tensor bytes alive on a rank at every operator of {steps}. Equal "
            "blocks were run once, on tensors without data, and repeated."
        )
    return (
        "Tensor bytes alive on each pipeline rank: while an action of the schedule runs, the most that is alive during "
        "it; between two, what is held."
    )


def step(explained: Explained) -> str:
    """How the lanes are to be read."""
    if explained.schedule is None:
        return (
            "Blocks in the order in which they run, dark and light by turns; below, what they do. Collectives run "
            "beside operators until something waits for them; both are slower then. Shares are of the step."
        )
    return (
        f"Schedule {explained.schedule.schedule.name}: numbers are micro-batches, lighter boxes are later stages of "
        f"a rank. What is done once a step before and after it is left out."
    )


def collectives(explained: Explained) -> str:
    """What the columns mean, or that there is none."""
    if not explained.collectives:
        return "This plan needs no collectives."
    moved = sum(row.sent_bytes * row.count for row in explained.collectives)
    return (
        f"Every collective of a step, equal ones of equal blocks in one row; all together they send "
        f"{format_bytes(moved)}, added up over the blocks of all stages, a rank of each. The whole tensor is what "
        f"the ranks of the group hold together (a term, for a reduction); what a rank sends is that of a ring. Names "
        f"of modules are those of one block of each kind."
    )


def columns(explained: Explained) -> str:
    """The columns of the lowering mesh: "0 is axes 3 (zero), 1 is ..."."""
    if not explained.columns:
        return "there is none"
    said = [
        f"{number} is {name_axes(column.axes, explained.cluster.given_names)} ({column.main_role})"
        for number, column in enumerate(explained.columns)
    ]
    return ", ".join(said)


def axis_names(explained: Explained) -> tuple[str, ...]:
    """Names of the axes that the plan has roles for, where the user gave them some."""
    named = zip(explained.cluster.given_names, explained.cluster.shape, strict=False)
    return tuple(name for name, size in named if size > 1)


def name_axes(axes: Sequence[int], names: Sequence[str]) -> str:
    """Axes by the names that the user gave them, else by their numbers: "axes dp.0, dp.1", "axes 0, 1"."""
    return f"{'axes' if len(axes) > 1 else 'axis'} {', '.join(names[axis] if names else str(axis) for axis in axes)}"


def uniform(explained: Explained) -> str:
    """What the first table of alternatives holds."""
    kept = "" if explained.plan.pipelining.is_trivial else " with the same stages, micro-batches and schedule"
    said = f"What people choose by hand: every block with the same strategy{kept}, lowered and simulated like the plan."
    faster = [
        a for a in explained.uniform if a.colour == OTHER and a.time_s is not None and a.time_s < explained.step_s
    ]
    if not faster:
        return said
    return (
        f"{said} What comes out faster here was slower by the prices that the search minimises, or not allowed to it."
    )


def pipelines(explained: Explained) -> str:
    """What the second table holds."""
    report = explained.plan.report
    if report is None:
        return "This plan was given and not searched, so nothing is known of other pipelines."
    if len(explained.pipelines) == 1:
        return (
            "The search was allowed no other pipeline: give it the role pipeline, or pin fewer of stages and schedule."
        )
    looked = ", ".join(f"{what} {count}" for what, count in report.counts.items() if count)
    return (
        f"The best configuration of every pipeline degree that the search saw ({looked}). It looks no closer than it "
        f"must: a bound (≥) is never beaten, an estimate (~) is about right, the others are sums of the prices."
    )


def blocks(explained: Explained) -> str:
    """How the table of blocks is to be read."""
    ranks = explained.plan.num_pipeline_ranks
    count = len(explained.labels)
    over = (
        f"all its blocks (there are {count}), which lie over {ranks} pipeline ranks" if ranks > 1 else "all its blocks"
    )
    held = (
        "parameters" if explained.plan.forward_only else
        "parameters, gradients, optimizer states and what is kept for backward"
    )  # fmt: skip
    return (
        f"Equal neighbours share a row, and axes that are as fast and play the same roles a column. Time and memory of "
        f"a row are the sums over {over}, as the search priced them: {held}. What a rank holds stands "
        f"under Where the memory goes."
    )


def what_ifs(explained: Explained) -> str:
    """What the rows have in common."""
    return (
        "The best plan under other conditions, with the same roles and free stages, precomputed from the same capture. "
        "These are the estimates of a sweep, among fewer schedules and micro-batches than a search tries: hold them "
        "against the first row, which is this plan's own conditions estimated alike."
    )


def _step(explained: Explained) -> str:
    return format_seconds(explained.step_s)


def _searched(explained: Explained) -> str:
    report = explained.plan.report
    return f"simulated; {format_seconds(report.chosen.time_s)} by the search's estimate" if report else "simulated"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _tokens(explained: Explained) -> str:
    return f"{_rate(explained.batch * explained.sequence / explained.step_s)} tokens/s" if explained.sequence else ""


def _ranks(explained: Explained) -> str:
    if explained.plan.pipelining.num_stages == 1:
        return "no pipeline"
    return f"on {explained.plan.num_pipeline_ranks} pipeline ranks"
