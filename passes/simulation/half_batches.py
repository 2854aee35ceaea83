"""Two half-batches of which one computes while the other communicates (Zhu et al. 2024, NanoFlow).

Both halves go through the blocks side by side: what one computes between two collectives, then the other. A half goes
on when its collective is done; meanwhile the device has the other half's work. Work and collectives at once slow each
other down as in any step (:mod:`cost_models.streams`). Operators of the two never run at once: they are on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from cost_models.streams import Event, Start, StreamRun, Wait, Work
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.prediction import COMPUTE, Cause
from passes.simulation.request_steps import BlockWork

__all__ = ["halves_s"]

_SHOWN = 2  # of equal blocks in a row: each one more adds what the next one does
_STREAM = 0


def halves_s(blocks: Sequence[tuple[BlockWork, ...]], first_s: Floats, second_s: Floats, overlap: Overlap) -> float:
    """Return the seconds of a stage of such ``blocks``; ``first_s``, ``second_s``: of each row of the prices, for the
    requests of one half and of the other.
    """
    runs = [(work, len(list(group))) for work, group in groupby(blocks)]
    short = [[work] * min(count, _SHOWN) for work, count in runs]

    def seconds(longer: int | None) -> float:
        kept = [group + [group[0]] * (place == longer) for place, group in enumerate(short)]
        parts = [part for group in kept for work in group for part in work]
        return StreamRun.of(_events(parts, (first_s, second_s)), overlap).now_s

    total = base = seconds(None)
    for place, (_, count) in enumerate(runs):
        if count > _SHOWN:
            total += (count - _SHOWN) * (seconds(place) - base)
    return total


def _events(parts: Sequence[BlockWork], halves: Sequence[Floats]) -> list[Event]:
    events: list[Event] = []
    started, last = 0, [0, 0]  # collectives in all, and the number of each half's last one
    for part in parts:
        for half, seconds in enumerate(halves):
            if last[half]:
                events.append(Wait(_STREAM, started - last[half]))
            events.append(Work(float(seconds[list(part.operators)].sum()), Cause(COMPUTE)))
            if part.collective >= 0:
                started += 1
                last[half] = started
                events.append(Start(float(seconds[part.collective]), Cause("collective"), _STREAM))
    return events
