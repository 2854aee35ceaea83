"""What a plan could have been instead, and by how much it loses: other pipelines, and one strategy for all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Protocol

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_table import describe_keeps, describe_roles
from galvatron_fx.ir.plan.prediction import RankUse
from galvatron_fx.ir.plan.search_report import BOUND, ESTIMATE, Contender
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

__all__ = ["CHOSEN", "OTHER", "Alternative", "other_pipelines", "uniform_plans"]

CHOSEN, OTHER, TOO_LARGE = "chosen", "other", "too large"
_MOST_CAUSES = 3
_LITTLE = 2e-3  # of the step: what a cause has to make of it to be told
_MARKS = {BOUND: "≥ ", ESTIMATE: "~ "}


@dataclass(frozen=True)
class Alternative:
    """A plan, or a kind of plans, beside the chosen one.

    ``time_s``: of a step, None where nothing is known; ``peak_bytes``: of the fullest rank, None where not
    simulated; ``known``: how both are known; ``verdict``: by how much it loses, or why it cannot be; ``colour``: of the
    pictures; ``reason``: what it takes more of.
    """

    name: str
    time_s: float | None
    peak_bytes: int | None
    known: str
    verdict: str
    colour: str
    reason: str = ""


def other_pipelines(plan: Plan) -> list[Alternative]:
    """The chosen plan, plans known by name, and of every pipeline degree the best other one that the search saw.

    Of a plan that no search has found there is only the plan itself.
    """
    if plan.report is None:
        pipelining = plan.pipelining
        chosen = Contender(
            plan.num_pipeline_ranks,
            pipelining.num_stages,
            pipelining.schedule,
            pipelining.num_microbatches,
            "given",
            plan.step_time_s,
        )
        return [_contender(chosen, chosen)] if plan.step_time_s else []
    chosen = plan.report.chosen
    return [_contender(contender, chosen) for contender in (chosen, *plan.report.runners_up)]


def _contender(contender: Contender, chosen: Contender) -> Alternative:
    name = contender.name or _pipeline_name(contender)
    if contender is chosen:
        return Alternative(f"chosen: {name}", chosen.step_s, chosen.peak_bytes, chosen.known, "chosen", CHOSEN)
    if not contender.fits:
        reason = "" if contender.peak_bytes is None else f"its leanest form takes {format_bytes(contender.peak_bytes)}"
        return Alternative(
            name, None, contender.peak_bytes, contender.known, "too large for the budget", TOO_LARGE, reason
        )
    mark = _MARKS.get(contender.known, "")
    verdict = f"{mark}{contender.lost_by(chosen):+.1%}"
    form = _pipeline_name(contender) if contender.name else ""
    return Alternative(name, contender.step_s, contender.peak_bytes, contender.known, verdict, OTHER, form)


def _pipeline_name(contender: Contender) -> str:
    if contender.num_stages == 1 and contender.num_microbatches == 1:
        return "no pipeline"
    parts = f"{contender.num_microbatches} micro-batches"
    if contender.num_stages == 1:
        return f"no pipeline, {parts}"
    ranks = f"{contender.pipeline_ranks} rank{'s' * (contender.pipeline_ranks > 1)}"
    return f"{contender.num_stages} stages on {ranks}, {contender.schedule}, {parts}"


class Step(Protocol):
    """A simulated step."""

    @property
    def step_time_s(self) -> float: ...

    @property
    def peak_memory_bytes(self) -> int: ...

    def ranks(self) -> tuple[RankUse, ...]:
        """What takes time and memory on every pipeline rank."""
        ...


def uniform_plans(
    plan: Plan, cluster: Cluster, chosen: Step, simulate: Callable[[Plan], Step]
) -> Iterator[Alternative]:
    """The same pipeline with one strategy in all blocks, as people choose by hand, each simulated.

    ``chosen``: the plan's own step; ``simulate``: that of another plan; what it refuses counts as impossible.
    """
    for strategy, known in _by_hand(plan, cluster).items():
        other = replace(plan, blocks=tuple(replace(block, strategy=strategy) for block in plan.blocks))
        if other.blocks == plan.blocks:
            continue
        name = f"{known}: {describe_roles(strategy, plan.axis_sizes)}"
        if not plan.forward_only:
            name += f", {describe_keeps(strategy)}"
        try:
            step = simulate(other)
        except GalvatronError as error:
            yield Alternative(name, None, None, "refused", "impossible", TOO_LARGE, str(error))
            continue
        verdict, colour = f"{step.step_time_s / chosen.step_time_s - 1:+.1%}", OTHER
        budget, reason = plan.memory_budget_bytes, _slower_by(step, chosen)
        if budget is not None and step.peak_memory_bytes > budget:
            verdict, colour = f"too large: {format_bytes(step.peak_memory_bytes)}", TOO_LARGE
            reason = f"{format_bytes(step.peak_memory_bytes - budget)} over the budget: {_largest_kinds(step)}"
        yield Alternative(name, step.step_time_s, step.peak_memory_bytes, "simulated", verdict, colour, reason)


def _slower_by(step: Step, chosen: Step) -> str:
    """The causes by which a step differs most from the chosen one's, averaged over ranks."""
    other_s, chosen_s = _by_cause(step.ranks()), _by_cause(chosen.ranks())
    differences = {cause: other_s.get(cause, 0.0) - chosen_s.get(cause, 0.0) for cause in {*other_s, *chosen_s}}
    largest = sorted(differences, key=lambda cause: (-abs(differences[cause]), cause))[:_MOST_CAUSES]
    said = [
        f"{cause} {'+' if differences[cause] > 0 else '−'}{format_seconds(abs(differences[cause]))}"
        for cause in largest
        if abs(differences[cause]) > _LITTLE * chosen.step_time_s
    ]
    return ", ".join(said) or "about the same"


