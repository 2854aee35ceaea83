"""Rows that a mask chooses: what a model does with them is exact with all rows kept, or refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:rows that a mask chooses")
WIDTH = 6
BATCH = 8


class Uses(nn.Module):
    """A loss that some code makes of y [batch, width], x [batch, width] and a mask [batch] of x, or of y."""

    def __init__(self, code: Callable[[Tensor, Tensor, Tensor], Any], is_hidden: bool = False) -> None:
        super().__init__()
        self.linear, self.code, self.is_hidden = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), code, is_hidden

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return self.code(y, x, (y if self.is_hidden else x)[:, 0] > 0)


def rows() -> Tensor:
    torch.manual_seed(0)
    x = torch.rand(BATCH, WIDTH, dtype=torch.float64) * 2
    x[::3, 0] *= -1
    return x


def reductions(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    z = y[mask]
    total = z.sum() * z.mean(dim=(0, 1)) + z.mean(0, keepdim=True).square().sum() + z.mean(-1).square().mean()
    total = total + z.T.sum(1).square().sum() + z.flatten().square().mean() + torch.sum(z, dim=0).sin().sum()
    total = total + (z * torch.zeros(z.shape[0], WIDTH).add(2)).sum() / len(z) + z.sum() * z.shape[0] / z.numel()
    return total + (z * len(z) / z.size(0)).sum().square()


def rows_by_themselves(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    z = y[mask]
    z *= 2
    z[:, :3].clamp_(min=-0.5)
    z = torch.cat([z, z.relu()], -1).chunk(2, -1)[0] + F.layer_norm(z, (WIDTH,)) + F.group_norm(z, 2)
    heads = z.view(-1, 2, WIDTH // 2).softmax(-1)
    ordered, _ = F.pad(z, (1, 0), value=0.5)[:, 1:].sort(-1)
    return heads.square().sum() + (ordered * torch.arange(WIDTH)).sum() + torch.einsum("nd,nd->n", z, z).sin().sum()


def writes(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    places = torch.where(mask)[0]
    out = torch.zeros_like(y)
    out.index_add_(0, places, y[places] * 2, alpha=3)
    out = out.index_copy(0, places, out[places] + 1)
    out.scatter_add_(0, places[:, None].expand(-1, WIDTH), y[places])
    out[mask] *= 2
    out[~mask] = y[~mask].cos()
    out[mask.nonzero().squeeze(-1)] += y[mask]
    return out.square().sum()


def losses(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    classes = (x[mask][:, 0] * 2).long().to(y.device)
    weight = torch.arange(1.0, WIDTH + 1, dtype=y.dtype)
    loss = F.cross_entropy(y[mask], classes, label_smoothing=0.1) + F.mse_loss(y[mask], x[mask])
    loss = loss + F.nll_loss(y[mask].log_softmax(-1), classes, weight=weight, reduction="sum")
    loss = loss + F.cross_entropy(y[mask], classes, reduction="none").square().sum()
    return loss + F.l1_loss(y[mask], x[mask], reduction="none").mean()


def places_of_elements(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = (x > 0.5).nonzero()
    one = (y[found[:, 0], found[:, 1]] * y[found[:, 0]].sum(-1)).sum()
    return one + y.masked_select(x > 0).square().sum() + y[:, x[0] > 0].square().sum()


def places_behind_other_indices(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    table, columns = y[:, None] * torch.arange(1.0, 4.0)[:, None], x[0] > 0
    one = table[..., columns].square().sum() + table[:, 1, columns].sin().sum() + table[0, 1:, columns].cos().sum()
    return one + (table[..., columns] * table[:, :, columns]).sum() + y[..., x > 0].square().sum()


def writes_at_pairs(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """As miners of pairs have it."""
    alike = torch.zeros_like(y)
    first, second = torch.where(x > 0.5)
    alike[first, second] = 1
    return (alike * y).sum()


def no_number(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Rows that are not chosen have logarithms that are no numbers, and gradients neither."""
    p = torch.relu(y)
    return torch.log(p[p > 0]).mean() + p[p > 0.1].sqrt().sum()


