"""Loops over experts, each of which takes its own tokens: captured as products of groups of rows, exact, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.graph.metadata import ports
from galvatron_fx.ir.graph.placement import Shard
from galvatron_fx.ir.kernels.experts import group_of, route
from passes.frontend.pipeline import Frontend
from passes.lowering.lower_step import Lower
from tests.helpers import assert_exact, captured, cluster_for, one_device, simulate, uniform
from tests.models.test_written_experts import COPIES, EXPERTS, INNER, WIDTH, Experts, written

f64 = torch.float64


class Looped(Experts):
    """Weights of all experts in one tensor; tokens by ``torch.where``; their copies are added up."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, copy = torch.where(ids == expert)
            if token.numel() == 0:
                continue
            rows = torch.relu(x[token] @ self.up[expert] + self.bias[expert]) @ self.down[expert]
            out.index_add_(0, token, rows * weights[token, copy, None])
        return out.reshape(h.shape)


class Halves(Experts):
    """Gate and value in one tensor of all experts, and products that come out of a flat one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH, dtype=f64) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH, dtype=f64) / 4)

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, copy = torch.where(ids == expert)
            gate, value = self.up[expert].chunk(2)
            rows = F.silu(F.linear(x[token], gate)) * F.linear(x[token], value) + self.bias[expert]
            rows = rows @ self.down.view(EXPERTS, INNER, WIDTH)[expert]
            out.index_add_(0, token, rows * weights[token, copy, None])
        return out.reshape(h.shape)


class Modules(Experts):
    """Each expert a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * INNER, dtype=f64), nn.GLU(), nn.Linear(INNER, WIDTH, dtype=f64))
            for _ in range(EXPERTS)
        )
        del self.up, self.bias, self.down


class Hits(Modules):
    """Only experts that have tokens are looked at; one too many is counted; masks are [experts, copies, tokens]."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        masks = F.one_hot(ids, EXPERTS).permute(2, 1, 0)
        for expert in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
            copy, token = torch.where(masks[expert].squeeze(0))
            rows = self.experts[expert[0]](x[None, token].reshape(-1, WIDTH))
            rows *= weights[token, copy, None]
            out[token] += rows
        return out.reshape(h.shape)


class Masked(Modules):
    """Copies of tokens by masks, put back by masks."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        copies, chosen = x.repeat_interleave(COPIES, 0), ids.flatten()
        rows = torch.empty_like(copies)
        for expert, layer in enumerate(self.experts):
            rows[chosen == expert] = layer(copies[chosen == expert])
        return (rows.view(-1, COPIES, WIDTH) * weights[..., None]).sum(1).reshape(h.shape)


class Dropped(Experts):
    """The first tokens of each expert alone; others stay as they are, and the last expert passes them on."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weight, ids = torch.softmax(self.router(x), -1).max(-1)
        masks = F.one_hot(ids, EXPERTS)
        masks = (masks * (masks.cumsum(0) <= 5)).bool()
        out = x.clone()
        for expert in range(EXPERTS):
            token = masks[:, expert].nonzero().squeeze(-1)
            rows = F.layer_norm(x[token], (WIDTH,)) @ self.up[expert] @ self.down[expert]
            out.index_add_(0, token, weight[token].unsqueeze(-1) * (rows if expert else x[token]))
        return out.reshape(h.shape)


class Beyond(Experts):
    """Masks of one expert more than there are weights: no token ever has its id."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        out = torch.zeros_like(x)
        masks = F.one_hot(ids, EXPERTS + 1).permute(2, 1, 0)
        for expert in (masks.sum((1, 2)) > 0).nonzero():
            expert = expert[0]
            copy, token = torch.where(masks[expert])
            rows = torch.relu(x[token] @ self.up[expert]) @ self.down[expert]
            out.index_add_(0, token, rows * weights[token, copy, None])
        return out.reshape(h.shape)