def _by_cause(ranks: Sequence[RankUse]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for use in ranks:
        for cause, amount in use.seconds.items():
            seconds[cause.kind] = seconds.get(cause.kind, 0.0) + amount / len(ranks)
    return seconds


def _largest_kinds(step: Step) -> str:
    fullest = max(step.ranks(), key=lambda use: sum(use.memory.values())).memory
    kinds = sorted(fullest, key=lambda kind: -fullest[kind])[:2]
    return ", ".join(f"{kind} {format_bytes(fullest[kind])}" for kind in kinds)


def _by_hand(plan: Plan, cluster: Cluster) -> dict[Strategy, str]:
    """Every axis that holds no stages in one role, and tensor parallelism inside a node with ZeRO between nodes: with
    the names that people call them by.
    """
    plan_roles = plan.blocks[0].strategy.roles
    axes = [axis for axis in cluster.axes if axis.size > 1]
    fastest = max((axis.bandwidth_bytes_per_s for axis in axes), default=0.0)
    inside = [axis.bandwidth_bytes_per_s == fastest for axis in axes]

    def with_roles(near: str, far: str, recompute: bool = False) -> Strategy:
        roles = (near if is_near else far for is_near in inside)
        return Strategy(
            tuple(PIPELINE if role == PIPELINE else new for role, new in zip(plan_roles, roles, strict=True)), recompute
        )

    free = [
        (axis.size, is_near) for axis, is_near, role in zip(axes, inside, plan_roles, strict=True) if role != PIPELINE
    ]
    ranks, near = prod(size for size, _ in free), prod(size for size, is_near in free if is_near)
    mixed = f"TP{near} × FSDP{ranks // near}" if ranks > near else f"TP{near}"
    named = {
        with_roles("data", "data"): f"DDP-{ranks}",
        with_roles("zero", "zero"): f"FSDP-{ranks}",
        with_roles("zero", "zero", recompute=True): f"FSDP-{ranks}",
        with_roles("tensor_sequence", "tensor_sequence"): f"TP{ranks}",
        with_roles("tensor_sequence", "zero"): mixed,
        with_roles("tensor_sequence", "zero", recompute=True): mixed,
    }
    stages = f" × PP{plan.num_pipeline_ranks}" if plan.num_pipeline_ranks > 1 else ""
    return {strategy: name + stages for strategy, name in named.items()}
