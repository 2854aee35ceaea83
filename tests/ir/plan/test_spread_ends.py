"""Embedding and head on all pipeline ranks together: the tables, what is checked of them, and their transfers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_models.schedule_time import simulate_schedule
from cost_models.shared_cores import simulate_sharing
from galvatron_fx import Plan
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.schedule import SPREAD, Action, Schedule, check_schedule, make_schedule
from galvatron_fx.ir.plan.spread_ends import make_spread_schedule
from galvatron_fx.ir.plan.transfers import with_transfers
from galvatron_fx.ir.torch_compat.pipelines import runtime_actions

SHAPES = (
    ("gpipe", 3, 3, 5), ("1f1b", 2, 2, 1), ("1f1b", 4, 4, 9), ("zb_h1", 4, 4, 6), ("interleaved_1f1b", 2, 6, 4),
    ("zbv", 2, 4, 5), ("dualpipev", 2, 4, 5),
)  # fmt: skip
HEAD = 0.5  # seconds of each third of the head of a micro-batch


def seconds(schedule: Schedule, head: float = HEAD) -> tuple[list[float], ...]:
    """A forward takes a second on each rank, and as long as each half of a backward; nothing is sent."""
    one = schedule.num_ranks / (schedule.num_stages - 2)
    inner = [one] * (schedule.num_stages - 2)
    free = [0.0] * (schedule.num_stages - 1)
    return [0.0, *inner, head], [0.0, *inner, 2 * head], [0.0, *inner, 0.0], free, free


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_every_schedule_takes_spread_ends(shape: tuple[str, int, int, int]) -> None:
    _, ranks, stages, parts = shape
    schedule = make_spread_schedule(*shape)
    check_schedule(schedule)
    assert schedule.rank_of_stage == (SPREAD, *make_schedule(*shape).rank_of_stage, SPREAD)
    rows = with_transfers(schedule, forward_only=True)
    assert sum(kind == "F" for row in rows for _, kind, _ in row) == (2 * ranks + stages) * parts


def test_two_ranks() -> None:
    assert_expected_inline(
        str(make_spread_schedule("1f1b", 2, 2, 3)),
        """\
