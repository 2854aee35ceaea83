"""The batch of most throughput: that of trying batches by hand, within the budget, refused where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Cluster, Plan, batch_search
from galvatron_fx.errors import BudgetError, InputError, PlanError

CLUSTER = Cluster.preset("4xA100-80GB")
BUDGET = 24_000_000
PINS = {"num_stages": 1, "num_microbatches": 1}
OPTIONS = {"memory_budget": BUDGET, "roles": ("data", "zero"), "recompute": False, **PINS}


class Stack(nn.Module):
    """Residual layers, one block, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def stack() -> nn.Module:
    return Stack()


def inputs_of(batch: int) -> tuple[Tensor]:
    return (torch.empty(batch, 512, dtype=torch.float32, device="meta"),)


def by_hand(model: nn.Module, batches: list[int]) -> dict[int, float]:
    """Samples a second of the batches that fit."""
    rates = {}
    for batch in batches:
        try:
            rates[batch] = batch / galvatron_fx.plan(model, CLUSTER, inputs_of(batch), **OPTIONS).step_time_s
        except BudgetError:
            continue
    return rates


@pytest.mark.slow
def test_equals_trying_all_by_hand(stack: nn.Module) -> None:
    batches = [8, 2048, 3072, 2**20]
    rates = by_hand(stack, batches)
    assert 1 < len(rates) < len(batches), "some fit, some do not"
    told: set[int | None] = set()
    batch, plan = galvatron_fx.plan_batch(
        stack, CLUSTER, inputs_of, batches=batches[::-1], progress=lambda moment: told.add(moment.batch), **OPTIONS
    )
    assert told == set(batches)
    assert batch == max(rates, key=lambda batch: rates[batch])
    assert batch / plan.step_time_s == rates[batch]
    assert plan.peak_memory_bytes <= BUDGET


def walked(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float], most: int) -> tuple[int, list[int]]:
    """The batch that is found where steps take ``seconds`` of a batch and batches up to ``most`` fit; those tried."""
    seen: list[int] = []

    def fake(model: nn.Module, cluster: Cluster, inputs: tuple[Tensor], **options: object) -> Plan:
        batch = len(inputs[0])
        seen.append(batch)
        if batch > most:
            raise BudgetError("too large", least_bytes=batch)
        return replace(Plan.uniform((4,), ["data"]), step_time_s=seconds(batch))

    with monkeypatch.context() as patch:
        patch.setattr(batch_search, "plan", fake)
        batch, plan = galvatron_fx.plan_batch(nn.Linear(1, 1), CLUSTER, inputs_of)
    assert plan.step_time_s == seconds(batch)
    assert len(seen) == len(set(seen)), "each batch is searched once"
    return batch, seen


def test_doubles_until_nothing_fits_then_looks_between(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seen = walked(monkeypatch, lambda batch: 1.0 + batch / 10, most=50)
    assert seen == [4, 8, 16, 32, 64, 48, 56, 40]
    assert batch == 48


def test_ends_where_throughput_no_longer_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, seen = walked(monkeypatch, lambda batch: 1.0 * batch, most=10**9)
    assert (batch, seen) == (4, [4, 8, 16, 2, 3])
    _, seen = walked(monkeypatch, lambda batch: batch * (1.0 + abs(batch - 64) / 64), most=10**9)
    assert seen[:7] == [4, 8, 16, 32, 64, 128, 256]
    assert 512 not in seen


def test_goes_below_the_number_of_devices_where_no_more_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert walked(monkeypatch, lambda batch: 1.0 + batch / 10, most=3) == (3, [4, 2, 1, 3])
    assert walked(monkeypatch, lambda batch: 1.0 + batch / 10, most=1) == (1, [4, 2, 1])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(most=st.integers(1, 5000), fixed=st.floats(0.1, 100.0), best=st.integers(1, 5000))
def test_comes_as_close_as_it_looks(monkeypatch: pytest.MonkeyPatch, most: int, fixed: float, best: int) -> None:
    """Against all batches, where throughput rises to one batch and falls behind it."""

    def seconds(batch: int) -> float:
        return (fixed + batch) * (1.0 + max(0, batch - best) / best)

    batch, seen = walked(monkeypatch, seconds, most)
    every = max(size / seconds(size) for size in range(1, most + 1))
    assert batch <= most
    assert batch / seconds(batch) >= every / 1.25
    assert len(seen) <= 40


@pytest.mark.slow
def test_fewer_samples_than_devices_where_more_do_not_fit(stack: nn.Module) -> None:
    options = {"roles": ("tensor",), "recompute": False, "memory_budget": 20_000_000}
    batch, plan = galvatron_fx.plan_batch(
        stack, CLUSTER, lambda batch: (torch.empty(batch, 1024, 512, dtype=torch.float32, device="meta"),), **options
    )
    assert batch == 1
    assert plan.peak_memory_bytes <= 20_000_000


def test_batches_too_small_for_pins_are_left_out(stack: nn.Module) -> None:
    options = {"roles": ("data",), "recompute": False, "num_microbatches": 16, "memory_budget": BUDGET}
    batch, plan = galvatron_fx.plan_batch(stack, CLUSTER, inputs_of, batches=[8, 16, 64], **options)
    assert batch == 64, "16 micro-batches of a sample for each of 4 devices"
    assert plan.pipelining.num_microbatches == 16


def test_a_budget_too_small_is_refused(stack: nn.Module) -> None:
    with pytest.raises(BudgetError, match="no plan fits 1 MB per device") as caught:
        galvatron_fx.plan_batch(stack, CLUSTER, inputs_of, memory_budget="1MB", roles=("data", "zero"))
    with pytest.raises(BudgetError, match="no plan fits 1 MB per device") as smallest:
        galvatron_fx.plan(stack, CLUSTER, inputs_of(4), memory_budget="1MB", roles=("data", "zero"))
    assert caught.value.least_bytes == smallest.value.least_bytes


@pytest.mark.parametrize("batches", [[], [0], [8, -1], [8, 2.5], [True]])
def test_bad_batches_are_refused(stack: nn.Module, batches: list[int]) -> None:
    with pytest.raises(InputError, match="give numbers of samples from 1"):
        galvatron_fx.plan_batch(stack, CLUSTER, inputs_of, batches=batches)


def test_inputs_of_another_batch_are_refused(stack: nn.Module) -> None:
    with pytest.raises(InputError, match=r"inputs_of\(4\) gives no tensor of 4 samples but shapes \[\(7, 512\)\]"):
        galvatron_fx.plan_batch(stack, CLUSTER, lambda batch: inputs_of(7))


def test_bad_options_are_refused_before_anything_is_traced(stack: nn.Module) -> None:
    with pytest.raises(PlanError, match="unknown role"):
        galvatron_fx.plan_batch(stack, CLUSTER, lambda batch: pytest.fail("traced"), roles=("date",))
    with pytest.raises(PlanError, match="the model has no such module"):
        galvatron_fx.plan_batch(stack, CLUSTER, inputs_of, constraints={"nowhere": ("data", "data")})
