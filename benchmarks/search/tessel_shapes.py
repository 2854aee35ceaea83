"""Placements of Tessel (Lin et al. 2024, arXiv:2311.15269) on four devices, and what it compares its schedules with.

Blocks, times and room are those of its examples (``examples/simulator/cases_tessel.py`` and the script that runs it): a
forward takes 1, the backward of a layer 3, as it computes forward again; a block on all devices takes 1 each way and,
but for K's, holds nothing. Its 1F1B+ is 1F1B of the stages with each shared block in front of the stage that it feeds,
and its backward behind that stage's. Chimera-direct is the order that its runtime writes for pairs of micro-batches.
The orders are Tessel's; a rank starts as soon as it may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from passes.search.tables.search import best_orders
from passes.search.tables.timing import step_s
from passes.search.tables.work import Operation, Orders, Work

__all__ = ["SHAPES", "Block", "Gain", "Shape", "gain"]

RANKS = 4
EVERYWHERE = tuple(range(RANKS))
_BESIDE = 0.25  # of a slot: a shared block stands between two slots of 1F1B


@dataclass(frozen=True)
class Block:
    """Forward and backward of a part of the model on ``ranks``.

    ``after``: numbers of blocks before it; ``slot``: of its micro-batch 0 in the order compared with, forward first.
    """

    ranks: tuple[int, ...]
    forward_s: float
    backward_s: float
    after: tuple[int, ...]
    slot: tuple[float, float]
    held: float = 1.0


@dataclass(frozen=True)
class Shape:
    """Blocks, what each rank has room for, and the order compared with: its name, and slots from each to the next."""

    blocks: tuple[Block, ...]
    room: float
    baseline: str
    slots: Callable[[int], tuple[float, float]]

    @property
    def work(self) -> Work:
        """Forward of all blocks, then backward."""
        count = len(self.blocks)
        forwards = [Operation(b.ranks, b.forward_s, tuple((i, 0.0) for i in b.after), b.held) for b in self.blocks]
        backwards = [
            Operation(
                b.ranks,
                b.backward_s,
                ((s, 0.0), *((count + i, 0.0) for i, other in enumerate(self.blocks) if s in other.after)),
                -b.held,
            )
            for s, b in enumerate(self.blocks)
        ]
        names = tuple((kind, s) for kind in "FB" for s in range(count))
        return Work((*forwards, *backwards), names, (self.room,) * RANKS)

    def orders(self, num_microbatches: int) -> Orders:
        """The order compared with."""
        count, work = len(self.blocks), self.work
        at = {
            (half * count + s, k): b.slot[half] + self.slots(k)[half]
            for s, b in enumerate(self.blocks)
            for half in (0, 1)
            for k in range(num_microbatches)
        }
        runs = sorted(at, key=at.__getitem__)
        return tuple(tuple(i for i, _ in runs if rank in work.operations[i].ranks) for rank in range(RANKS))


@dataclass(frozen=True)
class Gain:
    """Steps and the times between micro-batches, of the order compared with and of the table that is found.

    ``least_s``: no rank has less to do for one micro-batch.
    """

    baseline_s: float
    baseline_period_s: float
    step_s: float
    period_s: float | None
    least_s: float


def gain(shape: Shape, num_microbatches: int) -> Gain:
    """Simulate both orders. The baseline keeps to no budget, as in Tessel."""
    work = shape.work
    short, long = (step_s(work, shape.orders(n)) for n in (num_microbatches, 2 * num_microbatches))
    found = best_orders(work, num_microbatches, [])
    period = None if found.pattern is None else found.pattern.period_s
    return Gain(short, (long - short) / num_microbatches, found.step_s, period, max(work.loads_s))


def _stage(rank: int, stage: int, after: tuple[int, ...], num_stages: int = RANKS, extra_s: float = 0.0) -> Block:
    """In the slots of 1F1B: forward at its number, backward when the last stage's has come back."""
    return Block((rank,), 1 + extra_s, 3 + extra_s, after, (stage, 2 * num_stages - 1 - stage))


def _shared(stage: int, after: tuple[int, ...], num_stages: int = RANKS) -> Block:
    """In front of a stage, and its backward behind that stage's."""
    return Block(EVERYWHERE, 1, 1, after, (stage - _BESIDE, 2 * num_stages - 1 - stage + _BESIDE), 0.0)


def _one_f_one_b(microbatch: int) -> tuple[float, float]:
    return 2.0 * microbatch, 2.0 * microbatch


def _chimera(microbatch: int) -> tuple[float, float]:
    """Pairs of micro-batches 16 slots apart; the second of a pair is 2 later forward and 4 backward."""
    pair, second = divmod(microbatch, 2)
    return 16.0 * pair + 2 * second, 16.0 * pair + 4 * second


def _v() -> tuple[Block, ...]:
    return tuple(_stage(s, s, (s - 1,) if s else ()) for s in range(RANKS))


def _x() -> tuple[Block, ...]:
    """Two chains; the first forward of a pair comes in front of the last backward of the pair before."""
    slots = [(s or -2.5, 10 - 2 * s) for s in range(RANKS)]
    down = [Block((s,), 1, 3, (s - 1,) if s else (), slots[s]) for s in range(RANKS)]
    up = [Block((RANKS - 1 - s,), 1, 3, (RANKS + s - 1,) if s else (), slots[s]) for s in range(RANKS)]
    return (*down, *up)


def _m() -> tuple[Block, ...]:
    return (_shared(0, ()), *(_stage(s, s, (s,)) for s in range(RANKS)))


def _nn() -> tuple[Block, ...]:
    return (
        _shared(0, ()), _stage(0, 0, (0,)), _stage(1, 1, (1,)),
        _shared(2, (2,)), _stage(2, 2, (3,)), _stage(3, 3, (4,)),
    )  # fmt: skip


def _k() -> tuple[Block, ...]:
    branches = [_stage(rank, rank % 2, (rank - 1,) if rank % 2 else (), 2) for rank in EVERYWHERE]
    return (*branches, Block(EVERYWHERE, 1, 1, (1, 3), (1 + _BESIDE, 2 - _BESIDE)))


def _whole(heavy: tuple[int, ...]) -> tuple[Block, ...]:
    """The chain with a shared block whole on each ``heavy`` rank, for which it is four times as much."""
    return tuple(_stage(s, s, (s - 1,) if s else (), RANKS, RANKS * (s in heavy)) for s in range(RANKS))


SHAPES = {
    "V": Shape(_v(), 4, "1F1B", _one_f_one_b),
    "X": Shape(_x(), 4, "Chimera-direct", _chimera),
    "M": Shape(_m(), 6, "1F1B+", _one_f_one_b),
    "NN": Shape(_nn(), 6, "1F1B+", _one_f_one_b),
    "K": Shape(_k(), 6, "1F1B of each branch", _one_f_one_b),
    "V with M's work": Shape(_whole((0,)), 4, "1F1B", _one_f_one_b),
    "V with NN's work": Shape(_whole((0, 2)), 4, "1F1B", _one_f_one_b),
}
"""With Tessel's budgets; the last two are no placements of its."""
