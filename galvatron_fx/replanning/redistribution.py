"""Tensors from the ranks that hold parts of them to those that are to hold others: each part goes there at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.runtime.checksums import as_bytes
from galvatron_fx.runtime.dtensor_views import local_part

__all__ = ["Chunk", "Held", "Redistribution", "Target", "pieces"]

Target = Tensor | Callable[[], Tensor]
"""A tensor to be filled, or what makes it."""

_BATCH_BYTES = 2**26
"""About what is on its way at once, beside a tensor that is larger: starting to send takes as long as 1 MB."""


@dataclass(frozen=True)
class Chunk:
    """A block of a whole tensor: ``offsets`` and ``sizes`` along its dims."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Chunk:
        """What this rank holds of a tensor."""
        if not isinstance(tensor, DTensor):
            return cls.whole(tensor.shape)
        (chunk,) = tensor.__create_chunk_list__()
        return cls(tuple(chunk.offsets), tuple(chunk.sizes))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Chunk:
        """All of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in it."""
        return prod(self.sizes)

    def common(self, other: Chunk) -> Chunk | None:
        """What lies in both, None where nothing does."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = tuple(min(a + n, b + m) for a, n, b, m in zip(*self._both(other), strict=True))
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Chunk(starts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, other: Chunk) -> tuple[slice, ...]:
        """Where it lies in a tensor that holds the chunk ``other``."""
        starts = (mine - others for mine, others in zip(self.offsets, other.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def _both(self, other: Chunk) -> tuple[tuple[int, ...], ...]:
        return self.offsets, self.sizes, other.offsets, other.sizes


@dataclass(frozen=True)
class Held:
    """What a rank holds of a tensor: its part, and the dtype and size in bytes of an element."""

    chunk: Chunk
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of the part."""
        return self.chunk.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Piece:
    """A block that one rank gives to another, or keeps."""

    sender: int
    receiver: int
    chunk: Chunk


def pieces(held: Sequence[Chunk | None], wanted: Sequence[Chunk | None]) -> list[Piece]:
    """Who gives what to whom, by the parts of one tensor that every rank holds and wants; None: it has no part in it.

    Equal parts are copies, of which a rank takes its own, or those of the ranks that hold them in turn.
    """
    holders: dict[Chunk, list[int]] = {}
    for rank, chunk in enumerate(held):
        if chunk is not None:
            holders.setdefault(chunk, []).append(rank)
    found = []
    for receiver, want in enumerate(wanted):
        if want is None:
            continue
        commons = [(ranks, common) for chunk, ranks in holders.items() if (common := want.common(chunk)) is not None]
        assert sum(common.numel for _, common in commons) == want.numel, "what was held makes up the whole tensor"
        for ranks, common in commons:
            sender = receiver if receiver in ranks else ranks[receiver % len(ranks)]
            found.append(Piece(sender, receiver, common))
    return found


@dataclass(frozen=True)
class Redistribution:
    """``held``, ``wanted``: of every rank of the job, its parts by name; ``rank``: this one; ``device_type``: on which
    tensors travel.
    """

    held: Sequence[Mapping[str, Held]]
    wanted: Sequence[Mapping[str, Chunk]]
    rank: int
    device_type: str

    def run(self, sources: dict[str, Tensor], targets: Mapping[str, Target]) -> tuple[dict[str, Tensor], int]:
        """Return what this rank wants, by name, and the bytes it has received. All ranks of the job call it.

        ``sources``: what it holds, taken out once it was given; ``targets``: tensors for what it wants, or what makes
        one when its turn has come. So hardly more than one layout is in memory.
        """
        taken: dict[str, Tensor] = {}
        received_bytes = 0
        for names in self._batches():
            operations, arrivals = [], []
            for name in names:
                if name in targets:
                    target = targets[name]
                    taken[name] = target if isinstance(target, Tensor) else target()
                for piece in self._pieces(name):
                    if piece.sender == self.rank:
                        given = self._given(sources[name], name, piece)
                        if piece.receiver == self.rank:
                            self._place(taken[name], name, piece).copy_(given)
                        else:
                            given = given.to(self.device_type).contiguous()
                            operations.append(dist.P2POp(dist.isend, as_bytes(given), piece.receiver))
                    elif piece.receiver == self.rank:
                        place = self._place(taken[name], name, piece)
                        arriving = torch.empty(piece.chunk.sizes, dtype=place.dtype, device=self.device_type)
                        operations.append(dist.P2POp(dist.irecv, as_bytes(arriving), piece.sender))
                        arrivals.append((place, arriving))
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()
            for place, arriving in arrivals:
                place.copy_(arriving)
                received_bytes += arriving.numel() * arriving.element_size()
            for name in names:
                sources.pop(name, None)
        return taken, received_bytes

    def _batches(self) -> Iterator[list[str]]:
        """The names of all tensors, on every rank in the same order and the same parts."""
        most_bytes: dict[str, int] = {}
        for of_rank in self.held:
            for name, held in of_rank.items():
                most_bytes[name] = max(most_bytes.get(name, 0), held.size_bytes)
        batch: list[str] = []
        batch_bytes = 0
        for name, size_bytes in most_bytes.items():
            if batch and batch_bytes + size_bytes > _BATCH_BYTES:
                yield batch
                batch, batch_bytes = [], 0
            batch.append(name)
            batch_bytes += size_bytes
        if batch:
            yield batch

    def _pieces(self, name: str) -> list[Piece]:
        held = [of_rank[name].chunk if name in of_rank else None for of_rank in self.held]
        return pieces(held, [of_rank.get(name) for of_rank in self.wanted])

    def _given(self, source: Tensor, name: str, piece: Piece) -> Tensor:
        return local_part(source)[piece.chunk.inside(self.held[self.rank][name].chunk)]

    def _place(self, target: Tensor, name: str, piece: Piece) -> Tensor:
        return local_part(target)[piece.chunk.inside(self.wanted[self.rank][name])]
