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
from passes.search.trials import QueueEntry

_LEVELS = (BOUND, ESTIMATE, SEARCHED, SIMULATED)
_Key = tuple[Configuration, AxisPartition]


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

    seen: dict[_Key, Contender] = field(default_factory=dict)
    bound_s: float = 0.0
    simulations: int = 0

    def begin(self, waiting: Iterable[QueueEntry]) -> None:
        """Every configuration stands for its bound."""
        for entry in waiting:
            self.seen.setdefault(_key(entry.search), _contender(entry.search, BOUND, entry.time_s))
        self.bound_s = min(contender.time_s for contender in self.seen.values())

    def look(self, first: QueueEntry, closer: Iterable[QueueEntry]) -> None:
        """A closer look has led to what follows; to nothing where no choice fits."""
        following = next(iter(closer), None)
        known = ESTIMATE if first.looks == 0 or (following is not None and following.trial is None) else SEARCHED
        seconds = following.time_s if following is not None else inf
        self._put(first.search, _contender(first.search, known, seconds, fits=following is not None))

    def simulated(self, search: StageSearch, time_s: float, peak_bytes: int, fits: bool) -> None:
        """A choice was simulated."""
        self.simulations += 1
        self._put(search, _contender(search, SIMULATED, time_s, peak_bytes, fits))

    @property
    def searched(self) -> int:
        """Configurations in which a choice was searched for."""
        return sum(contender.known in (SEARCHED, SIMULATED) for contender in self.seen.values())

    def of(self, search: StageSearch, time_s: float, peak_bytes: int) -> Contender:
        """The chosen one."""
        return _contender(search, SIMULATED, time_s, peak_bytes)

    def runners_up(self, chosen: Configuration) -> tuple[Contender, ...]:
        """The best other configuration of each pipeline degree: of those that were looked at most closely."""
        best: dict[int, Contender] = {}
        for (configuration, _), contender in self.seen.items():
            known = best.get(contender.pipeline_ranks)
            if configuration != chosen and (known is None or _rank(contender) < _rank(known)):
                best[contender.pipeline_ranks] = contender
        return tuple(best[ranks] for ranks in sorted(best))

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
        known = self.seen[_key(search)]
        if known.known != SIMULATED or _rank(contender) < _rank(known):
            self.seen[_key(search)] = contender


def _key(search: StageSearch) -> _Key:
    return search.configuration, search.costs.kinds


def _contender(
    search: StageSearch, known: str, time_s: float, peak_bytes: int | None = None, fits: bool = True
) -> Contender:
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
    )


def _rank(contender: Contender) -> tuple[bool, int, float]:
    """What fits first, then what is known best, then what is fastest."""
    return not contender.fits, -_LEVELS.index(contender.known), contender.time_s
