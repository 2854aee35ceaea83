"""Seconds of a step that is cut into stages, from a strategy for every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from math import prod

import numpy as np

from cost_models.schedule_time import InFlight, simulate_schedule, waiting_counts
from galvatron_fx.ir.arrays import Floats, Ints
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Amount
from galvatron_fx.ir.plan.schedule import Schedule, legal, make_schedule
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.search.cost_table.cost_table import CostTable
from passes.search.solvers.cuts import Cuts

Kinds = Ints | np.int64

_FULL = 2  # micro-batches a pipeline rank that fill a schedule: more only lengthen its steady part
_SUMMED = 3  # the same, until the sums of all gradients are there beside a full schedule
_NEVER_FULL = ("gpipe",)  # holds all micro-batches at once
_FEW_RANKS = (4, 8)  # of schedules that stand for larger ones
_WHOLE = 512  # micro-batches times stages up to which a schedule is simulated whole


@dataclass(frozen=True)
class StepTimes:
    """Times one configuration on a priced chain: ``schedule_name`` on ``num_ranks`` ranks, ``num_microbatches``
    micro-batches.
    """

    costs: CostTable
    cluster: Cluster
    schedule_name: str
    num_ranks: int
    num_stages: int
    num_microbatches: int

    @property
    def schedule(self) -> Schedule:
        """The order of work, as a table."""
        return self._schedule_of(self.num_microbatches)

    @property
    def filled(self) -> Schedule:
        """The schedule, or one of fewer micro-batches that holds as many of them at once."""
        return self._schedule_of(self._filled_microbatches)

    @property
    def _filled_microbatches(self) -> int:
        return (
            self.num_microbatches
            if self.schedule_name in _NEVER_FULL
            else min(self.num_microbatches, _SUMMED * self.num_ranks)
        )

    @cached_property
    def stand_ins(self) -> tuple[tuple[float, Schedule], ...]:
        """Schedules, with weights, by which :attr:`filled` can be estimated without making it.

        With as many stages and micro-batches a rank, the idle time and the micro-batches in flight grow evenly with the
        ranks, so two small schedules tell of a large one, whose table takes long to make.
        """
        few, more = _FEW_RANKS
        small, larger = self._on_ranks(few), self._on_ranks(more)
        if self.num_ranks <= more or small is None or larger is None:
            return ((1.0, self.filled),)
        share = (self.num_ranks - few) / (more - few)
        return ((1 - share, small), (share, larger))

    def _on_ranks(self, ranks: int) -> Schedule | None:
        """The filled schedule with as many stages and micro-batches for each of so many ranks, if there is one."""
        stages, num_microbatches = (
            self.num_stages * ranks // self.num_ranks,
            self._filled_microbatches * ranks // self.num_ranks,
        )
        exists = num_microbatches * self.num_ranks == self._filled_microbatches * ranks
        exists = exists and legal(self.schedule_name, ranks, stages, num_microbatches) is None
        return _schedule(self.schedule_name, ranks, stages, num_microbatches) if exists else None

    def _schedule_of(self, num_microbatches: int) -> Schedule:
        return _schedule(self.schedule_name, self.num_ranks, self.num_stages, num_microbatches)

    @property
    def is_whole(self) -> bool:
        """Whether the schedule is simulated with all micro-batches, so that no stage gains by being slower."""
        return (
            self.num_microbatches <= (_FULL + 1) * self.num_ranks or self.num_microbatches * self.num_stages <= _WHOLE
        )

    def timed(self, cuts: Cuts, picks: Sequence[int], table: Schedule | None = None) -> float:
        """Seconds of the simulated schedule, and of what is done once a step on the rank that has most of it.

        ``table``: to run instead, of the same stages on the same ranks.
        """
        costs = self.costs
        ends = (*cuts[1:], len(costs.block_fingerprints))
        forward, backward, weight = [], [], []
        once = [0.0] * self.num_ranks
        for rank, first, end in zip(self.filled.rank_of_stage, cuts, ends, strict=True):
            rows, columns = list(range(first, end)), list(picks[first:end])
            moves = sum(costs.change_s(b, picks[b], picks[b + 1]) for b in range(first, end - 1)) / 2
            back, late = (float(part[rows, columns].sum()) for part in (costs.backward, costs.weight))
            late = back if first == 0 else min(late, back)  # equal sums may differ by their rounding
            forward.append(float(costs.forward[rows, columns].sum()) + moves)
            backward.append(back - late + moves)
            weight.append(late)
            once[rank] += float(costs.once[rows, columns].sum())
        kinds = [(costs.kind[picks[cut - 1]], costs.kind[picks[cut]]) for cut in cuts[1:]]
        pairs = enumerate(zip(cuts[1:], kinds, strict=True), 1)
        sends = [float(self.sends_s(stage, cut, *pair)) for stage, (cut, pair) in pairs]
        return self._step_s(forward, backward, weight, sends, table) + max(once)

    def _step_s(
        self,
        forward: Sequence[float],
        backward: Sequence[float],
        weight: Sequence[float],
        sends: Sequence[float],
        table: Schedule | None,
    ) -> float:
        """Seconds of the simulated schedule; once it is full, each further round of micro-batches takes equally long.

        Long schedules are built for few micro-batches, as their tables take longer to make than to simulate.
        """
        whole = [sum(parts) for parts in zip(backward, weight, strict=True)]
        amounts = forward, backward, weight, *self.both_ways_s(sends, forward, whole)

        if table is not None:
            return simulate_schedule(table, *amounts).step_s

        def step_s(count: int) -> float:
            return simulate_schedule(self._schedule_of(count), *amounts).step_s

        if self.is_whole or self.schedule_name in _NEVER_FULL:
            return step_s(self.num_microbatches)
        full = _FULL * self.num_ranks
        filled, longer = step_s(full), step_s(full + self.num_ranks)
        return filled + (longer - filled) / self.num_ranks * (self.num_microbatches - full)

    def both_ways_s(
        self, sends: Sequence[Amount], forward: Sequence[Amount], backward: Sequence[Amount]
    ) -> tuple[list[Amount], list[Amount]]:
        """Transfers between stages, to the next and back, with the time that the receiver waits for the sender.

        ``forward`` and ``backward``: seconds of a micro-batch on each stage, the gradients of weights included.
        """
        late = self.cluster.overlap.skew.seconds
        ahead = [send + late(spent) for send, spent in zip(sends, forward[:-1], strict=True)]
        return ahead, [send + late(spent) for send, spent in zip(sends, backward[1:], strict=True)]

    def sends_s(self, stage: int, cut: int, leaves: Kinds, enters: Kinds) -> Floats:
        """Seconds to pass activations of a micro-batch to ``stage``, before block ``cut``, and to change how they lie.

        ``leaves`` and ``enters``: kinds of boundaries of the sender and of the receiver, an entry for each pair.
        """
        latency_s, bandwidth = self._links[stage - 1]
        size = self.costs.crossing[cut] / self._shards[leaves]
        change = self.costs.change[cut - 1, leaves, enters] / 2
        seconds: Floats = latency_s + size / bandwidth + change
        return seconds

    @cached_property
    def _links(self) -> list[tuple[float, float]]:
        """Latency and bandwidth of the link into each stage but the first; those of the slowest axis where unlike
        stages are not told apart.
        """
        axes = [axis.size for axis in self.cluster.axes]
        outer = next((k for k in range(len(axes) + 1) if prod(axes[:k]) == self.num_ranks), 0)
        ranks = self.filled.rank_of_stage
        links = [
            self.cluster.axes[0] if here == there else self.cluster.hop(outer, here, there)
            for here, there in pairwise(ranks)
        ]
        return [(link.latency_s, link.bandwidth_bytes_per_s) for link in links]

    def quickest_send_s(self, cut: int) -> float:
        """The least of all pairs of boundaries."""
        kinds = np.arange(len(self._shards))
        stages = {link: stage for stage, link in enumerate(self._links, 1)}
        return min(float(self.sends_s(stage, cut, kinds[:, None], kinds[None, :]).min()) for stage in stages.values())

    @cached_property
    def _shards(self) -> Floats:
        """``[kind]``: among how many ranks a boundary is split."""
        shards = np.ones(self.costs.change.shape[-1])
        for kind, strategy in zip(self.costs.kind, self.costs.strategies, strict=True):
            shards[kind] = _shards(strategy, self.cluster)
        return shards


@cache
def _schedule(name: str, ranks: int, stages: int, num_microbatches: int) -> Schedule:
    return make_schedule(name, ranks, stages, num_microbatches)


@cache
def stages_waiting(schedule: Schedule) -> tuple[InFlight, ...]:
    """What waits on each stage; the first passes no gradient on, so all of its backward is for weights."""
    first, *others = waiting_counts(schedule)
    return ((max(whole + half for whole, half in first), 0),), *others


def _shards(strategy: Strategy, cluster: Cluster) -> int:
    splits = ("tensor", PIPELINE)
    return prod(axis.size for role, axis in zip(strategy.roles, cluster.axes, strict=True) if role not in splits)
