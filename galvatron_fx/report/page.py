"""A plan explained in one HTML file that needs nothing else: :func:`write_page`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from galvatron_fx.arguments import as_plan, check_model
from galvatron_fx.captured import Captured
from galvatron_fx.forward_only import settled
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_json import write
from galvatron_fx.ir.plan.progress import LOWERING, Observer
from galvatron_fx.pass_insertion import InsertedPasses, pass_control
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.report.explained import explained
from galvatron_fx.report.html import render
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs
from passes.frontend.pipeline import FRONTEND

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["write_page"]


def write_page(
    path: str | Path,
    model: nn.Module | Captured,
    cluster: Cluster,
    example_inputs: ExampleInputs | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    progress: Observer | None = None,
    passes: InsertedPasses | None = None,
    **options: Any,
) -> Plan:
    """Write a page that explains a plan to ``path``, all at once or not at all, and return the plan.

    The page is one HTML file for any browser, without a network: what every axis does for every block, where time and
    memory go, what lost, every collective with its bytes and its reason, and the lowered code. Nothing runs and no
    device is needed; ``model`` may be on the meta device. It tells what other devices and memory would do, too, and
    other batches where ``model`` is captured and no inputs are given. ``plan``: explain it, or the one at this path,
    instead of searching one, which leaves of ``options`` the budget alone, and has no alternatives that a search saw
    unless its report lies beside it; ``mixed_precision`` (default: the given plan's), ``progress``, ``passes``,
    ``batch``, ``sequence`` and ``options``:
    those of :func:`galvatron_fx.plan`, also for a captured ``model``.

    Raises what :func:`galvatron_fx.plan` raises, PlanError where ``plan`` does not fit model, batch or mesh, and
    OSError.
    """
    check_model(model, mixed_precision=mixed_precision, passes=passes)
    check_arguments(batch=batch, sequence=sequence, progress=progress)
    given = as_plan(plan)
    policy = mixed_precision if given is None or mixed_precision is not None else given.mixed_precision
    session = PlanningSession(
        cluster,
        settled(SearchSettings(**options), model, given),
        given,
        checked_policy(policy),
        pass_control(None, passes, [FRONTEND]),
        progress,
        simulate_runners_up=True,
    )

    def resized(batch: int) -> fx.GraphModule | None:
        return model.graph(batch, sequence) if isinstance(model, Captured) and example_inputs is None else None

    chosen, graph = session.run(model, example_inputs, batch, sequence)
    with session.watch.phase(LOWERING):
        name = model.name if isinstance(model, Captured) else type(model).__name__
        text = render(explained(graph, chosen, cluster, resized, session.settings.roles), name)
    write(path, text)
    return chosen
