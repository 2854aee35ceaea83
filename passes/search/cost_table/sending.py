"""What collectives over the axes of a role take in many columns at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from cost_models.bundles import bundled_s
from cost_models.collectives import collective_s
from cost_models.operator_time import traffic_s
from galvatron_fx.ir.arrays import Floats, Ints
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from passes.search.candidates import AxisPartition

_PACKING_PASSES = 2  # what is packed, or taken out, is read and written
_KINDS = {"exchange": "all_to_all", "counts": "all_gather"}


class Sent(NamedTuple):
    """``[C]`` each: seconds of sending, of these to start, and of casts and packing; how many collectives."""

    seconds: Floats
    start_s: Floats
    work_s: Floats
    collectives: Floats


class Sending:
    """Collectives over the axes of roles; ``served``: by role, the axes by kind of every column."""

    def __init__(self, cluster: Cluster, served: Sequence[Sequence[AxisPartition]]) -> None:
        self.cluster = cluster
        # Columns by the axes that a role has in them: collectives over equal axes are priced together.
        self.axes: list[dict[AxisPartition, Ints]] = []
        for of_columns in served:
            rows: dict[AxisPartition, list[int]] = {}
            for column, axes in enumerate(of_columns):
                rows.setdefault(axes, []).append(column)
            self.axes.append({axes: np.array(columns) for axes, columns in rows.items()})

    def each_s(self, kind: str, size: Floats, role: int) -> list[Floats]:
        """``[V, C]`` each: seconds of collectives of ``size[V, C]`` bytes over the axes of a role, one kind of axes
        after the other.

        An "exchange" is an all-to-all of as much from every rank, "counts" such an all-gather.
        """
        places = max(1, *map(len, self.axes[role]))
        seconds = [np.zeros_like(size) for _ in range(places)]
        for columns, place, group, group_bytes in self._groups(kind, size, role):
            seconds[place][:, columns] = collective_s(_KINDS.get(kind, kind), group_bytes, group)
        return seconds

    def bundled(self, kind: str, size: Floats, role: int) -> Sent:
        """The same in bundles of small tensors, added up."""
        seconds, starts, packing, count = (np.zeros(size.shape[1]) for _ in Sent._fields)
        shared, device = kind == "all_reduce" and not self.cluster.overlap.gains, self.cluster.device
        for columns, _, group, group_bytes in self._groups(kind, size, role):
            bundles = bundled_s(kind, group_bytes, group, shared)
            seconds[columns] += bundles.seconds
            starts[columns] += bundles.start_s
            count[columns] += bundles.collectives
            packing[columns] += traffic_s(device, _PACKING_PASSES * bundles.packed_bytes)
            packing[columns] += device.launch_overhead_s * bundles.packed
        return Sent(seconds, starts, packing, count)

    def _groups(self, kind: str, size: Floats, role: int) -> Iterator[tuple[Ints, int, list[Axis], Floats]]:
        """Columns, the place of a kind of axes in them, these axes, and the bytes of a collective over these alone: of
        what the kinds before it leave.
        """
        for served, columns in self.axes[role].items():
            groups = [[self.cluster.axes[i] for i in indices] for indices in served]
            degrees = [prod(axis.size for axis in group) for group in groups]
            of_columns = size if len(self.axes[role]) == 1 else size[:, columns]
            for place, group in enumerate(groups):
                if kind in ("all_reduce", "rotate"):
                    shared = 1
                elif kind in ("all_to_all", "exchange"):
                    shared = prod(degrees) // degrees[place]
                else:
                    shared = prod(degrees[:place])
                yield columns, place, group, of_columns / shared


def added(parts: Sequence[Sequence[Floats]]) -> Sent:
    """What several collectives take, each over one kind of axes after the other: ``parts``, by collective."""
    by_place = [np.array(place) for place in zip(*parts, strict=True)]
    nothing = np.zeros(by_place[0].shape[1])
    seconds, collectives = nothing, nothing
    for each in by_place:
        seconds, collectives = seconds + each.sum(axis=0), collectives + (each > 0).sum(axis=0)
    return Sent(seconds, nothing, nothing, collectives)
