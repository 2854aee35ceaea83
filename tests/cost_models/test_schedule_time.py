from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.schedule_time import ScheduleReport, Span, in_flight_counts, peak_bytes, simulate_schedule
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.plan.schedule import SCHEDULES, Action, Schedule, legal, make_schedule

STAGES_A_RANK = {"gpipe": (1,), "1f1b": (1,), "interleaved_1f1b": (2, 3), "zb_h1": (1,), "zbv": (2,), "dualpipev": (2,)}
LEGAL = st.sampled_from(
    [
        (name, num_ranks, num_ranks * stages, num_microbatches)
        for name in SCHEDULES
        for num_ranks in range(1, 5)
        for stages in STAGES_A_RANK[name]
        for num_microbatches in range(1, 11)
        if legal(name, num_ranks, num_ranks * stages, num_microbatches) is None
    ]
)
SECONDS = st.integers(0, 64).map(lambda ticks: ticks / 8)  # exact in binary, so that sums are, too
Times = tuple[list[float], list[float], list[float], list[float], list[float]]


def times_of(num_stages: int) -> st.SearchStrategy[Times]:
    stages = st.lists(SECONDS, min_size=num_stages, max_size=num_stages)
    transfers = st.lists(SECONDS, min_size=num_stages - 1, max_size=num_stages - 1)
    return st.tuples(stages, stages, stages, transfers, transfers)


def equal_times(num_stages: int, forward: float, inputs: float, weights: float, send: float = 0.0) -> Times:
    links = [send] * (num_stages - 1)
    return [forward] * num_stages, [inputs] * num_stages, [weights] * num_stages, links, links


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Times]:
    schedule = make_schedule(*draw(LEGAL))
    return schedule, draw(times_of(schedule.num_stages))


def sends(schedule: Schedule, seconds: list[float]) -> list[float]:
    """Return the transfers between neighbours, 0 where both are on one rank."""
    return [s if a != b else 0.0 for s, (a, b) in zip(seconds, pairwise(schedule.rank_of_stage), strict=True)]


