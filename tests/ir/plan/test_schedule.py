from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.schedule import (
    KINDS,
    SCHEDULES,
    Action,
    Schedule,
    check_schedule,
    legal,
    make_schedule,
    stage_ranks,
)

STAGES_A_RANK = {"gpipe": (1,), "1f1b": (1,), "interleaved_1f1b": (2, 3), "zb_h1": (1,), "zbv": (2,), "dualpipev": (2,)}
ARGUMENTS = [
    (name, num_ranks, num_ranks * stages, num_microbatches)
    for name in SCHEDULES
    for num_ranks in range(1, 6)
    for stages in STAGES_A_RANK[name]
    for num_microbatches in range(1, 14)
    if legal(name, num_ranks, num_ranks * stages, num_microbatches) is None
]
LEGAL = st.sampled_from(ARGUMENTS)
SMALL = st.sampled_from([case for case in ARGUMENTS if case[1] <= 3 and case[3] <= 6])


def table(*orders: str, ranks: Sequence[int], num_microbatches: int = 1) -> Schedule:
    actions = tuple(tuple(map(Action.parse, order.split())) for order in orders)
    return Schedule("by hand", tuple(ranks), num_microbatches, actions)


def test_gpipe() -> None:
    assert_expected_inline(
        str(make_schedule("gpipe", 2, 2, 3)),
        """\
gpipe: 2 ranks, 2 stages, 3 microbatches
step    0   1   2   3   4   5 6   7 8   9 10  11
rank 0  0F0 0F1 0F2 .   .   . 0B0 = 0B1 = 0B2 =
rank 1  .   1F0 1F1 1F2 1B0 = 1B1 = 1B2 = .   .""",
    )


def test_1f1b() -> None:
    assert_expected_inline(
        str(make_schedule("1f1b", 3, 3, 4)),
        """\
1f1b: 3 ranks, 3 stages, 4 microbatches
step    0   1   2   3   4 5   6   7   8   9   10  11  12  13  14  15 16  17
rank 0  0F0 0F1 0F2 .   . .   .   0B0 =   0F3 0B1 =   .   0B2 =   .  0B3 =
rank 1  .   1F0 1F1 .   . 1B0 =   1F2 1B1 =   1F3 1B2 =   .   1B3 =  .   .
rank 2  .   .   2F0 2B0 = 2F1 2B1 =   2F2 2B2 =   2F3 2B3 =   .   .  .   .""",
    )


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    assert_expected_inline(
        str(make_schedule("1f1b", 3, 3, 2)),
        """\
1f1b: 3 ranks, 3 stages, 2 microbatches
step    0   1   2   3   4 5   6   7   8   9 10  11
rank 0  0F0 0F1 .   .   . .   .   0B0 =   . 0B1 =
rank 1  .   1F0 1F1 .   . 1B0 =   .   1B1 = .   .
rank 2  .   .   2F0 2B0 = 2F1 2B1 =   .   . .   .""",
    )


def test_interleaved_1f1b() -> None:
    assert_expected_inline(
        str(make_schedule("interleaved_1f1b", 2, 4, 2)),
        """\
interleaved_1f1b: 2 ranks, 4 stages, 2 microbatches
step    0   1   2   3   4   5 6   7   8 9   10 11  12 13  14
rank 0  0F0 0F1 2F0 2F1 .   . 2B0 =   . 2B1 =  0B0 =  0B1 =
rank 1  .   1F0 1F1 3F0 3B0 = 3F1 3B1 = 1B0 =  1B1 =  .   .""",
    )


def test_zb_h1() -> None:
    assert_expected_inline(
        str(make_schedule("zb_h1", 3, 3, 4)),
        """\
zb_h1: 3 ranks, 3 stages, 4 microbatches
step    0   1   2   3   4   5   6   7   8   9   10  11  12  13
rank 0  0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
rank 1  .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
rank 2  .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3""",
    )


def test_zbv() -> None:
    assert_expected_inline(
        str(make_schedule("zbv", 2, 4, 3)),
        """\
zbv: 2 ranks, 4 stages, 3 microbatches
step    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2""",
    )


