"""Files that the command line names: read once, in bounded size, checked, and never run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

from galvatron_fx.ir.errors import ClusterError, GalvatronError, PlanError
from galvatron_fx.ir.strict_json import read_text

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.plan import Plan

__all__ = ["read_cluster", "read_plan", "refuse"]

Read = TypeVar("Read")


def read_plan(path: str | Path) -> Plan:
    """Read a plan; raises PlanError, or InputError for a file that cannot be read."""
    from galvatron_fx.ir.plan.plan import Plan

    return _read(path, "a plan", Plan.from_json, PlanError)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster or a profile; raises ClusterError, or InputError for a file that cannot be read."""
    from galvatron_fx.ir.cluster.cluster import Cluster

    return _read(path, "a cluster", Cluster.from_json, ClusterError)


def refuse(path: str | Path, error: GalvatronError) -> NoReturn:
    """Raise an error of the same kind that begins with the path."""
    raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _read(path: str | Path, what: str, parse: Callable[[str], Read], kind: type[GalvatronError]) -> Read:
    text = read_text(path, what)
    try:
        return parse(text)
    except kind as error:
        refuse(path, error)