@given(cases())
def test_every_start_is_the_latest_of_what_it_waits_for(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    forward, inputs, weights, send_forward, send_backward = times
    report = simulate_schedule(schedule, *times)
    spans = {span.action: span for span in report.spans}
    seconds = {"F": forward, "B": [i + w for i, w in zip(inputs, weights, strict=True)], "I": inputs, "W": weights}
    for order in schedule.orders:
        for before, action in zip((None, *order), order, strict=False):
            stage, microbatch = action.stage, action.microbatch
            bounds = [0.0 if before is None else spans[before].end_s]
            if action.kind == "F" and stage > 0:
                ended = spans[Action("F", stage - 1, microbatch)].end_s
                bounds.append(ended + sends(schedule, send_forward)[stage - 1])
            if action.kind in "BI" and stage < schedule.num_stages - 1:
                behind = [spans.get(Action(kind, stage + 1, microbatch)) for kind in "BI"]
                bounds += [span.end_s + sends(schedule, send_backward)[stage] for span in behind if span]
            assert spans[action].start_s == max(bounds)
            assert spans[action].end_s == spans[action].start_s + seconds[action.kind][stage]


@given(cases())
def test_step_is_at_least_the_busiest_rank_and_the_path_of_one_microbatch(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    forward, inputs, weights, send_forward, send_backward = times
    report = simulate_schedule(schedule, *times)
    work = [schedule.num_microbatches * sum(parts) for parts in zip(forward, inputs, weights, strict=True)]
    assert report.busy_s == tuple(sum(work[s] for s in schedule.stages_of(r)) for r in range(schedule.num_ranks))
    assert report.idle_s == tuple(report.step_s - busy for busy in report.busy_s)
    assert min(report.idle_s) >= 0
    path = sum(forward) + sum(inputs) + sum(sends(schedule, send_forward)) + sum(sends(schedule, send_backward))
    assert report.step_s >= path


@given(cases(), st.data())
def test_step_grows_with_every_time(case: tuple[Schedule, Times], data: st.DataObject) -> None:
    schedule, times = case
    more = data.draw(times_of(schedule.num_stages))
    longer = [[a + b for a, b in zip(old, new, strict=True)] for old, new in zip(times, more, strict=True)]
    assert simulate_schedule(schedule, *longer).step_s >= simulate_schedule(schedule, *times).step_s


@given(cases())
def test_step_scales_and_repeats(case: tuple[Schedule, Times]) -> None:
    schedule, times = case
    report = simulate_schedule(schedule, *times)
    assert simulate_schedule(schedule, *times) == report
    assert simulate_schedule(schedule, *([2 * s for s in part] for part in times)).step_s == 2 * report.step_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@given(ranks=st.integers(1, 6), count=st.integers(1, 12), forward=SECONDS, inputs=SECONDS, weights=SECONDS)
def test_equal_stages_take_the_textbook_time(
    name: str, ranks: int, count: int, forward: float, inputs: float, weights: float
) -> None:
    report = simulate_schedule(make_schedule(name, ranks, ranks, count), *equal_times(ranks, forward, inputs, weights))
    assert report.step_s == (count + ranks - 1) * (forward + inputs + weights)


@given(ranks=st.integers(2, 6), count=st.integers(1, 14), unit=st.integers(1, 64))
def test_zb_h1_idles_less_than_1f1b(ranks: int, count: int, unit: float) -> None:
    idle = [
        sum(simulate_schedule(make_schedule(name, ranks, ranks, count), *equal_times(ranks, unit, unit, unit)).idle_s)
        for name in ("zb_h1", "1f1b")
    ]
    assert idle[0] < idle[1]


def test_schedules_rank_as_published() -> None:
    """Four ranks, 16 micro-batches, F = I = W: with equal work a rank, each newer schedule takes less time."""
    steps = {}
    for name, stages in {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zb_h1": 1, "zbv": 2, "dualpipev": 2}.items():
        schedule = make_schedule(name, 4, 4 * stages, 16)
        steps[name] = simulate_schedule(schedule, *equal_times(4 * stages, 2 / stages, 2 / stages, 2 / stages)).step_s
    assert steps["gpipe"] == steps["1f1b"] == 114
    assert steps["1f1b"] > steps["interleaved_1f1b"]
    assert steps["1f1b"] > steps["zb_h1"] > steps["zbv"]
    assert steps["1f1b"] > steps["dualpipev"]


def test_transfers_run_beside_compute_and_cost_nothing_on_one_rank() -> None:
    schedule = make_schedule("1f1b", 2, 2, 1)
    assert simulate_schedule(schedule, [1, 2], [4, 8], [16, 32], [64], [128]).step_s == 1 + 64 + 42 + 128 + 20
    both = make_schedule("zbv", 1, 2, 1)
    assert simulate_schedule(both, [1, 2], [4, 8], [16, 32], [64], [128]).step_s == 1 + 2 + 4 + 8 + 16 + 32


@given(ranks=st.integers(1, 7), count=st.integers(1, 12))
def test_in_flight_of_1f1b_and_gpipe(ranks: int, count: int) -> None:
    assert in_flight_counts(make_schedule("1f1b", ranks, ranks, count)) == tuple(
        min(count, ranks - stage) for stage in range(ranks)
    )
    assert in_flight_counts(make_schedule("gpipe", ranks, ranks, count)) == (count,) * ranks


@given(cases(), st.data())
def test_memory_is_that_of_a_walk_over_the_orders(case: tuple[Schedule, Times], data: st.DataObject) -> None:
    schedule, times = case
    sizes = data.draw(
        st.lists(st.integers(0, 100), min_size=schedule.num_stages, max_size=schedule.num_stages), label="saved_bytes"
    )
    peaks, most = [], [0] * schedule.num_stages
    for order in schedule.orders:
        held, peak = [0] * schedule.num_stages, 0
        for action in order:
            held[action.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            most = [max(pair) for pair in zip(most, held, strict=True)]
            peak = max(peak, sum(count * size for count, size in zip(held, sizes, strict=True)))
        peaks.append(peak)
    report = simulate_schedule(schedule, *times)
    assert peak_bytes(schedule, sizes) == report.peak_bytes(sizes) == tuple(peaks)
    assert report.in_flight == tuple(most)


@given(cases(), st.integers(-100, 100), st.randoms())
def test_a_measured_report_starts_at_zero(case: tuple[Schedule, Times], clock_s: float, random: object) -> None:
    schedule, times = case
    report = simulate_schedule(schedule, *times)
    spans = [span._replace(start_s=span.start_s + clock_s, end_s=span.end_s + clock_s) for span in report.spans]
    random.shuffle(spans)  # type: ignore[attr-defined]
    assert ScheduleReport.from_spans(schedule, spans) == report


def test_spans_that_do_not_fit_the_schedule_are_refused() -> None:
    schedule = make_schedule("gpipe", 2, 2, 1)
    spans = simulate_schedule(schedule, *equal_times(2, 1, 1, 1)).spans
    with pytest.raises(InputError, match=r"no span of 1F0 on rank 1; give one for every action"):
        ScheduleReport.from_spans(schedule, [span for span in spans if str(span.action) != "1F0"])
    with pytest.raises(InputError, match=r"no span of 0F0 on rank 0"):
        ScheduleReport.from_spans(schedule, [spans[0]._replace(rank=1), *spans[1:]])
    with pytest.raises(InputError, match=r"5 spans for 4 actions; give one for each, of one step"):
        ScheduleReport.from_spans(schedule, [*spans, spans[0]])
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"0F0 on rank 0 starts at 0\.0 s and ends at .* s; give finite seconds"):
            ScheduleReport.from_spans(schedule, [Span(Action("F", 0, 0), 0, 0.0, wrong), *spans[1:]])


@pytest.mark.parametrize(
    ("place", "values", "message"),
    [
        (0, [1], r"forward_s has 1 entries, and 2 were expected; give one per stage"),
        (1, [1, 2, 3], r"input_grad_s has 3 entries, and 2 were expected; give one per stage"),
        (2, [1, -1], r"weight_grad_s\[1\] is -1 seconds; give a finite number from 0"),
        (2, [float("nan"), 1], r"weight_grad_s\[0\] is nan seconds"),
        (3, [1, 1], r"send_forward_s has 2 entries, and 1 were expected; give one per pair of neighbouring stages"),
        (4, [float("inf")], r"send_backward_s\[0\] is inf seconds"),
    ],
)
def test_wrong_times_are_refused(place: int, values: list[float], message: str) -> None:
    times = list(equal_times(2, 1, 1, 1))
    times[place] = values
    with pytest.raises(InputError, match=message):
        simulate_schedule(make_schedule("1f1b", 2, 2, 2), *times)


def test_wrong_bytes_are_refused() -> None:
    with pytest.raises(InputError, match=r"saved_bytes has 1 entries, and 2 were expected; give one per stage"):
        peak_bytes(make_schedule("1f1b", 2, 2, 2), [1])
    with pytest.raises(InputError, match=r"saved_bytes\[1\] is -1 bytes; give a finite number from 0"):
        peak_bytes(make_schedule("1f1b", 2, 2, 2), [1, -1])


def test_schedules_that_cannot_run_are_refused() -> None:
    schedule = make_schedule("1f1b", 2, 2, 2)
    broken = replace(schedule, orders=(schedule.orders[0], schedule.orders[1][1:]))
    with pytest.raises(PlanError, match=r"rank 1 lacks 1F0"):
        simulate_schedule(broken, *equal_times(2, 1, 1, 1))
    with pytest.raises(PlanError, match=r"rank 1 lacks 1F0"):
        in_flight_counts(broken)
    with pytest.raises(PlanError, match=r"rank 1 lacks 1F0"):
        peak_bytes(broken, [1, 1])
