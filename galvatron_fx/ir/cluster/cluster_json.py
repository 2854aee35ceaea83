"""A cluster as JSON: checked against ``cluster_schema.json``, versioned, never evaluated."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.cluster.provenance import Origin
from galvatron_fx.ir.errors import ClusterError
from galvatron_fx.ir.strict_json import JsonFormat

__all__ = ["CLUSTER_VERSION", "MOST_CHARACTERS", "read_cluster", "write_cluster"]

CLUSTER_VERSION = 5
MOST_CHARACTERS = 20_000_000
_MAPPINGS = ("peak_flops", "calls", "sharing")
_FORMAT = JsonFormat(
    name="cluster",
    error=ClusterError,
    schema_file="cluster_schema.json",
    version=CLUSTER_VERSION,
    too_long="a cluster is JSON text of at most {most} characters, and this has {size}; write it again with to_json",
    non_finite="the cluster holds {found}; give a finite number",
    other_version=f"cluster of version {{found}}; this release reads {CLUSTER_VERSION}: measure the machine again, or "
    f"write the preset again with to_json",
    misfit="bad cluster at {place}: {what}; write it again with to_json",
    nullable="an object that says where the cluster comes from",
)


def write_cluster(cluster: Cluster) -> str:
    """Return ``cluster`` as JSON, byte-identical from run to run."""
    device = _members(cluster.device)
    device |= {name: {str(key): value for key, value in device[name]} for name in _MAPPINGS}
    document = {
        "version": CLUSTER_VERSION,
        "device": device | {"curves": [_members(curve) for curve in cluster.device.curves]},
        "axes": [_members(axis) | {"curves": [_members(curve) for curve in axis.curves]} for axis in cluster.axes],
        "overlap": asdict(cluster.overlap),
        "origin": None if cluster.origin is None else asdict(cluster.origin),
    }
    return json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n"


def read_cluster(text: str) -> Cluster:
    """Return the cluster in ``text``; raises ClusterError, which names the place, for everything else."""
    document = _FORMAT.parse(text, MOST_CHARACTERS)
    device = dict(document["device"])
    device["curves"] = tuple(OperatorCurve(**curve) for curve in device["curves"])
    device["sharing"] = {int(ranks): factor for ranks, factor in device["sharing"].items()}
    axes = tuple(
        Axis(**{**axis, "curves": tuple(CollectiveCurve(**curve) for curve in axis["curves"])})
        for axis in document["axes"]
    )
    origin = document["origin"] and Origin(**document["origin"])
    overlap = dict(document["overlap"])
    return Cluster(Device(**device), axes, Overlap(**overlap | {"skew": Skew(**overlap["skew"])}), origin)


def _members(record: Device | Axis | OperatorCurve | CollectiveCurve) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.init}
