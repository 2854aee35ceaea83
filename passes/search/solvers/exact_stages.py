"""The fastest strategies for stages whose cuts are given, exactly, where blocks are few.

A step never gets shorter when a stage's forward, its gradients of inputs or weights, what it does once a step, or a
transfer takes longer. So of all the ways to give a stage's blocks their strategies only those matter that no other
one with equal boundaries beats in all of these and in memory. Such tuples are built block by block and joined stage by
stage. On the way those are dropped that no memory is left for, and those with which the schedule takes as long as a
choice that is known even if all that is not decided were at its best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from cost_models.many_steps import many_step_s
from cost_models.schedule_time import InFlight
from galvatron_fx.ir.arrays import Bools, Floats, Ints
from passes.search.solvers.cuts import Cuts
from passes.search.solvers.sections import Section
from passes.search.solvers.step_times import StepTimes

_MOST_TUPLES = 50_000  # with more of them at once the search gives up
Indices = Ints

# What a tuple takes, by which it is compared: seconds, and then bytes.
_FORWARD, _INPUTS, _WEIGHTS, _ONCE, _HELD, _TRANSIENT = range(6)


class _TooMany(Exception):
    """There are more tuples than are worth an exact search."""


@dataclass(frozen=True)
class _Tuples:
    """Ways to give consecutive blocks strategies, a row each: amounts, picks, boundaries in front and behind."""

    cost: Floats
    picks: Indices
    enters: Indices
    leaves: Indices

    def __getitem__(self, rows: Indices | Bools) -> _Tuples:
        return _Tuples(self.cost[rows], self.picks[rows], self.enters[rows], self.leaves[rows])

    def __len__(self) -> int:
        return len(self.cost)

    @property
    def least(self) -> Floats:
        """``[1, amount]``: the least of each amount, in whichever tuple."""
        least: Floats = self.cost.min(axis=0, keepdims=True)
        return least

    def then(self, block: _Tuples, move: Floats) -> _Tuples:
        """All of these followed by all of one more block; ``move[kind, kind]``: seconds between the two, each way."""
        _check_count(len(self) * len(block))
        here, there = (part.ravel() for part in np.indices((len(self), len(block))))
        cost = _together(self.cost[here], block.cost[there])
        between = move[self.leaves[here], block.enters[there]]
        cost[:, _FORWARD] += between
        cost[:, _INPUTS] += between
        picks = np.concatenate([self.picks[here], block.picks[there]], axis=1)
        return _Tuples(cost, picks, self.enters[here], block.leaves[there])

    def undominated(self) -> _Tuples:
        """Those that no other with equal boundaries beats, or equals, in every amount."""
        # What beats another has the smaller sum of amounts, however these are scaled.
        scaled = self.cost / np.maximum(self.cost.max(axis=0, initial=0.0), np.finfo(float).tiny)
        rest = np.argsort(scaled.sum(axis=1), kind="stable")
        kept = []
        while len(rest):
            first, rest = rest[0], rest[1:]
            kept.append(first)
            alike = (self.enters[rest] == self.enters[first]) & (self.leaves[rest] == self.leaves[first])
            rest = rest[~(alike & (self.cost[rest] >= self.cost[first]).all(axis=1))]
        return self[np.array(kept, dtype=np.int64)]


@dataclass(frozen=True)
class ExactPicks:
    """Searches the strategies of one way to cut; ``waiting``: what waits on each stage, ``budget``: bytes a rank."""

    times: StepTimes
    cuts: Cuts
    waiting: Sequence[InFlight]
    budget: float

    def run(self, below_s: float) -> list[int] | None:
        """The fastest picks if they take less than ``below_s`` seconds; None if none do, or if there are too many."""
        blocks = [self._options(stage) for stage in range(len(self.cuts))]
        if not all(len(options) for stage in blocks for options in stage):
            return None
        least = [_sum([options.least for options in stage]) for stage in blocks]
        stages: list[_Tuples] = []
        try:
            for stage, stage_options in enumerate(blocks):
                stages.append(self._grown(stage, stage_options, least, below_s))
                if not len(stages[-1]):
                    return None
                least[stage] = stages[-1].least
            return self._joined(stages, least, below_s)
        except _TooMany:
            return None

    # ---- one stage ----

    def _options(self, stage: int) -> list[_Tuples]:
        """The strategies of each block of a stage."""
        costs = self.times.costs
        blocks = range(self.cuts[stage], (*self.cuts[1:], len(costs.block_fingerprints))[stage])
        held = Section(tuple(blocks), (self.waiting[stage],) * len(blocks)).held(costs)
        weight = costs.backward if stage == 0 else costs.weight  # the first stage passes no gradient on
        stage_options = []
        for block, kept in zip(blocks, held, strict=True):
            late = weight[block] if self.times.filled.splits_backward else np.zeros_like(weight[block])
            amounts = (
                costs.forward[block],
                costs.backward[block] - late,
                late,
                costs.once[block],
                kept,
                costs.transient[block],
            )
            every = np.arange(len(costs.strategies))[:, None]
            options = _Tuples(np.stack(amounts, axis=1), every, costs.kind, costs.kind)[costs.allowed[block]]
            stage_options.append(options[options.cost[:, _HELD] + options.cost[:, _TRANSIENT] <= self.budget])
        return stage_options

    def _grown(self, stage: int, blocks: Sequence[_Tuples], least: Sequence[Floats], below_s: float) -> _Tuples:
        """The tuples of a stage that may be part of a better choice; ``least``: of every stage, what it takes."""
        change = self.times.costs.change / 2
        behind = [*accumulate((options.least for options in reversed(blocks[1:])), _together)][::-1]
        grown: _Tuples | None = None
        for place, options in enumerate(blocks):
            grown = options if grown is None else grown.then(options, change[self.cuts[stage] + place - 1])
            whole = _together(grown.cost, behind[place]) if place < len(behind) else grown.cost
            costs = [whole if other == stage else amounts for other, amounts in enumerate(least)]
            grown = grown[self._promising(costs, [], below_s)].undominated()
        assert grown is not None
        return grown

    # ---- all stages ----

    def _joined(self, stages: Sequence[_Tuples], least: Sequence[Floats], below_s: float) -> list[int] | None:
        """The fastest of one tuple a stage, those of the first stages put together first."""
        rows: list[Indices] = []
        sends: list[Floats] = []
        for stage, tuples in enumerate(stages):
            count = len(rows[0]) if rows else 1
            _check_count(count * len(tuples))
            before, new = (part.ravel() for part in np.indices((count, len(tuples))))
            rows = [*(row[before] for row in rows), new]
            sends = [send[before] for send in sends]
            if stage:
                leaves, enters = stages[stage - 1].leaves[rows[-2]], tuples.enters[new]
                sends.append(self.times.sends_s(stage, self.cuts[stage], leaves, enters))
            costs = [*(s.cost[row] for s, row in zip(stages, rows, strict=False)), *least[stage + 1 :]]
            keep = np.flatnonzero(self._promising(costs, sends, below_s))
            if not len(keep):
                return None
            rows, sends = [row[keep] for row in rows], [send[keep] for send in sends]
        best = int(self._step_s([s.cost[row] for s, row in zip(stages, rows, strict=True)], sends).argmin())
        return [int(pick) for s, row in zip(stages, rows, strict=True) for pick in s.picks[row[best]]]

    def _promising(self, costs: Sequence[Floats], sends: Sequence[Floats], below_s: float) -> Bools:
        """Which choices may fit the budget and be faster than ``below_s``; arguments as of :meth:`_step_s`."""
        fits = np.ones(1, dtype=np.bool_)
        for rank_stages in self._ranks():
            taken = _sum([costs[stage] for stage in rank_stages])
            fits = fits & (taken[:, _HELD] + taken[:, _TRANSIENT] <= self.budget)
        good: Bools = fits & (self._step_s(costs, sends) < below_s)
        return good

    def _step_s(self, costs: Sequence[Floats], sends: Sequence[Floats]) -> Floats:
        """Seconds of choices by the amounts of every stage, ``[choice, amount]`` or ``[1, amount]`` for all choices.

        ``sends``: of transfers between the first stages; those behind are at their fastest.
        """
        stages = [(cost[:, _FORWARD], cost[:, _INPUTS], cost[:, _WEIGHTS]) for cost in costs]
        forward, backward = [f for f, _, _ in stages], [i + w for _, i, w in stages]
        quickest = [self.times.quickest_send_s(cut) for cut in self.cuts[1 + len(sends) :]]
        once = [_sum([costs[stage] for stage in rank_stages])[:, _ONCE] for rank_stages in self._ranks()]
        most = once[0]
        for other in once[1:]:
            most = np.maximum(most, other)
        transfers = self.times.both_ways_s([*sends, *map(np.asarray, quickest)], forward, backward)
        return many_step_s(self.times.schedule, stages, *transfers) + most

    def _ranks(self) -> list[tuple[int, ...]]:
        return [self.times.filled.stages_of(rank) for rank in range(self.times.num_ranks)]


def _together(one: Floats, other: Floats) -> Floats:
    """The amounts of what shares a device: sums, but the larger of two transients."""
    both: Floats = one + other
    both[:, _TRANSIENT] = np.maximum(one[:, _TRANSIENT], other[:, _TRANSIENT])
    return both


def _sum(costs: Sequence[Floats]) -> Floats:
    *_, total = accumulate(costs, _together)
    return total


def _check_count(count: int) -> None:
    if count > _MOST_TUPLES:
        raise _TooMany
