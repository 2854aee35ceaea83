"""Loops that ask whether an expert has tokens: answered where nothing else is done, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from galvatron_fx.errors import CaptureError
from galvatron_fx.ir.kernels.experts import route
from passes.frontend.pipeline import Frontend
from tests.helpers import assert_exact, captured, one_device, simulate, uniform
from tests.models.test_expert_loops import Modules
from tests.models.test_written_experts import EXPERTS, WIDTH, written

ASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda mask: mask.any(),
    "torch.any": torch.any,
    "sum": lambda mask: mask.sum() > 0,
    "sum of some": lambda mask: mask.sum() != 0,
    "not none": lambda mask: torch.logical_not(mask.sum() == 0),
    "count": lambda mask: torch.count_nonzero(mask) >= 1,
}


@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_loops_may_ask_whether_an_expert_has_tokens(asks: Callable[[Tensor], Tensor]) -> None:
    """By a mask of all dims of tokens, of which rows are put back; weights are picked by the mask and a column."""

    class Asking(Modules):
        def forward(self, h: Tensor) -> Tensor:
            weights, ids = self.choose(h)
            all_weights = torch.zeros(*h.shape[:-1], EXPERTS, dtype=h.dtype).scatter(-1, ids, weights)
            out, x = torch.zeros_like(h), h.view(-1, WIDTH)
            for expert, layer in enumerate(self.experts):
                mask = (ids == expert).any(dim=-1)
                flat = mask.view(-1)
                if asks(flat):
                    out[mask] += layer(x[flat]) * all_weights.view(-1, EXPERTS)[flat, expert].unsqueeze(1)
            return out

    model, inputs = written(Asking)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert any(node.target is route for node in graph.graph.nodes)
    for roles in (("data", "expert"), ("zero", "tensor")):
        assert_exact(simulate(graph, model, inputs, (2, 2), uniform(graph, *roles), {}), expected)


class PassingOn(Modules):
    """The last expert passes rows on as they are (LongCat's, which compute nothing)."""

    def forward(self, h: Tensor) -> Tensor:
        x = h.reshape(-1, WIDTH)
        weights, ids = self.choose(x)
        out, masks = torch.zeros_like(x), F.one_hot(ids, EXPERTS).permute(2, 1, 0)
        for hit in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
            expert = int(hit.item())
            copy, token = torch.where(masks[expert].squeeze(0))
            if token.numel() == 0:
                continue
            rows = x[token]
            if expert == EXPERTS - 1:
                rows = rows * 2
            else:
                gate, up = self.experts[expert][0](rows).chunk(2, dim=-1)
                rows = self.experts[expert][2](up * gate.sigmoid())
            out.index_add_(0, token, rows * weights[token, copy, None])
        return out.reshape(h.shape)


def test_passes_of_a_loop_may_go_two_ways_behind_the_question() -> None:
    model, inputs = written(PassingOn)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    for roles in (("data", "expert"), ("zero", "tensor")):
        assert_exact(simulate(graph, model, inputs, (2, 2), uniform(graph, *roles), {}), expected)


def passes_by_any(layer: nn.Module, x: Tensor, masks: Sequence[Tensor], out: Tensor) -> None:
    for mask in masks:
        if not mask.any():
            continue
        out[mask] += layer(x[mask])


def passes_by_number(layer: nn.Module, x: Tensor, masks: Sequence[Tensor], out: Tensor) -> None:
    for mask in masks:
        if mask.sum().item() == 0:
            continue
        out.index_add_(0, torch.where(mask)[0], layer(x[mask]))


def goes_by_item(layer: nn.Module, x: Tensor, masks: Sequence[Tensor], out: Tensor) -> None:
    for mask in masks:
        if mask.any().item():
            token = mask.nonzero(as_tuple=True)[0]
            out[token] += layer(x[token])


@pytest.mark.filterwarnings("ignore:rows that a mask chooses")
@pytest.mark.parametrize("body", [passes_by_any, passes_by_number, goes_by_item], ids=lambda body: body.__name__)
def test_loops_may_pass_over_experts_without_tokens(body: Callable[..., None]) -> None:
    class Passing(Modules):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            out, ids = torch.zeros_like(x), self.choose(x)[1]
            body(self.experts[0], x, [(ids == expert).any(-1) for expert in range(EXPERTS)], out)
            return out.reshape(h.shape)

    model, inputs = written(Passing)
    graph, expected = captured(model, inputs), one_device(model, inputs)
    assert_exact(simulate(graph, model, inputs, (2,), uniform(graph, "data"), {}), expected)


def an_else(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    if mask.any():
        out[mask] += layer(x[mask])
    else:
        out = out + 1.0
    return out


def a_return(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    if mask.any():
        return out.index_add(0, torch.where(mask)[0], layer(x[mask]))
    return out + 1.0


def one_or_the_other(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    return out + (layer(x[mask]).sum() if mask.sum() > 0 else 1.0)


def counts_those_with_tokens(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    used = 0
    for _ in range(2):
        if not mask.any():
            continue
        out[mask] += layer(x[mask])
        used += 1
    return out / used


def counts_in_a_tensor(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    used = x.new_zeros(())
    if mask.any():
        out[mask] += layer(x[mask])
        used = used + 1.0
    return out * used


def subtracts_a_mean(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    if mask.any():
        out = out + x[mask].mean() - x.mean()
    return out


def scales_all(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    if mask.any():
        out.mul_(0.5)
        out[mask] += layer(x[mask])
    return out


def notes_that_some_are(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    seen = x.new_zeros(2)
    for way in range(2):
        if mask.any():
            out[mask] += layer(x[mask])
            seen[way] += x.mean()
    return out * seen.sum()


def raises_an_error(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    if mask.any():
        raise ValueError("there are some")
    return layer(x[mask]).sum() + x


def ends_the_loop(layer: nn.Module, x: Tensor, mask: Tensor, out: Tensor) -> Tensor:
    for _ in range(2):
        if not mask.any():
            break
        out[mask] += layer(x[mask])
    return out


@pytest.mark.parametrize(
    "body",
    [
        *(an_else, a_return, one_or_the_other, counts_those_with_tokens, counts_in_a_tensor, subtracts_a_mean),
        *(scales_all, notes_that_some_are, raises_an_error, ends_the_loop),
    ],
    ids=lambda body: body.__name__,
)
def test_what_is_done_where_there_are_no_rows_is_refused(body: Callable[..., Tensor]) -> None:
    class Asking(Modules):
        def forward(self, h: Tensor) -> Tensor:
            x = h.reshape(-1, WIDTH)
            return body(self.experts[0], x, self.router(x)[:, 0] > 0, torch.zeros_like(x)).reshape(h.shape)

    with pytest.raises(CaptureError, match=rf"value of a tensor(?s:.*)in {body.__name__}(?s:.*)torch.where"):
        Frontend().run(*written(Asking))


def test_what_is_asked_of_masks_that_take_no_rows_is_refused() -> None:
    class Asking(Modules):
        def forward(self, h: Tensor) -> Tensor:
            out = self.experts[0](h)
            return out * 2 if (out > 0).any() else out

    with pytest.raises(CaptureError, match=r"value of a tensor(?s:.*)if \(out > 0\).any\(\)"):
        Frontend().run(*written(Asking))
