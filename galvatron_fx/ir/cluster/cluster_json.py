"""A cluster as JSON: checked against ``cluster_schema.json``, versioned, never evaluated."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from typing import Any

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.nodes import Nodes
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.cluster.presets import PRESETS
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
_OF_NODES = replace(
    _FORMAT,
    schema_file="cluster_schema.json#of_nodes",
    misfit="bad cluster at {place}: {what}; mend it there, or write it with Cluster.from_nodes(...).save",
)


def write_cluster(cluster: Cluster) -> str:
    """Return ``cluster`` as JSON, byte-identical from run to run."""
    if cluster.nodes is not None:
        return _text(_nodes_document(cluster, cluster.nodes))
    document = {
        "version": CLUSTER_VERSION,
        "device": _device_document(cluster.device),
        "axes": [_members(axis) | {"curves": [_members(curve) for curve in axis.curves]} for axis in cluster.axes],
        "overlap": asdict(cluster.overlap),
        "origin": None if cluster.origin is None else asdict(cluster.origin),
    }
    return _text(document)


def read_cluster(text: str) -> Cluster:
    """Return the cluster in ``text``; raises ClusterError, which names the place, for everything else."""
    document = _FORMAT.load(text, MOST_CHARACTERS)
    if isinstance(document, dict) and "nodes" in document:
        _OF_NODES.check(document)
        return _cluster_of_nodes(document)
    document = _FORMAT.parse(text, MOST_CHARACTERS)
    axes = tuple(
        Axis(**{**axis, "curves": tuple(CollectiveCurve(**curve) for curve in axis["curves"])})
        for axis in document["axes"]
    )
    origin = document["origin"] and Origin(**document["origin"])
    return Cluster(_device(document["device"]), axes, _overlap(document["overlap"]), origin)


def _cluster_of_nodes(document: dict[str, Any]) -> Cluster:
    devices = [_device(given) for given in document.get("devices", [])]
    own = {device.name: device for device in devices}
    if len(own) < len(devices):
        raise ClusterError(f"bad cluster at $.devices: two have one name, of {sorted(own)}; give each its own")
    cluster = Cluster.from_nodes(
        [(own.get(node["device"], node["device"]), node["count"]) for node in document["nodes"]],
        latency_s=document.get("latency_s"),
        bandwidth_bytes_per_s=document.get("bandwidth_bytes_per_s"),
        overlap=_overlap(document["overlap"]) if "overlap" in document else None,
    )
    return cluster.ordered(document["order"]) if "order" in document else cluster


def _nodes_document(cluster: Cluster, nodes: Nodes) -> dict[str, Any]:
    own = [kind for kind in nodes.kinds if kind.name not in PRESETS or PRESETS[kind.name].device != kind]
    if len({kind.name for kind in nodes.kinds}) < len(nodes.kinds):
        raise ClusterError("two kinds of device have one name, by which a file tells them apart; rename one")
    return {
        "version": CLUSTER_VERSION,
        "devices": [_device_document(kind) for kind in own],
        "nodes": [{"device": node.device.name, "count": node.count} for node in nodes.nodes],
        "latency_s": nodes.latency_s,
        "bandwidth_bytes_per_s": nodes.bandwidth_bytes_per_s,
        "overlap": asdict(cluster.overlap),
        **({"order": cluster.rank_order} if cluster.rank_order else {}),
    }


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True, indent=1, allow_nan=False) + "\n"


def _device_document(device: Device) -> dict[str, Any]:
    members = _members(device)
    members |= {name: {str(key): value for key, value in members[name]} for name in _MAPPINGS}
    return members | {"curves": [_members(curve) for curve in device.curves]}


def _device(document: dict[str, Any]) -> Device:
    curves = tuple(OperatorCurve(**curve) for curve in document["curves"])
    sharing = {int(ranks): factor for ranks, factor in document["sharing"].items()}
    return Device(**{**document, "curves": curves, "sharing": sharing})


def _overlap(document: dict[str, Any]) -> Overlap:
    return Overlap(**document | {"skew": Skew(**document["skew"])})


def _members(record: Device | Axis | OperatorCurve | CollectiveCurve) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record) if field.init}
