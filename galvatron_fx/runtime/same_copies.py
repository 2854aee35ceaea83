"""Now and then ranks compare their copies of one part of a tensor, which training keeps alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.checksums import checksum, signed_sum
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.same_weights import gathered

__all__ = ["CopyComparison"]

_DRIFT = 1e-3  # of a norm: copies that each rank updates may round otherwise, on GPUs
_ROUNDINGS = 16  # the same, for dtypes that round more


class _Part(NamedTuple):
    """A tensor, and its place on the dims of the mesh that split it."""

    name: str
    place: tuple[int | None, ...]


class _Copy(NamedTuple):
    """A part that ``rank`` holds as its tensor number ``position``, and who has it first."""

    part: _Part
    rank: int
    position: int
    first: tuple[int, int]


class CopyComparison:
    """Compares parameters and buffers among the ranks that hold the same parts of them. Every rank calls it alike.

    ``device_type``: of the mesh of ``members``. What one rank alone holds has nothing to be compared with.
    """

    def __init__(self, device_type: str, members: Members) -> None:
        self._device_type = device_type
        self._members = members
        self._longest = 0
        self._copies: list[_Copy] = []

    def require_equal(self, tensors: Mapping[str, Tensor], call: int) -> None:
        """Refuse copies that differ: in any bit in the first ``call``, by more than rounding later.

        ``tensors``: what this rank holds, DTensors or whole. Raises InputError, on all ranks, naming the first.
        """
        if not self._longest:
            self._look_around(tensors)
        held = [local_part(tensor).detach() for tensor in tensors.values()]
        sums = self._gathered([checksum(tensor) for tensor in held], torch.int64)
        unlike = [copy for copy in self._copies if sums[copy.rank, copy.position] != sums[copy.first]]
        if unlike and call > 1:
            signed = self._gathered([signed_sum(tensor) for tensor in held], torch.float64)
            drift = self._gathered([_drift(tensor) for tensor in held], torch.float64)
            off = [(signed[copy.rank, copy.position] - signed[copy.first]).abs() for copy in unlike]
            unlike = list(compress(unlike, (bool(o > drift[copy.first]) for o, copy in zip(off, unlike, strict=True))))
        if unlike:
            raise InputError(_refusal(unlike[0], call, self._members))

    def _look_around(self, tensors: Mapping[str, Tensor]) -> None:
        parts_by_rank = self._members.all([_Part(name, _place(tensor)) for name, tensor in tensors.items()])
        self._longest = max(map(len, parts_by_rank))
        self._copies = list(_copies(parts_by_rank))

    def _gathered(self, values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The value of each tensor of each rank."""
        numbers = torch.zeros(self._longest, dtype=dtype)
        if values:
            numbers[: len(values)] = torch.stack([value.cpu() for value in values])  # from the device and the host
        return gathered(numbers, self._device_type, self._members)


def _copies(parts_by_rank: Sequence[Sequence[_Part]]) -> Iterator[_Copy]:
    first: dict[_Part, tuple[int, int]] = {}
    for rank, parts in enumerate(parts_by_rank):
        for position, part in enumerate(parts):
            if part in first:
                yield _Copy(part, rank, position, first[part])
            else:
                first[part] = rank, position


def _place(tensor: Tensor) -> tuple[int | None, ...]:
    if not isinstance(tensor, DTensor):
        return ()
    places = tensor.device_mesh.get_coordinate() or ()
    return tuple(None if how.is_replicate() else place for how, place in zip(tensor.placements, places, strict=True))


def _drift(tensor: Tensor) -> Tensor:
    """By how much rounding may let the signed sums of copies differ."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    share = max(_DRIFT, _ROUNDINGS * torch.finfo(tensor.dtype).eps)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
    return share * norm.double()


def _refusal(copy: _Copy, call: int, members: Members) -> str:
    rank, other = members.named([copy.rank, copy.first[0]])
    start = f"rank {rank} holds other values of '{copy.part.name}' than rank {other}"
    if call == 1:
        return (
            f"{start} at the first call, so they were changed after compile on some ranks only: load the same state on "
            f"every rank, or change the model before compile, which takes the values of rank 0"
        )
    return (
        f"{start} in call {call} of the module, so they were changed on some ranks only: load the same state, and take "
        f"the same steps, on every rank"
    )
