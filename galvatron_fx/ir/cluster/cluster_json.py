"""A cluster as JSON: checked against ``cluster_schema.json``, versioned, never evaluated."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import cache
from typing import Any, NoReturn

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.cluster.curves import CollectiveCurve, OperatorCurve
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.cluster.provenance import Origin
from galvatron_fx.ir.errors import ClusterError
from galvatron_fx.ir.json_schema import Schema

__all__ = ["CLUSTER_VERSION", "read_cluster", "write_cluster"]

CLUSTER_VERSION = 5
_MAX_TEXT = 20_000_000
_MAPPINGS = ("peak_flops", "calls", "sharing")


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
    document = _parse(text)
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


def _parse(text: str) -> dict[str, Any]:
    """Return the JSON object in ``text``, checked against the schema."""
    if not isinstance(text, str) or len(text) > _MAX_TEXT:
        raise ClusterError(f"a cluster is JSON text of at most {_MAX_TEXT} characters; write it again with to_json")
    try:
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except ClusterError:
        raise
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"the cluster is not JSON: {str(error)[:200]}; write it again with to_json") from None
    if isinstance(document, dict) and document.get("version") != CLUSTER_VERSION:
        raise ClusterError(
            f"cluster of version {document.get('version')!r:.80}; this release reads {CLUSTER_VERSION}: measure the "
            f"machine again, or write the preset again with to_json"
        )
    flaw = _schema().first_error(document)
    if flaw is not None:
        raise ClusterError(f"bad cluster at {flaw.json_path}: {flaw.message[:200]}; write it again with to_json")
    assert isinstance(document, dict)
    return document


@cache
def _schema() -> Schema:
    return Schema("cluster_schema.json")


def _refuse_constant(name: str) -> NoReturn:
    raise ClusterError(f"the cluster holds {name}; give a finite number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> Mapping[str, Any]:
    """Build an object, refusing a repeated key, of which JSON would keep the last in silence."""
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ClusterError(f"the cluster repeats a key among {sorted(key for key, _ in pairs)[:20]}; keep each once")
    return members
