"""Unlike machines: nodes with devices of several kinds, a matrix of the links between them, and who stands where.

Devices are numbered node by node, as torchrun numbers ranks. ``order`` says which device is at each position of the
mesh; the links of an axis, of a part of the mesh, and between two pipeline ranks follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import gcd

import numpy as np
import sympy

from galvatron_fx.ir.arrays import Floats, Ints
from galvatron_fx.ir.cluster.device import Device, checked_number
from galvatron_fx.ir.errors import ClusterError

__all__ = ["Link", "Matrix", "Node", "Nodes", "primes"]

Matrix = Sequence[Sequence[float]]
"""``[node][node]``: from one to another; on the diagonal, between devices of a node."""

Link = tuple[float, float]
"""Latency in seconds and bandwidth in bytes a second."""

_MOST_NODES = 4096
_MOST_DEVICES = 10_000_000


@dataclass(frozen=True)
class Node:
    """One machine: ``count`` devices of one kind. Raises ClusterError for no devices."""

    device: Device
    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            raise ClusterError(f"a node has the device {self.device!r:.80}; give a Device or the name of a preset")
        if not isinstance(self.count, int) or isinstance(self.count, bool) or not 1 <= self.count <= _MOST_DEVICES:
            raise ClusterError(f"a node has {self.count!r:.80} devices; give a whole number from 1")


@dataclass(frozen=True)
class Nodes:
    """Nodes, their links as :data:`Matrix`, and the device at each position of the mesh.

    A link is what a device sends to one of the other node while all others send as well, and as slow as its slower
    direction. Raises ClusterError for matrices of other shapes, for bad numbers, and for an order that is no
    permutation of the devices.
    """

    nodes: tuple[Node, ...]
    latency_s: tuple[tuple[float, ...], ...]
    bandwidth_bytes_per_s: tuple[tuple[float, ...], ...]
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.nodes) <= _MOST_NODES:
            raise ClusterError(f"a cluster of {len(self.nodes)} nodes; give 1 to {_MOST_NODES}")
        object.__setattr__(self, "latency_s", self._checked("latency_s", zero=True))
        object.__setattr__(self, "bandwidth_bytes_per_s", self._checked("bandwidth_bytes_per_s", zero=False))
        count = sum(node.count for node in self.nodes)
        if count > _MOST_DEVICES:
            raise ClusterError(f"the nodes have {count} devices; at most {_MOST_DEVICES} are planned for")
        order = tuple(self.order) or tuple(range(count))
        if sorted(order) != list(range(count)):
            raise ClusterError(
                f"the order of ranks is {str(list(order))[:80]}; name each of the {count} devices, 0 to {count - 1}, "
                f"once, or leave it out"
            )
        object.__setattr__(self, "order", order)

    def _checked(self, name: str, zero: bool) -> tuple[tuple[float, ...], ...]:
        matrix, size = getattr(self, name), len(self.nodes)
        if len(matrix) != size or any(len(row) != size for row in matrix):
            shape = f"{len(matrix)} rows of {sorted({len(row) for row in matrix})}"
            raise ClusterError(f"{name} has {shape} numbers for {size} nodes; give {size} rows of {size}")
        return tuple(
            tuple(checked_number(f"{name} from node {i} to node {j}", value, zero=zero) for j, value in enumerate(row))
            for i, row in enumerate(matrix)
        )

    @cached_property
    def kinds(self) -> tuple[Device, ...]:
        """The kinds of device, as they come first."""
        return tuple(dict.fromkeys(node.device for node in self.nodes))

    @cached_property
    def kind_of_device(self) -> Ints:
        """``[device]``: the number of its kind."""
        of_nodes = [self.kinds.index(node.device) for node in self.nodes]
        return np.repeat(np.array(of_nodes, dtype=np.int64), [node.count for node in self.nodes])

    @cached_property
    def _node_of_device(self) -> Ints:
        return np.repeat(np.arange(len(self.nodes), dtype=np.int64), [node.count for node in self.nodes])

    @cached_property
    def links(self) -> tuple[Floats, Floats]:
        """Latencies and bandwidths, each direction as slow as the slower."""
        latency, bandwidth = np.array(self.latency_s), np.array(self.bandwidth_bytes_per_s)
        return np.maximum(latency, latency.T), np.minimum(bandwidth, bandwidth.T)

    @property
    def shape(self) -> tuple[int, ...]:
        """Prime sizes of the mesh, outermost first: parts of one kind, then nodes, then devices of a node.

        So the outermost axes can hold stages of one kind each wherever all kinds have multiples of some count.
        """
        totals = [sum(node.count for node in self.nodes if node.device == kind) for kind in self.kinds]
        of_kind, inside = gcd(*totals), gcd(*(node.count for node in self.nodes))
        sizes = sum(totals) // of_kind, of_kind // inside, inside
        return tuple(prime for size in sizes for prime in primes(size)) or (1,)

    def axis_links(self, positions: Ints) -> list[Link]:
        """The slowest link of each axis of ``positions`` (numbers of them, in the shape of a mesh), along rings."""
        devices = np.array(self.order, dtype=np.int64)[positions]
        rings = (np.moveaxis(devices, axis, -1) for axis in range(devices.ndim))
        return [self._slowest(ring, np.roll(ring, -1, axis=-1)) for ring in rings]

    def hop(self, here: Ints, there: Ints) -> Link:
        """The slowest link between devices at as many positions ``here`` and ``there``, pair by pair."""
        devices = np.array(self.order, dtype=np.int64)
        return self._slowest(devices[here], devices[there])

    def _slowest(self, senders: Ints, receivers: Ints) -> Link:
        pairs = self._node_of_device[senders.ravel()], self._node_of_device[receivers.ravel()]
        latency, bandwidth = self.links
        return float(latency[pairs].max()), float(bandwidth[pairs].min())

    def kinds_at(self, positions: Ints) -> list[Device]:
        """The kinds of device at ``positions``."""
        found = np.unique(self.kind_of_device[np.array(self.order, dtype=np.int64)[positions.ravel()]])
        return [self.kinds[kind] for kind in found.tolist()]

    def ordered(self, order: Sequence[int]) -> Nodes:
        """The same with another device at each position."""
        return replace(self, order=tuple(order))

    def by_kinds(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """The order that has all devices of one kind, node by node, before those of the next; numbers of kinds."""
        return tuple(int(d) for kind in kinds for d in np.flatnonzero(self.kind_of_device == kind))

    @cached_property
    def first_devices(self) -> tuple[int, ...]:
        """The number of the first device of every node, and of all devices."""
        return tuple(accumulate((node.count for node in self.nodes), initial=0))


def primes(size: int) -> list[int]:
    """The prime factors of ``size``, largest first, so that the innermost axes are the smallest."""
    return sorted(sympy.factorint(size, multiple=True), reverse=True)


def weakest(kinds: Sequence[Device]) -> Device:
    """A device that no kind is slower or smaller than: the slowest kind, with the least memory of all."""
    slowest = min(kinds, key=lambda device: (device.flops_rate, device.memory_bytes, device.name))
    if len(kinds) == 1:
        return slowest
    return replace(
        slowest,
        name=" + ".join(dict.fromkeys(device.name for device in kinds))[:200],
        memory_bytes=min(device.memory_bytes for device in kinds),
        host_memory_bytes=min(device.host_memory_bytes for device in kinds),
        host_bandwidth_bytes_per_s=min(device.host_bandwidth_bytes_per_s for device in kinds),
        disk_bandwidth_bytes_per_s=min(device.disk_bandwidth_bytes_per_s for device in kinds),
    )
