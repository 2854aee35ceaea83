"""Times that the intra-block search minimises: of an operator under a rule, and of a change of placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import numpy as np

from cost_models.collectives import collective_s
from cost_models.node_cost import moved_bytes
from cost_models.operator_time import dtype_name, kind_of_call, traffic_s
from cost_models.ops import is_free, op_time_s
from cost_models.optimizer import ADAM
from galvatron_fx.ir.cluster.cluster import Axis, Device
from galvatron_fx.ir.graph.metadata import OpCost, TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import (
    PARTIAL,
    REPLICATE,
    Exchanged,
    Partial,
    Placement,
    Replicate,
    Shard,
    between,
    is_routed,
)
from galvatron_fx.ir.graph.symbols import BATCH
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.strategy import CAPACITY
from passes.sharding.attention_rules import travelling_bytes
from passes.sharding.expert_rules import sent_position
from passes.sharding.rules import OpRule

# What is only looked up in may be whole on every rank where that saves a tenth of the time to read all of it.
_KEEPING = 0.1
# A sharded copy is preferred to a whole one of equal price, as it takes less memory: a thousandth of its traffic.
_HOLDING = 1e-3


@dataclass(frozen=True)
class Prices:
    """Prices on one (merged) mesh axis of ``device`` s; ``axes`` are the prime axes that it is made of.

    ``batch_share``: the part of the graph's batch that is priced: what micro-batches and other axes leave of it.
    """

    device: Device
    axes: tuple[Axis, ...]
    batch_share: float = 1.0

    @cached_property
    def degree(self) -> int:
        """Ranks on the axis."""
        return prod(axis.size for axis in self.axes)

    @property
    def _room(self) -> float:
        """Of the rows that ranks exchange, the part that one of them has room for, at the usual capacity."""
        return min(1.0, CAPACITY / self.degree)

    def operator_s(self, call: OpCall, cost: OpCost, rule: OpRule) -> float:
        """Seconds of an operator on one rank under ``rule``; ``cost``: of the whole call, in numbers."""
        holding_s = self._traffic_s(_HOLDING * self._bytes(call.outputs, rule.outputs))
        if is_free(call.target):
            return holding_s
        specs, placements = (*call.inputs, *call.outputs), (*rule.inputs, *rule.outputs)
        share = self._room if rule.exchanges else 1.0 / self.degree if rule.splits_work else 1.0
        if any(spec is not None and spec.dim_of(BATCH) is not None for spec in specs):
            share *= self.batch_share
        moved = sum(
            self._share(spec, placement) * size
            for spec, placement, size in zip(specs, placements, moved_bytes(call), strict=True)
            if spec is not None
        )
        local = OpCost(cost.flops * share, moved, 0)
        time_s = float(op_time_s(local, dtype_name(call), self.device, kind_of_call(call)))
        sent = sent_position(call, rule)
        if sent is not None:
            size = self.degree * self._size(specs[sent])  # type: ignore[arg-type]
            counts = call.target is route
            kind, size = ("all_gather", size) if counts else ("all_to_all", size * self._room)
            time_s += _collective_s(kind, size, self.axes)
        sent_s = sum(map(self._ring_hop_s, travelling_bytes(call, rule)))
        hidden_s = time_s / self.degree
        return time_s + (self.degree - 1) * max(sent_s - hidden_s, 0.0) + holding_s

    def _ring_hop_s(self, size_bytes: int) -> float:
        """Seconds in which a rank hands its part of a tensor, or of its share of the batch, on to the next."""
        return _collective_s("rotate", size_bytes * self.batch_share / self.degree, self.axes)

    def redistribute_s(self, spec: TensorSpec, have: Placement, want: Placement) -> float | None:
        """Seconds to bring a tensor from ``have`` to ``want``; None where that has no meaning."""
        if have == want:
            return 0.0
        if is_routed(have) or is_routed(want):
            return None
        by_way_of = between(have, want)
        if by_way_of is not None and by_way_of != REPLICATE:
            first, second = self.redistribute_s(spec, have, by_way_of), self.redistribute_s(spec, by_way_of, want)
            return None if first is None or second is None else first + second
        size = self._size(spec)
        if isinstance(want, Partial):
            local = want == PARTIAL and (isinstance(have, Replicate) or have == Partial("avg"))
            return self._traffic_s(size) + self.device.launch_overhead_s if local else None
        if isinstance(have, Partial):
            kind = "all_reduce" if isinstance(want, Replicate) else "reduce_scatter"
        elif isinstance(have, Replicate):
            return self._traffic_s(2 * size / self.degree) + self.device.launch_overhead_s
        else:
            kind = "all_to_all" if isinstance(want, Shard) else "all_gather"
        return _collective_s(kind, size, self.axes) + self._copy_s(size, have, want)

    def reduce_s(self, spec: TensorSpec) -> float:
        """Seconds to add up the terms of a gradient, each rank keeping a share."""
        return _collective_s("reduce_scatter", self._size(spec), self.axes)

    def update_s(self, spec: TensorSpec, placement: Placement) -> float:
        """Seconds of Adam's update of a parameter, whatever the plan is for: its graphs depend on no optimizer."""
        size_bytes = np.array([self._bytes((spec,), (placement,))])
        return float(ADAM.updates([spec.shape], [spec.dtype.itemsize]).update_s(self.device, size_bytes)[0])

    def keep_s(self, spec: TensorSpec, placement: Placement) -> float:
        """Price, in seconds, of the memory of a table in which a graph without gradients only looks up rows."""
        return self._traffic_s(_KEEPING * self._bytes((spec,), (placement,)))

    def _copy_s(self, size: float, have: Placement, want: Placement) -> float:
        """Collectives move dim 0; other dims are copied before or after: shards where these are exchanged."""
        strided = [p for p in (have, want) if isinstance(p, Shard) and (p.dim or p.is_strided)]
        exchanges = isinstance(have, Shard) and isinstance(want, Shard)
        copied = len(strided) * size / self.degree if exchanges else size
        return self._traffic_s(2 * copied) if strided else 0.0

    def _traffic_s(self, size_bytes: float) -> float:
        return traffic_s(self.device, size_bytes)

    def _bytes(self, specs: Sequence[TensorSpec | None], placements: Sequence[Placement]) -> float:
        pairs = zip(specs, placements, strict=True)
        return sum(spec.size_bytes * self._share(spec, placement) for spec, placement in pairs if spec is not None)

    def _share(self, spec: TensorSpec, placement: Placement) -> float:
        """The part of a tensor that a rank has."""
        of_batch = self.batch_share if spec.dim_of(BATCH) is not None else 1.0
        if isinstance(placement, Exchanged):
            return of_batch * self._room
        return of_batch / self.degree if isinstance(placement, Shard) else of_batch

    def _size(self, spec: TensorSpec) -> float:
        """Bytes of a tensor, or of its share of the batch."""
        return spec.size_bytes * self._share(spec, REPLICATE)


@lru_cache(maxsize=65536)
def _collective_s(kind: str, size_bytes: float, axes: tuple[Axis, ...]) -> float:
    """The same few sizes are priced many times over."""
    return float(collective_s(kind, size_bytes, axes))
