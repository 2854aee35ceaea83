"""Pinned memory has the bytes that were asked for, and is given back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from galvatron_fx.runtime import pinned

LARGE, SMALL = 3 * 2**18 + 1, 5  # elements, of float32


class Cuda:
    """Registers memory, or does not."""

    def __init__(self, refuses: bool = False) -> None:
        self.refuses = refuses
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.refuses:
            self.pinned[address] = size
        return int(self.refuses)

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


@pytest.fixture
def by_torch(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of what torch's own allocator is asked for."""
    asked: list[torch.Size] = []

    def empty_like(like: Tensor, **options: object) -> Tensor:
        assert options == {"device": "cpu", "pin_memory": True}
        asked.append(like.shape)
        return torch.zeros(like.shape, dtype=like.dtype)

    monkeypatch.setattr(pinned, "torch", SimpleNamespace(frombuffer=torch.frombuffer, empty_like=empty_like))
    return asked


def test_large_tensors_have_pages_of_their_own(by_torch: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setattr(pinned, "_cuda", lambda: cuda)
    there = pinned.empty_pinned(torch.ones(LARGE))
    assert (there.shape, there.dtype) == ((LARGE,), torch.float32)
    there.copy_(torch.arange(LARGE))
    view = there[LARGE - 2 :]
    assert cuda.pinned == {there.data_ptr(): 4 * LARGE}
    del there
    assert cuda.pinned and view.tolist() == [LARGE - 2, LARGE - 1]  # a view holds them
    del view
    assert not cuda.pinned and not by_torch


def test_what_is_small_or_refused_or_strided_is_torchs(
    by_torch: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_cuda", Cuda)
    pinned.empty_pinned(torch.ones(SMALL))
    pinned.empty_pinned(torch.ones(LARGE, 2).t())
    monkeypatch.setattr(pinned, "_cuda", lambda: Cuda(refuses=True))
    pinned.empty_pinned(torch.ones(LARGE))
    assert by_torch == [(SMALL,), (2, LARGE), (LARGE,)]
