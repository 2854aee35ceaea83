"""What measured steps say about those that were not measured."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from galvatron_fx.ir.plan.prediction import IDLE, LOCAL_CAUSES
from galvatron_fx.ir.plan.search_report import SearchReport

__all__ = ["Cost", "corrected_s"]

_TRUST = 0.03  # in the one ratio of all measured steps, where they do not tell computing from communication
_LEAST = 0.1  # times that ratio: what either is corrected by at least


class Cost(NamedTuple):
    """Simulated seconds of a step on the busiest pipeline rank: computing, idle time included, and communication."""

    computing_s: float
    communication_s: float

    @classmethod
    def of(cls, report: SearchReport) -> Cost:
        """What the report of a plan says."""
        seconds = report.ranks[report.bottleneck].seconds
        computing_s = sum(time_s for cause, time_s in seconds.items() if cause.kind in (*LOCAL_CAUSES, IDLE))
        return cls(computing_s, report.simulated_s - computing_s)

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.computing_s + self.communication_s


def corrected_s(costs: Sequence[Cost], measured_s: Sequence[float | None]) -> list[float]:
    """Seconds of every step, had computing and communication been priced as the measured ones (not None) show.

    Both get a factor, by least squares of relative errors; as simulated where nothing is measured.
    """
    known = [(cost, seconds) for cost, seconds in zip(costs, measured_s, strict=True) if seconds is not None]
    if not known:
        return [cost.step_s for cost in costs]
    ratio = geometric_mean([seconds / cost.step_s for cost, seconds in known])
    rows = [np.array(cost) * ratio / seconds for cost, seconds in known]
    # Two rows say, with little weight, that both factors are the common one.
    system = np.vstack([*rows, _TRUST * np.eye(2)])
    wanted = np.concatenate([np.ones(len(known)), _TRUST * np.ones(2)])
    factors = np.linalg.lstsq(system, wanted, rcond=None)[0].clip(_LEAST) * ratio
    return [float(np.array(cost) @ factors) for cost in costs]
