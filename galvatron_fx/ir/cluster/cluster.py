"""What a plan is made for: devices, and the links between them as axes of prime size.

Every axis has its own latency and bandwidth, so that "tensor parallel inside a node, data parallel between nodes"
is a choice of axes. Axes go from the outermost (slowest) to the innermost (fastest), and rank = row-major position.
Numbers come from a preset (:mod:`galvatron_fx.ir.cluster.presets`) or from a profile
(:func:`galvatron_fx.measure_cluster`).
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import sympy
import torch
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.cluster.curves import CollectiveCurve
from galvatron_fx.ir.cluster.device import Device, checked_number
from galvatron_fx.ir.cluster.nodes import Link, Matrix, Node, Nodes, primes, weakest
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.cluster.presets import CPU_PRESET, PRESETS, Preset, cpu_preset, cuda_preset, preset_called
from galvatron_fx.ir.cluster.provenance import Origin
from galvatron_fx.ir.errors import ClusterError
from galvatron_fx.ir.plan.arguments import check_arguments, shown
from galvatron_fx.ir.plan.units import parse_bytes

__all__ = ["Axis", "Cluster", "Device", "mesh_axes"]

_MOST_DEVICES = 10_000_000


@dataclass(frozen=True)
class Axis:
    """One mesh axis of ``size`` devices, a prime or 1.

    ``latency_s``: seconds before the first byte arrives at a neighbour on this axis; ``bandwidth_bytes_per_s``: what
    one device can send, in one direction, while every other device sends along this axis too (so a network card
    shared by 8 devices gives each an eighth). ``curves``: what was measured of collectives over this axis, alone or
    together with axes further in; they take precedence. ``contention``: how many times longer a collective was measured
    to take while all groups of this axis communicate than while one does; the curves include it.
    Raises ClusterError for a size that is not prime and for bad numbers.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_bytes_per_s: float
    curves: tuple[CollectiveCurve, ...] = ()
    contention: float = 1.0
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        whole = isinstance(self.size, int) and 1 <= self.size <= _MOST_DEVICES
        if not whole or (self.size != 1 and not sympy.isprime(self.size)):
            raise ClusterError(f"axis '{self.name}' has size {self.size!r:.80}; split it into axes of prime size")
        for name in ("latency_s", "bandwidth_bytes_per_s", "contention"):
            number = checked_number(f"{name} of '{self.name}'", getattr(self, name), zero=name == "latency_s")
            object.__setattr__(self, name, number)
        curves = tuple(sorted(self.curves, key=lambda curve: (curve.kind, curve.axes)))
        if any(self.name not in curve.axes for curve in curves):
            raise ClusterError(f"axis '{self.name}' has a curve over other axes only; give it to one of these")
        object.__setattr__(self, "curves", curves)
        object.__setattr__(self, "_hash", zlib.crc32(repr(self).encode()))

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class Cluster:
    """Devices on a mesh of prime ``axes``, outermost (slowest) first; the ranks are its row-major positions.

    ``overlap``: the mutual slowdown of computing and communicating at once; ``origin``: what it was measured on, None
    for a preset; ``nodes``: of unlike machines, as :meth:`from_nodes` takes them: then ``device`` is one that none is
    slower or smaller than, and an axis has the slowest of its links. Raises ClusterError without axes and for two axes
    of one name.
    """

    device: Device
    axes: tuple[Axis, ...]
    overlap: Overlap = field(default_factory=Overlap)
    origin: Origin | None = None
    nodes: Nodes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))
        if not self.axes or len(set(self.axis_names)) < len(self.axes):
            raise ClusterError(f"a cluster has the axes {self.axis_names}; give it some, each with a name of its own")

    @property
    def num_devices(self) -> int:
        """The product of the axes' sizes."""
        return math.prod(self.shape)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the axes, outermost first."""
        return tuple(axis.name for axis in self.axes)

    @property
    def given_names(self) -> tuple[str, ...]:
        """Names of the axes as the user gave them; nothing where they are called a0, a1, ..."""
        numbered = tuple(f"a{index}" for index in range(len(self.axes)))
        return () if self.axis_names == numbered else self.axis_names

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(axis.size for axis in self.axes)

    def axis(self, name: str) -> Axis:
        """Return the axis called ``name``; raises ClusterError if there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise ClusterError(f"there is no axis '{name}' in this cluster; use one of {', '.join(self.axis_names)}")

    @property
    def kinds(self) -> tuple[Device, ...]:
        """The kinds of device, of which there are several in unlike nodes alone."""
        return (self.device,) if self.nodes is None else self.nodes.kinds

    @property
    def rank_order(self) -> tuple[int, ...]:
        """The device at each position of the mesh, where they are not in the order of the nodes; else nothing."""
        order = () if self.nodes is None else self.nodes.order
        return () if order == tuple(range(len(order))) else order

    def ordered(self, order: Sequence[int]) -> Cluster:
        """The same nodes with the devices ``order`` at the positions of the mesh, and the links that follow.

        Raises ClusterError for what is no permutation, and for a cluster that is not made of nodes.
        """
        if self.nodes is None:
            raise ClusterError("ranks are ordered by the links between nodes: describe them with Cluster.from_nodes")
        return _on_nodes(self.nodes.ordered(order), self.overlap)

    def parts(self, pipeline_axes: int) -> tuple[Cluster, ...]:
        """The devices of each pipeline rank where the outermost ``pipeline_axes`` axes hold stages: their kind, and on
        the other axes their own links. Equal devices are the same in each.

        Raises ClusterError where devices of several kinds would share a stage.
        """
        return _parts(self, pipeline_axes)

    def hop(self, pipeline_axes: int, here: int, there: int) -> Axis:
        """The link between two pipeline ranks, as an axis."""
        return self.axes[0] if self.nodes is None else _hop(self, pipeline_axes, here, there)

    @classmethod
    def from_nodes(
        cls,
        nodes: Sequence[tuple[str | Device, int] | Node],
        *,
        latency_s: Matrix | None = None,
        bandwidth_bytes_per_s: Matrix | None = None,
        overlap: Overlap | None = None,
    ) -> Cluster:
        """Describe unlike machines: ``nodes`` are pairs of a device, or the name of a preset's ("A100-80GB"), and how
        many of it a machine has. Their devices are the ranks, in order.

        ``latency_s`` and ``bandwidth_bytes_per_s``, ``[node][node]``: what was measured from a device of one node to
        one of another while all others send as well, and on the diagonal inside of each node; where None, nodes
        of presets have their usual links, and two nodes the slower ones of both. ``overlap``: as of the cluster; the
        first preset's where None. Raises ClusterError for unknown names, bad numbers, matrices of other shapes, and
        devices that are no preset's without matrices.
        """
        if isinstance(nodes, str) or not isinstance(nodes, Sequence):
            raise ClusterError(f"nodes are {shown(nodes)}; give a list of pairs such as ('A100-80GB', 8)")
        made = tuple(_node(given) for given in nodes)
        usual = [PRESETS.get(node.device.name) for node in made]
        first = next((preset for preset in usual if preset is not None), CPU_PRESET)
        latency, bandwidth = (
            _usual_links(made, usual, name, place) if matrix is None else tuple(tuple(row) for row in matrix)
            for place, (name, matrix) in enumerate(
                [("latency_s", latency_s), ("bandwidth_bytes_per_s", bandwidth_bytes_per_s)]
            )
        )
        return _on_nodes(Nodes(made, latency, bandwidth), first.overlap if overlap is None else overlap)

    @classmethod
    def preset(cls, text: str) -> Cluster:
        """Return ``"<count>x<device>"``, such as ``"64xA100-80GB"``: nodes of 8, linked as in their usual machines.

        The memory may be left out of a device that has one size of it (``"8xH100"``).

        Raises ClusterError for an unknown device, and for a count above 8 that is not a multiple of 8.
        """
        if not isinstance(text, str):
            raise ClusterError(f"the name of a preset is {shown(text)}: give a text such as '8xA100-80GB'")
        match = re.fullmatch(r"([1-9]\d{0,6})x(.+)", text, re.ASCII)
        preset = preset_called(match[2]) if match is not None else None
        if match is None or preset is None:
            raise ClusterError(f"'{text[:80]}' is no preset; write a count, 'x', and one of {', '.join(PRESETS)}")
        count = int(match[1])
        nodes, rest = divmod(count, preset.per_node)
        if nodes and rest:
            raise ClusterError(
                f"'{text}' would leave a node half empty; take up to {preset.per_node} devices, or a multiple such as "
                f"{nodes * preset.per_node} or {(nodes + 1) * preset.per_node}"
            )
        outer = [(size, preset.between) for size in primes(max(nodes, 1))]
        inner = [(size, preset.inside) for size in primes(preset.per_node if nodes else count)]
        return cls(preset.device, _axes(outer + inner), preset.overlap)

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, memory_bytes: str | int | None = None) -> Cluster:
        """Describe ``mesh``: its dims split into prime axes in order, so that flattening it gives the same ranks.

        Axes are called as :func:`mesh_axes` says.

        An axis has the links inside a node if no step along it leaves a node: ``LOCAL_WORLD_SIZE`` (torchrun sets it)
        consecutive ranks make a node, else as many as the preset has. A "cuda" mesh takes the preset that fits the name
        and memory of GPU 0, else a generic GPU; a "cpu" mesh takes a rough process whose memory is its share of the
        machine's. ``memory_bytes`` ("12GiB" or an int) overrides the memory of a device.

        Raises:
            ClusterError: for a mesh of another device type; describe its devices by hand instead.
            InputError: for a ``memory_bytes`` that cannot be read.
        """
        check_arguments(mesh=mesh)
        if mesh.device_type not in ("cpu", "cuda"):
            raise ClusterError(f"no description for '{mesh.device_type}' devices; build a Cluster by hand or from JSON")
        preset = cpu_preset(mesh.size()) if mesh.device_type == "cpu" else cuda_preset()
        device = preset.device
        if memory_bytes is not None:
            device = replace(device, memory_bytes=parse_bytes(memory_bytes))
        sizes = mesh_axes(mesh)
        crossing = _leaves_node(mesh.mesh.reshape(list(sizes.values())), _ranks_per_node(preset))
        links = [preset.between if leaves else preset.inside for leaves in crossing]
        axes = (Axis(name, size, *link) for (name, size), link in zip(sizes.items(), links, strict=True))
        return cls(device, tuple(axes), preset.overlap)

    def having(
        self,
        *,
        memory_bytes: str | int | None = None,
        inside_bytes_per_s: float | None = None,
        between_bytes_per_s: float | None = None,
        host_bytes_per_s: float | None = None,
        disk_bytes_per_s: float | None = None,
        chunks: bool | None = None,
    ) -> Cluster:
        """Return the same with other memory, or other links inside of nodes, between them or to the host.

        ``memory_bytes``: of a device, "96GiB" or a number; ``host_bytes_per_s``: what a copy to or from the host moves;
        ``disk_bytes_per_s``: what a device's process reads from or writes to disk;
        ``inside_bytes_per_s``, ``between_bytes_per_s``: what a
        device sends over an axis. The axes between nodes are those slower than the fastest; a cluster of one node has
        none; ``chunks``: whether collectives may travel in chunks beside products. What was measured of a link that is
        replaced is dropped. Raises InputError and ClusterError.
        """
        overlap = self.overlap if chunks is None else replace(self.overlap, chunks=chunks)
        if self.nodes is not None:
            if inside_bytes_per_s is not None or between_bytes_per_s is not None:
                raise ClusterError("links of nodes are a matrix: give others to Cluster.from_nodes")
            given = self.nodes.nodes
            devices = [_device_having(node.device, memory_bytes, host_bytes_per_s, disk_bytes_per_s) for node in given]
            nodes = tuple(Node(device, node.count) for device, node in zip(devices, given, strict=True))
            return _on_nodes(replace(self.nodes, nodes=nodes), overlap)
        fastest = max(axis.bandwidth_bytes_per_s for axis in self.axes)

        def linked(axis: Axis) -> Axis:
            speed = inside_bytes_per_s if axis.bandwidth_bytes_per_s == fastest else between_bytes_per_s
            return axis if speed is None else replace(axis, bandwidth_bytes_per_s=speed, curves=(), contention=1.0)

        device = _device_having(self.device, memory_bytes, host_bytes_per_s, disk_bytes_per_s)
        return replace(self, device=device, axes=tuple(linked(axis) for axis in self.axes), overlap=overlap)

    def __str__(self) -> str:
        """Return the cluster as a table of plain text."""
        from galvatron_fx.ir.cluster.cluster_table import render

        return render(self)

    def to_json(self) -> str:
        """Return the cluster as JSON, byte-identical from run to run."""
        from galvatron_fx.ir.cluster.cluster_json import write_cluster

        return write_cluster(self)

    @classmethod
    def from_json(cls, text: str) -> Cluster:
        """Return the cluster that :meth:`to_json` wrote; the text is checked and never evaluated.

        Raises ClusterError, which names the place in the text, for everything else.
        """
        from galvatron_fx.ir.cluster.cluster_json import read_cluster

        return read_cluster(text)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cluster to a file as JSON; raises OSError."""
        check_arguments(path=path)
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cluster:
        """Read what :meth:`save` wrote; raises OSError and ClusterError."""
        check_arguments(path=path)
        from galvatron_fx.ir.cluster.cluster_json import MOST_CHARACTERS
        from galvatron_fx.ir.strict_json import read_bytes

        return cls.from_json(read_bytes(path, MOST_CHARACTERS).decode("utf-8", errors="replace"))


def mesh_axes(mesh: DeviceMesh) -> dict[str, int]:
    """Sizes of the prime axes of ``mesh`` by name, outermost first: "dp" is a dim of that name and a prime size, and
    "dp.0", "dp.1" are those of one that has several; a0, a1, ... where dims have no names.
    """
    named: dict[str, int] = {}
    for position, size in enumerate(mesh.mesh.shape):
        factors = primes(size)
        for index, prime in enumerate(factors):
            dim = mesh.mesh_dim_names[position] if mesh.mesh_dim_names else ""
            parts = f"{dim}.{index}" if len(factors) > 1 else dim
            named[parts if dim else f"a{len(named)}"] = prime
    return named or {(mesh.mesh_dim_names or ("a0",))[0]: 1}


def _axes(sized: Iterable[tuple[int, tuple[float, float]]]) -> tuple[Axis, ...]:
    """Name axes a0, a1, ... outermost first; a cluster of one device keeps one axis of size 1."""
    kept = list(sized)
    if not kept:
        return (Axis("a0", 1, *CPU_PRESET.inside),)
    return tuple(Axis(f"a{index}", size, *link) for index, (size, link) in enumerate(kept))


def _ranks_per_node(preset: Preset) -> int:
    """Ranks on one node, as torchrun says, else as the preset has."""
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) > 0 else preset.per_node


def _leaves_node(ranks: torch.Tensor, per_node: int) -> list[bool]:
    """Tell of every dim of ``ranks`` (shape: the axes' sizes) whether a step along it goes from one node to another."""
    nodes = ranks.long().div(per_node, rounding_mode="floor")
    return [bool((nodes.amax(dim) != nodes.amin(dim)).any()) for dim in range(ranks.ndim)]


def _device_having(
    device: Device, memory_bytes: str | int | None, host_bytes_per_s: float | None, disk_bytes_per_s: float | None
) -> Device:
    if memory_bytes is not None:
        device = replace(device, memory_bytes=parse_bytes(memory_bytes))
    if disk_bytes_per_s is not None:
        device = replace(device, disk_bandwidth_bytes_per_s=disk_bytes_per_s)
    return device if host_bytes_per_s is None else replace(device, host_bandwidth_bytes_per_s=host_bytes_per_s)


def _node(given: tuple[str | Device, int] | Node) -> Node:
    if isinstance(given, Node):
        return given
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise ClusterError(f"a node is {shown(given)}; give a device and a count, such as ('A100-80GB', 8)")
    device, count = given
    if isinstance(device, str):
        preset = preset_called(device)
        if preset is None:
            raise ClusterError(
                f"'{device[:80]}' is no preset of a device; give a Device, or one of {', '.join(PRESETS)}"
            )
        device = preset.device
    return Node(device, count)


def _usual_links(
    nodes: Sequence[Node], usual: Sequence[Preset | None], name: str, place: int
) -> tuple[tuple[float, ...], ...]:
    """What presets say of links: number ``place`` of (latency, bandwidth)."""
    worse = (max, min)[place]
    for node, preset in zip(nodes, usual, strict=True):
        if preset is None:
            raise ClusterError(
                f"'{node.device.name}' is no preset's device, so its links are not known: give {name} as a matrix "
                f"[node][node], inside of nodes on the diagonal"
            )
    known = [preset for preset in usual if preset is not None]
    return tuple(
        tuple(a.inside[place] if i == j else worse(a.between[place], b.between[place]) for j, b in enumerate(known))
        for i, a in enumerate(known)
    )


def _on_nodes(nodes: Nodes, overlap: Overlap) -> Cluster:
    """The cluster that nodes in their order make."""
    links = nodes.axis_links(np.arange(len(nodes.order)).reshape(nodes.shape))
    return Cluster(weakest(nodes.kinds), _axes(list(zip(nodes.shape, links, strict=True))), overlap, nodes=nodes)


@lru_cache(maxsize=4096)
def _parts(cluster: Cluster, pipeline_axes: int) -> tuple[Cluster, ...]:
    shape, inner = cluster.shape, cluster.axes[pipeline_axes:]
    ranks = math.prod(shape[:pipeline_axes])
    if cluster.nodes is None:
        return (cluster,) * ranks
    parts = []
    for rank, positions in enumerate(np.arange(cluster.num_devices).reshape(ranks, *shape[pipeline_axes:])):
        kinds = cluster.nodes.kinds_at(positions)
        if len(kinds) > 1:
            raise ClusterError(_unlike_inside(cluster, pipeline_axes, rank, kinds))
        links = cluster.nodes.axis_links(positions)
        own = tuple(_linked(axis, link) for axis, link in zip(inner, links, strict=True))
        parts.append(Cluster(kinds[0], (*cluster.axes[:pipeline_axes], *own), cluster.overlap))
    return tuple(parts)


@lru_cache(maxsize=2**16)
def _hop(cluster: Cluster, pipeline_axes: int, here: int, there: int) -> Axis:
    assert cluster.nodes is not None, "equal devices have equal links"
    places = np.arange(cluster.num_devices).reshape(math.prod(cluster.shape[:pipeline_axes]), -1)
    return _linked(cluster.axes[0], cluster.nodes.hop(places[here], places[there]))


def _linked(axis: Axis, link: Link) -> Axis:
    return replace(axis, latency_s=link[0], bandwidth_bytes_per_s=link[1])


def _unlike_inside(cluster: Cluster, pipeline_axes: int, rank: int, kinds: Sequence[Device]) -> str:
    names = " and ".join(device.name for device in kinds)
    per_rank = cluster.num_devices // math.prod(cluster.shape[:pipeline_axes])
    return (
        f"devices of unlike kinds ({names}) would share pipeline rank {rank} of {per_rank} devices: the ranks of a "
        f"stage have equal shares of its work and memory, so the faster would wait for the slower, and the smaller "
        f"overflow. Allow role 'pipeline', with as many stages that each holds one kind (outermost axes first, of a "
        f"mesh of {'×'.join(map(str, cluster.shape))}), have kinds in multiples of more devices, or plan for the "
        f"devices of one kind"
    )
