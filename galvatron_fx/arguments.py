"""Models, clusters and plans as arguments of the public functions; :mod:`galvatron_fx.ir.plan.arguments` has others."""

from __future__ import annotations

import os
from typing import Any

from galvatron_fx.captured import Captured
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import ClusterError, InputError, PlanError
from galvatron_fx.ir.plan.arguments import check_arguments, shown
from galvatron_fx.ir.plan.plan import Plan

__all__ = ["as_plan", "check_cluster", "check_model", "refuse_captured", "refuse_sizes"]


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


def check_model(model: Any, **of_capture: Any) -> None:
    """Raise InputError for what is neither a model nor a captured one, and for what was decided when it was captured.

    ``of_capture``: the options that :class:`galvatron_fx.Captured` takes in place of the caller.
    """
    if not isinstance(model, Captured):
        check_arguments(model=model)
        return
    for name, value in of_capture.items():
        if value is not None:
            raise InputError(f"{name} is given beside a captured model: give it to Captured(model, inputs, {name}=...)")


def refuse_captured(model: Any, remedy: str) -> None:
    """Raise InputError, with what to do instead, where the model itself is needed and a captured one is given."""
    if isinstance(model, Captured):
        raise InputError(f"model is a Captured, which has no weights to train: {remedy}")


def refuse_sizes(**sizes: Any) -> None:
    """Raise InputError for a size that only a captured model can be brought to."""
    for name, value in sizes.items():
        if value is not None:
            raise InputError(
                f"{name} is {value} beside a model that is not captured: give example_inputs of that size, or "
                f"Captured(model, inputs) for the model"
            )
