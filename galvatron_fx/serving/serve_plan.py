"""Rank plans for a trace of requests by simulating each: :func:`serve_plan`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from torch import nn

from galvatron_fx.arguments import check_cluster
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import ClusterError, GalvatronError, InputError
from galvatron_fx.ir.plan.arguments import shown
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.units import format_bytes, parse_bytes
from galvatron_fx.serving.cache_room import CACHES, PAGED, CacheRoom
from galvatron_fx.serving.captures import CapturedRequests, RequestInputs
from galvatron_fx.serving.layouts import Layout, Memory, layouts
from galvatron_fx.serving.points import METRICS, PERCENTILES, ServingPoint, measured
from galvatron_fx.serving.policies import CHUNKED, PREFILL_FIRST, Policy, make_policies
from galvatron_fx.serving.replica import Replica
from galvatron_fx.serving.requests import Request, checked_trace
from galvatron_fx.serving.result import Serving

__all__ = ["serve_plan"]

Told = Callable[[int, int, str], None]
_RANKS = ("makespan_s", "tokens_per_s", *(f"{name}_p{percent}_s" for name in METRICS for percent in PERCENTILES))


def serve_plan(
    model: nn.Module | CapturedRequests,
    cluster: Cluster,
    trace: Iterable[Request],
    *,
    inputs: RequestInputs | None = None,
    memory_budget: str | int | None = None,
    policies: Sequence[str] = (PREFILL_FIRST, CHUNKED),
    chunks: Sequence[int] = (512,),
    most_tokens: int = 2048,
    halves: Sequence[bool] = (False,),
    most_requests: int = 256,
    cache: str = PAGED,
    only: Sequence[str] | None = None,
    rank_by: str = "e2e_p90_s",
    progress: Told | None = None,
) -> Serving:
    """Simulate a server of ``model`` under a trace of requests, in every layout and policy, and rank these.

    Layouts share the devices out among replicas, stages of each and ``tensor`` ranks of each stage; replicas take
    requests in turns. ``model``: or one that :class:`galvatron_fx.serving.captures.CapturedRequests` has captured for
    several traces, which has its own ``inputs``; ``inputs``: from numbers of requests, new tokens and keys to example
    inputs with a cache that has room for so many keys (default: of a causal language model of transformers);
    ``memory_budget``: bytes of a device; ``policies``, ``chunks``, ``most_tokens``, ``halves``: as of
    :class:`galvatron_fx.serving.policies.Policy`, every one with every other; ``most_requests``: that a replica has
    under way at once; ``cache``: "paged" or "reserved" (:class:`galvatron_fx.serving.cache_room.CacheRoom`); ``only``:
    the layouts to simulate, in the words of a table ("2 replicas, tensor 4"; default: all); ``rank_by``: a field of
    :class:`galvatron_fx.serving.points.ServingPoint`; ``progress``: called with the points that are done, those in
    all, and what is done now.

    What can serve nothing stands in the result, with the reason. Raises InputError for a wrong trace or option, and
    for a model whose costs at other sizes do not follow from a few, ClusterError for unlike nodes, BudgetError where
    no layout has room for the longest request, and what :func:`galvatron_fx.capture` raises.
    """
    requests = checked_trace(trace)
    check_cluster(cluster)
    if cluster.nodes is not None:
        raise ClusterError("serve_plan takes clusters of equal devices: plan each kind of device on its own")
    compared = make_policies(policies, chunks, most_tokens, halves)
    _check_options(most_requests, cache, rank_by)
    budget = cluster.device.memory_bytes if memory_budget is None else parse_bytes(memory_budget)
    tell = progress or (lambda done, total, what: None)
    tell(0, 1, "capture")
    captured = _captured(model, inputs, max(request.keys for request in requests))
    ways = [(layout, policy) for layout in _layouts(cluster, captured.num_blocks, only) for policy in compared]
    server = _Server(cluster, captured, requests, min(budget, cluster.device.memory_bytes), most_requests, cache)
    points: list[ServingPoint] = []
    for layout, policy in ways:
        tell(len(points), len(ways), f"{layout}, {policy}")
        points.append(server.point(layout, policy))
    tell(len(ways), len(ways), "done")
    if not any(point.fits for point in points):
        raise server.refusal(points[-1])
    subject = f"{captured.name} on {cluster.num_devices} {cluster.device.name}, {len(requests):,} requests"
    return Serving(subject, rank_by, tuple(sorted(points, key=lambda point: _rank(point, rank_by))), server.plans)


@dataclass
class _Server:
    """Simulates one model on one cluster under one trace; the ranks of a stage are lowered once for each degree."""

    cluster: Cluster
    captured: CapturedRequests
    requests: Sequence[Request]
    budget_bytes: int
    most_requests: int
    cache: str
    plans: dict[str, Plan] = field(default_factory=dict)
    _needed_bytes: dict[tuple[Layout, Policy], int] = field(default_factory=dict)

    def point(self, layout: Layout, policy: Policy) -> ServingPoint:
        """What comes of the trace, or why nothing does."""
        chunk = int(min(policy.most_tokens, sys.maxsize)) if policy.splits else 0
        shares = layout.replicas, layout.stages, layout.tensor
        point = ServingPoint(*shares, policy.name, chunk, policy.halves, plan=str(layout))
        try:
            steps = self.captured.steps(*layout.part(self.cluster))
        except GalvatronError as error:
            return replace(point, reason=str(error).partition("\n")[0])
        times = layout.times(steps, self.cluster)
        self.plans[point.plan] = layout.plan(times.cuts)
        most_tokens = policy.most_in_step(max(request.prompt for request in self.requests), self.most_requests)
        memory = Memory.of(times, self.budget_bytes, most_tokens, self.most_requests)
        self._needed_bytes[layout, policy] = memory.needed_bytes(self._longest.keys)
        tokens = int(memory.tokens) if memory.tokens < inf else -1
        point = replace(point, weights_bytes=memory.held_bytes, cache_tokens=tokens)
        room = CacheRoom(memory.tokens, self.cache)
        if room.needed(self._longest.keys) > room.pages:
            left = f"room for {tokens:,} tokens" if memory.tokens >= 0 else "no room for any"
            return replace(point, reason=f"{format_bytes(memory.held_bytes)} of weights leave {left}")
        runs = [
            Replica(times, policy, replace(room), self.most_requests).run(self.requests[first :: layout.replicas])
            for first in range(layout.replicas)
        ]
        return measured(point, runs, room.pages)

    def refusal(self, point: ServingPoint) -> GalvatronError:
        """Why nothing serves the trace: no room, or costs that are not known, as one point says."""
        if not point.weights_bytes:
            return InputError(point.reason)
        longest = self._longest
        return BudgetError(
            f"request {self.requests.index(longest) + 1} of the trace (in order of arrival) has {longest.prompt} "
            f"tokens of prompt and {longest.output} of output, and no layout of the devices has room for it in "
            f"{format_bytes(self.budget_bytes)} each ({point.plan}: {point.reason}): give more devices or memory, "
            f"fewer most_tokens or most_requests",
            least_bytes=min(self._needed_bytes.values()),
        )

    @cached_property
    def _longest(self) -> Request:
        return max(self.requests, key=lambda request: request.keys)


def _captured(model: nn.Module | CapturedRequests, inputs: RequestInputs | None, longest: int) -> CapturedRequests:
    """The model captured for requests of so many keys; raises InputError where it was captured for shorter ones."""
    if not isinstance(model, CapturedRequests):
        return CapturedRequests(model, longest, inputs)
    if inputs is not None:
        raise InputError("inputs are given beside a captured model: give them to CapturedRequests(model, longest, ...)")
    if longest > model.longest:
        raise InputError(
            f"the longest request has {longest} keys, and the model was captured for {model.longest}: give "
            f"CapturedRequests(model, {longest})"
        )
    return model


def _layouts(cluster: Cluster, num_blocks: int, only: Sequence[str] | None) -> list[Layout]:
    """Those of a cluster that are wanted; raises InputError for one that there is not."""
    every = {str(layout): layout for layout in layouts(cluster.axes, num_blocks)}
    unknown = [name for name in only or () if name not in every]
    if unknown or (only is not None and not only):
        raise InputError(f"only is {shown(unknown or only)}: give some of {'; '.join(every)}")
    return [layout for name, layout in every.items() if only is None or name in only]


def _check_options(most_requests: int, cache: str, rank_by: str) -> None:
    if isinstance(most_requests, bool) or not isinstance(most_requests, int) or most_requests < 1:
        raise InputError(f"most_requests is {shown(most_requests)}: give how many a replica serves at once, from 1")
    if cache not in CACHES:
        raise InputError(f"cache is {shown(cache)}: give one of {', '.join(CACHES)}")
    if rank_by not in _RANKS:
        raise InputError(f"rank_by is {shown(rank_by)}: give one of {', '.join(_RANKS)}")


def _rank(point: ServingPoint, rank_by: str) -> tuple[bool, float, str, str, int, bool]:
    value = getattr(point, rank_by) or 0.0
    order = -value if rank_by == "tokens_per_s" else value
    return not point.fits, order, point.plan, point.policy, point.chunk, point.halves
