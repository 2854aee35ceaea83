"""Rows that come from elsewhere for the places that a mask of inputs chooses, as images have tokens in a text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.helpers import assert_exact, one_device, simulate, uniform

pytestmark = pytest.mark.filterwarnings("ignore:rows that a mask chooses")
WIDTH, LENGTH = 4, 6
CHOSEN = (2, 3, 4, 3)  # places of each sample
PLANS = {
    "data": Plan.uniform((2,), ("data",)),
    "micro-batches": Plan.uniform((2,), ("data",), pipelining=Pipelining(1, 2)),
}


def added(h: Tensor, mask: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    """As Qwen3-VL adds what its tower saw in earlier layers."""
    h = h.clone()
    h[mask, :] = h[mask, :] + rows
    return h


def written(h: Tensor, mask: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    h = h.clone()
    h[mask] = rows
    return h.index_put((mask,), rows.detach().tanh()) + h


def places(h: Tensor, mask: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    h = h.clone()
    samples, columns = mask.nonzero(as_tuple=True)
    h[samples, columns] = torch.cat([h[samples, columns], rows], -1).chunk(2, -1)[1]
    return h


def losses(h: Tensor, mask: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
    return h * (F.mse_loss(h[mask], rows) + F.cross_entropy(h[mask], labels))


class Given(nn.Module):
    def __init__(self, use: Callable[..., Tensor], is_hidden: bool = False) -> None:
        super().__init__()
        self.use, self.is_hidden = use, is_hidden
        self.before, self.tower, self.after = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor, rows: Tensor, labels: Tensor) -> Tensor:
        h = self.before(x)
        mask = mask & (h[..., 0] < 100) if self.is_hidden else mask
        return self.after(self.use(h, mask, self.tower(rows), labels)).square().mean()


def given(use: Callable[..., Tensor], is_hidden: bool = False) -> Given:
    torch.manual_seed(0)
    return Given(use, is_hidden).double()


def batch(rows: int | None = None, chosen: tuple[int, ...] = CHOSEN) -> tuple[Tensor, ...]:
    rows = sum(chosen) if rows is None else rows
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(len(chosen), LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    order = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in chosen])
    others = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    return x, order < torch.tensor(chosen)[:, None], others, torch.randint(0, WIDTH, (rows,), generator=generator)


@pytest.mark.parametrize(
    "use, plan",
    [
        *((use, "data") for use in (added, written, places, losses)),
        *((use, "micro-batches") for use in (added, places)),
    ],
    ids=lambda part: part if isinstance(part, str) else part.__name__,
)
def test_each_place_looks_its_row_up(use: Callable[..., Tensor], plan: str) -> None:
    galvatron_fx.check(given(use), 2, batch(), PLANS[plan]).raise_if_different()


@pytest.mark.parametrize(
    ("chosen", "roles"),
    [((2, 0, 3, 1, LENGTH), ("zero",)), ((1, 2, 0, LENGTH, 3, 1, 2, 3), ("data", "sequence", "tensor"))],
    ids=["a batch of 5", "8 ranks"],
)
def test_odd_counts_and_frozen_weights_are_exact_on_many_ranks(chosen: tuple[int, ...], roles: tuple[str, ...]) -> None:
    """Samples with no place, and with all of theirs."""
    inputs = dict(zip(("x", "mask", "rows", "labels"), batch(chosen=chosen), strict=True))
    for use in (added, written, places, losses):
        model = given(use)
        model.before.weight.requires_grad_(False)
        graph = galvatron_fx.capture(model, inputs)
        got = simulate(graph, model, inputs, (2,) * len(roles), uniform(graph, *roles), {})
        assert_exact(got, one_device(model, inputs), use.__name__)


@pytest.mark.parametrize("use", [added, written], ids=lambda use: use.__name__)
def test_another_number_of_rows_is_refused(use: Callable[..., Tensor]) -> None:
    """As torch does, in the line that has them; later outputs are nan."""
    with pytest.raises(InputError, match=r"test_given_rows.py.*a mask chooses as many places as there are rows"):
        galvatron_fx.capture(given(use), batch(rows=11))
    model = given(use)
    graph = galvatron_fx.capture(model, batch())
    x, mask, rows, labels = batch()
    fewer = {"0": x, "1": mask & (torch.arange(LENGTH) > 0), "2": rows, "3": labels}
    assert simulate(graph, model, fewer, (2,), uniform(graph, "data"), {})["output 0"].isnan()


def test_masks_of_hidden_states_are_refused() -> None:
    """Whether they choose as many is known when it is too late for an error."""
    with pytest.raises(CaptureError, match="add with rows that a mask chose and others"):
        galvatron_fx.capture(given(added, is_hidden=True), batch())


class Checks(nn.Module):
    def __init__(self, is_right: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.is_right = nn.Linear(WIDTH, WIDTH), is_right

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        torch._assert(self.is_right(ids), "ids are below the vocabulary's size")
        return self.layer(x).square().mean()


def test_checks_that_example_inputs_fail_are_errors() -> None:
    x, ids = torch.rand(4, WIDTH), torch.arange(4)
    galvatron_fx.capture(Checks(lambda ids: ids.max() < 4), (x, ids))
    with pytest.raises(InputError, match=r"fails for the example inputs, at .*in forward.*: ids are below the voc"):
        galvatron_fx.capture(Checks(lambda ids: ids.max() < 3), (x, ids))
