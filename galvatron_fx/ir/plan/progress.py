"""What a search tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "CAPTURE",
    "LOWERING",
    "PHASES",
    "PRICING",
    "REPORT",
    "SEARCH",
    "SIMULATION",
    "TUNING",
    "Observer",
    "Progress",
]

CAPTURE, PRICING, SEARCH, SIMULATION, REPORT = "capture", "pricing", "search", "simulation", "report"
LOWERING, TUNING = "lowering", "tuning"

PHASES = (CAPTURE, PRICING, SEARCH, SIMULATION, REPORT, TUNING, LOWERING)
"""In the order of their beginnings; search and simulation take turns. A search ends with its report."""


@dataclass(frozen=True)
class Progress:
    """A moment of a search.

    ``phase``: what runs now, one of :data:`PHASES`; ``blocks``: found in the model; ``configurations``: that are
    priced, ``left``: those of them that may still beat the best, None before the first look; ``searched``: in how many
    a choice was searched for; ``simulated``: choices that were; ``best_s``: predicted seconds of a step of the best
    plan so far, None before there is one; ``batch``: the global batch that :func:`galvatron_fx.plan_batch` is at.
    """

    phase: str
    blocks: int = 0
    configurations: int = 0
    left: int | None = None
    searched: int = 0
    simulated: int = 0
    best_s: float | None = None
    batch: int | None = None


class Observer(Protocol):
    """Anything that is called with every :class:`Progress`; an error that it raises ends the search."""

    def __call__(self, progress: Progress, /) -> None:
        """Take note."""
