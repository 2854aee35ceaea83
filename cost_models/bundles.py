"""Seconds of many tensors over the same links, where small ones are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cost_models.collectives import Amount, collective_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Axis

__all__ = ["Bundled", "bundle_bytes", "bundled_s", "share_s", "start_s"]


_START_SHARE = 0.2  # of a collective's time that starting it may take before tensors are worth bundling
_MOST_BYTES = 2**26  # copying into bundles of more would take more memory than it saves time


@lru_cache(maxsize=4096)
def start_s(kind: str, axes: tuple[Axis, ...]) -> float:
    """Return the seconds of a collective of next to no bytes; kinds and errors as of :func:`bundle_bytes`."""
    return float(collective_s(kind, 1.0, axes))


@lru_cache(maxsize=4096)
def bundle_bytes(kind: str, axes: tuple[Axis, ...]) -> float:
    """Return the bytes (of the whole tensor) from which starting a collective takes little of its time.

    ``kind`` is one of :func:`cost_models.collectives.collective_s`, and so are the errors. 0 where there is nobody to
    talk to.
    """
    least_s = start_s(kind, axes)
    size = 1
    while size < _MOST_BYTES and collective_s(kind, float(size), axes) * _START_SHARE < least_s:
        size *= 2
    return float(size) if least_s else 0.0


class Bundled(NamedTuple):
    """``[C]`` each: seconds of sending, without packing, and of these to start, but where bundles are shared;
    collectives; how many tensors are packed, and their bytes.
    """

    seconds: Floats
    start_s: Floats
    collectives: Floats
    packed: Floats
    packed_bytes: Floats


def share_s(kind: str, size_bytes: Amount, axes: tuple[Axis, ...]) -> Amount:
    """Return the seconds of ``size_bytes`` as a part of a full bundle; kinds and errors as of :func:`bundle_bytes`."""
    enough = bundle_bytes(kind, axes)
    return size_bytes * (collective_s(kind, enough, axes) / max(enough, 1.0))


def bundled_s(kind: str, size_bytes: Floats, axes: Sequence[Axis], shared: bool = False) -> Bundled:
    """Return what tensors of ``size_bytes[V, C]`` take, those too small to be sent alone in bundles.

    ``shared``: whether these bundles hold more than these tensors, so that they take a share of full ones.
    """
    enough = bundle_bytes(kind, tuple(axes))
    small = np.where(size_bytes < enough, size_bytes, 0.0)
    total, count = small.sum(axis=0), (small > 0).sum(axis=0)
    alone: Floats = collective_s(kind, size_bytes - small, axes)
    starts = (alone > 0).sum(axis=0)
    if shared:
        bundles, packs = total / max(enough, 1.0), count > 0
        seconds = share_s(kind, total, tuple(axes))
    else:
        bundles, packs = np.where(total > 0, np.maximum(1.0, np.floor(total / max(enough, 1.0))), 0.0), count > 1
        seconds = bundles * collective_s(kind, total / np.maximum(bundles, 1.0), axes)
    start_count = starts if shared else starts + bundles
    return Bundled(
        alone.sum(axis=0) + seconds,
        start_count * start_s(kind, tuple(axes)),
        starts + bundles,
        np.where(packs, count, 0.0),
        np.where(packs, total, 0.0),
    )