def test_dualpipev_has_overlapped_pairs_one_after_another() -> None:
    assert_expected_inline(
        str(make_schedule("dualpipev", 2, 4, 4)),
        """\
dualpipev: 2 ranks, 4 stages, 4 microbatches
step    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16 17  18 19  20 21  22  23  24
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 =   3F2 0B0 =   3B2 =   3F3 .  0B1 =  3B3 =  0I2 0W2 0I3 0W3
rank 1  .   1F0 2F0 1F1 2F1 1F2 2B0 =   2F2 1B0 =   1F3 2B1 =   2F3 1B1 =  2B2 =  1B2 =  2I3 1I3 2W3 1W3""",
    )


def test_table_of_a_deadlock_shows_where_every_rank_is_stuck() -> None:
    assert_expected_inline(
        str(table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", ranks=(0, 1), num_microbatches=2)),
        """\
by hand: 2 ranks, 2 stages, 2 microbatches
step    0   1            2
rank 0  0F0 stuck at 0B0 .
rank 1  .   1F0          stuck at 1F1""",
    )


def test_every_schedule_has_legal_sizes() -> None:
    assert {name for name, *_ in ARGUMENTS} == set(SCHEDULES)
    assert {num_ranks for _, num_ranks, *_ in ARGUMENTS} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_legal_schedule_passes(name: str) -> None:
    for arguments in ARGUMENTS:
        if arguments[0] == name:
            check_schedule(make_schedule(*arguments))


@given(LEGAL)
def test_steps_are_the_orders_and_come_after_what_they_wait_for(arguments: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*arguments)
    for rank, order in enumerate(schedule.orders):
        assert tuple(step.action for step in schedule.steps if step.rank == rank) == order
    for index, step in enumerate(schedule.steps):
        assert 0 <= step.after <= index
        assert step.slot == 4 * step.action.stage + KINDS.index(step.action.kind)
        if step.after:
            waited, own = schedule.steps[step.after - 1].action, step.action
            assert waited.microbatch == own.microbatch
            assert waited.stage - own.stage == (-1 if own.kind == "F" else 1)


@given(LEGAL)
def test_dict_round_trip(arguments: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*arguments)
    assert Schedule.from_dict(schedule.to_dict()) == schedule


@given(LEGAL)
def test_stages_of_ranks_are_a_partition(arguments: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*arguments)
    assert schedule.rank_of_stage == stage_ranks(*arguments[:3])
    stages = [stage for rank in range(schedule.num_ranks) for stage in schedule.stages_of(rank)]
    assert sorted(stages) == list(range(schedule.num_stages))


def test_to_dict() -> None:
    assert make_schedule("gpipe", 2, 2, 1).to_dict() == {
        "name": "gpipe",
        "rank_of_stage": [0, 1],
        "num_microbatches": 1,
        "orders": [["0F0", "0B0"], ["1F0", "1B0"]],
    }


def test_stage_ranks() -> None:
    assert stage_ranks("1f1b", 3, 3) == (0, 1, 2)
    assert stage_ranks("interleaved_1f1b", 2, 6) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks("zbv", 3, 6) == stage_ranks("dualpipev", 3, 6) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_which_schedules_split_backward(name: str) -> None:
    num_stages = 2 * STAGES_A_RANK[name][0]
    assert make_schedule(name, 2, num_stages, 4).splits_backward == (name in ("zb_h1", "zbv", "dualpipev"))


def test_importing_and_reading_schedules_needs_no_torch() -> None:
    code = "import sys, galvatron_fx.ir.plan.schedule, cost_models.schedule_time; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(st.builds(Action, st.sampled_from(KINDS), st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1)))
def test_action_text_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "F0", "0X0", "0f0", "-1F0", "00F0", "0F01", "0F0 ", "0F1.0", "٣F0", "0SEND_F0"]
)
def test_malformed_actions_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match=r"is no action; write stage, kind"):
        Action.parse(text)