class Lists(Modules):
    """Sorted rows, taken apart by a list of how many each expert has."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        order = ids.flatten().sort()[1]
        counts = F.one_hot(ids.flatten(), EXPERTS).sum(0).tolist()
        parts = [
            layer(rows) if count > 0 else rows
            for layer, rows, count in zip(self.experts, x[order // COPIES].split(counts), counts, strict=True)
        ]
        rows = torch.cat(parts) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // COPIES, rows).reshape(h.shape)


class Slices(Lists):
    """Likewise, by running sums of the numbers, and put back in the order of copies."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        counts = ids.new_zeros((len(x), EXPERTS)).scatter(1, ids, 1).sum(0)
        order = ids.view(-1).argsort()
        by_expert, parts, start = x[order // COPIES], [], 0
        for expert, count in enumerate(counts.tolist()):
            end = start + count
            if count == 0:
                continue
            parts.append(self.experts[expert](by_expert[start:end]))
            start = end
        rows = torch.cat(parts, dim=0)
        back = torch.empty_like(rows)
        back[order] = rows
        return (back.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1).reshape(h.shape)


LOOPS = (Looped, Halves, Lists, Slices, Hits, Masked, Dropped, Beyond)


@pytest.mark.sampled(9)
@pytest.mark.parametrize("experts", LOOPS)
def test_loops_are_exact(experts: Callable[[], nn.Module]) -> None:
    model, inputs = written(experts)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert any(node.target is route for node in graph.graph.nodes)
    assert not any(node.target is group_of for node in graph.graph.nodes)
    for roles in (("data", "expert"), ("zero", "tensor")):
        assert_exact(simulate(graph, model, inputs, (2, 2), uniform(graph, *roles), {}), expected)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("experts", [Looped, Halves, Hits])
def test_ranks_hold_parts_of_experts(experts: Callable[[], nn.Module]) -> None:
    """Some experts of one parameter, or a part of each that is a parameter of its own, be it a bias."""
    model, inputs = written(experts)
    graph = captured(model, inputs)
    strategies = uniform(graph, "expert")
    lowered = Lower(strategies, cluster_for((2,), strategies), {}).run(graph)
    inputs_placed = zip(ports(graph), lowered.layout.inputs, strict=True)
    placed = {port.name: placements for (port, _), placements in inputs_placed if port.kind == "param"}
    of_experts = {name: value for name, value in placed.items() if name.startswith("experts.") and "router" not in name}
    assert of_experts and set(of_experts.values()) == {(Shard(0),)}


def reads_before(seen: Tensor, out: Tensor, token: Tensor, rows: Tensor) -> None:
    seen.index_add_(0, token, out[token])
    out.index_add_(0, token, rows)


def reads_behind(seen: Tensor, out: Tensor, token: Tensor, rows: Tensor) -> None:
    out.index_add_(0, token, rows)
    seen.index_add_(0, token, out[token])


def adds_to_what_is_read(seen: Tensor, out: Tensor, token: Tensor, rows: Tensor) -> None:
    out.index_add_(0, token, rows + out[token].sin())


@pytest.mark.filterwarnings("ignore:rows that a mask chooses")
@pytest.mark.parametrize("body", [reads_before, reads_behind, adds_to_what_is_read], ids=lambda body: body.__name__)
def test_what_one_pass_writes_another_reads(body: Callable[[Tensor, Tensor, Tensor, Tensor], None]) -> None:
    """Each token has several experts, of which the later ones find what the earlier ones added."""

    class Reading(Modules):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            weights, ids = self.choose(x)
            out, seen = torch.zeros_like(x), torch.zeros_like(x)
            for expert in range(EXPERTS):
                token, copy = torch.where(ids == expert)
                body(seen, out, token, self.experts[expert](x[token]) * weights[token, copy, None])
            return (out + 2 * seen).reshape(h.shape)

    model, inputs = written(Reading)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), expected)


WAYS = {
    "item": lambda hits: (hit.item() for hit in hits),
    "int": lambda hits: (int(hit) for hit in hits),
    "tolist of each": lambda hits: (hit.tolist()[0] for hit in hits),
    "tolist of rows": lambda hits: (hit[0] for hit in hits.tolist()),
    "tolist": lambda hits: hits.squeeze(-1).cpu().tolist(),
    "flat": lambda hits: hits.flatten(),
    "items of a view": lambda hits: (hit.item() for hit in hits.view(-1)),
}


