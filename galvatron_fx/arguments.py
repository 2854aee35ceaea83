"""Clusters and plans as arguments of the public functions; :mod:`galvatron_fx.ir.plan.arguments` has all others."""

from __future__ import annotations

import os
from typing import Any

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import ClusterError, InputError, PlanError
from galvatron_fx.ir.plan.arguments import shown
from galvatron_fx.ir.plan.plan import Plan

__all__ = ["as_plan", "check_cluster", "refuse_beside_captured", "refuse_without_captured"]


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


def refuse_beside_captured(**options: Any) -> None:
    """Raise InputError for an option that is decided when a model is captured, and is given beside one that is."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name} is given beside a captured model: give it to Captured(model, inputs, {name}=...)")


def refuse_without_captured(**sizes: Any) -> None:
    """Raise InputError for a size that only a captured model can be brought to."""
    for name, value in sizes.items():
        if value is not None:
            raise InputError(
                f"{name} is {value} beside a model that is not captured: give example_inputs of that size, or "
                f"Captured(model, inputs) for the model"
            )
