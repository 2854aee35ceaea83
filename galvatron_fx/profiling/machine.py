"""What this process runs on, and whether a profile was measured there."""

from __future__ import annotations

import platform
import warnings
from functools import cache

import torch
from torch.distributed.device_mesh import DeviceMesh

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.provenance import Origin, today

__all__ = ["StaleProfileWarning", "origin_of", "stale", "warn_if_stale"]


class StaleProfileWarning(UserWarning):
    """Given once for a profile that was measured on another machine, with other software, or long ago."""


def origin_of(mesh: DeviceMesh) -> Origin:
    """The machine at hand, as a profile of ``mesh`` notes it."""
    return Origin(
        measured=today(),
        device=torch.cuda.get_device_name() if mesh.device_type == "cuda" else processor(),
        device_type=mesh.device_type,
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        world_size=mesh.size(),
    )


def stale(cluster: Cluster, mesh: DeviceMesh) -> list[str]:
    """Say what differs between where ``cluster`` was measured and ``mesh``; empty for presets and where all fits."""
    return [] if cluster.origin is None else cluster.origin.differences(origin_of(mesh))


def warn_if_stale(cluster: Cluster, mesh: DeviceMesh) -> None:
    """Warn, once for each profile, if it does not fit ``mesh``: what differs, and to measure again."""
    differences = stale(cluster, mesh)
    if differences:
        _warn_once(f"the profile of '{cluster.device.name}' is stale: {'; '.join(differences)}. Measure again with "
                   f"galvatron-fx profile, or galvatron_fx.measure_cluster(mesh)")  # fmt: skip


@cache
def _warn_once(message: str) -> None:
    warnings.warn(message, StaleProfileWarning, stacklevel=3)


@cache
def processor() -> str:
    """The processor's name where the system tells it, else its architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else platform.machine()
