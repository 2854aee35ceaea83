"""What a plan could have been instead, and by how much it loses: other pipelines, and one strategy for all blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_table import describe_keeps, describe_roles
from galvatron_fx.ir.plan.search_report import BOUND, ESTIMATE, Contender
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from galvatron_fx.ir.plan.units import format_bytes

__all__ = ["CHOSEN", "OTHER", "Alternative", "other_pipelines", "uniform_plans"]

CHOSEN, OTHER, TOO_LARGE = "chosen", "other", "too large"
_MARKS = {BOUND: "≥ ", ESTIMATE: "~ "}


@dataclass(frozen=True)
class Alternative:
    """A plan, or a kind of plans, beside the chosen one.

    ``time_s``: of a step, None where nothing is known; ``peak_bytes``: of the fullest rank, None where not
    simulated; ``known``: how both are known; ``verdict``: by how much it loses, or why it cannot be; ``colour``: of the
    pictures.
    """

    name: str
    time_s: float | None
    peak_bytes: int | None
    known: str
    verdict: str
    colour: str


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
        return Alternative(name, None, contender.peak_bytes, contender.known, "too large for the budget", TOO_LARGE)
    mark = _MARKS.get(contender.known, "")
    verdict = f"{mark}{contender.lost_by(chosen):+.1%}"
    return Alternative(name, contender.step_s, contender.peak_bytes, contender.known, verdict, OTHER)


def _pipeline_name(contender: Contender) -> str:
    if contender.num_stages == 1 and contender.num_microbatches == 1:
        return "no pipeline"
    parts = f"{contender.num_microbatches} micro-batches"
    if contender.num_stages == 1:
        return f"no pipeline, {parts}"
    ranks = f"{contender.pipeline_ranks} rank{'s' * (contender.pipeline_ranks > 1)}"
    return f"{contender.num_stages} stages on {ranks}, {contender.schedule}, {parts}"


def uniform_plans(
    plan: Plan, cluster: Cluster, chosen_s: float, simulate: Callable[[Plan], tuple[float, int]]
) -> Iterator[Alternative]:
    """The same pipeline with one strategy in all blocks, as people choose by hand, each simulated.

    ``chosen_s``: seconds of the plan's own step; ``simulate``: seconds of a step and bytes of the fullest rank of a
    plan; what it refuses counts as impossible.
    """
    for strategy in _by_hand(plan, cluster):
        other = replace(plan, blocks=tuple(replace(block, strategy=strategy) for block in plan.blocks))
        if other.blocks == plan.blocks:
            continue
        name = f"{describe_roles(strategy, plan.axis_sizes)}, {describe_keeps(strategy)}"
        try:
            time_s, peak_bytes = simulate(other)
        except GalvatronError as error:
            yield Alternative(name, None, None, f"refused: {error}", "impossible", TOO_LARGE)
            continue
        verdict = f"{time_s / chosen_s - 1:+.1%}"
        budget, colour = plan.memory_budget_bytes, OTHER
        if budget is not None and peak_bytes > budget:
            verdict, colour = f"too large: {format_bytes(peak_bytes)}", TOO_LARGE
        yield Alternative(name, time_s, peak_bytes, "simulated", verdict, colour)


def _by_hand(plan: Plan, cluster: Cluster) -> list[Strategy]:
    """Every axis that holds no stages in one role; and tensor parallelism inside a node with ZeRO between nodes."""
    plan_roles = plan.blocks[0].strategy.roles
    axes = [axis for axis in cluster.axes if axis.size > 1]
    fastest = max((axis.bandwidth_bytes_per_s for axis in axes), default=0.0)
    inside = [axis.bandwidth_bytes_per_s == fastest for axis in axes]

    def with_roles(near: str, far: str, recompute: bool = False) -> Strategy:
        roles = (near if is_near else far for is_near in inside)
        return Strategy(
            tuple(PIPELINE if role == PIPELINE else new for role, new in zip(plan_roles, roles, strict=True)), recompute
        )

    strategies = [
        with_roles("data", "data"),
        with_roles("zero", "zero"),
        with_roles("zero", "zero", recompute=True),
        with_roles("tensor_sequence", "tensor_sequence"),
        with_roles("tensor_sequence", "zero"),
        with_roles("tensor_sequence", "zero", recompute=True),
    ]
    return list(dict.fromkeys(strategies))
