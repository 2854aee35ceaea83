"""What a search sees: how far it looked at each configuration, how long its phases took, how much time is left."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from galvatron_fx.ir.plan.progress import Observer, Progress
from galvatron_fx.ir.plan.search_report import BOUND, ESTIMATE, SEARCHED, SIMULATED, Contender
from passes.search.candidates import AxisPartition
from passes.search.solvers.stage_search import Configuration, StageSearch
from passes.search.trials import Prospect, Trial

_LEVELS = (BOUND, ESTIMATE, SEARCHED, SIMULATED)
Key = tuple[Configuration, AxisPartition]
"""A configuration, and the kinds of axes that it tells apart."""


@dataclass
class Watch:
    """Times the phases of a search and tells an observer of them."""

    observer: Observer | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _now: Progress = field(default_factory=lambda: Progress(""))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what runs within."""
        self.tell(phase=name)
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def tell(self, **changes: object) -> None:
        """Tell the observer what has changed."""
        self._now = replace(self._now, **changes)  # type: ignore[arg-type]
        if self.observer is not None:
            self.observer(self._now)


@dataclass
class Record:
    """How far the search looked at each configuration and kinds of axes, and what it saw there."""

    seen: dict[Key, Contender] = field(default_factory=dict)
    searches: dict[Key, StageSearch] = field(default_factory=dict)
    bound_s: float = 0.0
    simulations: int = 0

    def begin(self, searches: Iterable[StageSearch], prospects: Iterable[Prospect]) -> None:
        """Every configuration stands for its bound; those that are no ``prospects`` cannot fit."""
        for prospect in prospects:
            self.seen.setdefault(_key(prospect.search), contender_of(prospect.search, BOUND, prospect.time_s))
        for search in searches:
            self.searches.setdefault(_key(search), search)
            self.seen.setdefault(_key(search), contender_of(search, BOUND, inf, fits=False))
        self.bound_s = min(contender.time_s for contender in self.seen.values())

    def look(self, item: Prospect | Trial, closer: Prospect | Trial | None) -> None:
        """A closer look has led to what follows; to nothing where no choice fits."""
        no_choice = isinstance(closer, Prospect) or (closer is None and isinstance(item, Prospect) and item.looks == 0)
        time_s = inf if closer is None else closer.time_s
        self._put(item.search, contender_of(item.search, ESTIMATE if no_choice else SEARCHED, time_s))

    def simulated(self, search: StageSearch, contender: Contender) -> None:
        """A choice was simulated."""
        self.simulations += 1
        self._put(search, contender)

    @property
    def searched(self) -> int:
        """Configurations in which a choice was searched for."""
        return sum(contender.known in (SEARCHED, SIMULATED) for contender in self.seen.values())

    def others(self, chosen: Configuration) -> list[Key]:
        """The best other configuration of each pipeline degree: of those that were looked at most closely."""
        best: dict[int, Key] = {}
        for key, contender in self.seen.items():
            known = best.get(contender.pipeline_ranks)
            if key[0] != chosen and (known is None or _rank(contender) < _rank(self.seen[known])):
                best[contender.pipeline_ranks] = key
        return [best[ranks] for ranks in sorted(best)]

    def counts(self) -> Mapping[str, int]:
        """Configurations by how far they were looked at, and the number of simulations."""
        unfit = sum(not contender.fits for contender in self.seen.values())
        counts = Counter(contender.known for contender in self.seen.values() if contender.fits)
        return {
            "configurations": len(self.seen),
            "left at a bound": counts[BOUND],
            "left at an estimate": counts[ESTIMATE],
            "searched only": counts[SEARCHED],
            "simulated": counts[SIMULATED],
            "too large": unfit,
            "simulations": self.simulations,
        }

    def _put(self, search: StageSearch, contender: Contender) -> None:
        """Keep the better of two simulated ones, else what was seen later."""
        known = self.seen.get(_key(search))
        if known is None or known.known != SIMULATED or _rank(contender) < _rank(known):
            self.seen[_key(search)] = contender
            self.searches.setdefault(_key(search), search)


def _key(search: StageSearch) -> Key:
    return search.configuration, search.costs.kinds


def contender_of(
    search: StageSearch,
    known: str,
    time_s: float,
    peak_bytes: int | None = None,
    fits: bool = True,
    simulated_s: float | None = None,
) -> Contender:
    """A configuration as far as it is known; see :class:`Contender`."""
    setting = search.configuration
    return Contender(
        search.num_ranks,
        setting.num_stages,
        setting.schedule,
        setting.num_microbatches,
        known,
        float(time_s),
        peak_bytes,
        fits and isfinite(time_s),
        simulated_s,
    )


def _rank(contender: Contender) -> tuple[bool, int, float]:
    """What fits first, then what is known best, then what is fastest."""
    return not contender.fits, -_LEVELS.index(contender.known), contender.step_s
