"""A sample of random programs under random plans; benchmarks/correctness/fuzz_compiler.py runs any number of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.plan.strategy import Strategy
from passes.sharding import expand_rings, expansions
from passes.sharding.insert_collectives import _Lowering
from passes.sharding.local_args import DENSE_ARGUMENTS
from tests.fuzz.plans import PlanDraw
from tests.fuzz.programs import draw_program
from tests.fuzz.rules import Known, bad_rules
from tests.fuzz.runner import EXACT, REFUSED, SENSITIVE, UNDEFINED, UNTRACED, WRONG, Prepared, run_plan, run_program
from tests.fuzz.shrink import shrunk
from tests.fuzz.source import Function, Program

# Tracing is what costs, and trying every rule of every call, which is done for the first few.
PROGRAMS = [*((seed, True) for seed in range(12)), (0, False)]
WITH_RULES = 3

CONTRAST = Program(
    0,
    (
        Function(
            "Model",
            ("x",),
            ("self.m0 = nn.Linear(6, 8)", "self.m1 = nn.Linear(8, 8)"),
            (
                "b = x.shape[0]",
                "v1 = self.m0(x)",
                "v2 = torch.tanh(v1)",
                "v3 = self.m1(v2)",
                "v4 = F.normalize(v3, dim=-1)",
                "v5 = v4 @ v4.T / 0.5",
                "v6 = v5.masked_fill(torch.eye(b, dtype=torch.bool), float('-inf'))",
                "v7 = torch.cat([torch.arange(b // 2, b), torch.arange(b // 2)])",
                "v8 = F.cross_entropy(v6, v7)",
            ),
            "v8",
        ),
    ),
    (("x", "torch.randn(4, 6)"),),
)
ATTENTION = Program(
    0,
    (
        Function(
            "Model",
            ("x",),
            ("self.m0 = nn.Linear(4, 12)",),
            (
                "q, k, v = (y.unflatten(-1, (2, 2)).transpose(1, 2) for y in self.m0(x).chunk(3, -1))",
                "v1 = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                "v2 = v1.square().mean()",
            ),
            "v2",
        ),
    ),
    (("x", "torch.randn(2, 24, 4)"),),
)
DATA = PlanDraw((2,), (Strategy(("data",)),))


@pytest.fixture(autouse=True)
def float32_afterwards() -> Iterator[None]:
    """Programs set the default dtype, as their text does where it is pasted."""
    yield
    torch.set_default_dtype(torch.float32)


def test_a_sample() -> None:
    kinds: Counter[str] = Counter()
    known = Known(often=5)
    for seed, small in PROGRAMS:
        prepared = Prepared(draw_program(seed, small=small))
        for outcome in run_program(prepared, plans=1):
            kinds[outcome.kind] += 1
            assert not outcome.is_fault, str(outcome)
            if outcome.plan is not None and small and seed < WITH_RULES:
                bad = list(bad_rules(prepared, known))
                assert not bad, f"seed {seed}: {bad[0]}"
    assert kinds[EXACT] > len(PROGRAMS) / 2, kinds
    assert set(kinds) <= {EXACT, REFUSED, UNTRACED, UNDEFINED, SENSITIVE}


def test_programs_run_and_equal_seeds_draw_equal_ones() -> None:
    for seed in range(60):
        prepared = Prepared(draw_program(seed))
        prepared.model(**prepared.inputs)
        assert str(draw_program(seed)) == str(draw_program(seed))


def _masked_product(e: expansions.Emitter, mask: fx.Node, value: fx.Node) -> fx.Node:
    return e.emit(torch.ops.aten.mul.Tensor, (value, mask), expansions._like(value))


def test_a_masked_product_is_seen_and_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What gave nan until masks chose instead."""
    assert run_plan(Prepared(CONTRAST), DATA).kind == EXACT
    monkeypatch.setattr(expansions, "_where", _masked_product)
    outcome = run_plan(Prepared(CONTRAST), DATA)
    assert outcome.kind == WRONG, outcome
    assert [bad.rule.expansion for bad in bad_rules(Prepared(CONTRAST), Known(often=5))][:1] == ["vocabulary_nll_loss"]
    small = shrunk(outcome, tries=25)
    assert small.kind == WRONG
    assert len(small.program.functions[-1].lines) <= 7, small
    assert "check_plan(model, inputs, PlanDraw(sizes=(2,)" in str(small)


def test_rules_of_rings_are_checked_with_their_steps_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = Prepared(ATTENTION)
    assert not list(bad_rules(prepared, Known(often=5)))
    monkeypatch.setattr(expand_rings, "_rotated", lambda e, x: x)
    bad = list(bad_rules(prepared, Known(often=5)))
    assert bad and all("attention" in str(each.call.target) for each in bad), bad


@pytest.mark.parametrize("lost", [c.all_reduce, c.all_gather])
def test_a_lost_collective_is_seen(lost: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that leaves out one kind of collective is at fault under some plan."""
    emit = expansions.Emitter.emit

    def without(self: Any, target: Any, args: tuple[Any, ...], spec: Any, **kwargs: Any) -> fx.Node:
        if target is lost:
            target, args, kwargs = torch.ops.aten.clone.default, args[:1], {}
        return emit(self, target, args, spec, **kwargs)

    monkeypatch.setattr(expansions.Emitter, "emit", without)
    prepared = Prepared(CONTRAST)
    plans = [PlanDraw((2,), (Strategy((role,)),)) for role in ("data", "tensor")]
    assert any(run_plan(prepared, plan).is_fault for plan in plans)


def test_statistics_that_are_not_dense_are_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of programs drawn from seed 6000 on, 6488 is the first that finds it where DenseArguments leaves them out."""

    def as_view(rows: Tensor, shape: Sequence[int], dim: int, split_factor: int) -> Tensor:
        runs = rows.reshape(len(rows), *shape[:dim], split_factor, shape[dim] // split_factor, *shape[dim + 1 :])
        return runs.movedim(0, dim + 1).reshape(*shape[:dim], len(rows) * shape[dim], *shape[dim + 1 :])

    prepared = Prepared(draw_program(6488))
    assert [outcome.kind for outcome in run_program(prepared, plans=1)] == [EXACT]
    monkeypatch.setattr(c, "join_rows", as_view)
    assert [outcome.kind for outcome in run_program(prepared, plans=1)] == [EXACT]
    monkeypatch.delitem(DENSE_ARGUMENTS, torch.ops.aten.native_layer_norm_backward.default)
    assert [outcome.kind for outcome in run_program(prepared, plans=1)] == [WRONG]


def test_gradients_of_zero_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward whose terms are only those of nobody."""
    change = _Lowering._emit_change

    def nothing(self: Any, new: fx.Node, have: Any, want: Any, consumer: Any) -> fx.Node:
        made = change(self, new, have, want, consumer)
        if consumer.phase == "backward" and made.target is c.all_reduce:
            made.target, made.args = torch.ops.aten.zeros_like.default, made.args[:1]
        return made

    monkeypatch.setattr(_Lowering, "_emit_change", nothing)
    assert run_plan(Prepared(CONTRAST), DATA).is_fault
