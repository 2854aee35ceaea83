"""Which device stands where in the mesh: heavy traffic takes fast links (Pipette: Yim et al., DATE 2024).

A step never gets shorter on slower links. So of all orders those alone are timed whose links no other order has all
at least as good: up to eight devices all orders are looked at, and the one found is the best there is. Of more, two
devices (of large nodes: two groups) change places as long as that makes the step shorter, from the order that there
is, and from orders in which devices that are near each other stand along one axis after the other. Devices change
places with those of their kind alone, so no rank gets less memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations
from math import gcd, prod

import numpy as np

from galvatron_fx.ir.arrays import Floats, Ints
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.nodes import Nodes

__all__ = ["RankOrder"]

_ALL_ORDERS = 8  # devices of which all orders are looked at
_MOST_GROUPS = 128  # that change places, two and two
_GAIN = 1e-9  # share of a step that is rounding

Order = tuple[int, ...]


@dataclass
class RankOrder:
    """Searches the order of a cluster of nodes whose outermost ``pipeline_axes`` hold stages, from the one it has.

    ``seconds``: of a step on the cluster in another order, asked for once for equal links.
    """

    cluster: Cluster
    pipeline_axes: int
    seconds: Callable[[Cluster], float]
    timed: int = 0
    _known: dict[bytes, float] = field(default_factory=dict)

    def run(self) -> Cluster:
        """The cluster in the best order found; itself where none is better."""
        nodes = self._nodes
        if not self._has_choice:
            return self.cluster
        order = self._of_all() if len(nodes.order) <= _ALL_ORDERS else self._best_moved()
        return self.cluster if order == nodes.order else self.cluster.ordered(order)

    @property
    def _nodes(self) -> Nodes:
        assert self.cluster.nodes is not None, "equal links are in every order the same"
        return self.cluster.nodes

    @property
    def _has_choice(self) -> bool:
        """Whether links between nodes, or inside of them, differ at all."""
        links = {*zip(sum(self._nodes.latency_s, ()), sum(self._nodes.bandwidth_bytes_per_s, ()), strict=True)}
        return len(self._nodes.nodes) > 1 and len(links) > 1

    def _of_all(self) -> Order:
        """The best of all orders."""
        orders = np.array(list(self._every_order()), dtype=np.int64)
        costs = self._costs(orders)
        _, first = np.unique(costs, axis=0, return_index=True)
        first = np.sort(first)
        best, best_s = self._nodes.order, self._time(self._nodes.order)
        for row in undominated(costs[first]).tolist():
            order = tuple(orders[first[row]].tolist())
            if (seconds := self._time(order)) < best_s * (1 - _GAIN):
                best, best_s = order, seconds
        return best

    def _every_order(self) -> Iterator[Order]:
        """Orders that have unlike nodes at some position, those of the cluster's kinds at each; the devices of a node
        ascend.
        """
        kinds, nodes = self._nodes.kind_of_device, self._node_of_device()
        here = kinds[list(self._nodes.order)]
        wanted = sorted(permutations(nodes[list(self._nodes.order)].tolist()))
        kind_of_node = dict(zip(nodes.tolist(), kinds.tolist(), strict=True))
        for labels in dict.fromkeys(wanted):
            if all(kind_of_node[node] == kind for node, kind in zip(labels, here.tolist(), strict=True)):
                yield self._devices(labels)

    def _devices(self, labels: Sequence[int]) -> Order:
        """The devices of nodes at each position, in ascending order for each node."""
        left = list(self._nodes.first_devices)
        order = []
        for node in labels:
            order.append(left[node])
            left[node] += 1
        return tuple(order)

    def _best_moved(self) -> Order:
        """The fastest of what exchanges make of all starts, the first of equal ones."""
        inner = range(self.pipeline_axes, len(self.cluster.axes))
        starts = [self._nodes.order]
        for first in inner:
            near = self._near([first, *(axis for axis in reversed(inner) if axis != first)])
            starts += [near] if near is not None else []
        moved = [self._moved(start) for start in dict.fromkeys(starts)]
        fastest = min(moved, key=self._time)
        same = self._time(fastest) >= self._time(self._nodes.order) * (1 - _GAIN)
        return self._nodes.order if same else fastest

    def _near(self, axes: Sequence[int]) -> Order | None:
        """An order whose neighbours along the first of ``axes`` are as near as can be, then those along the next;
        None where kinds do not come out even.
        """
        units = [np.full((1,) * len(axes), device) for device in range(len(self._nodes.order))]
        for axis in axes:
            groups: list[Ints] = []
            while units:
                members = [units.pop(0)]
                for _ in range(self.cluster.shape[axis] - 1):
                    if (place := self._nearest(members[-1], units)) is None:
                        return None
                    members.append(units.pop(place))
                groups.append(np.concatenate(members, axis=axis - self.pipeline_axes))
            units = groups
        order: list[int] = []
        for first in self._nodes.order[:: units[0].size]:
            last = np.array(order[-units[0].size :] or [first]).reshape(units[0].shape if order else (1,) * len(axes))
            place = self._nearest(last, units, self._nodes.kind_of_device[first])
            if place is None:
                return None
            order += units.pop(place).ravel().tolist()
        return tuple(order)

    def _nearest(self, unit: Ints, others: Sequence[Ints], kind: int | None = None) -> int | None:
        """Which of ``others`` has the fastest slowest link to a unit, of the unit's kind where none is given."""
        nodes, kinds = self._node_of_device(), self._nodes.kind_of_device
        wanted = kinds[unit.flat[0]] if kind is None else kind
        _, bandwidth = self._nodes.links
        speeds = [
            (-float(bandwidth[nodes[unit].ravel(), nodes[other].ravel()].min()), place)
            for place, other in enumerate(others)
            if kinds[other.flat[0]] == wanted
        ]
        return min(speeds)[1] if speeds else None

    def _moved(self, order: Order) -> Order:
        """The order after all exchanges that help, the best of each round."""
        best_s = self._time(order)
        while True:
            others = list(self._exchanged(order))
            if not others:
                return order
            costs = self._costs(np.array([order, *others], dtype=np.int64))
            # What has no better link anywhere is no faster.
            better = np.flatnonzero((costs[1:] < costs[0]).any(axis=1)).tolist()
            timed = [(self._time(others[row]), row) for row in better]
            seconds, row = min(timed, default=(best_s, -1))
            if seconds >= best_s * (1 - _GAIN):
                return order
            order, best_s = others[row], seconds

    def _exchanged(self, order: Order) -> Iterator[Order]:
        """The order with two devices of one kind and unlike nodes in each other's place, or two groups of as many."""
        size = 1
        if len(order) > _MOST_GROUPS:
            size = gcd(*(node.count for node in self._nodes.nodes))
        nodes, kinds = self._node_of_device(), self._nodes.kind_of_device
        groups = [order[first : first + size] for first in range(0, len(order), size)]
        for a, b in combinations(range(len(groups)), 2):
            unlike = nodes[groups[a][0]] != nodes[groups[b][0]]
            if unlike and kinds[list(groups[a])].tolist() == kinds[list(groups[b])].tolist():
                swapped = list(groups)
                swapped[a], swapped[b] = groups[b], groups[a]
                yield tuple(device for group in swapped for device in group)

    def _time(self, order: Order) -> float:
        key = self._costs(np.array([order], dtype=np.int64)).tobytes()
        if key not in self._known:
            self.timed += 1
            self._known[key] = self.seconds(self.cluster.ordered(order))
        return self._known[key]

    def _node_of_device(self) -> Ints:
        return np.repeat(np.arange(len(self._nodes.nodes)), [node.count for node in self._nodes.nodes])

    def _costs(self, orders: Ints) -> Floats:
        """``[order, link]``: latencies and seconds a byte of every link that a step is timed by."""
        nodes, shape = self._node_of_device()[orders], self.cluster.shape
        ranks = prod(shape[: self.pipeline_axes])
        grid = nodes.reshape(len(orders), ranks, *shape[self.pipeline_axes :])
        latency, bandwidth = self._nodes.links
        costs = []
        for axis in range(2, grid.ndim):
            rings = np.moveaxis(grid, axis, -1).reshape(len(orders), ranks, -1, grid.shape[axis])
            pairs = rings, np.roll(rings, -1, axis=-1)
            costs += [matrix[pairs].max(axis=(2, 3)) for matrix in (latency, 1 / bandwidth)]
        rows = grid.reshape(len(orders), ranks, -1)
        for here, there in [(rank, rank + 1) for rank in range(ranks - 1)] + [(ranks - 1, 0)] * (ranks > 2):
            pairs = rows[:, here], rows[:, there]
            costs += [matrix[pairs].max(axis=1, keepdims=True) for matrix in (latency, 1 / bandwidth)]
        return np.concatenate(costs, axis=1) if costs else np.zeros((len(orders), 1))


def undominated(costs: Floats) -> Ints:
    """The rows of ``costs`` that no other row is at most as large as in every column; equal rows are not asked for."""
    scaled = costs / np.maximum(costs.max(axis=0, initial=0.0), np.finfo(float).tiny)
    rest = np.argsort(scaled.sum(axis=1), kind="stable")
    kept = []
    while len(rest):
        first, rest = rest[0], rest[1:]
        kept.append(first)
        rest = rest[~(costs[rest] >= costs[first]).all(axis=1)]
    return np.array(kept, dtype=np.int64)
