"""What is asked of all blocks of a table, as arrays: strategies, micro-batches, and what blocks keep."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from galvatron_fx.ir.arrays import Bools, Ints
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy, batch_share
from passes.analysis.kept_sets import MOST_SETS
from passes.search.candidates import AxisPartition
from passes.search.cost_table.block_columns import ColumnKey
from passes.search.cost_table.offload_levels import ALL_HERE, NOTHING


class Level(NamedTuple):
    """What a block does with what backward needs: the place of a set of what is kept, and how much of that waits on the
    host, one of :data:`passes.search.cost_table.offload_levels.OFFLOADED`; and where parameters and optimizer states
    are.
    """

    kept: int
    offloaded: int = NOTHING
    home: int = ALL_HERE


Wanted = tuple[Strategy, int, AxisPartition, Level]
"""A strategy to price, the number of micro-batches, the axes that are served as one, and the level of what is kept."""

KEEPS_ALL, KEEPS_NONE = 0, -1
"""The first and the last place."""

Extra = tuple[bool, bool]
"""Whether there are sets between keeping all and nothing, and whether blocks offload."""


@dataclass(frozen=True)
class Asked:
    """All that is wanted, read once for all blocks.

    ``shares``: of the batch, by distinct column; ``keys``: what the prices of each of these rest on, on every cluster
    of such devices; by what is wanted, ``rows``: its place among them, ``levels``: that of what is kept and offloaded
    among the levels of its block, and what else it says.
    """

    shares: dict[ColumnKey, float]
    keys: dict[ColumnKey, Hashable]
    extra: Extra
    rows: Ints
    levels: Ints
    again: Bools
    keep_gathered: Bools
    gather_late: Bools
    several: Bools
    pipelined: Bools
    home: Ints

    @classmethod
    def of(cls, wanted: Sequence[Wanted], cluster: Cluster) -> Asked:
        """Read ``wanted``, of one strategy and number of micro-batches a run of equal ones."""
        shares: dict[ColumnKey, float] = {}
        place: dict[ColumnKey, int] = {}
        rows: list[int] = []
        last: tuple[Strategy, int, AxisPartition] | None = None
        for strategy, num_microbatches, kinds, _ in wanted:
            if last is None or last[0] is not strategy or last[1:] != (num_microbatches, kinds):
                last = strategy, num_microbatches, kinds
                column = strategy.groups(cluster.shape), num_microbatches, kinds, strategy.capacity
                if column not in place:
                    place[column] = len(place)
                    shares[column] = batch_share(strategy, num_microbatches, cluster.shape)
                row = place[column]
            rows.append(row)
        places = np.array([level.kept for *_, level in wanted], dtype=np.int64)
        offloaded = np.array([level.offloaded for *_, level in wanted], dtype=np.int64)
        some = bool((places > KEEPS_ALL).any())
        count = 2 + MOST_SETS * some

        def flags(values: list[bool]) -> Bools:
            return np.array(values, dtype=np.bool_)

        return cls(
            shares,
            {column: _key(column, cluster.axes) for column in shares},
            (some, bool(offloaded.any())),
            np.array(rows, dtype=np.int64),
            offloaded * count + places % count,
            places != KEEPS_ALL,
            flags([strategy.keep_gathered for strategy, *_ in wanted]),
            flags([strategy.gather_late for strategy, *_ in wanted]),
            flags([num_microbatches > 1 for _, num_microbatches, *_ in wanted]),
            flags([PIPELINE in strategy.roles for strategy, *_ in wanted]),
            np.array([level.home for *_, level in wanted], dtype=np.int64),
        )


def _key(column: ColumnKey, axes: Sequence[Axis]) -> Hashable:
    groups, num_microbatches, kinds, capacity = column
    roles = tuple((group.role, tuple(_link(axes[i]) for i in group.axes)) for group in groups)
    places = {axis: place for place, axis in enumerate(i for group in groups for i in group.axes)}
    served = tuple(tuple(places[i] for i in kind) for kind in kinds if kind[0] in places)
    return roles, num_microbatches, served, capacity


def _link(axis: Axis) -> Hashable:
    """What a price over an axis rests on; curves go by the names of axes."""
    named = axis.name if axis.curves else ""
    return axis.size, axis.latency_s, axis.bandwidth_bytes_per_s, axis.contention, axis.curves, named
