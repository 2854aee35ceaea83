"""Measure the machine at hand: operators, memory, collectives, and what all of them do to each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.curves import OperatorCurve
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.profiling.collectives import groups_of, measure_collectives
from galvatron_fx.profiling.kernel_choice import fastest_kernels
from galvatron_fx.profiling.links import measure_disk, measure_host_link
from galvatron_fx.profiling.machine import origin_of
from galvatron_fx.profiling.operators import all_kernels, measure_operators
from galvatron_fx.profiling.overlap import measure_overlap, measure_sharing
from galvatron_fx.profiling.ranks import Ranks
from galvatron_fx.profiling.skew import measure_skew
from galvatron_fx.profiling.tensors import Pool
from galvatron_fx.profiling.timing import slowdown_among_all
from galvatron_fx.profiling.updates import measure_updates
from galvatron_fx.profiling.waiting import Waiting
from galvatron_fx.runtime.agreement import require_all_ranks

__all__ = ["PHASES", "ProfileProgress", "measure_cluster"]

OPERATORS, UPDATES, COLLECTIVES, MUTUAL = "operators", "optimizer update", "collectives", "mutual slowdown"
PHASES = (OPERATORS, UPDATES, COLLECTIVES, MUTUAL)
# Shares of the time; what is mutual takes as long as it takes, a few seconds.
_OPERATORS_SHARE, _UPDATES_SHARE, _COLLECTIVES_SHARE = 0.55, 0.05, 0.4
_DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float32)}


@dataclass(frozen=True)
class ProfileProgress:
    """A moment of a measurement: what is measured, one of :data:`PHASES`, and the share of it that is over."""

    phase: str
    share: float


def measure_cluster(
    mesh: DeviceMesh,
    *,
    seconds: float = 60.0,
    dtypes: Sequence[torch.dtype] | None = None,
    storage: str | os.PathLike[str] | None = None,
    progress: Callable[[ProfileProgress], None] | None = None,
) -> Cluster:
    """Measure the devices and links of ``mesh``; every rank calls it, and gets the same cluster.

    All ranks measure at once, with the number of threads that they have now, since that is how they train: on a CPU
    with fewer cores than ranks each gets its share. ``seconds``: about how long it may take, one round of all
    measurements at least; ``dtypes``: what products of matrices are measured in (the rest in the first of them;
    default: float32, and on "cuda" bfloat16 before it); ``storage``: a folder of the disk that optimizer states may be
    on, which is measured as well; ``progress``: called with every :class:`ProfileProgress`. Warns
    where other work had the processors meanwhile, as far as the system tells.

    Raises ClusterError for other device types than "cpu" and "cuda", and InputError for seconds that are not above 0
    and for a mesh over some of the ranks, StorageError for a ``storage`` without room.
    """
    check_arguments(mesh=mesh, seconds=seconds, progress=progress, storage=storage)
    require_all_ranks(mesh)
    described = Cluster.from_mesh(mesh)
    ranks = Ranks(mesh)
    dtypes = dtypes or _DTYPES[ranks.device_type]

    def telling(phase: str) -> Callable[[float], None]:
        return lambda share: progress(ProfileProgress(phase, share)) if progress else None

    with torch.no_grad():
        device = _measured_device(ranks, described.device, dtypes, seconds, telling)
        if storage is not None:
            device = replace(device, disk_bandwidth_bytes_per_s=measure_disk(ranks, Path(storage)))
        axes: tuple[Axis, ...] = described.axes
        overlap = Overlap()
        if ranks.count > 1:
            groups = groups_of(ranks, described)
            report = telling(COLLECTIVES)
            axes = measure_collectives(ranks, described, groups, _COLLECTIVES_SHARE * seconds, report)
            telling(MUTUAL)(0.0)
            chunks = ranks.device_type != "cpu"  # processes that share cores gain nothing by it
            overlap = replace(measure_overlap(ranks, groups), skew=measure_skew(ranks, groups), chunks=chunks)
        telling(MUTUAL)(1.0)
    return Cluster(device, axes, overlap, origin_of(mesh))


def _measured_device(
    ranks: Ranks,
    described: Device,
    dtypes: Sequence[torch.dtype],
    seconds: float,
    telling: Callable[[str], Callable[[float], None]],
) -> Device:
    asked = all_kernels(Pool(ranks.device_type), dtypes)
    kernels = fastest_kernels(ranks.mesh)
    sharing = measure_sharing(ranks)
    slowdown = slowdown_among_all(sharing)
    waiting = Waiting()
    operators = measure_operators(ranks, asked, kernels, _OPERATORS_SHARE * seconds, slowdown, telling(OPERATORS))
    waiting.warn(ranks)
    curves = [*operators.curves, measure_updates(ranks, _UPDATES_SHARE * seconds, slowdown, telling(UPDATES))]
    by_kind = {(curve.kind, curve.dtype): curve for curve in curves}
    first = str(dtypes[0]).removeprefix("torch.")
    copies = by_kind["copy", first]
    return replace(
        described,
        peak_flops=dict(described.peak_flops) | operators.flops_per_s,
        memory_bandwidth_bytes_per_s=_last_rate(copies),
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        host_bandwidth_bytes_per_s=measure_host_link(ranks),
        launch_overhead_s=by_kind["pointwise", first].points[0][1],
        curves=tuple(curves),
        view_s=operators.view_s,
        sharing=sharing,
    )


def _last_rate(curve: OperatorCurve) -> float:
    """Bytes a second of the largest operators of a curve over bytes."""
    work_s, seconds = curve.points[-1]
    return work_s / curve.byte_s / seconds
