"""A plan explained in one HTML file that needs nothing else: :func:`write_page`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from galvatron_fx.api import capture
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_json import write
from galvatron_fx.ir.plan.progress import CAPTURE, LOWERING, Observer
from galvatron_fx.plan_fit import check_budget
from galvatron_fx.report.explained import explained
from galvatron_fx.report.html import render
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs
from passes.lowering.apply_plan import check_plan
from passes.search.plan_search import search_plan
from passes.search.record import Watch

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
    watch = Watch(progress)
    settings = SearchSettings(**options)
    searched = settings.on(cluster)
    if plan is not None:
        settings.refuse_beside_a_plan()
    policy = mixed_precision if plan is None or mixed_precision is not None else plan.mixed_precision
    with watch.phase(CAPTURE):
        graph = capture(model, example_inputs, mixed_precision=policy)
    chosen = plan or search_plan(graph, cluster, searched, watch)
    check_plan(chosen, graph, cluster)
    if plan is not None:
        check_budget(plan, graph, cluster, settings.budget_bytes)
    with watch.phase(LOWERING):
        text = render(explained(graph, chosen, cluster), type(model).__name__)
    write(path, text)
    return chosen
