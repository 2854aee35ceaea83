"""Pipelines whose embedding and head all ranks compute together, made of those that a search found with whole ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from torch import fx

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.plan.schedule import SCHEDULES
from galvatron_fx.ir.plan.spread_ends import make_spread_schedule
from passes.lowering.apply_plan import with_spread_ends
from passes.search.best_first import Simulated
from passes.search.solvers.cuts import Cuts
from passes.search.solvers.stage_search import StageChoice, StageSearch
from passes.simulation.choice import SimulateChoice, Staging
from passes.simulation.stages import StagesReport

__all__ = ["fastest_with_spread_vocabulary", "with_spread_vocabulary"]

_PIPELINES = 4  # that are tried, the fastest of each configuration
_LARGE = 2**14  # rows of a vocabulary; with fewer it is never more than a small part of a model
_SHARE = 0.2  # of what a rank does in a pipeline that is even: with less, uneven cuts make up for embedding and head
_NEAR = 1.5  # times the best step
_ROUNDING = 1e-9


def fastest_with_spread_vocabulary(
    graph: fx.GraphModule, outcomes: Sequence[Simulated], best: Simulated, simulate: SimulateChoice, limit: float
) -> Simulated:
    """Return ``best``, or what is faster and keeps to ``limit`` bytes: one of the ``outcomes``, which may keep to more,
    with its strategies, its first and last block spread over all pipeline ranks, and even stages between.

    Tried where a vocabulary is large: a parameter of the last block has many rows, which the ranks divide, and the two
    blocks take long against the share of a rank.
    """
    rows = _most_rows(graph)
    near = [
        outcome
        for outcome in outcomes
        if rows >= _LARGE
        and outcome.simulated_s < _NEAR * best.simulated_s
        and rows % outcome.search.num_ranks == 0
        and _is_long(outcome.search)
    ]
    spread = [each for each in _spread(near, simulate) if isinstance(each, Simulated) and each.fits(limit)]
    return min((best, *spread), key=lambda outcome: outcome.simulated_s)


def with_spread_vocabulary(outcomes: Sequence[Simulated], simulate: SimulateChoice) -> list[Simulated]:
    """Return the fastest of the ``outcomes``, which have stages, each with spread ends and even stages between, whether
    that is faster or not, in any memory. Raises PlanError where the model cannot be run so.
    """
    tried = list(_spread(outcomes, simulate))
    refusals = [each for each in tried if isinstance(each, PlanError)]
    if len(refusals) == len(tried):
        raise refusals[0]
    return [each for each in tried if isinstance(each, Simulated)]


def _spread(outcomes: Sequence[Simulated], simulate: SimulateChoice) -> Iterator[Simulated | PlanError]:
    """The fastest outcomes with stages, one a configuration, simulated with spread ends; or why one cannot be run."""
    by_configuration: dict[object, Simulated] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.simulated_s):
        if isinstance(outcome.report, StagesReport) and outcome.search.num_ranks > 1:
            by_configuration.setdefault(outcome.search.configuration, outcome)
    for outcome in list(by_configuration.values())[:_PIPELINES]:
        for choice in _choices(outcome):
            try:
                yield _simulated(outcome, choice, simulate)
            except PlanError as refusal:  # a parameter that a stage of one rank uses, too
                yield refusal


def _is_long(search: StageSearch) -> bool:
    """Whether embedding and head take long, against what is left for each rank."""
    fastest = search.costs.fastest
    return bool(fastest[0] + fastest[-1] > _SHARE * fastest.sum() / search.num_ranks)


def _most_rows(graph: fx.GraphModule) -> int:
    """The longest dim of a weight of the last block."""
    blocks = {node: meta_of(node).block for node in graph.graph.nodes if node.op == "call_function"}
    last = max(blocks.values(), default=0)
    weights = (
        meta_of(node).spec.shape
        for port, node in ports(graph)
        if port.kind == "param" and any(blocks.get(user) == last for user in node.users)
    )
    return max((max(shape) for shape in weights if len(shape) > 1), default=0)


def _choices(outcome: Simulated) -> Iterator[StageChoice]:
    """Even stages between the ends, with the strategies as they are, and with one of them in all blocks between."""
    search, picks = outcome.search, outcome.choice.picks
    between = dict.fromkeys(picks[1:-1])
    every = [picks, *((picks[0], *[pick] * (len(picks) - 2), picks[-1]) for pick in between)]
    for candidate in dict.fromkeys(every):
        cuts = _even(search, candidate)
        if cuts is not None and all(search.costs.allowed[block, pick] for block, pick in enumerate(candidate)):
            yield StageChoice(cuts, candidate, outcome.choice.time_s)


def _even(search: StageSearch, picks: Sequence[int]) -> Cuts | None:
    """The first block of every stage, so that those between the ends take equally long; None for too few blocks."""
    stages, count = search.configuration.num_stages, len(picks)
    if count - 2 < stages:
        return None
    ends = np.cumsum(search.costs.time[np.arange(1, count - 1), picks[1:-1]])
    cuts = [1]
    for stage in range(1, stages):
        block = 1 + int(np.searchsorted(ends, ends[-1] * stage / stages * (1 + _ROUNDING), side="right"))
        cuts.append(min(max(block, cuts[-1] + 1), count - 1 - (stages - stage)))
    return (0, *cuts, count - 1)


def _simulated(outcome: Simulated, choice: StageChoice, simulate: SimulateChoice) -> Simulated:
    """The choice with spread ends. Raises PlanError where the model cannot be run so."""
    search, setting = outcome.search, outcome.search.configuration
    assert setting.schedule in SCHEDULES
    filled, whole = (
        make_spread_schedule(setting.schedule, search.num_ranks, setting.num_stages, schedule.num_microbatches)
        for schedule in (search.filled, search.schedule)
    )
    staging = Staging(whole, filled, simulate.cluster.axes[: setting.pipeline_axes])
    report = simulate.run(with_spread_ends(search.strategies(choice)), choice.first_blocks, staging)
    return replace(outcome, choice=replace(choice, time_s=report.step_time_s), report=report)
