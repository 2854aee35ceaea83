"""A point of a sweep: what is planned there, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SweepPoint"]


@dataclass(frozen=True)
class SweepPoint:
    """The best plan at one point, or the ``reason`` why there is none.

    ``parameters``: of the model; ``device``, ``devices``: their kind and number; ``budget_bytes``: per device;
    ``batch``: samples a step; ``sequence``: tokens a sample, 0 where inputs have none; ``plan``: its roles in words;
    ``known``: "searched" (the sum that a search minimises, memory by estimate) or "simulated" on the lowered graphs;
    ``step_s``, ``peak_bytes``, ``tokens_per_s`` (samples where there are no tokens) and ``mfu`` (a share, see
    :class:`galvatron_fx.ir.plan.throughput.Throughput`): None without a plan; ``usd_per_mtoken``, ``days`` and ``usd``:
    None without prices, or a number of tokens to train.
    """

    model: str
    parameters: int
    device: str
    devices: int
    budget_bytes: int
    batch: int
    sequence: int
    plan: str = ""
    known: str = ""
    step_s: float | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    usd_per_mtoken: float | None = None
    days: float | None = None
    usd: float | None = None
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether there is a plan."""
        return self.step_s is not None