@given(st.text(max_size=12) | st.none() | st.integers())
def test_parse_raises_nothing_but_plan_errors(text: str) -> None:
    with contextlib.suppress(PlanError):
        assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("X", 0, 0), r"unknown kind of action 'X'; use one of F, B, I, W"),
        (("F", -1, 0), r"an action with stage -1 and microbatch 0; give ints"),
        (("F", 0, 1.0), r"an action with stage 0 and microbatch 1\.0; give ints"),
        (("F", True, 0), r"an action with stage True"),
    ],
)
def test_actions_of_wrong_values_are_refused(fields: tuple[str, int, int], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Action(*fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, r"the name of a schedule is 3; give text"),
        ({"extra": 1}, r"give an object with the keys name, rank_of_stage, num_microbatches, orders"),
        ({"rank_of_stage": "01"}, r"rank_of_stage of a schedule is '01'; give a list"),
        ({"rank_of_stage": [0, -2]}, r"rank_of_stage of a schedule is \[0, -2\]; give a list"),
        ({"num_microbatches": True}, r"num_microbatches of a schedule is True; give an int"),
        ({"num_microbatches": 1.5}, r"num_microbatches of a schedule is 1\.5; give an int"),
        ({"orders": "0F0"}, r"orders of a schedule is '0F0'; give one list of actions"),
        ({"orders": ["0F0"]}, r"orders of a schedule is \['0F0'\]; give one list of actions"),
        ({"orders": [["0F0", "__import__('os')"]]}, r"is no action"),
        ({"orders": [["0F0", 7]]}, r"7 is no action"),
    ],
)
def test_malformed_dicts_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Schedule.from_dict({**make_schedule("gpipe", 2, 2, 1).to_dict(), **change})


def test_dicts_with_missing_keys_and_other_values_are_refused() -> None:
    with pytest.raises(PlanError, match=r"a schedule is \{\}; give an object"):
        Schedule.from_dict({})
    with pytest.raises(PlanError, match=r"a schedule is \[\]; give an object"):
        Schedule.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2, 4), r"unknown schedule '2f2b'; use one of gpipe, 1f1b"),
        (("gpipe", 0, 0, 4), r"0 pipeline ranks; give an int from 1"),
        (("gpipe", 2.0, 2, 4), r"2\.0 pipeline ranks; give an int from 1"),
        (("gpipe", 2, -2, 4), r"-2 stages; give an int from 1"),
        (("gpipe", 2, 2, 0), r"0 microbatches; give an int from 1"),
        (("gpipe", 2, 2, "4"), r"'4' microbatches; give an int from 1"),
        (("gpipe", 2, 4, 4), r"'gpipe' wants one stage a rank, and there are 4 for 2; give 2 stages"),
        (("1f1b", 2, 1, 4), r"'1f1b' wants one stage a rank, and there are 1 for 2; give 2 stages"),
        (("zb_h1", 3, 6, 6), r"'zb_h1' wants one stage a rank, and there are 6 for 3; give 3 stages"),
        (
            ("interleaved_1f1b", 2, 2, 4),
            r"wants two or more stages a rank.* are 2 for 2 ranks; give 4, 6, \.\.\. stages",
        ),
        (
            ("interleaved_1f1b", 2, 5, 4),
            r"wants two or more stages a rank.* are 5 for 2 ranks; give 4, 6, \.\.\. stages",
        ),
        (
            ("interleaved_1f1b", 2, 4, 5),
            r"goes through 5 microbatches on 2 ranks in 2 rounds.* give 4 microbatches, or any",
        ),
        (("zbv", 2, 2, 4), r"'zbv' wants two stages a rank, and there are 2 for 2 ranks; give 4 stages"),
        (("dualpipev", 2, 6, 8), r"'dualpipev' wants two stages a rank, and there are 6 for 2 ranks; give 4 stages"),
        (
            ("dualpipev", 2, 4, 3),
            r"at least as many microbatches as stages, and there are 3 for 4 stages; give 4 or more",
        ),
    ],
)
def test_illegal_schedules_are_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    assert re.search(message, legal(*arguments) or "")
    with pytest.raises(PlanError, match=message):
        make_schedule(*arguments)


def test_the_remedy_for_interleaved_microbatches_is_legal() -> None:
    for num_ranks in range(1, 7):
        for num_microbatches in range(1, 40):
            reason = legal("interleaved_1f1b", num_ranks, 2 * num_ranks, num_microbatches)
            found = re.search(r"give (\d+) microbatches, or any multiple of (\d+)", reason or "")
            for remedy in map(int, found.groups() if found else ()):
                assert legal("interleaved_1f1b", num_ranks, 2 * num_ranks, remedy) is None


