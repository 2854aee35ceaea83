"""Experts written by hand, in ways that people write them: found by structure where they are sorted, else computed as
they stand; right under every role.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (registers products of groups that take float64)
from torch import Tensor, fx, nn

from galvatron_fx.errors import InputError
from galvatron_fx.ir.kernels.experts import collect, combine, dispatch, route, spread
from tests.helpers import assert_exact, captured, one_device, simulate, uniform

WIDTH, INNER, EXPERTS, COPIES, VOCABULARY = 16, 24, 4, 2, 32
grouped_mm = torch.ops.transformers.grouped_mm_fallback


class Experts(nn.Module):
    """Weights of experts and of a router, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, dtype=torch.float64)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER, dtype=torch.float64) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, INNER, dtype=torch.float64) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH, dtype=torch.float64) / 4)

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = torch.softmax(self.router(x), -1).topk(COPIES, -1)
        return weights / weights.sum(-1, keepdim=True), ids


class Sorted(Experts):
    """Rows of tokens in the order of their experts, added up where they came from (as Megablocks does)."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        order = ids.flatten().argsort()
        ends = torch.histc(ids.flatten().double(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        rows = torch.relu(grouped_mm(x[order // COPIES], self.up, ends))
        rows = grouped_mm(rows, self.down, ends) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // COPIES, rows).reshape(h.shape)


class Gathered(Experts):
    """Copies of tokens that are sorted, with biases of experts, and put back by the inverse order."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        expert, order = ids.view(-1).sort()
        inverse = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
        ends = torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
        rows = torch.relu(grouped_mm(x.repeat_interleave(COPIES, 0)[order], self.up, ends) + self.bias[expert])
        back = grouped_mm(rows, self.down, ends).gather(0, inverse[:, None].expand(-1, WIDTH))
        return (back.view(-1, COPIES, WIDTH) * weights[..., None]).sum(1).reshape(h.shape)


class Masked(Experts):
    """A loop over experts, each of which computes all tokens."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            share = (weights * (ids == expert)).sum(-1, keepdim=True)
            out = out + torch.relu(x @ self.up[expert]) @ self.down[expert] * share
        return out.reshape(h.shape)


class Capacity(Experts):
    """Products with masks, each expert taking so many tokens of a sequence (GShard, Lepikhin et al. 2020)."""

    def forward(self, h: Tensor) -> Tensor:
        batch, length, _ = h.shape
        weights, ids = self.choose(h)
        chosen = F.one_hot(ids, EXPERTS)
        in_turn = chosen.transpose(1, 2).reshape(batch, COPIES * length, EXPERTS).cumsum(1) - 1
        place = in_turn.reshape(batch, COPIES, length, EXPERTS).transpose(1, 2)
        kept = chosen * (place < length // 2)
        slot = F.one_hot((place * kept).sum(-1), length // 2).to(h.dtype)
        back = torch.einsum("btk,btke,btkc->btec", weights, kept.to(h.dtype), slot)
        rows = torch.einsum("btec,bth->ebch", (back > 0).to(h.dtype), h)
        rows = torch.einsum("ebci,eih->ebch", torch.relu(torch.einsum("ebch,ehi->ebci", rows, self.up)), self.down)
        return torch.einsum("btec,ebch->bth", back, rows)


class Model(nn.Module):
    """A layer of experts between an embedding and a loss."""

    def __init__(self, experts: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.experts = experts()
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        return F.cross_entropy(self.head(x + self.experts(x)).flatten(0, 1), labels.flatten())


def written(experts: Callable[[], nn.Module]) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(VOCABULARY, (4, 8))
    return Model(experts), {"ids": ids, "labels": ids}


def targets(graph: fx.GraphModule, phase: str) -> list[object]:
    known = (route, dispatch, combine, spread, collect)
    forward = [node.target for node in graph.graph.nodes if node.target in known]
    return forward[: forward.index(route) + 4] if phase == "forward" else forward[forward.index(route) + 4 :]


SPLIT = [("data", "expert"), ("expert", "tensor"), ("zero", "sequence")]
WHOLE = [("data", "tensor"), ("zero", "sequence")]
CASES = [(Sorted, SPLIT), (Gathered, SPLIT), (Masked, WHOLE), (Capacity, WHOLE)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("experts", "plans"), CASES, ids=[experts.__name__ for experts, _ in CASES])
def test_written_experts_are_exact(experts: Callable[[], nn.Module], plans: list[tuple[str, ...]]) -> None:
    model, inputs = written(experts)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert any(node.target is route for node in graph.graph.nodes) == (plans is SPLIT)
    for roles in plans:
        assert_exact(simulate(graph, model, inputs, (2, 2), uniform(graph, *roles), {}), expected)


def test_sorted_experts_become_operators_of_experts() -> None:
    """Lookups and writes, forward and backward; of the sort and what came of it nothing is left."""
    graph = captured(*written(Gathered))
    assert targets(graph, "forward") == [route, dispatch, spread, combine]
    assert targets(graph, "backward") == [dispatch, collect, combine]
    assert not [node for node in graph.graph.nodes if "sort" in str(node.target) or "index" in str(node.target)]


def test_other_uses_of_the_order_leave_all_as_it_is() -> None:
    class Counted(Experts):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            ids = self.choose(x)[1].flatten()
            order = ids.argsort()
            ends = torch.histc(ids.double(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
            rows = grouped_mm(x[order // COPIES], self.up, ends) @ self.bias.t() * order[0]
            return h + rows.mean()

    model, inputs = written(Counted)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert not any(node.target is route for node in graph.graph.nodes)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), expected)


class Dropped(Experts):
    """Copies of little weight have the id of no expert; experts' rows are counted by ``searchsorted`` or ``histc``."""

    def __init__(self, searched: bool) -> None:
        super().__init__()
        self.searched = searched

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        dropped = weights < 0.45
        expert, order = ids.masked_fill(dropped, -1).flatten().sort()
        bounds = torch.arange(EXPERTS)
        counts = torch.histc(expert.double(), EXPERTS, 0, EXPERTS - 1).cumsum(0)
        ends = torch.searchsorted(expert, bounds, right=True) if self.searched else counts
        rows = torch.relu(grouped_mm(x[order // COPIES], self.up, ends.to(torch.int32)))
        rows = grouped_mm(rows, self.down, ends.to(torch.int32)) * (weights * ~dropped).flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // COPIES, rows).reshape(h.shape)


@pytest.mark.parametrize("searched", [True, False])
def test_ids_of_no_expert(searched: bool) -> None:
    """They stand where the operators of experts have them, or all stays as it is; ranks exchange no such rows."""
    model, inputs = written(lambda: Dropped(searched))
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert any(node.target is route for node in graph.graph.nodes) == searched
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), expected)
    if searched:
        with pytest.raises(InputError, match=r"ids from -1 to 3.*weight of 0.*without the role 'expert'"):
            simulate(graph, model, inputs, (2,), uniform(graph, "expert"), {})
