"""A whole measurement on real processes, and on one without a process group."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.errors import ClusterError, InputError
from galvatron_fx.ir.cluster.provenance import Origin
from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.profiling import calls, measure_cluster
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.tensors import Pool
from galvatron_fx.profiling.timing import Call, Rounds, Turns, mean_without_worst, slowdown_among_all
from tests.ir.cluster.test_cluster import world
from tests.runtime.launch import launched

HERE = Origin("2026-03-31", "EPYC", "cpu", "2.13.0", 1, 4)


@pytest.mark.slow
def test_two_ranks_measure_the_same_cluster() -> None:
    output = launched(Path(__file__).with_name("measuring_ranks.py"))
    assert output.endswith("ok\n"), output[-5000:]


def test_a_step_of_a_ring_is_timed_with_the_columns_of_its_mask() -> None:
    """Of four ranks, as the mask has four times as many columns as there are keys here."""
    x, sums, mask = (TensorSpec(shape, torch.float32) for shape in ((1, 2, 8, 4), (1, 2, 8), (1, 1, 8, 32)))
    forward = (x, x, x, x, sums, mask, 2, False, False, None, 0)
    backward = (x, x, x, x, x, sums, x, mask, 2, False, None, 0)
    for target, arguments, made in ((c.ring_step, forward, (x, sums)), (c.ring_step_backward, backward, (x, x, x))):
        tensors = tuple(each for each in arguments if isinstance(each, TensorSpec))
        kernel = calls._runnable(Pool("cpu"), Kernels("cpu"), OpCall(target, arguments, (), tensors, made))
        assert kernel is not None
        results = kernel.target(*kernel.make(0)[0])
        assert [each.shape for each in results] == [torch.Size(each.shape) for each in made]


def alone() -> DeviceMesh:
    """A mesh of this process alone."""
    with world(1):
        return DeviceMesh("cpu", torch.arange(1), _init_backend=False)


def test_rounds_take_the_median_of_what_every_round_finds() -> None:
    counted: list[int] = []

    def task():
        return counted.append

    times = Rounds(Ranks(alone()), [task, task]).run(0.01, 3, lambda share: None)
    assert len(times) == 2
    assert min(times) > 0
    repeats = [count for count in counted if count > 2]
    assert len(repeats) >= 6, "three rounds of two tasks, each as often as fits a window"


class SecondOfTwo(Ranks):
    """A rank whose peer finds one second for everything."""

    count, index = 2, 1

    def sum(self, values: list[float]) -> list[float]:
        return [value + 1.0 for value in values]


def test_where_ranks_share_cores_the_first_measures_alone() -> None:
    assert slowdown_among_all({}) == slowdown_among_all({1: 0.95, 2: 1.0}) == 1.0
    slowdown = slowdown_among_all({1: 0.5, 2: 0.6, 4: 1.0})
    assert slowdown == 2.0
    counted: list[int] = []
    times = Rounds(SecondOfTwo(alone()), [lambda: counted.append], slowdown=slowdown).run(0.01, 3, lambda share: None)
    assert times == [2.0] and not counted


def test_turns_make_every_call_between_others() -> None:
    made: list[str] = []
    calls = [Call(lambda name=name: made.append(f"before {name}"), partial(made.append, name)) for name in "abc"]
    times = Turns(Ranks(alone()), calls).run(1e-9, 3, lambda share: None)
    assert len(times) == 3 and min(times) > 0
    assert all(before == f"before {name}" for before, name in zip(made[::2], made[1::2], strict=True))
    turns = [made[start + 1 : start + 6 : 2] for start in range(0, len(made), 6)]
    assert len(turns) == 4, "one that is not counted, and three"
    assert all(sorted(turn) == list("abc") for turn in turns) and len({tuple(turn) for turn in turns}) > 1


class FirstOfFour(Ranks):
    """A rank of the first of two groups, whose peers took one second less, in the other group 2 and 5 seconds."""

    count, index = 4, 0

    def sum(self, values: list[float]) -> list[float]:
        return values

    def all(self, value: Any) -> list[Any]:
        groups, found = value
        first = [[taken - 1 for taken in times] for times in found]
        others = [[[seconds] * len(times) for times in found] for seconds in (2.0, 5.0)]
        return [value, (groups, first), *(([1], other) for other in others)]


def test_a_collective_takes_what_it_takes_on_the_last_rank_to_begin() -> None:
    call = Call(lambda: None, lambda: time.sleep(0.01), group=0)
    [seconds] = Turns(FirstOfFour(alone()), [call]).run(1e-9, 2, lambda share: None)
    assert seconds == pytest.approx((0.01 - 1 + 2) / 2, abs=5e-3)


def test_the_longest_twentieth_does_not_count() -> None:
    assert mean_without_worst([1.0] * 38 + [100.0] * 2) == 1.0
    assert mean_without_worst([1.0, 3.0]) == 2.0


def test_seconds_to_measure_in_are_some() -> None:
    with pytest.raises(InputError, match="seconds is 0: give seconds above 0"):
        measure_cluster(alone(), seconds=0)


XEON = Origin("2026-03-31", "Xeon", "cpu", "2.11.0", 1, 4)
GPUS = Origin("2026-03-31", "EPYC", "cuda", "2.13.0", 2, 8)


@pytest.mark.parametrize(
    ("measured", "differences"),
    [
        (HERE, []),
        (replace(HERE, measured="2026-03-02"), []),
        (replace(HERE, measured="2026-02-01"), ["measured 58 days ago"]),
        (XEON, ["device Xeon, now EPYC", "torch version 2.11.0, now 2.13.0"]),
        (GPUS, ["device type cuda, now cpu", "threads a process 2, now 1", "number of ranks 8, now 4"]),
    ],
)
def test_what_makes_a_profile_stale(measured, differences) -> None:
    assert measured.differences(HERE) == differences


def test_a_day_that_is_none_is_refused() -> None:
    with pytest.raises(ClusterError, match="measured is 'yesterday'; give a day such as 2026-11-21"):
        Origin("yesterday", "EPYC", "cpu", "2.13.0", 1, 4)
