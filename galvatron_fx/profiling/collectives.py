"""Curves of collectives, over every set of mesh axes that a plan may merge, by all groups at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import torch
import torch.distributed as dist

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.curves import CollectiveCurve
from galvatron_fx.ir.graph.bound_ops import finished
from galvatron_fx.ir.torch_compat.processes import all_gather_rows
from galvatron_fx.profiling.fit import fit_collective
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.timing import COMPUTED_S, Call, Rounds, Task, Turns, mean_without_worst, some_products

__all__ = ["Group", "groups_of", "measure_collectives"]

_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_SIZES = tuple(4**power for power in range(4, 13))  # bytes of the full tensor, 256 B to 16 MiB
_CONTENTION_BYTES, _CONTENTION_S = 2**20, 1.0
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
    groups = []
    for axes in (picked for size in sizes for picked in combinations(real, size)):
        rest = [i for i in range(len(shape)) if i not in axes]
        rows = grid.permute(*rest, *axes).reshape(-1, prod(shape[i] for i in axes)).tolist()
        process_groups = [dist.new_group(row) for row in rows]
        number = next(i for i, row in enumerate(rows) if dist.get_rank() in row)
        names = tuple(cluster.axes[i].name for i in axes)
        groups.append(Group(names, process_groups[number], tuple(rows[number]), number, len(rows)))
    return groups


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
    lone = [group for group in groups if len(group.axes) == 1 and group.count > 1]
    times = _clock(ranks, wanted).run(seconds, 1, done)
    points: dict[tuple[tuple[str, ...], str], list[tuple[int, float]]] = {}
    for (group, kind, size), spent in zip(wanted, times, strict=True):
        points.setdefault((group.axes, kind), []).append((size, spent))
    curves = [fit_collective(kind, axes, *zip(*rows, strict=True)) for (axes, kind), rows in points.items()]
    contention = {group.axes[0]: factor for group, factor in zip(lone, _contention(ranks, lone), strict=True)}
    return tuple(_measured_axis(axis, curves, contention.get(axis.name, 1.0)) for axis in cluster.axes)


def _clock(ranks: Ranks, wanted: Sequence[tuple[Group, str, int]]) -> Rounds | Turns:
    """What times collectives: on CPUs each behind some computing, without which gloo's threads wake sooner. Most take
    less than the mean there, but a step takes the sum of all. What ranks wait for each other is no part of it.
    """
    if ranks.device_type != "cpu":
        return Rounds(ranks, [_task(ranks, *asked) for asked in wanted])
    compute = some_products(ranks, COMPUTED_S)
    calls = [_call(ranks, *asked, compute) for asked in wanted]
    return Turns(ranks, calls, usual=mean_without_worst)


def _contention(ranks: Ranks, groups: Sequence[Group]) -> list[float]:
    """By how much longer an all-reduce takes when all groups of an axis do it, for the first of each axis."""
    tasks = [_task(ranks, group, "all_reduce", _CONTENTION_BYTES, alone) for group in groups for alone in (False, True)]
    times = Rounds(ranks, tasks).run(_CONTENTION_S, 1, lambda share: None) if tasks else []
    # Where one of the groups measured alone, the others waited: their share of the mean is nothing.
    pairs = zip(groups, times[::2], times[1::2], strict=True)
    return [max(1.0, together / (alone * group.count)) for group, together, alone in pairs]


def _measured_axis(axis: Axis, curves: Sequence[CollectiveCurve], contention: float) -> Axis:
    """The axis with the curves whose outermost axis it is, and the link that its messages show."""
    axis_curves = tuple(curve for curve in curves if curve.axes[0] == axis.name)
    link = next((curve for curve in axis_curves if curve.kind == "send_recv"), None)
    if link is None:
        return axis
    return replace(
        axis,
        latency_s=link.latency_s,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s,
        curves=axis_curves,
        contention=contention,
    )


def _task(ranks: Ranks, group: Group, kind: str, size: int, alone: bool = False) -> Task:
    """A collective in a loop; ``alone``: by the first group only."""

    def prepare() -> Callable[[int], None]:
        if alone and group.number > 0:
            return lambda times: None
        call = _call(ranks, group, kind, size)

        def run(times: int) -> None:
            for _ in range(times):
                call.run()

        return run

    return prepare


def _call(ranks: Ranks, group: Group, kind: str, size: int, compute: Callable[[], None] = lambda: None) -> Call:
    """A collective as lowered graphs have it, waited for where it stands, on a tensor that was written behind
    ``compute``.
    """
    degree = len(group.members)
    share = max(1, size // 4 // degree)
    name = group.handle.group_name
    if kind == "all_to_all":  # the full tensor is what all ranks hold together; each passes on its part of it
        share = share // degree * degree or degree
    elements = {"all_reduce": share * degree, "reduce_scatter": share * degree, "send_recv": max(1, size // 4)}
    tensor = torch.zeros(elements.get(kind, share), dtype=torch.float32, device=ranks.device_type)
    rows = [share // degree] * degree
    issues: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: c10d.all_reduce_(tensor, "sum", name),
        "all_gather": lambda: all_gather_rows(tensor, degree, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor(tensor, "sum", degree, name),
        "all_to_all": lambda: c10d.all_to_all_single(tensor, rows, rows, name),
    }
    run = _message(group, tensor) if kind == "send_recv" else lambda: finished(issues[kind]())

    def before() -> None:
        compute()
        tensor.zero_()

    return Call(before, run, group.number)


def _message(group: Group, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A message from each rank of even place to the next one; an odd one out waits."""
    place = group.members.index(dist.get_rank())
    peer = place ^ 1

    def run() -> torch.Tensor:
        if peer >= len(group.members):
            return tensor
        if place % 2 == 0:
            dist.send(tensor, group.members[peer])
        else:
            dist.recv(tensor, group.members[peer])
        return tensor

    return run
