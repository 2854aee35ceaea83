"""Caches that a first forward writes into a part of a buffer."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from galvatron_fx.errors import CaptureError
from passes.frontend.capture.capture import Capture
from tests.helpers import assert_exact
from tests.seams.test_module_state import BATCH, WIDTH, Trained, batches, compiled, eager, made


class CachedPart(Trained):
    """Angles that are made once, of weights that nobody trains, and kept in a part of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.register_buffer("angles", torch.zeros(2 * BATCH, WIDTH), persistent=False)
        self.num_angles = 0

    def middle(self, h: Tensor) -> Tensor:
        if h.shape[1] <= self.num_angles:
            return h * self.angles[: h.shape[1]].detach().sum(0)
        angles = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * self.rates
        self.angles[: h.shape[1]] = angles.detach()
        self.num_angles = h.shape[1]
        return h * angles.sum(0)


class OtherPart(CachedPart):
    """A cache that is read at another place than it was written."""

    def middle(self, h: Tensor) -> Tensor:
        if self.num_angles:
            return h * self.angles[1 : h.shape[1] + 1].detach().sum(0)
        return super().middle(h)


class WholeCache(CachedPart):
    """A cache that the first forward makes, and others take a slice of, which is all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", None, persistent=False)

    def middle(self, h: Tensor) -> Tensor:
        if self.angles is not None and len(self.angles) >= h.shape[1]:
            return h * self.angles[: h.shape[1]].sum(0)
        angles = torch.arange(h.shape[1], dtype=h.dtype)[:, None] * self.rates
        self.register_buffer("angles", angles.detach(), persistent=False)
        return h * angles.sum(0)


@pytest.mark.parametrize("kind", [CachedPart, WholeCache])
@pytest.mark.parametrize(("roles", "sizes"), [(("data",), (2,)), (("zero", "tensor"), (2, 2))])
def test_a_cache_of_what_is_fixed_is_as_good_as_that(
    roles: tuple[str, ...], sizes: tuple[int, ...], kind: type[CachedPart]
) -> None:
    model = made(kind)
    expected = eager(copy.deepcopy(model))
    expected.pop("angles")  # which is no state
    assert_exact(compiled(model, roles, sizes), expected, "cached part")


def test_a_cache_that_is_read_elsewhere_is_refused() -> None:
    with pytest.raises(
        CaptureError,
        match=r"depends on 'num_angles', which forward itself changes \(0 before the first.*run the model once before",
    ):
        Capture(symbolic=False).run(made(OtherPart), batches()[0])
