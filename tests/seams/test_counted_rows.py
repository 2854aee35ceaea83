"""Rows that masks of inputs choose, where code needs to know how many: as many as those of the example inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import FileCheck

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import CaptureError, InputError
from tests.ir.cluster.test_cluster import described

WIDTH, LENGTH = 4, 6
DATA = Plan.uniform((2,), ("data",))


def visible(h: Tensor, mask: Tensor) -> Tensor:
    """As masked autoencoders have it."""
    return h[mask].reshape(len(h), -1, WIDTH)


def filled(h: Tensor, mask: Tensor) -> Tensor:
    """What is computed of some rows goes back to their places."""
    whole = torch.zeros_like(h)
    whole[mask, :] = visible(h, mask).cumsum(1).flatten(0, 1)
    return whole


def put(h: Tensor, mask: Tensor) -> Tensor:
    whole = torch.ones_like(h).index_put((mask,), h[mask].flip(0))
    return whole.index_put_((mask,), h[mask].cumsum(0), accumulate=True)


def places(h: Tensor, mask: Tensor) -> Tensor:
    rows, columns = mask.nonzero(as_tuple=True)
    flat = torch.nonzero(mask.flatten()).squeeze(1)
    both = torch.argwhere(mask.long())
    return torch.stack([h[rows, columns], h.flatten(0, 1)[flat], h[both[:, 0], both[:, 1]]]).softmax(0)


def written_since(h: Tensor, mask: Tensor) -> Tensor:
    """What was chosen stays as it was, and so does what was written."""
    h = h.clone()
    chosen = h[mask]
    whole = torch.ones_like(h).index_put((mask,), chosen)
    h[mask, :] = chosen * 2
    h.mul_(3)
    kept = chosen.tanh().cumsum(0)
    chosen.mul_(5)
    return torch.cat([kept, h[mask], chosen, whole[mask]])


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "visible": visible,
    "filled": filled,
    "put": put,
    "places": places,
    "written since": written_since,
    "selected": lambda h, mask: h.masked_select(mask.unsqueeze(-1)).reshape(-1, WIDTH).cumsum(0),
    "of two columns": lambda h, mask: h[mask, :2].cumsum(0).repeat(1, 2),
    "behind": lambda h, mask: h[:, mask[0]].softmax(1),
    "sum of a float mask": lambda h, mask: h[(mask.double() * 2 > 1)].cumsum(0),
}


class Masked(nn.Module):
    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use, self.before, self.after = use, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.after(self.use(self.before(x), mask)).square().mean()


def masked(use: str) -> Masked:
    torch.manual_seed(0)
    return Masked(USES[use]).double()


def batch(kind: str, seed: int = 1, rows: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, LENGTH, WIDTH, generator=generator, dtype=torch.float64)
    order = torch.stack([torch.randperm(LENGTH, generator=generator) for _ in range(rows)])
    counts = {"each": [3] * rows, "all": [LENGTH] * rows, "some": [2, 3, 4, 3] * (rows // 4)}[kind]
    return x, order < torch.tensor(counts)[:, None]


WITH_OTHERS = ("put", "places", "written since")


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "use, kind",
    [
        *((use, "each") for use in USES),
        *((use, kind) for use in WITH_OTHERS for kind in ("all", "some")),
    ],
)
def test_rows_are_as_many_as_in_the_example(use: str, kind: str) -> None:
    with pytest.warns(UserWarning, match="takes as many rows as a mask of '1' chooses at .*test_counted_rows"):
        galvatron_fx.check(masked(use), 2, batch(kind), DATA).raise_if_different()


def test_rows_of_equal_counts_are_split() -> None:
    """Each rank looks up in its own samples, and gathers nothing but gradients; so do micro-batches."""
    session = galvatron_fx.check(masked("filled"), 2, batch("each"), DATA)
    session.raise_if_different()
    plan = galvatron_fx.plan(masked("filled"), described((2,)), batch("each"), roles=("data",), num_microbatches=2)
    galvatron_fx.check(masked("filled"), 2, batch("each"), plan).raise_if_different()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["each", "some"])
def test_each_call_is_compared(kind: str, mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(masked("put"), mesh, batch(kind), plan=Plan.uniform((1,), ("data",)))
    other = batch(kind, seed=2)  # as many rows, elsewhere
    torch.testing.assert_close(compiled.forward_backward(*other), masked("put")(*other), rtol=1e-10, atol=0)
    x, mask = batch("each")
    fewer = x, mask & (torch.arange(LENGTH) > 0)  # rows, of each sample another number: another program
    torch.testing.assert_close(compiled.forward_backward(*fewer), masked("put")(*fewer), rtol=1e-10, atol=0)


def test_masks_of_hidden_states_are_refused() -> None:
    def chosen(h: Tensor, mask: Tensor) -> Tensor:
        return h[(h[..., 0] > 0) & mask].cumsum(0)

    with pytest.raises(CaptureError, match="indexes by a mask"):
        galvatron_fx.capture(Masked(chosen), batch("each"))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("use", ["visible", "filled", "of two columns"])
def test_masks_of_another_shape_are_refused_as_torch_does(use: str, columns: int) -> None:
    x, mask = batch("each")
    with pytest.raises(IndexError, match="shape of the mask"):
        masked(use)(x, mask[:, :columns])
    with pytest.raises((InputError, CaptureError)):
        galvatron_fx.capture(masked(use), (x, mask[:, :columns]))


class Token(nn.Module):
    """A learned token at the places of a mask, as speech and image models train by."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.token = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(shape))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(x)
        h[mask, :] = self.token.to(h.dtype)
        return self.layer(h.index_put((mask[:, 1],), self.token.mean())).square().mean()


@pytest.mark.parametrize("shape", [(WIDTH,), (1, WIDTH), ()])
def test_learned_tokens_are_written_by_masks(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    galvatron_fx.check(Token(shape).double(), 2, batch("some"), DATA).raise_if_different()


def test_masks_of_numbers_are_checked_in_the_program() -> None:
    """Rounding on a device may choose other rows than on the host: then outputs are nan."""

    def padded(h: Tensor, mask: Tensor) -> Tensor:
        return h[mask.abs().sum(-1) > 0].cumsum(0)

    x = batch("each")[0]
    x[1, 2] = 0.0
    with pytest.warns(UserWarning, match="takes as many rows"):
        graph = galvatron_fx.capture(Masked(padded).double(), (batch("all")[0], x))
    FileCheck().check("sum").check("eq").check("where").run(graph.code)


@pytest.mark.parametrize("columns", [1, 2])
def test_tokens_for_masks_of_another_shape_are_refused_as_torch_does(columns: int) -> None:
    """A mask of size 1 is not broadcast."""
    x, mask = batch("some")
    with pytest.raises(InputError, match=r"shape of the mask \[4, .\] is not that of the tensor"):
        galvatron_fx.capture(Token((WIDTH,)).double(), (x, mask[:, :columns]))
