"""A way to serve a trace, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from galvatron_fx.serving.replica import ReplicaRun

__all__ = ["METRICS", "PERCENTILES", "ServingPoint", "measured"]

METRICS = {"ttft": "time to first token", "tpot": "time per token behind it", "gap": "between tokens", "e2e": "in all"}
"""What percentiles are of, by the beginning of their fields' names."""

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ServingPoint:
    """One layout and policy, simulated on the trace, or the ``reason`` why it cannot serve it.

    ``replicas``, ``stages``, ``tensor``: how the devices are shared out; ``policy``, ``chunk``, ``halves``: as of
    :class:`galvatron_fx.serving.policies.Policy`, ``chunk`` 0 where prompts are whole; ``cache_tokens``: room of a
    replica for keys and values of all its requests (-1 where these take none);
    ``weights_bytes``: of parameters on the fullest rank.

    Of the trace, None with a reason: ``makespan_s`` from the first arrival to the last token; ``requests_per_s`` and
    ``tokens_per_s`` (tokens that are made) over it; ``steps`` of all replicas; ``busy``: the share of it in which
    stages compute or communicate; ``cache_used``: the largest share of the room that was taken; ``preempted``: how
    often a request gave up its cache. Percentiles over requests, in seconds: ``ttft``: from arrival to the first token;
    ``tpot``: of each request the mean between its tokens; ``gap``: of all times between two tokens of a request;
    ``e2e``: from arrival to the last token. Those between tokens are 0 where no request makes two.
    """

    replicas: int
    stages: int
    tensor: int
    policy: str
    chunk: int
    halves: bool
    plan: str
    weights_bytes: int = 0
    cache_tokens: int = 0
    makespan_s: float | None = None
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    ttft_p50_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p90_s: float | None = None
    tpot_p99_s: float | None = None
    gap_p50_s: float | None = None
    gap_p90_s: float | None = None
    gap_p99_s: float | None = None
    e2e_p50_s: float | None = None
    e2e_p90_s: float | None = None
    e2e_p99_s: float | None = None
    busy: float | None = None
    cache_used: float | None = None
    preempted: int = 0
    steps: int = 0
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the trace was served."""
        return self.makespan_s is not None


def measured(point: ServingPoint, runs: Sequence[ReplicaRun], pages: float) -> ServingPoint:
    """The point with what came of the trace on its replicas, each of which has room for so many pages."""
    served = [each for run in runs for each in run.served]
    times = [np.array(each.times_s) for each in served]
    arrivals = np.array([each.request.arrival_s for each in served])
    first, last = np.array([made[0] for made in times]), np.array([made[-1] for made in times])
    gaps = [np.diff(made) for made in times if len(made) > 1]
    seconds = {
        "ttft": first - arrivals,
        "tpot": np.array([gap.mean() for gap in gaps] or [0.0]),
        "gap": np.concatenate(gaps or [np.zeros(1)]),
        "e2e": last - arrivals,
    }
    makespan = float(last.max() - arrivals.min())
    percentiles: dict[str, Any] = {
        f"{name}_p{percent}_s": float(np.percentile(values, percent))
        for name, values in seconds.items()
        for percent in PERCENTILES
    }
    return replace(
        point,
        makespan_s=makespan,
        requests_per_s=len(served) / makespan,
        tokens_per_s=sum(len(made) for made in times) / makespan,
        busy=sum(run.busy_s for run in runs) / (makespan * point.stages * point.replicas),
        cache_used=max(run.most_pages for run in runs) / pages,
        preempted=sum(each.preempted for each in served),
        steps=sum(run.steps for run in runs),
        **percentiles,
    )
