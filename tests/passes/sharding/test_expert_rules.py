"""Tokens on their way to experts: each rank sorts its own, and nothing else may move them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers operators)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import FileCheck

from galvatron_fx.errors import ShardingError
from galvatron_fx.ir.graph.collectives import all_to_all
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.op_call import op_call
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, ROUTED_ENDS, Shard, through_view, to_dtensor
from galvatron_fx.ir.kernels.experts import combine, dispatch, route
from passes.lowering.lower_step import Lower
from passes.sharding.insert_collectives import AxisSharding, InsertCollectives
from passes.sharding.prices import Prices
from passes.sharding.rules import op_rules
from tests.graphs import Builder
from tests.helpers import DEVICE, assert_exact, axes, captured, cluster_for, one_device, simulate, uniform

EXPERTS, COPIES = 4, 2
ROWS = Shard(0, routed=True)


class Mixture(nn.Module):
    """Experts by the operators themselves; ``body``: what they do between two products of theirs."""

    def __init__(self, body: Callable[[Tensor], Tensor], experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.router = nn.Linear(8, experts).double()
        self.up = nn.Parameter(torch.randn(experts, 8, 8, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(experts, 8, 8, dtype=torch.float64))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(COPIES)
        place, order, ends = route(chosen.reshape(-1), len(self.up))
        rows = product(dispatch(tokens, place, order, COPIES), self.up, ends)
        rows = product(self.body(rows), self.down, ends)
        rows = rows * dispatch(weights.reshape(-1), place, order, 1).unsqueeze(-1)
        return combine(rows, place, order, COPIES).pow(2).mean()


def product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


BODIES = {
    "elementwise": F.silu,
    "gate": lambda rows: rows.chunk(2, -1)[0].repeat(1, 2) * rows,
    "interleaved": lambda rows: rows.view(-1, 4, 2).flip(1).reshape(-1, 8),
    "norm": lambda rows: F.rms_norm(rows, (8,)),
    "sum": lambda rows: rows - rows.sum(0) * 0.01,  # of all rows: they stay whole
    "position": lambda rows: rows * torch.arange(len(rows), dtype=rows.dtype).unsqueeze(-1),  # likewise
    "random": lambda rows: F.dropout(rows, 0.5),  # one device draws for rows as it sorts them
}


ROLES = [
    ("data",), ("zero",), ("sequence",), ("tensor",), ("data", "sequence"), ("expert",), ("expert", "data"),
    ("expert", "tensor"), ("sequence", "expert"), ("tensor_sequence", "expert"),
]  # fmt: skip
# What rows are computed from between products is the same for any role that splits tokens, or experts, alone.
PAIRS = [
    (body, roles)
    for body in BODIES
    for roles in (ROLES if body in ("elementwise", "norm") else ROLES[3:5] + ROLES[7:9])
]
EXCHANGING = ("exchanging_route", "exchanging_dispatch", "exchanging_combine")
# Several axes of experts, that other blocks tell apart: tests/models/test_experts.py trains with them.
AMONG_MORE = tuple(f"among_more_{what}" for what in ("places", "rounds", "orders", "packed", "unpacked"))


@pytest.mark.sampled(12)
@pytest.mark.parametrize("body, roles", PAIRS, ids=str)
def test_experts_are_exact_whatever_they_do(body: str, roles: tuple[str, ...]) -> None:
    x = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Mixture(BODIES[body])
    graph = captured(model, (x,))
    plain = simulate(graph, model, (x,), (1,), uniform(graph, "data"), {})
    if body != "random":
        assert_exact(plain, one_device(model, (x,)))
    assert_exact(simulate(graph, model, (x,), (2,) * len(roles), uniform(graph, *roles), {}), plain)


@pytest.mark.parametrize("crowded", [True, False])
def test_all_tokens_to_one_expert_and_ranks_without_order(crowded: bool) -> None:
    """Experts without tokens, all of the tokens at one expert, and equal weights of all."""
    x = torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Mixture(F.silu)
    with torch.no_grad():
        model.router.weight.zero_()
        model.router.bias.copy_(torch.tensor([0.0, 50.0, 40.0, 0.0]) if crowded else torch.zeros(EXPERTS))
    graph, expected = captured(model, (x,)), one_device(model, (x,))
    for roles in (("data", "zero"), ("sequence", "data"), ("expert", "data"), ("zero", "expert"), ("expert", "expert")):
        assert_exact(simulate(graph, model, (x,), (2, 2), uniform(graph, *roles), {}), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "experts, batch, degree, exchanged",
    [(4, 4, 2, True), (3, 4, 2, False), (6, 6, 3, True), (4, 3, 2, True), (6, 4, 3, False)],
)
def test_rows_are_exchanged_where_experts_and_tokens_are_split(
    experts: int, batch: int, degree: int, exchanged: bool
) -> None:
    """Else each rank has all of the experts, for its own tokens or for all of them."""
    x = torch.randn(batch, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Mixture(F.silu, experts)
    graph = captured(model, (x,))
    strategies = uniform(graph, "expert")
    local = Lower(strategies, cluster_for((degree,), strategies), {}).run(graph).joint
    assert (all_to_all in {node.target for node in local.graph.nodes}) == exchanged
    weights = [n for n in local.graph.nodes if n.op == "placeholder" and meta_of(n).spec.shape[1:] == (8, 8)]
    assert {meta_of(n).spec.shape[0] for n in weights} == {experts // degree if exchanged else experts}
    assert_exact(simulate(graph, model, (x,), (degree,), strategies, {}), one_device(model, (x,)))


def test_the_exchange_is_printed() -> None:
    """Counts first; then rows to their experts and back, and in backward the same way round."""
    model, x = Mixture(F.silu), torch.zeros(4, 4, 8, dtype=torch.float64)
    graph = captured(model, (x,))
    strategies = uniform(graph, "expert")
    local = Lower(strategies, cluster_for((2,), strategies), {}).run(graph).joint
    check = FileCheck().check("place_by_rank").check("all_gather").check("in_round").check("received_order")
    forward = ("pack", "all_to_all", "index_select", "grouped_mm_fallback", "unsort", "all_to_all", "unpack")
    backward = ("pack", "all_to_all", "index_select", "unsort", "all_to_all", "unpack", "grouped_mm_fallback_backward")
    for name in (*forward, "further_rounds", *backward, "further_rounds"):
        check = check.check(name)
    check.run(str(local.graph))


def test_operators_are_transposes_of_each_other() -> None:
    place, order, ends = route(torch.tensor([2, 0, 2, 1, 0, 2]), 4)
    assert order.tolist() == [1, 4, 3, 0, 2, 5] and ends.tolist() == [2, 3, 6, 6]
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: dispatch(value, place, order, 2), (x,))
    assert torch.autograd.gradcheck(lambda value: combine(value, place, order, 2), (rows,))
    torch.testing.assert_close((dispatch(x, place, order, 2) * rows).sum(), (x * combine(rows, place, order, 2)).sum())
    torch.testing.assert_close(combine(dispatch(x, place, order, 2), place, order, 2), 2 * x)


def test_routed_rows_cannot_be_moved() -> None:
    prices = Prices(DEVICE, axes((2,)))
    spec = TensorSpec((8, 4), torch.float64)
    for have, want in ((ROWS, REPLICATE), (REPLICATE, ROWS), (ROWS, Shard(0)), (Shard(0), ROWS), (ROWS, Shard(1))):
        assert prices.redistribute_s(spec, have, want) is None
    for have, want in ((ROUTED_ENDS, REPLICATE), (REPLICATE, ROUTED_ENDS), (ROUTED_ENDS, PARTIAL)):
        assert prices.redistribute_s(TensorSpec((4,), torch.int32), have, want) is None
    assert str(ROWS) == "S(0,routed)" and str(Shard(1, 2)) == "S(1,2)"
    assert through_view(ROWS, (8, 4), (8, 2, 2), 2) == ROWS
    with pytest.raises(AssertionError, match=r"S\(0,routed\) has no place in a DTensor"):
        to_dtensor(ROWS)


def test_lowering_refuses_to_move_them() -> None:
    build = Builder()
    x = build.input("x", (4, 8))
    place, order = (build.input(name, (8,), dtype=torch.int64) for name in ("place", "order"))
    node = build.call(dispatch, x, place, order, 2)
    graph = build.finish(("output", "0", node))
    rules = {node: next(rule for rule in op_rules(op_call(node), 2) if rule.routes and not rule.exchanges)}
    sharding = AxisSharding(0, 2, rules, {x: Shard(0), place: ROWS, order: ROWS}, (REPLICATE,))
    with pytest.raises(ShardingError, match=r"'dispatch' is placed S\(0,routed\) and cannot become R: rows as routed"):
        InsertCollectives(sharding).run(graph)