def changed_by_weights(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Rows that are not chosen have no gradients that are no numbers where rows are changed in place, too."""
    z = x[mask] + 0 * y[mask]
    z *= y.mean()
    return z.square().log().sum()


def none_chosen(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    total = y.sum()
    found = torch.where(x[:, 0] > 99)[0]
    if len(found) > 0 and found.numel():
        total = total + F.cross_entropy(y[found], x[found, 1].long()) + y[found].mean()
    return total + y[found].sum() / max(len(found), 1) + y.sum() * len(found) + len(found)


def masks_made_again(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """By the same code, of copies of what is computed."""
    found = (y * 3).long()
    one = y.reshape(-1)[(found > 0).reshape(-1)] * x.reshape(-1)[(found > 0).reshape(-1)]
    shifted = y[:, 1:].flatten()[found[:, 1:].flatten().ne(0)] * x[:, 1:].flatten()[found[:, 1:].flatten().ne(0)]
    both = y[(y > 0) & (x > 1)] * x[(y > 0) & (x > 1)]
    return one.mean() + shifted.sum() + both.sum() + (y[found.bool()] * x[found.bool()]).sum()


EXACT = [reductions, rows_by_themselves, writes, losses, places_of_elements, no_number, changed_by_weights, none_chosen]
EXACT += [masks_made_again, places_behind_other_indices, writes_at_pairs]


def rows_of_a_mask_that_changed(y: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    found = (y * 3).long()
    before = y[found.flatten(start_dim=1).bool()]
    found += 1
    return (before * x[found.flatten(start_dim=1).bool()]).sum()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("code", EXACT, ids=lambda code: code.__name__)
def test_what_is_done_with_chosen_rows_is_exact(code: Any) -> None:
    found = galvatron_fx.check(Uses(code), (2, 2), (rows(),), Plan.uniform((2, 2), ("data", "tensor")))
    assert found.ok and not found.notes, str(found)


REFUSED = {
    "max over rows": lambda y, x, mask: y[mask].max(),
    "mixes rows that a mask chose, by matmul": lambda y, x, mask: (y[mask] @ y[mask].T).sum(),
    "mixes rows that a mask chose, by sub": lambda y, x, mask: (y[mask][:, None] - y[mask][None]).abs().sum(),
    "cumsum over rows": lambda y, x, mask: y[mask].cumsum(0).sum(),
    "calls flip with rows": lambda y, x, mask: (y[mask].flip(0) * y[mask]).sum(),
    "calls batch_norm with rows": lambda y, x, mask: F.batch_norm(y[mask], None, None, training=True).sum(),
    "indexes by a mask and another tensor": lambda y, x, mask: y[torch.arange(BATCH), (x[0] > 0).flip(0)].sum(),
    "indexes rows that a mask chose": lambda y, x, mask: y[mask][0].sum(),
    "decides by, the number of rows": lambda y, x, mask: y[mask][: min(len(y[mask]), 2)].sum(),
    "takes the number of rows that a mask chooses for one that is known": lambda y, x, mask: y[: len(y[mask])].sum(),
    "calls tensor with the number of rows": lambda y, x, mask: y.sum() * torch.tensor(len(y[mask])),
    "puts elements of several rows that a mask chose into one, by view": lambda y, x, mask: (
        y[mask].view(WIDTH, -1)[0].square().sum()
    ),
    "gathers from other rows, by their order": lambda y, x, mask: (
        torch.cat([y, y]).gather(1, (x[mask] > 1).long()).square().sum()
    ),
    "adds rows that a mask chose to other rows, by their order": lambda y, x, mask: (
        torch.cat([y, y]).scatter_add(1, (x[mask] > 1).long(), y[mask]).square().sum()
    ),
    "changes the shape of rows that a mask chose, by t in place": lambda y, x, mask: y[mask].t_()[0].sum(),
    "mask chooses for one that is known": lambda y, x, mask: sum(y[at].sum() for at in range(len(y[mask]))),
    "computes with, or decides by, the number of": lambda y, x, mask: y[mask].sum() * math.log(len(y[mask])),
    "gives a number of rows to what takes none": lambda y, x, mask: y[mask].sum() * torch.arange(len(y[mask])).sum(),
    "unhashable type": lambda y, x, mask: y[mask].sum() * {4: 2}.get(len(y[mask]), 1),
    "for one that is known": lambda y, x, mask: y[mask].sum() * list(range(9))[len(y[mask])],
    "unbind over rows": lambda y, x, mask: sum(row.sum() for row in y[mask]),
    "returns rows that a mask chose": lambda y, x, mask: (y.sum(), y[mask]),
    "returns rows that a mask chose, or their number": lambda y, x, mask: (y.sum(), len(y[mask])),
    "with rows that several masks chose": rows_of_a_mask_that_changed,
    "rows that several masks chose": lambda y, x, mask: (y[mask] * y[~mask]).sum(),
    "mul with rows that a mask chose and others": lambda y, x, mask: (y[mask] * y).sum(),
    "writes rows that one mask chose to the places of another": lambda y, x, mask: y.clone().index_copy_(
        0, torch.where(mask)[0], y[~mask]
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_depends_on_other_rows_is_refused(words: str) -> None:
    with pytest.raises(CaptureError, match="with all rows kept, it .*" + re.escape(words)):
        galvatron_fx.capture(Uses(REFUSED[words], is_hidden=True), (rows(),))


def test_a_warning_says_where_masks_choose_rows() -> None:
    with pytest.warns(UserWarning, match=r"rows that a mask chooses at .*test_masked_rows.py:\d+ are computed for all"):
        galvatron_fx.capture(Uses(reductions), (rows(),))
