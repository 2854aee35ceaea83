"""What holds for a replica whatever steps cost: nothing is lost, nothing is early, room is kept to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest

from cost_models.request_costs import Load
from galvatron_fx.errors import InputError
from galvatron_fx.serving.cache_room import CacheRoom
from galvatron_fx.serving.policies import Policy, make_policies
from galvatron_fx.serving.replica import Replica, ReplicaRun
from galvatron_fx.serving.requests import Request

START_S, TOKEN_S, KEY_S = 1e-3, 1e-4, 1e-7
LESS = 1 - 1e-9  # for rounding
POLICIES = [Policy("prefill_first", 256), Policy("mixed", 256), Policy("chunked", 64), Policy("chunked", 1)]


@dataclass(frozen=True)
class Affine:
    """Steps whose seconds are known, in equal stages."""

    num_stages: int = 1

    def stages_s(self, load: Load, halves: bool = False) -> Sequence[float]:
        return [(START_S + TOKEN_S * load.tokens + KEY_S * load.keys) / self.num_stages] * self.num_stages

    def sends_s(self, load: Load) -> Sequence[float]:
        return [0.0] * (self.num_stages - 1)


def trace(seed: int, count: int = 40, per_s: float = 50.0) -> list[Request]:
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / per_s, count))
    lengths = rng.integers(1, 120, (count, 2))
    return [Request(float(at), int(p), int(o)) for at, (p, o) in zip(arrivals, lengths, strict=True)]


def run(
    requests: Sequence[Request],
    policy: Policy,
    stages: int = 1,
    tokens: float = inf,
    cache: str = "paged",
    most: int = 8,
) -> ReplicaRun:
    room = CacheRoom(tokens, cache)
    result = Replica(Affine(stages), policy, room, most).run(requests)
    assert room.used == 0 and result.most_pages <= room.pages
    return result


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("stages", [1, 3])
def test_every_token_is_made_once_in_order_and_not_before_it_can_be(policy: Policy, stages: int) -> None:
    requests = trace(stages)
    result = run(requests, policy, stages)
    assert result.new_tokens == sum(request.keys for request in requests)
    assert [each.request for each in result.served] == requests
    for each in result.served:
        prompt, output = each.request.prompt, each.request.output
        steps_s = np.diff([each.request.arrival_s, *each.times_s])
        assert len(each.times_s) == output
        assert steps_s[0] >= (START_S + TOKEN_S * prompt + KEY_S * prompt) * LESS
        assert (steps_s[1:] >= (START_S + TOKEN_S) * LESS).all()
    last_s = max(each.times_s[-1] for each in result.served)
    assert result.busy_s / stages * LESS <= last_s - requests[0].arrival_s


def test_chunks_without_a_limit_are_whole_prompts() -> None:
    one, other = (run(trace(7), Policy(name)) for name in ("chunked", "mixed"))
    assert [each.times_s for each in one.served] == [each.times_s for each in other.served]


def test_the_same_trace_gives_the_same_times() -> None:
    one, other = (run(trace(8), POLICIES[0], stages=2) for _ in range(2))
    assert [each.times_s for each in one.served] == [each.times_s for each in other.served]


def test_chunks_bound_what_a_token_waits_for() -> None:
    requests = [Request(0.0, 5, 50), *(Request(0.01 * i, 4000, 1) for i in range(1, 5))]

    def longest_gap_s(policy: Policy) -> float:
        return max(np.diff(run(requests, policy).served[0].times_s))

    assert longest_gap_s(Policy("chunked", 64)) <= START_S + TOKEN_S * 64 + KEY_S * 5000
    assert longest_gap_s(Policy("mixed")) > TOKEN_S * 4000
    assert longest_gap_s(Policy("prefill_first")) > TOKEN_S * 4000


@pytest.mark.parametrize("policy", POLICIES[:3], ids=str)
def test_little_room_is_kept_to_by_giving_up_caches_or_by_waiting(policy: Policy) -> None:
    requests = [Request(0.0, 20, 100) for _ in range(6)]
    paged = run(requests, policy, tokens=256)
    reserved = run(requests, policy, tokens=256, cache="reserved")
    assert all(len(each.times_s) == 100 for each in (*paged.served, *reserved.served))
    assert sum(each.preempted for each in paged.served) > 0
    assert sum(each.preempted for each in reserved.served) == 0
    assert reserved.new_tokens == sum(request.keys for request in requests) < paged.new_tokens


def test_stages_share_room_and_end() -> None:
    result = run([Request(0.0, 20, 100) for _ in range(9)], Policy("mixed", 64), stages=3, tokens=256, most=9)
    assert all(each.is_done for each in result.served)


@pytest.mark.parametrize("seed", range(3))
def test_more_replicas_and_more_stages_make_no_fewer_tokens_a_second(seed: int) -> None:
    requests = trace(seed, per_s=1e4)

    def ends_s(parts: int, stages: int) -> float:
        runs = [run(requests[first::parts], Policy("chunked", 64), stages, most=12) for first in range(parts)]
        return max(each.times_s[-1] for result in runs for each in result.served)

    assert ends_s(4, 1) < ends_s(2, 1) < ends_s(1, 1)
    assert ends_s(1, 3) < ends_s(1, 1)


def test_policies_that_cannot_be_are_refused() -> None:
    with pytest.raises(InputError, match="policy is 'fifo': give one of prefill_first, mixed, chunked"):
        Policy("fifo")
    with pytest.raises(InputError, match="most_tokens of a policy is 0"):
        Policy("chunked", 0)
    for names, chunks in (((), (512,)), (("chunked",), ())):
        with pytest.raises(InputError, match="no policies to compare"):
            make_policies(names, chunks, 512, (False,))
