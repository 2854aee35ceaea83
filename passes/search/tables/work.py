"""What a micro-batch asks of a pipeline: operations with ranks, seconds, bytes, and what each waits for.

This is all that a search for a table sees. Stages in a chain are one case (:mod:`passes.search.tables.stages`); chains
that meet, and operations that several ranks run together, are others: the blocks of Lin et al. 2024 (Tessel,
arXiv:2311.15269, section 3).

Micro-batches are alike, so there is a best table in which each operation takes them in turn: an order of a rank is a
sequence of operations, whose n-th entry of one kind is micro-batch n.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from galvatron_fx.ir.errors import InputError

__all__ = ["Operation", "Orders", "Work"]

Orders = tuple[tuple[int, ...], ...]
"""For each rank the operations it runs, by number, in order."""

ROUNDING = 1e-9
"""Share of a time or a size that is rounding."""


@dataclass(frozen=True)
class Operation:
    """Part of a micro-batch: it keeps ``ranks`` busy for ``seconds``.

    ``after``: numbers of operations of the same micro-batch that it waits for, each with the seconds that the result
    travels. ``adds_bytes``: what each of its ranks holds more from its start on; negative: less once it has ended.
    """

    ranks: tuple[int, ...]
    seconds: float
    after: tuple[tuple[int, float], ...] = ()
    adds_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """The operations of a micro-batch, named by kind (F, B, I, W) and stage, and each rank's bytes for them.

    Raises InputError where operations wait in a circle, leave bytes behind, or one alone is too large for its rank.
    """

    operations: tuple[Operation, ...]
    names: tuple[tuple[str, int], ...]
    free_bytes: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.topological) != len(self.operations):
            raise InputError("operations wait for each other in a circle; let none wait for what comes after it")
        for rank, free in enumerate(self.free_bytes):
            adds = [self.operations[i].adds_bytes for i in self.of_rank[rank]]
            if abs(sum(adds)) > 1e-6 * sum(map(abs, adds)):
                raise InputError(f"rank {rank} keeps {sum(adds):g} bytes of each micro-batch; make its bytes add to 0")
            most = max(self.replay_bytes(rank, [i for i in self.topological if rank in self.operations[i].ranks]))
            if most > free:
                raise InputError(f"rank {rank} has {free:g} bytes, and one micro-batch takes {most:g}; give it more")

    @property
    def num_ranks(self) -> int:
        """The ranks of the pipeline."""
        return len(self.free_bytes)

    @cached_property
    def of_rank(self) -> tuple[tuple[int, ...], ...]:
        """For each rank the operations it runs, by number."""
        return tuple(
            tuple(i for i, operation in enumerate(self.operations) if rank in operation.ranks)
            for rank in range(self.num_ranks)
        )

    @cached_property
    def followers(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        """For each operation those that wait for it, each with the seconds that the result travels."""
        follow: list[list[tuple[int, float]]] = [[] for _ in self.operations]
        for i, operation in enumerate(self.operations):
            for before, seconds in operation.after:
                follow[before].append((i, seconds))
        return tuple(map(tuple, follow))

    @cached_property
    def topological(self) -> tuple[int, ...]:
        """The operations, each after all that it waits for; without those that wait in a circle."""
        waits = [len(operation.after) for operation in self.operations]
        order = [i for i, count in enumerate(waits) if not count]
        for i in order:
            for follower, _ in self.followers[i]:
                waits[follower] -= 1
                order += [] if waits[follower] else [follower]
        return tuple(order)

    @cached_property
    def tails_s(self) -> tuple[float, ...]:
        """For each operation the seconds from its start to the end of its micro-batch, if nothing else ran."""
        tails = [0.0] * len(self.operations)
        for i in reversed(self.topological):
            behind = max((travel + tails[follower] for follower, travel in self.followers[i]), default=0.0)
            tails[i] = self.operations[i].seconds + behind
        return tuple(tails)

    @cached_property
    def loads_s(self) -> tuple[float, ...]:
        """For each rank the seconds that a micro-batch keeps it busy: no period is shorter than the largest."""
        return tuple(sum(self.operations[i].seconds for i in own) for own in self.of_rank)

    def replay_bytes(self, rank: int, order: Iterable[int]) -> list[float]:
        """What ``rank`` holds while it runs each operation of ``order``."""
        held, moments = 0.0, [0.0]
        for i in order:
            adds = self.operations[i].adds_bytes
            moments.append(held + max(adds, 0.0))
            held += adds
        return moments

    def fits(self, orders: Orders) -> bool:
        """Whether every rank's order keeps to its bytes."""
        return all(self.rank_fits(rank, order) for rank, order in enumerate(orders))

    def rank_fits(self, rank: int, order: Iterable[int]) -> bool:
        """Whether one rank's does."""
        return max(self.replay_bytes(rank, order)) <= self.free_bytes[rank] * (1 + ROUNDING)
