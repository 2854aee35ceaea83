"""Prices of pipeline ranks that have devices, memory or links of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from galvatron_fx.ir.arrays import Bools
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import PlanError
from passes.search.cost_table.cost_table import CostTable, CostTableRequest, Pricer

__all__ = ["Parts", "limits_of", "tables_of_parts"]

_SECONDS = ("forward", "backward", "weight", "once", "change")
_BYTES = ("static", "saved", "deferred", "transient")


@dataclass(frozen=True)
class Parts:
    """``tables``: a chain's prices by pipeline rank, of the same strategies. Their bytes are ``scales[rank]`` of those
    that the rank holds, so that one budget, of the rank with the least memory, is for all.
    """

    tables: tuple[CostTable, ...]
    scales: tuple[float, ...]

    @property
    def least(self) -> CostTable:
        """The least of every amount: what no rank beats."""
        amounts = (*_SECONDS, *_BYTES)
        least: dict[str, Any] = {
            name: np.min([getattr(table, name) for table in self._distinct], axis=0) for name in amounts
        }
        return replace(self.tables[0], **least)

    @property
    def _distinct(self) -> list[CostTable]:
        return list({id(table): table for table in self.tables}.values())

    def joined(self, rank_of_block: Sequence[int]) -> CostTable:
        """The prices of every block on its rank."""
        tables = [self.tables[rank] for rank in rank_of_block]
        numbers = {id(table): number for number, table in enumerate(self._distinct)}
        amounts: dict[str, Any] = {
            name: np.stack([getattr(table, name)[block] for block, table in enumerate(tables)])
            for name in ("forward", "backward", "weight", "once", *_BYTES)
        }
        change = [table.change[block] for block, table in enumerate(tables[:-1])]
        first = self.tables[0]
        marks = zip(first.block_fingerprints, tables, strict=True)
        return replace(
            first,
            **amounts,
            change=np.stack(change) if change else first.change,
            block_fingerprints=tuple(f"{mark}@{numbers[id(table)]}" for mark, table in marks),
        )

    def allowing(self, allowed: Bools) -> Parts:
        """The same with other ``allowed`` strategies."""
        twins = {id(table): replace(table, allowed=allowed) for table in self._distinct}
        return replace(self, tables=tuple(twins[id(table)] for table in self.tables))


def limits_of(cluster: Cluster, pipeline_axes: int, budget_bytes: float) -> list[float]:
    """Bytes that each pipeline rank may take: what its devices have, and no more than the budget."""
    return [min(budget_bytes, part.device.memory_bytes) for part in cluster.parts(pipeline_axes)]


def tables_of_parts(
    pricer: Pricer, request: CostTableRequest, pipeline_axes: int, budget_bytes: float
) -> Parts | PlanError:
    """The prices of a request on every pipeline rank, or why there are none."""
    cluster = pricer.cluster
    parts, limits = cluster.parts(pipeline_axes), limits_of(cluster, pipeline_axes, budget_bytes)
    several = len(cluster.kinds) > 1
    scales = tuple(min(limits) / limit if several else 1.0 for limit in limits)
    pricer.cost_tables([request])  # so that blocks are sharded as they will be lowered, for the devices of all parts
    priced: dict[Cluster, CostTable] = {}
    tables: dict[tuple[Cluster, float], CostTable] = {}
    for part, scale in zip(parts, scales, strict=True):
        if part not in priced:
            (table,) = pricer.on_part(part).cost_tables([request])
            if isinstance(table, PlanError):
                return table
            priced[part] = table
        if (part, scale) not in tables:
            scaled: dict[str, Any] = {name: getattr(priced[part], name) * scale for name in _BYTES}
            tables[part, scale] = replace(priced[part], **scaled)
    found = list(tables.values())
    alike = _alike(found)
    allowed = np.logical_and.reduce([table.allowed for table in found]) & alike[None, :]
    if not allowed.any(axis=1).all():
        return PlanError("no strategy is possible on the devices of every kind: allow more roles, or fewer stages")
    ranks = tuple(tables[key] for key in zip(parts, scales, strict=True))
    return Parts(ranks, scales).allowing(allowed)


def _alike(tables: Sequence[CostTable]) -> Bools:
    """The strategies that keep the same values, and have the same on the host, on every kind of device."""
    first, *others = tables
    blocks = first.distinct[0].tolist()

    def choices(table: CostTable, pick: int) -> list[Any]:
        return [(table.kept[block][pick], table.on_host[block][pick]) for block in blocks]

    picks = range(len(first.strategies))
    return np.array([all(choices(t, pick) == choices(first, pick) for t in others) for pick in picks], dtype=np.bool_)
