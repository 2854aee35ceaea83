"""What is known of a configuration while the search goes on: a bound, an estimate, or its choice under some budget."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from passes.search.solvers.stage_search import KEPT_SETS, StageChoice, StageSearch

MOST_SLACK = 1.5  # by how much estimates may be above what the lowered program takes
_CLOSE = 0.02  # of the budget: how closely its estimate is brought to what the lowered program takes
_NEAR = 0.7  # of the limit: choices as full tell how far estimates are off there
_SLACK = 1.1  # by how much estimates are above it, often: what is tried until a simulation tells
_ENOUGH = 3  # simulations near the limit: estimates are not further off than was seen by then
_STEP = 1.04  # from a budget that nothing keeps to to the next
_LIKE = 0.95  # of how far the estimate before was off, another choice of the same search is off as well
_TRIES = 8
_UNIFORM_TRIES = 3
ESTIMATE = 0.96  # of an estimate; choices of down to 0.970 of theirs have been seen
_MOVED = 0.8  # of a choice whose cuts were not moved; choices of down to 0.847 of theirs have been seen


_Kind = tuple[int, str, bool, bool, bool]
"""Pipeline axes, schedule, whether there are micro-batches, and whether blocks keep no sets of values, or offload none.
"""


@dataclass(frozen=True)
class Trial:
    """A configuration's choice under a budget of estimated bytes, and what is known of other budgets.

    ``fits`` and ``over``: the largest budget whose choice kept to the real one when it was simulated, and the least
    whose choice did not; ``tries``: simulations that are left; ``is_rough``: whether the choice may still become one of
    fewer kinds of axes; ``is_uniform``: whether only one table of roles is searched; ``times``: the estimate, what the
    choice before took by simulation, at least.
    """

    search: StageSearch
    choice: StageChoice
    budget: float
    fits: float = 0.0
    over: float = np.inf
    tries: int = _TRIES
    is_rough: bool = False
    is_uniform: bool = False
    times: float = 1.0

    @classmethod
    def first(cls, search: StageSearch, budget: float, most: float) -> Trial | None:
        """The choice under ``budget``; where there is none, under larger ones up to ``most``."""
        while budget <= most:
            choice = search.search_once(budget)
            if choice is not None:
                return cls(search, choice, budget, is_rough=search.may_be_alike)
            budget *= 1 + 10 * _CLOSE
        return None

    @classmethod
    def uniform(cls, trial: Trial) -> Trial | None:
        """What has the main roles of the trial's choice in all blocks; None where that is the choice, or none fits.

        What a small block of another kind costs those around it (axes that it tells apart are served one by one for
        all, what enters and leaves it is redistributed) is known to estimates only roughly.
        """
        alike = trial.search.uniform(trial.choice)
        choice = alike.search_once(trial.budget, trial.choice.first_blocks) if alike is not None else None
        if alike is None or choice is None or choice == trial.choice:
            return None
        return cls(alike, choice, trial.budget, tries=_UNIFORM_TRIES, is_uniform=True)

    @property
    def time_s(self) -> float:
        """Seconds of a step, by estimate and by what was simulated of the search before."""
        return self.choice.time_s * self.times

    def may_be_closer(self, simulated_s: float, below_s: float) -> bool:
        """Whether more was known to be too much, and a little more than this, which fits, may take less than
        ``below_s``.
        """
        return bool(np.isfinite(self.over)) and simulated_s * (1 - _CLOSE) < below_s

    @property
    def is_first(self) -> bool:
        """Whether nothing of it was simulated yet."""
        return self.tries == _TRIES

    def refined(self) -> Trial:
        """The choice that is simulated: of a rough one, one that is alike."""
        return replace(self, choice=self.search.with_fewer_axis_groups(self.choice, self.budget), is_rough=False)

    def next(
        self, limit: float, peak_bytes: int, simulated_s: float, below_s: float = np.inf, apart: float = _CLOSE
    ) -> Trial | None:
        """The trial that follows from what this one's simulation took; None where nothing is left to learn, or where
        one of less memory promises no step ``below_s``. ``apart``: by what share budgets differ that are tried.
        """
        room = limit - peak_bytes
        if room < 0 and _LIKE * simulated_s >= below_s:
            return None
        fits = max(self.fits, self.budget) if room >= 0 else self.fits
        over = min(self.over, self.budget) if room < 0 else self.over
        used = self.budget if room >= 0 else min(self.budget, self.search.bytes(self.choice))
        budget = used + room
        if np.isfinite(over) and not (fits + over) / 2 <= budget < over * (1 - _CLOSE):
            budget = (fits + over) / 2  # what the room promises is known to be too much, or gets on too slowly
            if room < 0 and self.search.bytes(self.choice) + room > budget:  # a little too much: a little less fits
                budget = max(budget, over * (1 - 2 * _CLOSE))
        closed = budget <= fits * (1 + apart) or budget >= over * (1 - apart) or abs(room) < _CLOSE * limit
        if self.tries == 1 or (closed and room >= 0) or budget <= 0:
            return None
        cuts = self.choice.first_blocks
        choice = self.search.run(budget, cuts)
        while room < 0 and choice is None and budget * _STEP < min(self.budget, over) * (1 - _CLOSE):
            budget *= _STEP
            choice = self.search.run(budget, cuts)
        # It takes more than was estimated: ask for less, until that costs time.
        while room < 0 and choice is not None and choice.time_s <= self.choice.time_s:
            budget *= 1 - _CLOSE
            choice = self.search.run(budget, cuts)
        if choice is None or choice == self.choice or (room >= 0 and choice.time_s >= self.choice.time_s):
            return None
        times = max(1.0, _LIKE * simulated_s / self.choice.time_s)
        return replace(self, choice=choice, budget=budget, fits=fits, over=over, tries=self.tries - 1, times=times)


@dataclass(frozen=True)
class Prospect:
    """A configuration that no choice was searched in; ``time_s``: what it promises, by a bound or by estimates.

    ``looks``: how often an estimate was made.
    """

    search: StageSearch
    time_s: float
    looks: int = 0

    @classmethod
    def of(cls, search: StageSearch, limit: float) -> Prospect:
        return cls(search, search.bound_s(MOST_SLACK * limit))

    def closer(self, limit: float, budget: float, most: float) -> Prospect | Trial | None:
        """The same after a closer look, None where no choice fits.

        ``budget``: bytes that choices are searched under to find one that takes ``limit`` bytes; ``most``: the largest
        such budget.
        """
        if self.looks == 0:
            estimates = (ESTIMATE * self.search.estimate_s(bytes_) for bytes_ in (limit, MOST_SLACK * limit))
            estimate = next(filter(np.isfinite, estimates), None)
            return replace(self, time_s=max(self.time_s, estimate), looks=1) if estimate is not None else None
        if self.looks == 1 and (at_least_s := _MOVED * self.search.unmoved_s(budget)) > self.time_s:
            return replace(self, time_s=at_least_s, looks=2)
        return Trial.first(self.search, budget, most)


@dataclass
class MemorySlack:
    """How far estimates of bytes are above those of lowered programs, by what was simulated near the limit.

    ``ratios``: seen of a kind, by the roles that most time is spent under.
    """

    ratios: dict[_Kind, dict[tuple[str, ...], list[float]]] = field(default_factory=dict)

    def budgets(self, search: StageSearch, limit: float) -> tuple[float, float]:
        """The least and the largest budget of estimated bytes to search for a choice that takes ``limit`` bytes."""
        seen = self._seen(kind_of(search))
        least = max(seen, default=_SLACK)
        return least * limit, (least if len(seen) >= _ENOUGH else MOST_SLACK) * limit

    def suited(self, trial: Trial, limit: float) -> Trial:
        """A first trial, or that under less, where estimates of a choice of its roles are known to be closer."""
        seen = self.ratios.get(kind_of(trial.search), {}).get(trial.search.main_roles(trial.choice), [])
        budget = max(seen, default=np.inf) * limit
        closer = Trial.first(trial.search, budget, budget) if budget < trial.budget * (1 - _CLOSE) else None
        return closer or trial

    def learn(self, trial: Trial, peak_bytes: int, limit: float) -> bool:
        """Hear what a choice took; whether first trials of its kind have to be made anew."""
        if not _NEAR <= peak_bytes / limit <= 1 / _NEAR:
            return False
        kind, roles = kind_of(trial.search), trial.search.main_roles(trial.choice)
        before = max(self._seen(kind), default=_SLACK)
        ratio = min(trial.search.bytes(trial.choice) / peak_bytes, MOST_SLACK)
        self.ratios.setdefault(kind, {}).setdefault(roles, []).append(ratio)
        return abs(max(self._seen(kind)) / before - 1) > _CLOSE

    def _seen(self, kind: _Kind) -> list[float]:
        return [ratio for ratios in self.ratios.get(kind, {}).values() for ratio in ratios]


def kind_of(search: StageSearch) -> _Kind:
    """What decides how far estimates of bytes are off, beside roles."""
    setting, excluded = search.configuration, search.excluded
    several = setting.num_microbatches > 1
    return setting.pipeline_axes, setting.schedule, several, KEPT_SETS in excluded, "activations" in excluded
