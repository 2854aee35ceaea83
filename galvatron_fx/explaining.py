"""The graph after every pass, as text to read: :func:`explain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from galvatron_fx.arguments import as_plan, check_model
from galvatron_fx.captured import Captured
from galvatron_fx.forward_only import settled
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.pass_dump import PassFolder
from galvatron_fx.ir.graph.precision import checked_policy
from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import Observer
from galvatron_fx.pass_insertion import LOWERING_PIPELINES, PIPELINES, InsertedPasses, pass_control, require_all_ran
from galvatron_fx.planning_session import PlanningSession
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["explain"]


def explain(
    model: nn.Module | Captured,
    cluster: Cluster,
    example_inputs: ExampleInputs | None = None,
    *,
    batch: int | None = None,
    sequence: int | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    after: str | None = None,
    folder: str | Path | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    progress: Observer | None = None,
    passes: InsertedPasses | None = None,
    **options: Any,
) -> str:
    """Return the graph as readable Python after each pass, from capture to the lowered program.

    ``model``, ``batch``, ``sequence``: as of :func:`galvatron_fx.plan`, a captured model too, which has its own
    ``mixed_precision`` and passes of the front end;
    ``after``: only that pass; ``folder``: also write one file a pass there, as soon as it has run, so that they are
    there if a later one fails; ``plan``: lower by it, or by the one at this path, instead of searching, which leaves
    of ``options`` the budget alone; ``mixed_precision``, ``progress``, ``passes`` and ``options``: those of
    :func:`galvatron_fx.compile`. Raises InputError naming the passes where ``after`` is none of them, and OSError where
    the folder cannot be written.
    """
    check_model(model, mixed_precision=mixed_precision)
    given = as_plan(plan)
    check_arguments(batch=batch, sequence=sequence, after=after, dump_folder=folder, progress=progress)
    stages: dict[str, str] = {}
    files = PassFolder(Path(folder)) if folder is not None else None

    def note(name: str, graph: fx.GraphModule) -> None:
        stages[name] = readable(graph)
        if files is not None:
            files.write(name, stages[name])

    control = pass_control(note, passes, LOWERING_PIPELINES if isinstance(model, Captured) else PIPELINES)
    settings = settled(SearchSettings(**options), model, given)
    session = PlanningSession(cluster, settings, given, checked_policy(mixed_precision), control, progress)
    shown = model.shown_to(note) if isinstance(model, Captured) else model
    chosen, graph = session.run(shown, example_inputs, batch, sequence)
    session.lower(graph, chosen)
    require_all_ran(control)
    if after is not None and after not in stages:
        raise InputError(f"no pass is called {after!r}: the passes are {', '.join(stages)}")
    wanted = {after: stages[after]} if after is not None else stages
    return "\n".join(f"# ---- after {name} ----\n{text}" for name, text in wanted.items())