def over_hits(body: Callable[[nn.Module, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> type[Modules]:
    """``body(module, hits, masks, x, weights, out)`` does what a layer does; the last expert has no token."""

    class Over(Modules):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            weights, ids = self.choose(x)
            masks = F.one_hot(ids, EXPERTS + 1).permute(2, 1, 0)
            hits = torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero()
            return body(self, hits, masks, x, weights, torch.zeros_like(x)).reshape(h.shape)

    return Over


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_hits_may_be_numbers(way: Callable[[Tensor], Iterable[int]]) -> None:
    """However a loop over those experts that have tokens asks which they are; one expert passes its tokens on."""

    def body(module: nn.Module, hits: Tensor, masks: Tensor, x: Tensor, weights: Tensor, out: Tensor) -> Tensor:
        for expert in way(hits):
            copy, token = torch.where(masks[expert])
            rows = module.experts[expert](x[token]) if expert < EXPERTS - 1 else x[token]
            out.index_add_(0, token, rows * weights[token, copy, None])
        return out

    model, inputs = written(over_hits(body))
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert any(node.target is route for node in graph.graph.nodes)
    assert_exact(simulate(graph, model, inputs, (2, 2), uniform(graph, "data", "expert"), {}), expected)


def counts_kept_numbers(
    module: nn.Module, hits: Tensor, masks: Tensor, x: Tensor, weights: Tensor, out: Tensor
) -> Tensor:
    total = x.new_zeros(())
    for expert in [hit.item() for hit in hits]:
        copy, token = torch.where(masks[expert])
        out.index_add_(0, token, module.experts[expert](x[token]) * weights[token, copy, None])
        total = total + 1.0
    return out + total


def counts_kept_lists(
    module: nn.Module, hits: Tensor, masks: Tensor, x: Tensor, weights: Tensor, out: Tensor
) -> Tensor:
    return counts_kept_numbers(module, list(hits.flatten()), masks, x, weights, out)


def sums_weights_of_hits(
    module: nn.Module, hits: Tensor, masks: Tensor, x: Tensor, weights: Tensor, out: Tensor
) -> Tensor:
    total = 0
    for hit in hits.flatten():
        copy, token = torch.where(masks[hit])
        out.index_add_(0, token, module.experts[hit](x[token]) * weights[token, copy, None])
        total = total + module.experts[hit][0].weight.square().sum()
    return out + total


@pytest.mark.parametrize(
    "body", [counts_kept_numbers, counts_kept_lists, sums_weights_of_hits], ids=lambda body: body.__name__
)
def test_what_only_hits_do_is_refused(body: Callable[..., Tensor]) -> None:
    """Each expert is looked at, and one without tokens would not have done this."""
    with pytest.raises(CaptureError, match=r"(?s)no one graph of it.*multiply them in groups"):
        Frontend().run(*written(over_hits(body)))


HASHES = {
    "inputs, some of no expert": lambda ids: ids,
    "remainders, some of no expert": lambda ids: ids % (EXPERTS + 2),
    "places": lambda ids: torch.arange(ids.numel()).view_as(ids) * 7 % EXPERTS,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("of", HASHES)
def test_tokens_that_are_hashed_to_experts_are_exact(of: str) -> None:
    class Hashed(Experts):
        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            out = torch.zeros_like(x)
            for expert in range(EXPERTS):
                (token,) = torch.where(HASHES[of](ids) == expert)
                out.index_add_(0, token, torch.relu(x[token] @ self.up[expert]) @ self.down[expert])
            return out.square().mean()

    torch.manual_seed(0)
    model, inputs = Hashed(), {"x": torch.randn(16, WIDTH, dtype=f64), "ids": torch.arange(16)}
    del model.router, model.bias
    graph = captured(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), one_device(model, inputs))


def test_ids_that_follow_from_several_values_are_exact() -> None:
    class Flags(Modules):
        """Whether a token is among the first of its expert chooses between two experts (NLLB-MoE)."""

        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            weights = torch.softmax(self.router(x), -1)
            chosen = F.one_hot(weights.argmax(-1), EXPERTS)
            flags = chosen * (chosen.cumsum(0) <= 3)
            out = torch.zeros_like(x)
            masks = F.one_hot(flags, EXPERTS).permute(2, 1, 0)
            for expert in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
                column, token = torch.where(masks[expert].squeeze(0))
                rows = self.experts[expert[0]](x[token]) * weights[token, column, None]
                out.index_add_(0, token, rows)
            return out.reshape(h.shape)

    model, inputs = written(Flags)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "expert"), {}), expected)


