"""Galvatron-FX: give it a PyTorch model and a device mesh, get the same model back as a distributed graph.

The public names are loaded on first use, so that ``import galvatron_fx.ir`` from a pass is no circle and
reading a plan does not import the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from galvatron_fx._own_packages import require_own_packages
from galvatron_fx._version import __version__ as __version__

if TYPE_CHECKING:
    from cost_models.graph_cost import GraphCost, graph_cost
    from galvatron_fx import errors as errors
    from galvatron_fx import optim as optim
    from galvatron_fx.api import capture, compile, plan
    from galvatron_fx.batch_search import plan_batch
    from galvatron_fx.captured import Captured
    from galvatron_fx.checking.check import check
    from galvatron_fx.checking.report import CheckReport
    from galvatron_fx.checkpoint import Checkpointer
    from galvatron_fx.estimating import estimate
    from galvatron_fx.explaining import explain
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.pipelining import Pipelining
    from galvatron_fx.ir.plan.plan import Plan
    from galvatron_fx.ir.plan.strategy import Strategy
    from galvatron_fx.loss_inside import with_loss
    from galvatron_fx.profiling import measure_cluster
    from galvatron_fx.replanning.replan import Replanned, replan
    from galvatron_fx.runtime.batch_rows import own_rows
    from galvatron_fx.runtime.gathered_batch import gather_batch
    from galvatron_fx.runtime.module import DistributedGraphModule
    from galvatron_fx.runtime.whole_updates import update_whole
    from galvatron_fx.serving.points import ServingPoint
    from galvatron_fx.serving.requests import Request
    from galvatron_fx.serving.result import Serving
    from galvatron_fx.serving.serve_plan import serve_plan
    from galvatron_fx.sweeping.points import SweepPoint
    from galvatron_fx.sweeping.result import Sweep
    from galvatron_fx.sweeping.sweep import sweep
    from galvatron_fx.weights import gather, load_weights, save_weights

require_own_packages()

__all__ = [
    "Captured",
    "CheckReport",
    "Checkpointer",
    "Cluster",
    "DistributedGraphModule",
    "GraphCost",
    "Pipelining",
    "Plan",
    "Replanned",
    "Request",
    "Serving",
    "ServingPoint",
    "Strategy",
    "Sweep",
    "SweepPoint",
    "capture",
    "check",
    "compile",
    "errors",
    "estimate",
    "explain",
    "gather",
    "gather_batch",
    "graph_cost",
    "load_weights",
    "measure_cluster",
    "optim",
    "own_rows",
    "plan",
    "plan_batch",
    "replan",
    "save_weights",
    "serve_plan",
    "sweep",
    "update_whole",
    "with_loss",
]

_HOMES = {
    "Captured": "galvatron_fx.captured",
    "CheckReport": "galvatron_fx.checking.report",
    "Checkpointer": "galvatron_fx.checkpoint",
    "Cluster": "galvatron_fx.ir.cluster.cluster",
    "DistributedGraphModule": "galvatron_fx.runtime.module",
    "GraphCost": "cost_models.graph_cost",
    "Pipelining": "galvatron_fx.ir.plan.pipelining",
    "Plan": "galvatron_fx.ir.plan.plan",
    "Replanned": "galvatron_fx.replanning.replan",
    "Request": "galvatron_fx.serving.requests",
    "Serving": "galvatron_fx.serving.result",
    "ServingPoint": "galvatron_fx.serving.points",
    "Strategy": "galvatron_fx.ir.plan.strategy",
    "Sweep": "galvatron_fx.sweeping.result",
    "SweepPoint": "galvatron_fx.sweeping.points",
    "capture": "galvatron_fx.api",
    "check": "galvatron_fx.checking.check",
    "compile": "galvatron_fx.api",
    "estimate": "galvatron_fx.estimating",
    "explain": "galvatron_fx.explaining",
    "gather": "galvatron_fx.weights",
    "gather_batch": "galvatron_fx.runtime.gathered_batch",
    "graph_cost": "cost_models.graph_cost",
    "load_weights": "galvatron_fx.weights",
    "measure_cluster": "galvatron_fx.profiling",
    "own_rows": "galvatron_fx.runtime.batch_rows",
    "plan": "galvatron_fx.api",
    "plan_batch": "galvatron_fx.batch_search",
    "replan": "galvatron_fx.replanning.replan",
    "save_weights": "galvatron_fx.weights",
    "serve_plan": "galvatron_fx.serving.serve_plan",
    "sweep": "galvatron_fx.sweeping.sweep",
    "update_whole": "galvatron_fx.runtime.whole_updates",
    "with_loss": "galvatron_fx.loss_inside",
}


def __getattr__(name: str) -> object:
    """Load the public name ``name`` from its home; raises AttributeError for any other name."""
    if name in ("errors", "optim"):
        return importlib.import_module(f"galvatron_fx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; the public names are {__all__}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names also before they are loaded."""
    return sorted({*globals(), *__all__})
