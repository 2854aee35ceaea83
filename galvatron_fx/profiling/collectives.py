"""Curves of collectives, over every set of mesh axes that a plan may merge, by all groups at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import torch
import torch.distributed as dist

from galvatron_fx.ir.cluster import Axis, Cluster
from galvatron_fx.ir.curves import CollectiveCurve
from galvatron_fx.ir.torch_compat import all_gather_rows
from galvatron_fx.profiling.fit import fit_collective
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.timing import Rounds, Task
from passes.codegen import finished

__all__ = ["Group", "groups_of", "measure_collectives"]

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = tuple(4**power for power in range(4, 13))  # bytes of the full tensor, 256 B to 16 MiB
_CONTENTION_BYTES = 2**20
_MOST_AXES = 3  # all sets of axes up to so many axes; of more, each axis and all of them

c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Group:
    """This rank's group along some axes: its ``name``, its ``members`` in order, and how many groups there are."""

    axes: tuple[str, ...]
    handle: dist.ProcessGroup
    members: tuple[int, ...]
    number: int
    count: int


def groups_of(ranks: Ranks, cluster: Cluster) -> list[Group]:
    """A group for each set of axes of more than one rank; every rank makes all groups, in the same order."""
    shape = [axis.size for axis in cluster.axes]
    grid = ranks.mesh.mesh.reshape(shape)
    real = [i for i, size in enumerate(shape) if size > 1]
    sizes = range(1, len(real) + 1) if len(real) <= _MOST_AXES else (1, len(real))
    found = []
    for axes in (picked for size in sizes for picked in combinations(real, size)):
        rest = [i for i in range(len(shape)) if i not in axes]
        rows = grid.permute(*rest, *axes).reshape(-1, prod(shape[i] for i in axes)).tolist()
        made = [dist.new_group(row) for row in rows]
        number = next(i for i, row in enumerate(rows) if dist.get_rank() in row)
        names = tuple(cluster.axes[i].name for i in axes)
        found.append(Group(names, made[number], tuple(rows[number]), number, len(rows)))
    return found


def measure_collectives(
    ranks: Ranks, cluster: Cluster, groups: Sequence[Group], seconds: float, done: Callable[[float], None]
) -> tuple[Axis, ...]:
    """The axes of ``cluster`` with what was measured of them."""
    wanted = [
        (group, kind, size)
        for group in groups
        for kind in (*_KINDS, *(("send_recv",) if len(group.axes) == 1 else ()))
        for size in _SIZES
    ]
    lone = [(group, "all_reduce", _CONTENTION_BYTES) for group in groups if len(group.axes) == 1 and group.count > 1]
    tasks = [_task(ranks, *asked) for asked in wanted] + [_task(ranks, *asked, alone=True) for asked in lone]
    times = Rounds(ranks, tasks).run(seconds, 1, done)
    found: dict[tuple[tuple[str, ...], str], list[tuple[int, float]]] = {}
    for (group, kind, size), spent in zip(wanted, times, strict=False):
        found.setdefault((group.axes, kind), []).append((size, spent))
    curves = [fit_collective(kind, axes, *zip(*rows, strict=True)) for (axes, kind), rows in found.items()]
    # Where one of the groups measured alone, the others waited: their share of the mean is nothing.
    together = {(g.axes, size): s for (g, kind, size), s in zip(wanted, times, strict=False) if kind == "all_reduce"}
    contention = {
        group.axes[0]: max(1.0, together[group.axes, size] / (spent * group.count))
        for (group, _, size), spent in zip(lone, times[len(wanted) :], strict=True)
    }
    return tuple(_measured_axis(axis, curves, contention.get(axis.name, 1.0)) for axis in cluster.axes)


def _measured_axis(axis: Axis, curves: Sequence[CollectiveCurve], contention: float) -> Axis:
    """The axis with the curves whose outermost axis it is, and the link that its messages show."""
    own = tuple(curve for curve in curves if curve.axes[0] == axis.name)
    link = next((curve for curve in own if curve.kind == "send_recv"), None)
    if link is None:
        return axis
    return replace(
        axis,
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        curves=own,
        contention=contention,
    )


def _task(ranks: Ranks, group: Group, kind: str, size: int, alone: bool = False) -> Task:
    """A collective as lowered graphs have it, waited for where it stands; ``alone``: by the first group only."""
    degree = len(group.members)
    share = max(1, size // 4 // degree)
    name = group.handle.group_name

    def whole() -> torch.Tensor:
        return torch.ones(share * degree, device=ranks.device_type)

    def part() -> torch.Tensor:
        return torch.ones(share, device=ranks.device_type)

    def prepare() -> Callable[[int], None]:
        if alone and group.number > 0:
            return lambda times: None
        if kind == "send_recv":
            return _messages(group, torch.ones(max(1, size // 4), device=ranks.device_type))
        return _repeated(_collective(kind, name, degree, whole, part))

    return prepare


def _collective(
    kind: str, name: str, degree: int, whole: Callable[[], torch.Tensor], part: Callable[[], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    if kind == "all_reduce":
        tensor = whole()
        return lambda: c10d.all_reduce(tensor, "sum", name)
    if kind == "all_gather":
        tensor = part()
        return lambda: all_gather_rows(tensor, degree, name)
    if kind == "reduce_scatter":
        tensor = whole()
        return lambda: c10d.reduce_scatter_tensor(tensor, "sum", degree, name)
    # The full tensor is what all ranks hold together; each passes on its part of it.
    tensor = torch.ones(part().numel() // degree * degree or degree, device=part().device)
    rows = [tensor.numel() // degree] * degree
    return lambda: c10d.all_to_all_single(tensor, rows, rows, name)


def _repeated(issue: Callable[[], torch.Tensor]) -> Callable[[int], None]:
    def run(times: int) -> None:
        for _ in range(times):
            finished(issue())

    return run


def _messages(group: Group, tensor: torch.Tensor) -> Callable[[int], None]:
    """Messages from each rank of even place to the next one; an odd one out waits."""
    place = group.members.index(dist.get_rank())
    peer = place ^ 1
    buffer = torch.empty_like(tensor)

    def run(times: int) -> None:
        if peer >= len(group.members):
            return
        for _ in range(times):
            if place % 2 == 0:
                dist.send(tensor, group.members[peer])
            else:
                dist.recv(buffer, group.members[peer])

    return run
