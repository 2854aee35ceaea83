"""Clusters and plans as arguments of the public functions; :mod:`galvatron_fx.ir.plan.arguments` has all others."""

from __future__ import annotations

import os

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import ClusterError, PlanError
from galvatron_fx.ir.plan.arguments import shown
from galvatron_fx.ir.plan.plan import Plan

__all__ = ["as_plan", "check_cluster"]


def as_plan(plan: Plan | str | os.PathLike[str] | None) -> Plan | None:
    """The plan itself, or the one in the file at a path. Raises PlanError for a file that is none, and for no plan."""
    if isinstance(plan, (str, os.PathLike)):
        return Plan.load(plan)
    if plan is not None and not isinstance(plan, Plan):
        raise PlanError(
            f"plan is {shown(plan)}: give a Plan, the path of one that Plan.save wrote, or None to search one"
        )
    return plan


def check_cluster(cluster: Cluster) -> None:
    """Raise ClusterError for what is no cluster."""
    if not isinstance(cluster, Cluster):
        raise ClusterError(
            f"cluster is {shown(cluster)}: give a Cluster, as Cluster.preset('8xA100-80GB'), Cluster.load(path), "
            f"Cluster.from_mesh(mesh) and galvatron_fx.measure_cluster(mesh) return"
        )
