"""The few best choices of a search that are unlike each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from passes.search.best_first import Simulated

_NEAR = 1.5  # times the best step: simulations are not as far off


def shortlist(outcomes: Iterable[Simulated], best: Simulated, limit: float, most: int) -> list[Simulated]:
    """At most so many of what was simulated and keeps to ``limit`` bytes, ``best`` first, then by simulated seconds.

    Of those with the same stages, micro-batches and roles, the fastest.
    """
    near = [each for each in outcomes if each.fits(limit) and each.simulated_s < _NEAR * best.simulated_s]
    unlike: dict[Hashable, Simulated] = {_kind(best): best}
    for outcome in sorted(near, key=lambda outcome: outcome.simulated_s):
        unlike.setdefault(_kind(outcome), outcome)
    return list(unlike.values())[:most]


def _kind(outcome: Simulated) -> Hashable:
    search = outcome.search
    roles = {(strategy.roles, strategy.recompute) for strategy in search.strategies(outcome.choice)}
    return search.configuration, frozenset(roles)
