"""Throughput by number of devices, as schedulers of clusters take it: what a job gains from each device more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from galvatron_fx.sweeping.points import SweepPoint

__all__ = ["DevicesRate", "by_devices"]


@dataclass(frozen=True)
class DevicesRate:
    """What a job does in a second when it is given ``devices``: those that it uses (``used``), and its rate.

    ``gain``: its rate over that on the fewest devices it runs on; ``step_s``, ``plan``: of the point that it runs as. A
    job that is given fewer devices than it fits into has no rate and uses none.
    """

    model: str
    device: str
    budget_bytes: int
    batch: int
    sequence: int
    devices: int
    used: int = 0
    tokens_per_s: float | None = None
    gain: float | None = None
    step_s: float | None = None
    plan: str = ""


def by_devices(points: Iterable[SweepPoint]) -> tuple[DevicesRate, ...]:
    """Return the rate of each model on 1, 2, ... devices of a kind, up to the most that were swept, for each budget,
    batch and sequence.

    A number that was not swept, or is no faster than a smaller one (5 devices that split nothing evenly), has the rate
    of the fastest smaller one: the rest stands idle. So rates never fall.
    """
    jobs: dict[tuple[str, str, int, int, int], list[SweepPoint]] = {}
    for point in points:
        job = point.model, point.device, point.budget_bytes, point.batch, point.sequence
        jobs.setdefault(job, []).append(point)
    rates = []
    for job, of_job in jobs.items():
        running = sorted((point for point in of_job if point.tokens_per_s), key=lambda point: point.devices)
        for devices in range(1, max(point.devices for point in of_job) + 1):
            fitting = [point for point in running if point.devices <= devices]
            if not fitting:
                rates.append(DevicesRate(*job, devices))
                continue
            best = max(
                fitting, key=lambda point: point.tokens_per_s or 0.0
            )  # the first, with fewest devices, of equals
            rate, least = best.tokens_per_s or 0.0, running[0].tokens_per_s or 0.0
            rates.append(DevicesRate(*job, devices, best.devices, rate, rate / least, best.step_s, best.plan))
    return tuple(rates)