1f1b: 2 ranks, 4 stages, 3 microbatches
step    0   1   2   3   4   5   6   7 8   9 10  11  12  13 14  15 16  17  18  19 20  21 22  23 24  25 26  27 28  29
rank 0  0F0 0F1 0F2 1F0 1F1 3F0 3B0 = 1F2 . .   3F1 3B1 =  1B0 =  .   3F2 3B2 =  0B0 =  1B1 =  1B2 =  0B1 =  0B2 =
rank 1  0F0 0F1 0F2 .   2F0 3F0 3B0 = 2B0 = 2F1 3F1 3B1 =  2B1 =  2F2 3F2 3B2 =  0B0 =  2B2 =  .   .  0B1 =  0B2 =""",
    )


@pytest.mark.parametrize(("ranks", "parts"), [(2, 8), (4, 16), (5, 20), (8, 32)])
def test_in_1f1b_no_rank_waits_once_the_pipeline_is_full(ranks: int, parts: int) -> None:
    schedule = make_spread_schedule("1f1b", ranks, ranks, parts)
    step_s = simulate_schedule(schedule, *seconds(schedule)).step_s
    filling = 3 * (ranks - 1)
    assert step_s <= parts * (3 + 3 * HEAD) + filling + 1e-9
    held = [max(counts[1] for counts in moments) for moments in schedule.holdings]
    assert held == [min(parts, 1 + (3 * (ranks - 1 - rank) + 1) // 2) for rank in range(ranks)]


def test_ranks_that_share_cores_come_to_the_same_where_none_is_slowed() -> None:
    schedule = make_spread_schedule("1f1b", 3, 3, 4)
    alone, sharing = (
        simulate_schedule(schedule, *seconds(schedule)),
        simulate_sharing(schedule, *seconds(schedule), lambda ranks: 1.0),
    )
    assert sharing.ends_s == pytest.approx(alone.ends_s)
    assert alone.from_spans(schedule, alone.spans).ends_s == alone.ends_s


def together(schedule: Schedule) -> bool:
    """Replay with one counter a rank: whether all ranks come to the end, each action once and after what it needs."""
    at, ended, last = [0] * schedule.num_ranks, set[tuple[str, int, int]](), schedule.num_stages - 1
    while True:
        now = {r: order[at[r]] for r, order in enumerate(schedule.orders) if at[r] < len(order)}
        for action in dict.fromkeys(now.values()):
            kind = "F" if action.kind == "F" else "B"
            before = action.stage + (-1 if kind == "F" else 1)
            here = [r for r, other in now.items() if other == action]
            ready = not 0 <= before <= last or (kind, before, action.microbatch) in ended or action.kind == "W"
            if ready and here == list(schedule.ranks_of(action.stage)):
                ended.add((kind, action.stage, action.microbatch))
                for rank in here:
                    at[rank] += 1
                break
        else:
            return not now


@settings(max_examples=120)
@given(st.sampled_from(SHAPES), st.data())
def test_swapped_actions_are_refused_or_run(shape: tuple[str, int, int, int], data: st.DataObject) -> None:
    schedule = make_spread_schedule(*shape)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = list(schedule.orders[rank])
    place = data.draw(st.integers(0, len(order) - 2))
    order[place], order[place + 1] = order[place + 1], order[place]
    orders = [*schedule.orders]
    orders[rank] = tuple(order)
    mutant = replace(schedule, orders=tuple(orders))
    swapped = order[place + 1], order[place]
    is_pair = swapped[0].stage == swapped[1].stage and swapped[0].microbatch == swapped[1].microbatch
    try:
        check_schedule(mutant)
    except PlanError:
        assert is_pair or not together(mutant)
    else:
        assert together(mutant)


def test_one_order_of_what_all_compute() -> None:
    schedule = make_spread_schedule("1f1b", 2, 2, 2)
    order = list(schedule.orders[1])
    first, second = order.index(Action("F", 0, 0)), order.index(Action("F", 0, 1))
    order[first], order[second] = order[second], order[first]
    with pytest.raises(PlanError, match=r"deadlock: .*rank 0 at 0F0 \(all ranks compute it together\); rank 1 at 0F1"):
        check_schedule(replace(schedule, orders=(schedule.orders[0], tuple(order))))
    with pytest.raises(PlanError, match=r"rank 1 lacks 0F1"):
        check_schedule(replace(schedule, orders=(schedule.orders[0], schedule.orders[1][:1] + schedule.orders[1][2:])))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[0])
def test_transfers_are_torchs(shape: tuple[str, int, int, int]) -> None:
    from torch.distributed.pipelining import schedules

    schedule = make_schedule(*shape)
    rows = [[(a.stage, a.kind, a.microbatch) for a in order] for order in schedule.orders]
    theirs = schedules._add_send_recv(runtime_actions(rows), lambda s: schedule.rank_of_stage[s], schedule.num_stages)
    assert runtime_actions(with_transfers(schedule)) == theirs


def test_only_ranks_that_lack_it_are_told() -> None:
    received, told = (
        [sum(kind.startswith("RECV") for _, kind, _ in rows) for rows in with_transfers(schedule)]
        for schedule in (make_schedule("1f1b", 3, 3, 1), make_spread_schedule("1f1b", 3, 3, 1))
    )
    assert received == [1, 2, 1]
    # the first rank lacks what the head takes, the second also the embedding's gradient, the last only that
    assert told == [2, 4, 2]


def test_a_plan_keeps_it() -> None:
    pipelining = Pipelining(2, 4, "zb_h1", (1, 3), vocabulary="spread")
    plan = Plan.uniform((2,), ("pipeline",), pipelining=pipelining)
    assert Plan.from_json(plan.to_json()) == plan and '"vocabulary": "spread"' in plan.to_json()
    assert "vocabulary" not in Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 4)).to_json()
    assert pipelining.cuts(6) == (0, 1, 3, 5)
    by_hand = Pipelining.by_hand(pipelining.table(2), (1, 3))
    assert by_hand.table(2).orders == pipelining.table(2).orders and by_hand.cuts(6) == (0, 1, 3, 5)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: Pipelining(vocabulary="split"), "vocabulary is 'split'; give 'ends' or 'spread'"),
        (lambda: Pipelining(2, 2, first_blocks=(0, 3), vocabulary="spread"), "ascending from 1"),
        (lambda: Pipelining(2, 2, vocabulary="spread").cuts(3), "use at most 1 stages, or vocabulary='ends'"),
        (
            lambda: Plan.uniform((2,), ("data",), pipelining=Pipelining(1, 2, vocabulary="spread")),
            "no axis of role 'pipeline'",
        ),
        (
            lambda: replace(Pipelining.by_hand(make_schedule("1f1b", 2, 2, 2)), vocabulary="spread").table(2),
            "the plan 2 pipeline ranks and 4 stages",
        ),
        (
            lambda: replace(
                Pipelining.by_hand(make_spread_schedule("1f1b", 2, 2, 2)), vocabulary="ends", num_stages=4
            ).table(2),
            re.escape("stages [0, 3] of the table are of all ranks"),
        ),
    ],
)
def test_refusals(act: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        act()  # type: ignore[operator]
