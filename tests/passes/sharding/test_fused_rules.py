"""Products of queries, keys and values in one: each of the three is split by heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import op_call
from galvatron_fx.ir.graph.placement import PARTIAL, Placement, Shard
from galvatron_fx.ir.graph.symbols import BATCH
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import PIPELINE
from passes.lowering.lower_step import Lower
from passes.sharding.fused_rules import feature_runs, fused_rules
from tests.graphs import Builder
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, simulate_stages, uniform
from tests.models import zoo
from tests.models.language import language

aten = torch.ops.aten
WIDTH, HEADS = 8, 4
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def chunks(x: Tensor) -> Any:
    return (part.unflatten(-1, (HEADS, -1)) for part in x.chunk(3, -1))


def sizes(x: Tensor) -> Any:
    return (part.unflatten(-1, (HEADS, -1)) for part in x.split([WIDTH] * 3, -1))


def grouped(x: Tensor) -> Any:
    """Two heads of queries share one of keys and values."""
    q, *others = (part.unflatten(-1, (-1, 2)) for part in x.split([WIDTH, WIDTH // 2, WIDTH // 2], -1))
    return q, *(each.repeat_interleave(2, -2) for each in others)


def grouped_slices(x: Tensor) -> Any:
    """As Phi-3 has it."""
    half = WIDTH // 2
    q, *others = (x[..., :WIDTH], x[..., WIDTH : WIDTH + half], x[..., WIDTH + half :])
    return q.unflatten(-1, (-1, 2)), *(each.unflatten(-1, (-1, 2)).repeat_interleave(2, -2) for each in others)


def grouped_heads(x: Tensor) -> Any:
    """Features become heads before they are taken apart."""
    q, *others = x.unflatten(-1, (-1, 2)).split([HEADS, HEADS // 2, HEADS // 2], -2)
    return q, *(each.repeat_interleave(2, -2) for each in others)


def three_of_heads(x: Tensor) -> Any:
    """As vision transformers of timm have it."""
    return x.reshape(*x.shape[:2], 3, HEADS, -1).unbind(2)


def heads_of_three(x: Tensor) -> Any:
    """As BLOOM and GPT-NeoX have it: heads are outermost, so that a plain split has whole heads."""
    return x.unflatten(-1, (HEADS, 3, -1)).unbind(-2)


GROUPED = (grouped, grouped_slices, grouped_heads)


class Fused(nn.Module):
    def __init__(self, apart: Callable[[Tensor], Any], bias: bool) -> None:
        super().__init__()
        self.norm, self.out, self.apart = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), apart
        self.qkv = nn.Linear(WIDTH, (2 if apart in GROUPED else 3) * WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        heads = (each.transpose(1, 2) for each in self.apart(self.qkv(self.norm(x))))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(attended.transpose(1, 2).flatten(2))


def attending(apart: Callable[[Tensor], Any], bias: bool = True) -> zoo.Case:
    model, inputs = language(2)
    torch.manual_seed(0)
    model.layers = nn.ModuleList(Fused(apart, bias).double() for _ in range(3))
    return model, inputs


def heads_of_a_rank(graph: fx.GraphModule, roles: tuple[str, ...]) -> set[int]:
    strategies = uniform(graph, *roles)
    joint = Lower(strategies, cluster_for((2,) * len(roles), strategies)).run(graph).joint
    calls = joint.graph.find_nodes(op="call_function", target=FORWARD)
    return {meta_of(call).specs[0].shape[1] for call in calls}  # type: ignore[union-attr]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "apart", [chunks, sizes, three_of_heads, heads_of_three, *GROUPED], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("roles, heads", [
    (("tensor",), 2), (("tensor", "tensor"), 1), (("data", "tensor_sequence"), 2), (("zero", "tensor"), 2),
], ids=str)  # fmt: skip
def test_heads_are_split(apart: Any, bias: bool, roles: tuple[str, ...], heads: int) -> None:
    model, inputs = attending(apart, bias)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    too_few = apart in GROUPED and heads == 1  # two heads of keys and values for four ranks
    assert heads_of_a_rank(graph, roles) == {HEADS if too_few else heads}
    for again in (False, True):
        strategies = uniform(graph, *roles, recompute=again)
        assert_exact(simulate(graph, model, inputs, (2,) * len(roles), strategies, {}), expected)


def test_stages_and_microbatches() -> None:
    model, inputs = attending(chunks)
    graph, schedule = captured(model, inputs), make_schedule("1f1b", 2, 2, 4)
    found = simulate_stages(graph, model, inputs, (2, 2), uniform(graph, PIPELINE, "tensor"), (0, 2), schedule)
    assert_exact(found, one_device(model, inputs))


def _rules(target: Any, *args: Any, offered: list[Placement], inputs: int = 1) -> list[str]:
    build = Builder()
    values = [build.input(f"x{i}", (4, 24), dims=(BATCH, 24)) for i in range(inputs)]
    call = build.call(target, values[0] if target is not aten.cat.default else values, *args)
    return [str(rule) for rule in fused_rules(op_call(call), offered)]


def test_rules() -> None:
    runs: list[Placement] = [Shard(1, 3), Shard(1, 6), Shard(1), PARTIAL]
    apart = ["S(1,3) -> S(1), S(1), S(1)", "S(1,6) -> S(1,2), S(1,2), S(1,2)"]
    assert _rules(aten.split.Tensor, 8, 1, offered=runs) == apart
    assert _rules(aten.split_with_sizes.default, [8, 8, 8], -1, offered=runs) == apart
    assert _rules(aten.split_with_sizes.default, [12, 6, 6], 1, offered=runs) == ["S(1,2:1:1) -> S(1), S(1), S(1)"]
    assert _rules(aten.split.Tensor, 2, 0, offered=runs) == [], "samples lie in no runs"
    together = ["S(1), S(1), S(1) -> S(1,3)", "S(1,2), S(1,2), S(1,2) -> S(1,6)"]
    assert _rules(aten.cat.default, 1, offered=runs, inputs=3) == together
    assert _rules(aten.cat.default, 1, offered=[Shard(1)], inputs=3) == []


def test_runs_of_features() -> None:
    build = Builder()
    x = build.input("x", (4, 2, 24), dims=(BATCH, 2, 24))
    parts = [build.call(aten.split.Tensor, x, size, 2) for size in (8, 12, 4, 16)]
    views = [build.call(aten.view.default, x, [4, 2, *shape]) for shape in ((3, 2, 4), (24,), (3, 8))]
    assert [feature_runs([node]) for node in parts] == [(3,), (2,), (), ((2, 1),)], "six are no runs"
    assert [feature_runs([node]) for node in views] == [(3,), (), ()]
    assert feature_runs([*parts, *views]) == (3, 2, (2, 1))
