"""Rounds in which ranks exchange the rows that found no room in the first one: a node that runs a graph again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["FurtherRounds", "num_rounds"]


def num_rounds(counts: Tensor, ranks: int, slots: int) -> int:
    """In how many rounds ``ranks`` exchange all rows with ``slots`` for each pair; waits for the device.

    ``counts[ranks * experts]``: of each rank, how many rows go to each expert. All ranks have the same.
    """
    of_pairs = counts.view(ranks, ranks, -1).sum(-1)
    return -(-int(of_pairs.max()) // slots)


@dataclass(frozen=True, eq=False)
class FurtherRounds:
    """Add what all rounds but the first add to sums; calls return the sums, in whose memory it is.

    ``call(counts, *sums, *inputs)``: ``counts`` as of :func:`num_rounds`, the ``num_sums`` sums after the first round,
    and what the rounds read. ``body``: one round, ``body(start, *inputs)`` returns terms of the sums, where ``start``
    says how many rows of each pair of ranks earlier rounds took. Where every pair has enough room it does nothing.
    ``ranks``: that exchange rows; ``slots``: rows for each pair; ``expected``: how many
    rounds more there are if all pairs send alike.
    """

    body: fx.GraphModule = field(repr=False)
    num_sums: int
    ranks: int
    slots: int
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
        return range(self.slots, self.slots * num_rounds(counts, self.ranks, self.slots), self.slots)

    def sums_of(self, args: Sequence[Any]) -> list[Any]:
        """Those arguments of a call whose memory its results have."""
        return list(args[1 : 1 + self.num_sums])

    def inputs_of(self, args: Sequence[Any]) -> list[Any]:
        """Those arguments of a call that every round reads."""
        return list(args[1 + self.num_sums :])