def test_stage_ranks_refuses_what_it_cannot_place() -> None:
    with pytest.raises(PlanError, match=r"'zbv' wants two stages a rank"):
        stage_ranks("zbv", 2, 2)


def test_stages_of_no_rank_are_refused() -> None:
    with pytest.raises(PlanError, match=r"pipeline rank 2 of 2; give 0 to 1"):
        make_schedule("gpipe", 2, 2, 2).stages_of(2)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (table("0F0 0B0", ranks=(0,), num_microbatches=0), r"a schedule of 0 microbatches; give an int from 1"),
        (table(ranks=()), r"ranks \[\] of 0 have no stage"),
        (table("0F0 0B0", "", ranks=(0,)), r"ranks \[1\] of 2 have no stage; give every pipeline rank"),
        (
            table("0F0 0B0", ranks=(1,)),
            r"stage 0 is on rank 1 of a schedule with orders for 1 ranks; mend rank_of_stage",
        ),
        (table("0B0", ranks=(0,)), r"rank 0 lacks 0F0; add it"),
        (table("", ranks=(0,)), r"rank 0 lacks 0F0; add it"),
        (table("0F0", ranks=(0,)), r"rank 0 lacks 0B0 \(or I and W\); add it"),
        (table("0F0 0I0", ranks=(0,)), r"rank 0 lacks 0W0; add it"),
        (table("0F0 0W0", ranks=(0,)), r"rank 0 lacks 0I0; add it"),
        (table("0F0 0B0", ranks=(0,), num_microbatches=2), r"rank 0 lacks 0F1; add it"),
        (table("0F0 0F0 0B0", ranks=(0,)), r"rank 0 has 0F0 twice, at 0 and 1; remove one"),
        (table("0F0 0I0 0B0", ranks=(0,)), r"rank 0 has 0B0 together with 0I0; keep B, or both I and W"),
        (table("0F0 0B0 0W0", ranks=(0,)), r"rank 0 has 0B0 together with 0W0; keep B, or both I and W"),
        (table("0F0 0B0 1F0", "1B0", ranks=(0, 1)), r"rank 0 has 1F0, and stage 1 is on rank 1; move it there"),
        (table("0F0 0B0 1F0", ranks=(0,)), r"rank 0 has 1F0 in a schedule of 1 stages and 1 microbatches.*; remove it"),
        (table("0F0 0B0 0F1", ranks=(0,)), r"rank 0 has 0F1 in a schedule of 1 stages and 1 microbatches.*; remove it"),
        (table("0B0 0F0", ranks=(0,)), r"rank 0 has 0B0 at 0, before 0F0 at 1; swap them"),
        (table("0I0 0F0 0W0", ranks=(0,)), r"rank 0 has 0I0 at 0, before 0F0 at 1; swap them"),
        (table("0F0 0W0 0I0", ranks=(0,)), r"rank 0 has 0W0 at 1, before 0I0 at 2; swap them"),
        (
            table("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", ranks=(0, 1), num_microbatches=2),
            r"deadlock: no rank can go on, rank 0 at 0B0 \(waits for 1B0 or 1I0 on rank 1\); "
            r"rank 1 at 1F1 \(waits for 0F1 on rank 0\); on each rank order",
        ),
        (
            table("1F0 1B0 0F0 0B0", ranks=(0, 0)),
            r"deadlock: no rank can go on, rank 0 at 1F0 \(waits for 0F0 on rank 0\)",
        ),
    ],
)
def test_broken_schedules_are_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(schedule)
    with pytest.raises(PlanError, match=message):
        _ = schedule.steps


def test_a_table_by_hand_may_mix_full_and_split_backward() -> None:
    check_schedule(table("0F0 1F0 1I0 0F1 0B0 1F1 1B1 1W0 0B1", ranks=(0, 0), num_microbatches=2))


