"""What is known of a configuration while the search goes on: a bound, an estimate, or its choice under some budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from passes.search.solvers.stage_search import Configuration, StageChoice, StageSearch

MOST_SLACK = 1.5  # by how much estimates may be above what the lowered program takes
_CLOSE = 0.02  # of the budget: how closely its estimate is brought to what the lowered program takes
_TRIES = 8
_UNIFORM_TRIES = 3
_ESTIMATE = 0.96  # of an estimate; choices of down to 0.970 of theirs have been seen
_MOVED = 0.8  # of a choice whose cuts were not moved; choices of down to 0.847 of theirs have been seen


@dataclass(frozen=True)
class Trial:
    """A configuration's choice under a budget of estimated bytes, and what is known of other budgets.

    ``fits`` and ``over``: the largest budget whose choice kept to the real one when it was simulated, and the least
    whose choice did not; ``tries``: simulations that are left; ``is_rough``: whether the choice may still become one of
    fewer kinds of axes.
    """

    search: StageSearch
    choice: StageChoice
    budget: float
    fits: float = 0.0
    over: float = np.inf
    tries: int = _TRIES
    is_rough: bool = False

    @classmethod
    def first(cls, search: StageSearch, limit: float) -> Trial | None:
        """The choice under the real budget; estimates are high, so where there is none, under larger ones."""
        budget = limit
        while budget <= MOST_SLACK * limit:
            choice = search.search_once(budget)
            if choice is not None:
                return cls(search, choice, budget, is_rough=search.may_be_alike)
            budget *= 1 + 10 * _CLOSE
        return None

    @classmethod
    def uniform(cls, search: StageSearch, choice: StageChoice, budget: float) -> Trial | None:
        """What has the main roles of ``choice`` in all blocks."""
        alike = search.uniform(choice)
        uniform_choice = alike.search_once(budget, choice.first_blocks)
        return cls(alike, uniform_choice, budget, tries=_UNIFORM_TRIES) if uniform_choice is not None else None

    def refined(self) -> Trial:
        """The choice that is simulated: of a rough one, one that is alike."""
        return replace(self, choice=self.search.with_fewer_axis_groups(self.choice, self.budget), is_rough=False)

    def next(self, limit: float, peak_bytes: int) -> Trial | None:
        """The trial that follows from what this one's simulation took; None where nothing is left to learn."""
        room = limit - peak_bytes
        fits = max(self.fits, self.budget) if room >= 0 else self.fits
        over = min(self.over, self.budget) if room < 0 else self.over
        budget = self.budget + room if not np.isfinite(over) else max(self.budget + room, (fits + over) / 2)
        closed = budget <= fits * (1 + _CLOSE) or budget >= over * (1 - _CLOSE) or abs(room) < _CLOSE * limit
        if self.tries == 1 or (closed and room >= 0) or budget <= 0:
            return None
        choice = self.search.run(budget)
        # It takes more than was estimated: ask for less, until that costs time.
        while room < 0 and choice is not None and choice.time_s <= self.choice.time_s:
            budget *= 1 - _CLOSE
            choice = self.search.run(budget)
        if choice is None or choice == self.choice or (room >= 0 and choice.time_s >= self.choice.time_s):
            return None
        return Trial(self.search, choice, budget, fits, over, self.tries - 1)


@dataclass(frozen=True, order=True)
class QueueEntry:
    """A configuration with what it promises: a bound, an estimate or (with a trial) the time of a choice.

    ``looks``: how often an estimate was made.
    """

    time_s: float
    configuration: Configuration
    search: StageSearch = field(compare=False)
    trial: Trial | None = field(default=None, compare=False)
    looks: int = field(default=0, compare=False)

    @classmethod
    def bound(cls, search: StageSearch, limit: float) -> QueueEntry:
        return cls(search.bound_s(MOST_SLACK * limit), search.configuration, search)

    @classmethod
    def of(cls, trial: Trial) -> QueueEntry:
        return cls(trial.choice.time_s, trial.search.configuration, trial.search, trial)

    def closer(self, limit: float) -> list[QueueEntry]:
        """The same after a closer look, nothing where no choice fits."""
        if self.trial is not None:
            return [QueueEntry.of(self.trial.refined())]
        if self.looks == 0:
            estimates = (_ESTIMATE * self.search.estimate_s(share * limit) for share in (1.0, MOST_SLACK))
            estimate = next(filter(np.isfinite, estimates), None)
            return [replace(self, time_s=max(self.time_s, estimate), looks=1)] if estimate is not None else []
        if self.looks == 1 and (at_least_s := _MOVED * self.search.unmoved_s(limit)) > self.time_s:
            return [replace(self, time_s=at_least_s, looks=2)]
        trial = Trial.first(self.search, limit)
        return [QueueEntry.of(trial)] if trial is not None else []
