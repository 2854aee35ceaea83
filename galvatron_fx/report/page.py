"""A plan explained in one HTML file that needs nothing else: :func:`write_page`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_json import write
from galvatron_fx.ir.plan.progress import LOWERING, Observer
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.report.explained import explained
from galvatron_fx.report.html import render
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["write_page"]


def write_page(
    path: str | Path,
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    progress: Observer | None = None,
    **options: Any,
) -> Plan:
    """Write a page that explains a plan to ``path``, all at once or not at all, and return the plan.

    The page is one HTML file for any browser, without a network: what every axis does for every block, where time and
    memory go, what lost, every collective with its bytes and its reason, and the lowered code. Nothing runs and no
    device is needed; ``model`` may be on the meta device. ``plan``: explain it instead of searching one, which then
    has no alternatives that a search saw, and leaves of ``options`` the budget alone; ``mixed_precision`` (default: the
    given plan's), ``progress`` and ``options``: those of :func:`galvatron_fx.plan`.

    Raises what :func:`galvatron_fx.plan` raises, PlanError where ``plan`` does not fit model, batch or mesh, and
    OSError.
    """
    policy = mixed_precision if plan is None or mixed_precision is not None else plan.mixed_precision
    session = PlanningSession(
        cluster,
        SearchSettings(**options),
        plan,
        checked_policy(policy),
        progress=progress,
        simulate_runners_up=True,
    )
    chosen, graph = session.run(model, example_inputs)
    with session.watch.phase(LOWERING):
        text = render(explained(graph, chosen, cluster), type(model).__name__)
    write(path, text)
    return chosen
