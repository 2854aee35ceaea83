"""How long a thread waits for a processor that something else has."""

from __future__ import annotations

import warnings
from pathlib import Path

from galvatron_fx.profiling.ranks import Ranks

__all__ = ["Waiting"]

_TIMES = Path("/proc/thread-self/schedstat")  # of Linux: nanoseconds that the thread ran, and that it could not
_MUCH = 0.05  # of the time: a quiet machine takes a hundredth


class Waiting:
    """Begins to count when it is made."""

    def __init__(self) -> None:
        self._before = _ran_and_waited()

    @property
    def share(self) -> float:
        """The part of the time since then, in which there was something to do, that was spent waiting; 0 where the
        system does not tell.
        """
        ran, waited = (now - before for now, before in zip(_ran_and_waited(), self._before, strict=True))
        return waited / max(ran + waited, 1)

    def warn(self, ranks: Ranks) -> None:
        """Warn on the first rank where any rank waited much. Every rank calls it."""
        share = max(ranks.all(self.share))
        if share > _MUCH and ranks.index == 0:
            warnings.warn(
                f"other work had the processors for {share:.0%} of the time in which operators were measured: this "
                f"profile, and what is predicted with it, is about as much too slow. Measure again on a quiet machine",
                stacklevel=3,
            )


def _ran_and_waited() -> tuple[int, int]:
    try:
        ran, waited = map(int, _TIMES.read_text().split()[:2])
    except (OSError, ValueError):  # another system, or a kernel that does not count
        return 0, 0
    return ran, waited