def trains(schedule: Schedule) -> bool:
    """Replay by trying every action that is next on a rank, with sets of what has ended: slow, and plain to see."""
    wanted = {(stage, m) for stage in range(schedule.num_stages) for m in range(schedule.num_microbatches)}
    ended: set[Action] = set()
    orders = [list(order) for order in schedule.orders]
    while moves := [order for order in orders if order and may_run(schedule, order[0], ended)]:
        ended.add(moves[0].pop(0))
    forward, inputs, weights = (
        {(a.stage, a.microbatch) for a in ended if a.kind in kinds} for kinds in ("F", "BI", "BW")
    )
    right = all(schedule.rank_of_stage[a.stage] == rank for rank, order in enumerate(schedule.orders) for a in order)
    return right and not any(orders) and forward == inputs == weights == wanted


def may_run(schedule: Schedule, action: Action, ended: set[Action]) -> bool:
    stage, m = action.stage, action.microbatch
    if action in ended:
        return False
    if action.kind == "F":
        return stage == 0 or Action("F", stage - 1, m) in ended
    if action.kind == "W":
        return Action("I", stage, m) in ended
    if Action("F", stage, m) not in ended or {Action("B", stage, m), Action("I", stage, m)} & ended:
        return False
    return stage == schedule.num_stages - 1 or bool({Action("B", stage + 1, m), Action("I", stage + 1, m)} & ended)


def with_order(schedule: Schedule, rank: int, order: Sequence[Action]) -> Schedule:
    orders = [*schedule.orders]
    orders[rank] = tuple(order)
    return replace(schedule, orders=tuple(orders))


@settings(max_examples=300)
@given(SMALL, st.data())
def test_mutants_are_refused_or_train(arguments: tuple[str, int, int, int], data: st.DataObject) -> None:
    schedule = make_schedule(*arguments)
    for _ in range(data.draw(st.integers(1, 2))):
        rank = data.draw(st.integers(0, schedule.num_ranks - 1))
        order = list(schedule.orders[rank])
        first, second = data.draw(st.tuples(*[st.integers(0, len(order) - 1)] * 2))
        mutation = data.draw(st.sampled_from(["drop", "duplicate", "swap", "move", "other kind"]))
        if mutation == "drop":
            del order[first]
        elif mutation == "duplicate":
            order.insert(second, order[first])
        elif mutation == "swap":
            order[first], order[second] = order[second], order[first]
        elif mutation == "move":
            order.insert(second, order.pop(first))
        else:
            order[first] = replace(order[first], kind=data.draw(st.sampled_from(KINDS)))
        schedule = with_order(schedule, rank, order)
    accepted = True
    try:
        check_schedule(schedule)
    except PlanError:
        accepted = False
    assert accepted == trains(schedule)


@given(SMALL, st.data())
def test_dropped_and_doubled_actions_are_always_refused(
    arguments: tuple[str, int, int, int], data: st.DataObject
) -> None:
    schedule = make_schedule(*arguments)
    rank = data.draw(st.integers(0, schedule.num_ranks - 1))
    order = schedule.orders[rank]
    place = data.draw(st.integers(0, len(order) - 1))
    with pytest.raises(PlanError, match=rf"rank {rank} (lacks|has)"):
        check_schedule(with_order(schedule, rank, [*order[:place], *order[place + 1 :]]))
    with pytest.raises(PlanError, match=rf"rank {rank} has {order[place]} twice"):
        check_schedule(with_order(schedule, rank, [*order, order[place]]))


@given(LEGAL)
def test_holdings_are_the_local_maxima_of_what_is_held(arguments: tuple[str, int, int, int]) -> None:
    schedule = make_schedule(*arguments)
    for rank, order in enumerate(schedule.orders):
        stages = schedule.stages_of(rank)
        held, counts = set[Action](), list[tuple[int, ...]]()
        for action in order:
            forward = Action("F", action.stage, action.microbatch)
            held = held | {forward} if action.kind == "F" else held - {forward} if action.kind in "BW" else held
            counts.append(tuple(sum(a.stage == stage for a in held) for stage in stages))
        assert set(schedule.holdings[rank]) <= set(counts)
        assert all(any(all(map(int.__le__, c, h)) for h in schedule.holdings[rank]) for c in counts)
