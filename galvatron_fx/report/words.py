"""What the page says in words: sentences over its pictures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite, prod

from galvatron_fx.ir.plan.prediction import IDLE, TRANSFER, busiest
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.report.alternatives import OTHER
from galvatron_fx.report.explained import Explained

__all__ = ["Card"]


@dataclass(frozen=True)
class Card:
    """A number at a glance: what it is, how much, and a remark."""

    name: str
    value: str
    more: str = ""


def lead(told: Explained) -> str:
    """What the page is about."""
    shape = " × ".join(map(str, told.plan.axis_sizes)) or "1"
    sizes = f"a batch of {told.batch} samples" if told.batch else "the given batch"
    sizes += f" of {told.sequence} tokens" if told.sequence else ""
    return (
        f"The plan of one training step: {len(told.labels)} layer blocks on a mesh of {shape} "
        f"({told.cluster.num_devices} devices), {sizes}. All of it is predicted, on lowered graphs that did not run."
    )


def cards(told: Explained) -> list[Card]:
    """The plan in numbers."""
    plan, own = told.plan, told.plan.pipelining
    budget = plan.memory_budget_bytes
    share = f"{told.peak_bytes / budget:.0%} of the budget" if budget else "no budget"
    found = [
        Card("step time", format_seconds(told.step_s), _searched(told)),
        Card("peak memory of a rank", format_bytes(told.peak_bytes), share),
        Card("memory budget", format_bytes(budget) if budget is not None else "none", "per rank"),
    ]
    if told.batch and told.step_s:
        found.append(Card("throughput", f"{_rate(told.batch / told.step_s)} samples/s", _tokens(told)))
    found += [
        Card("devices", str(told.cluster.num_devices), told.cluster.device.name),
        Card("stages", str(own.num_stages), _ranks(told)),
        Card("micro-batches", str(own.num_microbatches), f"schedule {own.schedule}" if own.num_stages > 1 else ""),
        Card("optimizer", plan.optimizer),
    ]
    if plan.report is not None and isfinite(plan.report.gap):
        bound = f"by the search's prices no plan takes less than {format_seconds(plan.report.bound_s)}"
        found.append(Card("at most slower than the best", f"{plan.report.gap:.1%}", bound))
    return found


def axes(told: Explained) -> list[Mapping[str, object]]:
    """The mesh axes that the plan has roles for; neighbours that are as fast and play the same roles, together."""
    own = [axis for axis in told.cluster.axes if axis.size > 1]
    roles = [tuple(block.strategy.roles[i] for block in told.plan.blocks) for i in range(len(own))]
    groups = groupby(range(len(own)), lambda i: (roles[i], own[i].bandwidth_bytes_per_s))
    found: list[Mapping[str, object]] = []
    for (_, speed), group in groups:
        members = list(group)
        ranks = prod(own[i].size for i in members)
        found.append(
            {
                "first": members[0],
                "name": name_axes(members),
                "ranks": f"{ranks} ranks",
                "speed": f"{format_bytes(speed)}/s",
            }
        )
    return found


def time(told: Explained) -> str:
    """Who is busy, and who waits."""
    rank = busiest(told.ranks)
    use = told.ranks[rank]
    hidden = f" {format_seconds(use.hidden_s)} of collectives are hidden behind computing." if use.hidden_s else ""
    if len(told.ranks) == 1:
        return f"Every rank does the same. A step takes {_step(told)}; collectives count with what they add.{hidden}"
    waits = max(use.seconds.get(cause, 0.0) for use in told.ranks for cause in use.seconds if cause.kind == IDLE)
    moved = any(cause.kind == TRANSFER and s for use in told.ranks for cause, s in use.seconds.items())
    spared = "; transfers count as far as faster links would spare them" if moved else ""
    return (
        f"Pipeline rank {rank} (stages {', '.join(map(str, use.stages))}) is busy longest, for "
        f"{use.busy_s / told.step_s:.0%} of the step of {_step(told)}. A rank waits for others for up to "
        f"{format_seconds(waits)}{spared}.{hidden}"
    )


def memory(told: Explained) -> str:
    """Whether the budget binds."""
    report, budget = told.plan.report, told.plan.memory_budget_bytes
    if budget is None:
        return "The plan has no memory budget."
    left = f"The fullest rank leaves {format_bytes(max(0, budget - told.peak_bytes))} of the budget."
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


def timeline(told: Explained) -> str:
    """What the areas are made of."""
    if told.schedule is None:
        return (
            "Tensor bytes alive on a rank at every operator of forward, backward and the optimizer's update. Equal "
            "blocks were run once, on tensors without data, and repeated."
        )
    return (
        "Tensor bytes alive on each pipeline rank: while an action of the schedule runs, the most that is alive during "
        "it; between two, what is held."
    )


def step(told: Explained) -> str:
    """How the lanes are to be read."""
    if told.schedule is None:
        return (
            "Blocks in the order in which they run, dark and light by turns; below, what they do. Collectives run "
            "beside operators until something waits for them; both are slower then. Shares are of the step."
        )
    return (
        f"Schedule {told.schedule.schedule.name}: numbers are micro-batches, lighter boxes are later stages of a rank. "
        f"What is done once a step before and after it is left out."
    )


def collectives(told: Explained) -> str:
    """What the columns mean, or that there is none."""
    if not told.collectives:
        return "This plan needs no collectives."
    moved = sum(row.sent_bytes * row.count for row in told.collectives)
    return (
        f"Every collective of a step, equal ones of equal blocks in one row; all together they send "
        f"{format_bytes(moved)}, added up over the blocks of all stages, a rank of each. The whole tensor is what "
        f"the ranks of the group hold together (a term, for a reduction); what a rank sends is that of a ring. Names "
        f"of modules are those of one block of each kind."
    )


def columns(told: Explained) -> str:
    """The columns of the lowering mesh: "0 is axes 3 (zero), 1 is ..."."""
    if not told.columns:
        return "there is none"
    said = [f"{number} is {name_axes(column.axes)} ({column.main_role})" for number, column in enumerate(told.columns)]
    return ", ".join(said)


def name_axes(axes: Sequence[int]) -> str:
    """Axes by their numbers: "axes 0, 1"."""
    return f"{'axes' if len(axes) > 1 else 'axis'} {', '.join(map(str, axes))}"


def uniform(told: Explained) -> str:
    """What the first table of alternatives holds."""
    kept = "" if told.plan.pipelining.is_trivial else " with the same stages, micro-batches and schedule"
    said = f"What people choose by hand: every block with the same strategy{kept}, lowered and simulated like the plan."
    faster = [a for a in told.uniform if a.colour == OTHER and a.time_s is not None and a.time_s < told.step_s]
    if not faster:
        return said
    return (
        f"{said} What comes out faster here was slower by the prices that the search minimises, or not allowed to it."
    )


def pipelines(told: Explained) -> str:
    """What the second table holds."""
    report = told.plan.report
    if report is None:
        return "This plan was given and not searched, so nothing is known of other pipelines."
    if len(told.pipelines) == 1:
        return (
            "The search was allowed no other pipeline: give it the role pipeline, or pin fewer of stages and schedule."
        )
    looked = ", ".join(f"{what} {count}" for what, count in report.counts.items() if count)
    return (
        f"The best configuration of every pipeline degree that the search saw ({looked}). It looks no closer than it "
        f"must: a bound (≥) is never beaten, an estimate (~) is about right, the others are sums of the prices."
    )


def _step(told: Explained) -> str:
    return format_seconds(told.step_s)


def _searched(told: Explained) -> str:
    if not told.plan.step_time_s:
        return "simulated"
    return f"simulated; {format_seconds(told.plan.step_time_s)} as searched"


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def _tokens(told: Explained) -> str:
    return f"{_rate(told.batch * told.sequence / told.step_s)} tokens/s" if told.sequence else ""


def _ranks(told: Explained) -> str:
    if told.plan.pipelining.num_stages == 1:
        return "no pipeline"
    return f"on {told.plan.num_pipeline_ranks} pipeline ranks"
