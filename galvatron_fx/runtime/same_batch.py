"""Now and then ranks compare their batches, of which each computes a part: unlike ones would train on a mixture."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.absent_cache import AbsentCache
from galvatron_fx.runtime.checksums import checksum
from galvatron_fx.runtime.members import Members
from galvatron_fx.runtime.same_weights import gathered
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["BatchComparison"]

_FIRST = 3


class BatchComparison:
    """Compares checksums of inputs across ranks: in the first three calls, and in every ``every``-th; with 0 never.

    ``device_type``: of the mesh of ``members``; ``is_local``: whether each rank brings a batch of its own. Every rank
    makes the calls in the same order.
    """

    def __init__(self, every: int, device_type: str, is_local: bool, members: Members) -> None:
        self._every = every
        self._device_type = device_type
        self._is_local = is_local
        self._members = members
        self.calls = 0

    def is_due(self) -> bool:
        """Count a call; whether what the ranks hold is to be compared."""
        self.calls += 1
        if not self._every or self._members.size == 1:
            return False
        return self.calls <= _FIRST or self.calls % self._every == 0

    def require_equal(self, inputs: FlatInputs, own: Collection[int], rows: Sequence[int]) -> None:
        """Refuse inputs of which ranks hold unlike values. Raises InputError, on all ranks, naming which in what.

        ``own``: positions of the tensors that hold ``rows`` of the global batch: ranks with the same rows hold the same
        values. All other tensors are equal on all ranks, as every rank passes them whole; but caches that are split
        already, of which ranks hold parts, are not compared.
        """
        tensors = inputs.tensors
        sums = [checksum(torch.tensor(list(rows) if own else [])), *map(_sum, tensors)]
        sums_by_rank = gathered(
            torch.stack([each.to(self._device_type) for each in sums]), self._device_type, self._members
        )
        for position, name in enumerate(inputs.tensor_names):
            values = sums_by_rank[:, 1 + position]
            shares = sums_by_rank[:, 0] if position in own else torch.zeros_like(values)
            first = (shares[:, None] == shares[None]).int().argmax(dim=1)
            ranks = (values != values[first]).nonzero().flatten().tolist()
            if ranks:
                other = self._members.ranks[int(first[ranks[0]])]
                raise InputError(self._refusal(name.strip("[]'"), self._members.named(ranks), other, position in own))

    def _refusal(self, name: str, ranks: list[int], other: int, has_rows: bool) -> str:
        start = f"ranks {ranks} hold other values of '{name}' than rank {other} in call {self.calls} of the module"
        if has_rows:
            return (
                f"{start}, though they compute the same rows: pass own_rows those that batch_rows of the module lists"
            )
        if self._is_local:
            return f"{start}: it has no batch dim, so pass the same on all ranks, also with batch='local'"
        return (
            f"{start}: pass the global batch, the same on every rank, or, where each rank brings rows of its own (as "
            f"with DistributedSampler), compile(..., batch='local')"
        )


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64) if isinstance(tensor, (AbsentCache, DTensor)) else checksum(tensor)
