"""Seconds of many tensors over the same links, where small ones are sent together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cost_models.collectives import collective_s
from galvatron_fx.ir.cluster import Axis

__all__ = ["bundle_bytes", "bundled_s"]

Floats = NDArray[np.float64]

_START_SHARE = 0.1  # of a collective's time that starting it may take before tensors are worth bundling
_MOST_BYTES = 2**26  # copying into bundles of more would take more memory than it saves time


@lru_cache(maxsize=4096)
def bundle_bytes(kind: str, axes: tuple[Axis, ...]) -> float:
    """Return the bytes (of the whole tensor) from which starting a collective takes little of its time.

    ``kind`` is one of :func:`cost_models.collectives.collective_s`, and so are the errors. 0 where there is nobody to
    talk to.
    """
    start_s = collective_s(kind, 1.0, axes)
    size = 1
    while size < _MOST_BYTES and collective_s(kind, float(size), axes) * _START_SHARE < start_s:
        size *= 2
    return float(size) if start_s else 0.0


def bundled_s(kind: str, size_bytes: Floats, axes: Sequence[Axis]) -> Floats:
    """Return ``[C]``: the seconds of tensors of ``size_bytes[V, C]``, those too small to be sent alone in bundles."""
    enough = bundle_bytes(kind, tuple(axes))
    small = np.where(size_bytes < enough, size_bytes, 0.0).sum(axis=0)
    bundles = np.maximum(1.0, np.floor(small / max(enough, 1.0)))
    alone = collective_s(kind, np.where(size_bytes < enough, 0.0, size_bytes), axes).sum(axis=0)
    total: Floats = alone + bundles * collective_s(kind, small / bundles, axes)
    return total
