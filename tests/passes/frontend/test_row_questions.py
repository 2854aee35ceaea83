"""Code that asks whether a mask chooses rows: right where it chooses none, or nan with a warning, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from galvatron_fx.errors import CaptureError
from tests.helpers import assert_exact, captured, one_device, simulate, uniform
from tests.passes.frontend.test_masked_rows import Uses, rows

WARNS = pytest.mark.filterwarnings("ignore:rows that a mask chooses")
pytestmark = WARNS
Code = Callable[[Tensor, Tensor, Tensor], Tensor]


def adds_losses(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    loss = y.square().mean()
    found = torch.where(mask)[0]
    if len(found) > 0 and found.numel():
        loss = loss + 0.5 * F.cross_entropy(y[found], x[found, 1].long()) - y[found].flatten().mean()
        loss += torch.stack([y[found].mean() * 2, y[found].sum() / len(found)]).mean()
        loss -= sum([y[found].mean(), y[found].square().mean()])
    return loss


def adds_to_none(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    loss: Any = 0
    picked = y[mask]
    if picked.shape[0]:
        loss = F.mse_loss(picked, x[mask]) + loss
    return loss + y.sum() * loss + y.mean()


def returns_zero(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    def loss_of(found: Tensor) -> Tensor:
        if found.numel() == 0:
            return y.sum() * 0.0
        targets = x[found, 1].long()
        loss = F.cross_entropy(y[found], targets)
        return loss

    return y.mean() + loss_of(torch.where(mask)[0])


def either(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask)[0]
    if len(found) > 0:
        picked = y[found]
        loss = F.l1_loss(picked, x[found])
    else:
        loss = torch.tensor(0.0, dtype=y.dtype)
    return y.mean() + loss + (y[found].mean() if len(found) else 0.0)


def asks_before(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    loss = y.mean()
    if mask.any():
        loss = loss + F.cross_entropy(y[mask], x[mask][:, 1].long())
    return loss


def at_least_one(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask)[0]
    return y[found].sum() / max(len(found), 1) + y.sum() * max(1, len(found)) + y.mean() * max(found.numel(), 3)


def test_masks_of_floating_point_inputs_may_be_asked_for() -> None:
    """By whose values nothing is decided, other than by those of whole numbers."""
    model, some = Uses(asks_before), rows()
    graph = captured(model, (some,))
    assert_exact(simulate(graph, model, (some,), (2,), uniform(graph, "data"), {}), one_device(model, (some,)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "code",
    [adds_losses, adds_to_none, returns_zero, either, asks_before, at_least_one],
    ids=lambda code: code.__name__,
)
@pytest.mark.filterwarnings("error:code asks")
def test_what_vanishes_without_rows_is_exact(code: Code) -> None:
    model, some = Uses(code, is_hidden=code is asks_before), rows()
    graph = captured(model, (some,))
    with torch.no_grad():
        none = some.clone()
        none[:, 0] = -none[:, 0].abs()
        if model.is_hidden:
            none[:] = torch.linalg.solve(model.linear.weight, -1 - model.linear.bias)
    for batch in (some, none):
        expected = one_device(model, (batch,))
        assert_exact(simulate(graph, model, (batch,), (2, 2), uniform(graph, "data", "tensor"), {}), expected)


def subtracts_a_mean(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    loss, found = y.sum(), torch.where(mask)[0]
    if len(found):
        loss = loss + y[found].mean() - y.mean()
    return loss


def counts_in_one_of_two(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    terms, found = 1, torch.where(mask)[0]
    if len(found) > 0:
        loss = y[found].sum()
        if x.shape[1] > 1:
            terms = terms + 1
            loss = loss * 2
        y = y + loss
    return y.sum() / terms


def counts(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    terms, found = 1, torch.where(mask)[0]
    if len(found) > 0:
        terms += 1
    return y.sum() / terms


def adds_one(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask)[0]
    return y.sum() + (y[found].mean() + 1 if found.numel() > 0 else 0)


def changes_what_vanished(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    loss, found = y.sum(), torch.where(mask)[0]
    if found.numel() > 0:
        loss = loss + y[found].mean().add_(y.mean())
    return loss


def subtracts_from_one(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask)[0]
    return y.mean() + (1 - y[found].mean() if found.numel() > 0 else 0)


def divides_by_its_own_count(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    loss = y.mean()
    if len(y[mask]) > 0:
        loss = loss + y[mask].sum() / mask.sum()
    return loss


def another_value(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask)[0]
    return y[found].sum() if found.numel() > 0 else y.sum()


def asserts(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = torch.where(mask)[0]
    assert len(found) > 0
    return y[found].sum()


def remembers(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    is_some = len(torch.where(mask)[0]) > 0
    return y[mask].sum() + is_some


def scales_in_place(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    y = y * 1
    if len(y[mask]) > 0:
        y.mul_(2)
    return y.sum()


def means_of_several(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    losses = [y.mean()]
    for column in range(2):
        found = torch.where(mask)[column - column]
        if len(found) == 0:
            continue
        losses.append(y[found, column].mean())
    return torch.stack(losses).mean()


def joins_means(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    means = [y.mean(0, keepdim=True)]
    for _ in range(2):
        found = torch.where(mask)[0]
        if len(found) == 0:
            continue
        means.append(y[found].mean(0, keepdim=True))
    return torch.cat(means).mean()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "code",
    [
        *(subtracts_a_mean, counts, counts_in_one_of_two, adds_one, another_value, asserts, remembers, scales_in_place),
        *(means_of_several, changes_what_vanished, subtracts_from_one, divides_by_its_own_count, joins_means),
    ],
    ids=lambda code: code.__name__,
)
def test_what_does_more_is_nan_without_rows(code: Code) -> None:
    model, some = Uses(code), rows()
    with pytest.warns(UserWarning, match=r"code asks at .*test_row_questions.py:\d+ whether a mask chooses rows"):
        graph = captured(model, (some,))
    strategies = uniform(graph, "data", "tensor")
    assert_exact(simulate(graph, model, (some,), (2, 2), strategies, {}), one_device(model, (some,)))
    none = torch.cat([-some[:, :1].abs(), some[:, 1:]], 1)
    assert simulate(graph, model, (none,), (2, 2), strategies, {})["output 0"].isnan()


def test_loops_while_there_are_rows_are_refused() -> None:
    def loops(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        found = torch.where(mask)[0]
        while len(found) > 0:
            found = found[:-1]
        return y.sum()

    with pytest.raises(CaptureError, match="loops for as long as a mask chooses rows"):
        captured(Uses(loops, is_hidden=True), (rows(),))


def test_loops_over_experts_that_do_more_without_tokens_are_nan_there() -> None:
    """As all rows are computed then, and no loop is left out."""

    def counts_used(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
        out, used = torch.zeros_like(y), 0
        for expert in range(2):
            token = torch.where(y.argmax(-1) % 2 == expert)[0]
            if token.numel() == 0:
                continue
            used += 1
            out.index_add_(0, token, y[token] * (expert + 1))
        return out.sum() / used

    model, some = Uses(counts_used), rows()
    with pytest.warns(UserWarning, match="code asks at"):
        graph = captured(model, (some,))
    strategies = uniform(graph, "data")
    assert_exact(simulate(graph, model, (some,), (2,), strategies, {}), one_device(model, (some,)))
