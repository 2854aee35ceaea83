"""Rows of a batch from the ranks that brought them to those that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from galvatron_fx.runtime.checksums import as_bytes

__all__ = ["RowExchange"]


@dataclass(frozen=True)
class RowExchange:
    """What this rank sends and receives of one input: ``sends[rank]`` and ``receives[rank]`` are numbers of rows.

    ``is_empty``: whether no rank needs any; then none calls :meth:`run`.
    """

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[tuple[int, ...], ...]
    is_empty: bool

    @classmethod
    def build(cls, brought: Sequence[Sequence[int]], read: Sequence[Sequence[int]], rank: int) -> RowExchange:
        """Find out who sends what to whom from the rows that each rank ``brought`` and those that each has to ``read``.

        Every row is brought by some rank; where several bring it, the next one after the reader sends it.
        """
        count = len(brought)
        sends: list[list[int]] = [[] for _ in range(count)]
        receives: list[list[int]] = [[] for _ in range(count)]
        is_empty = True
        for reader in range(count):
            missing = set(read[reader]) - set(brought[reader])
            is_empty = is_empty and not missing
            for distance in range(1, count):
                giver = (reader + distance) % count
                given = sorted(missing.intersection(brought[giver]))
                missing.difference_update(given)
                if giver == rank:
                    sends[reader] = given
                if reader == rank:
                    receives[giver] = given
            assert not missing, f"nobody brings rows {sorted(missing)}"
        return cls(tuple(map(tuple, sends)), tuple(map(tuple, receives)), is_empty)

    def run(self, whole: Tensor, device_type: str, group: dist.ProcessGroup | None) -> None:
        """Fill in rows of ``whole``, ``[rows of the global batch, ...]``, which holds those that this rank brought.

        ``group``: of the ranks, None for that of all. In bytes: not every dtype can be sent. Every rank calls it.
        """
        given = whole[[row for rows in self.sends for row in rows]].to(device_type).contiguous()
        taken = given.new_empty(sum(map(len, self.receives)), *whole.shape[1:])
        width = whole[:1].numel() * whole.element_size()
        received, sent = ([width * len(rows) for rows in every] for every in (self.receives, self.sends))
        dist.all_to_all_single(as_bytes(taken), as_bytes(given), received, sent, group=group)
        whole[[row for rows in self.receives for row in rows]] = taken.to(whole.device)
