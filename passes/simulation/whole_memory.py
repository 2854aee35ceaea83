"""The memory of a whole model from that of short ones, moment by moment.

What is alive at a moment grows evenly with every period of equal blocks; the most of all moments does not: with few
layers it may be at the loss, with many at the end of backward, where all gradients are there. So each is followed by
itself. At periods between those that are kept no more is alive than at one of these: it changes evenly from each to the
next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.plan.prediction import HOST, MEMORY_KINDS, MemoryUse, Moment
from passes.simulation.short_model import Apart, Place, ShortModel

_KINDS = (*MEMORY_KINDS, HOST)


class _At(NamedTuple):
    """A moment of a short model and of those that are longer: its part of the step, and the place of its block."""

    part: object
    place: Place | None


_UPDATE = _At("update", None)

_Held = Mapping[_At, Floats]


def whole_memory(
    short: ShortModel,
    base: Sequence[MemoryUse],
    longer: Mapping[Apart, Sequence[MemoryUse]],
    ranks: Sequence[Sequence[int]],
) -> list[MemoryUse]:
    """What every rank of the whole model takes, by what those of ``short`` and of each that is longer do; ``ranks``:
    the stages of each.
    """
    few = [_held(short, use) for use in base]
    more = {apart: [_held(short.longer(apart), use) for use in uses] for apart, uses in longer.items()}
    moments = list(dict.fromkeys(at for held in few for at in held))
    tables = {apart: _table(rows, moments) for apart, rows in more.items()}
    total = short.extrapolate(_table(few, moments), tables, ranks).reshape(len(base), len(moments), len(_KINDS))
    return [
        _use({at: kinds for at, kinds in zip(moments, amounts, strict=True) if at in held})
        for held, amounts in zip(few, total, strict=True)
    ]


def _use(whole: dict[_At, Floats]) -> MemoryUse:
    """What a rank takes: the most of all moments."""
    update = whole.pop(_UPDATE)
    held = np.array(list(whole.values()))
    step = held[held[:, :-1].sum(axis=1).argmax()]
    return MemoryUse(_by_kind(step), _by_kind(update), round(held[:, -1].max()))


def _held(model: ShortModel, use: MemoryUse) -> dict[_At, Floats]:
    """By moment: bytes of every kind."""
    places = model.places

    def known_as(moment: Moment) -> list[_At]:
        return [_At(moment.part, place) for place in (places[moment.block] if moment.block is not None else [None])]

    moments = {at: _kinds(held) for moment, held in use.moments.items() for at in known_as(moment)}
    return {**moments, _UPDATE: _kinds(use.update)}


def _table(ranks: Sequence[_Held], moments: Sequence[_At]) -> Floats:
    """``[rank, amount]``, zero where a rank has no such moment."""
    nothing = np.zeros(len(_KINDS))
    return np.array([np.concatenate([held.get(at, nothing) for at in moments]) for held in ranks])


def _kinds(held: Mapping[str, int]) -> Floats:
    return np.array([float(held.get(kind, 0)) for kind in _KINDS])


def _by_kind(kinds: Floats) -> dict[str, int]:
    return {kind: round(size) for kind, size in zip(MEMORY_KINDS, kinds.tolist(), strict=False)}
