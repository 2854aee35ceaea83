"""Laws of running work and collectives side by side."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models.streams import Event, Share, Start, StreamRun, Wait, Work, exposed_s
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.graph.host_copies import HOST_STREAM
from galvatron_fx.ir.plan.prediction import COMPUTE, HOST_COPIES, Cause

SECONDS = st.floats(0.0, 10.0)
NOTHING_GAINED = Overlap(2.0, 2.0)


def sent(stream: int) -> Cause:
    return Cause("all_gather", (stream,))


@st.composite
def event_lists(draw: st.DrawFn, starts: bool = True) -> list[Event]:
    """Up to 12 events on two streams, none of which waits for what has not begun; ``starts``: which take time."""
    events: list[Event] = []
    for _ in range(draw(st.integers(0, 12))):
        stream = draw(st.integers(0, 1))
        seconds, part = draw(SECONDS), draw(st.sampled_from([0.0, 0.25, 1.0])) if starts else 0.0
        kinds = (Work(seconds, Cause(COMPUTE)), Start(seconds, sent(stream), stream, part * seconds))
        events.append(draw(st.sampled_from([*kinds, Wait(stream, draw(st.integers(0, 3)))])))
    return events


def work_s(events: list[Event]) -> float:
    return sum(event.seconds for event in events if isinstance(event, Work))


def sent_s(events: list[Event], stream: int) -> float:
    return sum(event.seconds for event in events if isinstance(event, Start) and event.stream == stream)


OVERLAPS = st.builds(Overlap, st.floats(1.0, 3.0), st.floats(1.0, 3.0))


@given(events=event_lists(), overlap=OVERLAPS)
def test_bounds(events: list[Event], overlap: Overlap) -> None:
    """At least what each stream takes alone, at most all of it one after the other at its slowest."""
    taken_s = StreamRun.of(events, overlap).now_s
    least = max(work_s(events), sent_s(events, 0), sent_s(events, 1))
    most = overlap.compute * work_s(events) + overlap.communication * (sent_s(events, 0) + sent_s(events, 1))
    assert least * (1 - 1e-9) <= taken_s <= most * (1 + 1e-9) + 1e-12


@given(events=event_lists(), overlap=OVERLAPS)
def test_parts_add_up(events: list[Event], overlap: Overlap) -> None:
    run = StreamRun.of(events, overlap)
    assert run.now_s == pytest.approx(work_s(events) + sum(run.exposed.values()), abs=1e-9)
    assert min(run.exposed.values(), default=0.0) >= 0.0
    starts = [number for number, event in enumerate(events) if isinstance(event, Start)]
    assert sorted(run.spans_s) == starts and all(a <= b <= run.now_s for a, b in run.spans_s.values())


@given(events=event_lists(starts=False))
def test_sharing_evenly_gains_nothing(events: list[Event]) -> None:
    """On one stream, and but for what collectives take to start: as one after the other."""
    one = [event for event in events if isinstance(event, Work) or event.stream == 0]
    run = StreamRun.of(one, NOTHING_GAINED)
    assert run.now_s == pytest.approx(work_s(one) + sent_s(one, 0), abs=1e-9)


@given(events=event_lists(), overlap=OVERLAPS, number=st.integers(0, 11), more_s=SECONDS)
def test_more_bytes_never_take_less(events: list[Event], overlap: Overlap, number: int, more_s: float) -> None:
    """On one stream, where overlapping loses nothing: there, being late may make others run alone."""
    overlap = overlap if 1 / overlap.compute + 1 / overlap.communication >= 1 else NOTHING_GAINED
    one = [event for event in events if isinstance(event, Work) or event.stream == 0]
    longer = [
        event._replace(seconds=event.seconds + more_s) if i == number and isinstance(event, Start) else event
        for i, event in enumerate(one)
    ]
    assert StreamRun.of(longer, overlap).now_s >= StreamRun.of(one, overlap).now_s * (1 - 1e-9) - 1e-12


@given(compute=SECONDS, communication=SECONDS, start=st.floats(0.0, 1.0), overlap=OVERLAPS)
def test_the_formula(compute: float, communication: float, start: float, overlap: Overlap) -> None:
    events = [Start(communication, sent(0), 0, start * communication), Work(compute, Cause(COMPUTE)), Wait(0, 0)]
    expected = StreamRun.of(events, overlap).now_s - compute
    arrays = (np.array([seconds]) for seconds in (compute, communication, start * communication))
    assert exposed_s(*arrays, overlap)[0] == pytest.approx(expected, abs=1e-9)


def test_by_hand() -> None:
    """2 s of work beside 1 s: that takes 1.3 s, in which 1 s is computed."""
    events = [Start(1.0, sent(0), 0), Work(2.0, Cause(COMPUTE)), Wait(0, 0), Start(3.0, sent(1), 1)]
    run = StreamRun.of(events, Overlap(1.3, 1.3))
    assert run.begins_s == pytest.approx([0.0, 0.0, 2.3, 2.3, 5.3])
    assert run.spans_s[0] == pytest.approx((0.0, 1.3)) and run.spans_s[3] == pytest.approx((2.3, 5.3))
    assert run.exposed == pytest.approx({sent(0): 0.3, sent(1): 3.0})


def test_what_starts_is_not_slowed_down() -> None:
    """1.3 s to start, in which 1 s is computed, then 1 s that takes 2 s beside computing of as much as 2 / 1.3 s."""
    events = [Start(2.3, sent(0), 0, start_s=1.3), Work(3.0, Cause(COMPUTE)), Wait(0, 0)]
    run = StreamRun.of(events, Overlap(1.3, 2.0))
    assert run.spans_s[0] == pytest.approx((0.0, 3.3)) and run.begins_s[2] == pytest.approx(1.3 + 2.0 + 2.0 - 2 / 1.3)


def test_the_first_wait_after_computing_takes_longer() -> None:
    """By the skew of so much computing; what is waited for right behind it does not."""
    skew = Skew(late_s=0.5, growth=0.4)
    compute, two = Work(3.0, Cause(COMPUTE)), [Start(1.0, sent(0), 0), Start(1.0, sent(0), 0)]
    run = StreamRun.of([compute, *two, Wait(0, 1), Wait(0, 0), compute, *two], Overlap(skew=skew))
    assert run.now_s == pytest.approx(6.0 + 4.0 + 2 * skew.seconds(3.0))
    assert skew.seconds(3.0) == pytest.approx(0.5 * 3.0**0.4)


def test_shares_belong_to_the_next_that_takes_them() -> None:
    shares = [Share(1.0, sent(0), 0), Start(0.5, sent(0), 0), Share(2.0, sent(0), 0), Share(4.0, sent(1), 1)]
    run = StreamRun.of([*shares, Start(0.0, sent(0), 0, takes_shares=True)], Overlap())
    assert run.spans_s == {1: (0.0, 0.5), 4: (0.5, 3.5)}


@given(
    computed=st.floats(0.0, 100.0), more=st.floats(0.0, 100.0), late=st.floats(0.0, 10.0), growth=st.floats(0.01, 1.0)
)
def test_skew_grows_ever_less(computed: float, more: float, late: float, growth: float) -> None:
    skew = Skew(late, growth)
    both = skew.seconds(computed + more)
    assert 0.0 <= skew.seconds(computed) <= both <= computed + more
    assert both <= (skew.seconds(computed) + skew.seconds(more)) * (1 + 1e-12)
    assert skew.seconds(np.array([computed, more])).tolist() == [skew.seconds(computed), skew.seconds(more)]
    assert Skew().seconds(computed) == 0.0


def test_host_copies_and_computing_do_not_slow_each_other_down() -> None:
    """Nor do they wait for other ranks; what is waited for counts."""
    copy = Cause(HOST_COPIES)
    events = [Start(3.0, copy, HOST_STREAM), Work(2.0, Cause(COMPUTE)), Wait(HOST_STREAM, 0), Work(1.0, Cause(COMPUTE))]
    run = StreamRun.of(events, Overlap(2.0, 2.0, Skew(1.0, 1.0)))
    assert (run.now_s, run.exposed, run.spans_s) == (4.0, {copy: 1.0}, {0: (0.0, 3.0)})
    beside = StreamRun.of([Start(1.0, sent(0), 0), *events], Overlap(2.0, 2.0))
    assert beside.exposed == {sent(0): 1.0} and beside.spans_s[1] == (0.0, 3.0), "a collective slows computing down"
