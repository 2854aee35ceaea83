"""The steady part of a pipeline: the pattern of least period that keeps to memory, as an integer program.

With period ``T``, operation ``i`` of micro-batch ``k`` starts at ``(u[i] + k) T``. Times are counted in periods and
``t = 1 / T`` is a variable, which makes the program linear (Hanen 1994, "Study of a NP-hard cyclic scheduling
problem").
Tessel (arXiv:2311.15269, section 4) fixes the micro-batch of each block instead and solves once for each way to do so.

    maximise    t
    subject to  u[j] - u[i] >= (s[i] + travel) t                        j waits for i
                n[i,j] + s[i] t <= u[j] - u[i] <= n[i,j] + 1 - s[j] t   i and j share a rank
                sum_i s[i] t <= 1                                       over the operations of each rank
                sum_i adds[i] n[i,j] <= free                            at each j that takes bytes, on each of its ranks

``n[i,j]`` is the last micro-batch whose ``i`` comes before ``j`` of micro-batch 0; what a rank holds is linear in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from galvatron_fx.ir.arrays import Floats
from passes.search.tables.work import Orders, Work

__all__ = ["Repetend", "least_period"]

_LEAST_SHARE = 1e-4  # of a period: an operation is taken to last so long, so that rounding leaves the order clear
_NODES = 1000  # of branch and bound, where a limit in seconds would make plans depend on how busy the machine is
_SAME = 1e-6  # share of a period that is rounding

Terms = dict[int, float]


@dataclass(frozen=True)
class Repetend:
    """Every ``period_s`` seconds a micro-batch enters; ``starts``: of its operations, in periods; ``least_s``: no
    pattern has a shorter period.
    """

    period_s: float
    starts: tuple[float, ...]
    least_s: float

    def orders(self, work: Work, num_microbatches: int) -> Orders:
        """The pattern from the first micro-batch to the last: what it holds on the way is no more than in its midst."""
        entries = [(self.starts[i] + k, i) for i in range(len(self.starts)) for k in range(num_microbatches)]
        ordered = [i for _, i in sorted(entries)]
        return tuple(tuple(i for i in ordered if rank in work.operations[i].ranks) for rank in range(work.num_ranks))


def least_period(work: Work) -> Repetend | None:
    """The pattern of least period, and of those one that a micro-batch passes soonest; None where none is known after
    so many nodes of branch and bound.
    """
    program = _Program(work)
    fastest, most = program.fastest()
    if fastest is None:
        return None
    rate = float(fastest[0])
    soonest = program.soonest(rate)
    # Where none of that rate is found again, the first is as fast.
    starts = (fastest if soonest is None else soonest)[1 : 1 + len(work.operations)]
    return Repetend(program.busiest_s / rate, tuple(map(float, starts)), program.busiest_s / most)


@dataclass(frozen=True)
class _Program:
    """Columns: the rate ``t`` (times the busiest rank's seconds: at most 1), ``u`` of operations, ``n`` of pairs."""

    work: Work

    @cached_property
    def busiest_s(self) -> float:
        return max(max(self.work.loads_s), 1e-12)

    @cached_property
    def seconds(self) -> list[float]:
        """Of each operation, as a share of the busiest rank's."""
        return [max(operation.seconds / self.busiest_s, _LEAST_SHARE) for operation in self.work.operations]

    @cached_property
    def pairs(self) -> dict[tuple[int, int], int]:
        """The column of each two operations that share a rank, the lower first."""
        first = 1 + len(self.work.operations)
        both = dict.fromkeys(pair for own in self.work.of_rank for pair in combinations(own, 2))
        return {pair: first + number for number, pair in enumerate(both)}

    def last_before(self, i: int, j: int, factor: float) -> tuple[Terms, float]:
        """``factor n[i,j]`` as terms and a constant."""
        if i == j:
            return {}, 0.0
        if (i, j) in self.pairs:
            return {self.pairs[i, j]: factor}, 0.0
        return {self.pairs[j, i]: -factor}, -factor  # n[i,j] = -n[j,i] - 1

    @cached_property
    def constraints(self) -> LinearConstraint:
        rows: list[tuple[Terms, float, float]] = []
        for j, operation in enumerate(self.work.operations):
            for i, travel in operation.after:
                rows.append(({1 + j: 1.0, 1 + i: -1.0, 0: -self.seconds[i] - travel / self.busiest_s}, 0.0, np.inf))
        for (i, j), column in self.pairs.items():
            rows.append(({1 + j: 1.0, 1 + i: -1.0, column: -1.0, 0: -self.seconds[i]}, 0.0, np.inf))
            rows.append(({1 + j: 1.0, 1 + i: -1.0, column: -1.0, 0: self.seconds[j]}, -np.inf, 1.0))
        for own in self.work.of_rank:
            rows.append(({0: sum(self.seconds[i] for i in own)}, -np.inf, 1.0))
        rows += [row for rank in range(self.work.num_ranks) for row in self._memory(rank)]
        entries = [(number, *term) for number, (terms, _, _) in enumerate(rows) for term in terms.items()]
        numbers, columns, values = zip(*entries, strict=True)
        matrix = coo_matrix((values, (numbers, columns)), shape=(len(rows), self._columns)).tocsr()
        return LinearConstraint(matrix, [low for _, low, _ in rows], [high for _, _, high in rows])

    def _memory(self, rank: int) -> list[tuple[Terms, float, float]]:
        """What ``rank`` holds at each operation that takes bytes, in units of what it has."""
        own, free = self.work.of_rank[rank], self.work.free_bytes[rank]
        rows = []
        for j in own:
            if self.work.operations[j].adds_bytes > 0:
                terms: Terms = {}
                constant = 0.0
                for i in own:
                    held, more = self.last_before(i, j, self.work.operations[i].adds_bytes / free)
                    terms |= held
                    constant += more
                rows.append((terms, -np.inf, 1.0 + _SAME - constant))
        return rows

    @property
    def _columns(self) -> int:
        return 1 + len(self.work.operations) + len(self.pairs)

    def fastest(self) -> tuple[Floats | None, float]:
        """The columns of the highest rate found, and a rate that none exceeds."""
        costs = np.zeros(self._columns)
        costs[0] = -1.0
        result = self._solve(costs, self._one_at_a_time)
        return result.x, min(1.0, -float(result.mip_dual_bound or -1.0))

    @cached_property
    def _one_at_a_time(self) -> float:
        """The rate at which one operation runs after the other, which always fits."""
        travels_s = sum(travel for operation in self.work.operations for _, travel in operation.after)
        return 1.0 / (sum(self.seconds) + travels_s / self.busiest_s)

    def soonest(self, rate: float) -> Floats | None:
        """The columns at that rate whose starts are earliest; None where none is found within the limit."""
        costs = np.zeros(self._columns)
        costs[1 : 1 + len(self.work.operations)] = 1.0
        columns: Floats | None = self._solve(costs, rate * (1 - _SAME)).x
        return columns

    def _solve(self, costs: Floats, least_rate: float) -> Any:
        count, integral = len(self.work.operations), np.ones(self._columns)
        integral[: 1 + count] = 0.0
        # Periods that a micro-batch stays at most: it waits for less than one in front of each operation.
        deep = count + max(self.work.tails_s) / self.busiest_s
        low = np.array([least_rate, *[0.0] * count, *[-deep] * len(self.pairs)])
        high = np.array([1.0, *[deep] * count, *[deep] * len(self.pairs)])
        options = {"node_limit": _NODES, "mip_rel_gap": _SAME}
        return milp(
            costs, integrality=integral, bounds=Bounds(low, high), constraints=self.constraints, options=options
        )