def looping(body: Callable[[nn.Module, Tensor, Tensor, Tensor, int, Tensor], None]) -> type[Experts]:
    """Experts whose loop does ``body`` of (module, tokens, ids, weights, expert, sum)."""

    class Loop(Experts):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH) * 1.0
            weights, ids = self.choose(x)
            out = torch.zeros_like(x)
            for expert in range(EXPERTS):
                body(self, x, ids, weights, expert, out)
            return out.reshape(h.shape)

    return Loop


def picks_twice(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    (token,) = torch.where((ids == expert).any(-1))
    out.index_add_(0, token, x[token] @ self.up[expert] @ self.down[expert])


def picks_by_weights(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    (token,) = torch.where(weights[:, 0] > expert)
    out.index_add_(0, token, x[token])


def takes_a_mean(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    token, _ = torch.where(ids == expert)
    out.index_add_(0, token, x[token] - x[token].mean(0))


def counts_rows(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    token, _ = torch.where(ids == expert)
    out.index_add_(0, token, x[token] * (1 / token.numel()))


def changes_tokens(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    token, _ = torch.where(ids == expert)
    rows = x[token]
    x.mul_(1.01)
    out.index_add_(0, token, rows)


def does_more_where_hit(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    for hit in (F.one_hot(ids, EXPERTS).sum((0, 1)) > expert).nonzero():
        out += weights.mean() * self.bias[hit].mean()


def passes_over(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    if expert == 0:
        for hit in (F.one_hot(ids[:1], EXPERTS).sum((0, 1)) > 0).nonzero():
            token, _ = torch.where(ids == hit)
            out.index_add_(0, token, x[token])


def puts_copies_into_one_place(
    self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor
) -> None:
    token, _ = torch.where(ids == expert)
    out[token] = x[token]


def puts_by_weights(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    mask = self.router(x)[:, expert] > 0
    if mask.any():
        out[mask] += x[mask] @ self.up[expert] @ self.down[expert]


REFUSED = (counts_rows, does_more_where_hit, passes_over)


def raises_to_their_number(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor, expert: int, out: Tensor) -> None:
    token, _ = torch.where(ids == expert)
    out.index_add_(0, token, x[token].abs() ** token.numel())


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore:rows that a mask chooses")
@pytest.mark.parametrize(
    "body",
    [
        *(raises_to_their_number, takes_a_mean, changes_tokens, puts_copies_into_one_place),
        *(picks_twice, picks_by_weights, puts_by_weights),
    ],
    ids=lambda body: body.__name__,
)
def test_other_loops_compute_all_rows(body: Callable[..., None]) -> None:
    model, inputs = written(looping(body))
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert not any(node.target is route for node in graph.graph.nodes)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), expected)


def test_lists_that_leave_rows_out_are_an_error_of_the_step() -> None:
    class Fewer(Experts):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            counts = (self.choose(x)[1] == 0).sum(0).tolist()
            return torch.cat([rows @ self.up[0] @ self.down[0] for rows in x.split(counts)]).reshape(h.shape)

    model, inputs = written(Fewer)
    graph = captured(model, inputs)
    with pytest.raises(IndexError, match="out of bounds"):
        simulate(graph, model, inputs, (2,), uniform(graph, "data"), {})


def test_numbers_of_rows_in_lists_are_refused_elsewhere() -> None:
    class Summed(Experts):
        def forward(self, h: Tensor) -> Tensor:
            counts = (self.choose(h)[1] == 0).flatten(0, 1).sum(0).tolist()
            return h * sum(counts)

    class Skipped(Experts):
        def forward(self, h: Tensor) -> Tensor:
            first, second, *_ = (self.choose(h)[1] == 0).flatten(0, 1).sum(0).tolist()
            return torch.cat([h[0][first : first + second], h[0][:first]])

    for experts in (Summed, Skipped):
        with pytest.raises(CaptureError, match="turns the values of a tensor into Python numbers"):
            Frontend().run(*written(experts))


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: body.__name__)
def test_loops_that_are_not_of_one_expert_a_row_are_refused(body: Callable[..., None]) -> None:
    model, inputs = written(looping(body))
    with pytest.raises(CaptureError, match=rf"(?s)no one graph of it.*in {body.__name__}.*multiply them in groups"):
        Frontend().run(model, inputs)
