"""Rounds in which ranks exchange the rows that found no room in the first one: a node that runs a graph again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["FurtherRounds", "Room"]


@dataclass(frozen=True)
class Room:
    """For the rows of one round: ``slots`` for each pair of ``ranks``, and ``shadow_slots`` on each for those of the
    ``shadows``, experts that it computes itself.
    """

    ranks: int
    slots: int
    shadows: int = 0
    shadow_slots: int = 0

    def num_rounds(self, counts: Tensor) -> int:
        """In how many rounds ranks exchange all rows; waits for the device.

        ``counts[ranks * (experts + shadows)]``: of each rank, how many rows go to each expert, and of how many it keeps
        for each shadow. All ranks have the same.
        """
        sent, kept = self._most(counts)
        rounds = -(-sent // self.slots)
        return max(rounds, -(-kept // self.shadow_slots)) if self.shadows else rounds

    def enough(self, counts: Tensor) -> float:
        """The least ``capacity`` of a strategy with which there is one round; waits for the device."""
        sent, kept = self._most(counts)
        of_rank = max(int(counts.sum()), 1) / self.ranks
        num_experts = counts.numel() // self.ranks - self.shadows
        of_shadows = kept * num_experts / self.shadows if self.shadows else 0
        return max(sent * self.ranks, of_shadows / self.ranks) / of_rank

    def _most(self, counts: Tensor) -> tuple[int, int]:
        """Rows that some rank sends to some other, and that some rank keeps for shadows."""
        of_ranks = counts.view(self.ranks, -1)
        sent, kept = of_ranks.split([of_ranks.shape[1] - self.shadows, self.shadows], 1)
        return int(sent.reshape(self.ranks, self.ranks, -1).sum(-1).max()), int(kept.sum(-1).max())


@dataclass(frozen=True, eq=False)
class FurtherRounds:
    """Add what all rounds but the first add to sums; calls return the sums, in whose memory it is.

    ``call(counts, *sums, *inputs)``: ``counts`` as of :meth:`Room.num_rounds`, the ``num_sums`` sums after the first
    round, and what the rounds read. ``body``: one round, ``body(start, *inputs)`` returns terms of the sums, where
    ``start`` says how many rows of each pair of ranks earlier rounds took. Where there is room for all it does nothing.
    ``room``: of each; ``expected``: how many rounds more there are if all pairs send alike.
    """

    body: fx.GraphModule = field(repr=False)
    num_sums: int
    room: Room
    expected: int = 0

    __name__ = "further_rounds"  # as which it stands in code

    def __call__(self, counts: Tensor, *values: Tensor) -> list[Tensor]:
        sums, inputs = values[: self.num_sums], values[self.num_sums :]
        for start in self.starts(counts):
            terms = self.body(torch.tensor(start), *inputs)
            for index, total in enumerate(sums):
                total.add_(terms[index])
            del terms  # before the next round makes others
        return list(sums)

    def starts(self, counts: Tensor) -> range:
        """How many rows of each pair are gone when each further round begins."""
        slots = self.room.slots
        return range(slots, slots * self.room.num_rounds(counts), slots)

    def sums_of(self, args: Sequence[Any]) -> list[Any]:
        """Those arguments of a call whose memory its results have."""
        return list(args[1 : 1 + self.num_sums])

    def inputs_of(self, args: Sequence[Any]) -> list[Any]:
        """Those arguments of a call that every round reads."""
        return list(args[1 + self.num_sums :])
