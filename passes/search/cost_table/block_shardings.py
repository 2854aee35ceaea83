"""The intra-block solver's decisions for every role, degree and share of the batch, solved as rarely as can be."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from math import log

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import BATCH_ROLES, CONTEXT, GRAPH, RoleGroup
from passes.sharding.assign_shardings import AssignShardings, SolvedBlocks
from passes.sharding.graph_values import GraphValues
from passes.sharding.insert_collectives import AxisSharding
from passes.sharding.prices import Prices
from passes.sharding.roles import RoleRules

_CLOSE_SHARES = 16.0  # shares of the batch that differ by no more are taken to have one of their two decisions


@dataclass
class Solutions:
    """Decisions for the blocks ``only`` of a graph with ``batch`` samples and ``blocks`` blocks.

    What micro-batches and other axes leave of the batch is a share of it. A decision's price grows evenly with
    the share, so one that is best at two shares is best at all between: only where they differ is a third solved, and
    there only the blocks whose decisions differ. ``coarse``: shares are rounded to powers of what is close.
    """

    graph: fx.GraphModule
    cluster: Cluster
    blocks: int
    batch: int
    only: frozenset[int]
    coarse: bool = False
    _known: dict[tuple[str, int], dict[float, AxisSharding]] = field(default_factory=dict)
    _solved_blocks: dict[tuple[str, int, float], SolvedBlocks] = field(default_factory=dict)

    @cached_property
    def _values(self) -> GraphValues:
        return GraphValues(self.graph)

    def on(self, cluster: Cluster) -> Solutions:
        """The same decisions for another cluster, which adds to them."""
        assert self._values  # read once, for all
        twin = copy.copy(self)
        twin.cluster = cluster
        return twin

    def solve(self, wanted: Iterable[tuple[RoleGroup, float]]) -> None:
        """Find decisions for role groups at shares of the batch."""
        shares: dict[tuple[str, int], set[float]] = {}
        group_of: dict[tuple[str, int], RoleGroup] = {}
        for group, share in wanted:
            key = group.role, group.degree
            group_of.setdefault(key, group)
            shares.setdefault(key, set()).add(1.0 if group.role in (*BATCH_ROLES, GRAPH) else self._rounded(share))
        for key, group_shares in shares.items():
            twin = self._solved_for_any_degree(key)
            if twin is not None:
                self._known[key] = {1.0: twin}
            else:
                low, high = (self._close_to(key, share) for share in (min(group_shares), max(group_shares)))
                self._between(group_of[key], low, high)

    def _close_to(self, key: tuple[str, int], share: float) -> float:
        """The share that was solved before, for other numbers of micro-batches, where it is as close to ``share`` as
        :meth:`_between` leaves others to those that it solves; else, or where ``share`` is above all, the share itself.
        """
        known = [at for at in self._known.get(key, {}) if share <= max(self._known[key])]
        nearest = min(known, key=lambda at: (max(at / share, share / at), at), default=share)
        return nearest if max(nearest / share, share / nearest) <= _CLOSE_SHARES**0.5 else share

    def at(self, group: RoleGroup, share: float) -> AxisSharding:
        """The decision for a role group at a share of the batch."""
        known = self._known[group.role, group.degree]
        nearest = min(known, key=lambda at: (max(at / share, share / at), at))
        return known[nearest]

    def _rounded(self, share: float) -> float:
        return _CLOSE_SHARES ** round(log(share, _CLOSE_SHARES)) if self.coarse else share

    def _between(self, group: RoleGroup, low: float, high: float) -> None:
        """Solve at both ends, and between them as long as these differ."""
        pair = self._solve(group, low), self._solve(group, high)
        if pair[0] is not pair[1] and high / low > _CLOSE_SHARES:
            middle = (low * high) ** 0.5
            self._solve(group, middle, self._alike(group, low, high))
            self._between(group, low, middle)
            self._between(group, middle, high)

    def _alike(self, group: RoleGroup, low: float, high: float) -> SolvedBlocks:
        """The blocks whose decisions are equal at two shares."""
        of_low, of_high = (self._solved_blocks[group.role, group.degree, share] for share in (low, high))
        return {key: decisions for key, decisions in of_low.items() if of_high.get(key) == decisions}

    def _solve(self, group: RoleGroup, share: float, solved: SolvedBlocks | None = None) -> AxisSharding:
        """The decision at a share, where the blocks in ``solved`` are known."""
        known = self._known.setdefault((group.role, group.degree), {})
        below = max((other for other in known if other <= share), default=share)
        above = min((other for other in known if other >= share), default=share)
        if below < share < above and known[below] is known[above]:
            known[share] = known[below]
            self._solved_blocks[group.role, group.degree, share] = self._solved_blocks[group.role, group.degree, below]
        if share not in known:
            roles = [RoleRules(group.role, group.degree, self.batch)] * self.blocks
            prices = Prices(self.cluster.device, tuple(self.cluster.axes[i] for i in group.axes), share)
            cache = self._solved_blocks[group.role, group.degree, share] = dict(solved or {})
            sharding = AssignShardings(0, roles, prices, cache=cache, only=self.only).decide(self._values)
            known[share] = next((other for other in known.values() if other == sharding), sharding)
        return known[share]

    def _solved_for_any_degree(self, key: tuple[str, int]) -> AxisSharding | None:
        """Where a degree divides the batch, batch roles split the same dims as for another that does; so does
        ``context`` where it divides the sequence.
        """
        role, degree = key
        size = self._size_split_by(role)
        if size % degree:
            return None
        known = [s for (r, d), s in self._known.items() if r == role and size % d == 0]
        return next(iter(known[0].values())) if known else None

    def _size_split_by(self, role: str) -> int:
        """What the degree of a role has to divide for its decisions to be those of other degrees; 1 if nothing does."""
        sizes = self._values.sizes
        if role == CONTEXT and sizes is not None and sizes.sequence and sizes.sequence % 2 == 0:
            return sizes.sequence // 2
        return self.batch if role in BATCH_ROLES else 1
