"""The graph after every pass, as text to read: :func:`explain`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from galvatron_fx.api import capture
from galvatron_fx.arguments import as_plan
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.pass_dump import PassFolder
from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import CAPTURE, LOWERING, Observer
from galvatron_fx.plan_fit import check_budget
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs
from passes.lowering.apply_plan import check_plan, lower, warn_without_sequence
from passes.search.plan_search import search_plan
from passes.search.record import Watch

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

__all__ = ["explain"]


def explain(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    after: str | None = None,
    folder: str | Path | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
    progress: Observer | None = None,
    **options: Any,
) -> str:
    """Return the graph as readable Python after each pass, from capture to the lowered program.

    ``after``: only that pass; ``folder``: also write one file a pass there, as soon as it has run, so that they are
    there if a later one fails; ``plan``: lower by it, or by the one at this path, instead of searching, which leaves
    of ``options`` the budget alone; ``mixed_precision``, ``progress`` and ``options``: those of
    :func:`galvatron_fx.plan`. Raises InputError naming the passes where ``after`` is none of them, and OSError where
    the folder cannot be written.
    """
    check_arguments(model=model, after=after, dump_folder=folder, progress=progress)
    given = as_plan(plan)
    settings = SearchSettings(**options)
    searched = settings.on(cluster)
    if given is not None:
        settings.refuse_beside_a_plan()
    stages: dict[str, str] = {}
    files = PassFolder(Path(folder)) if folder is not None else None

    def note(name: str, graph: fx.GraphModule) -> None:
        stages[name] = readable(graph)
        if files is not None:
            files.write(name, stages[name])

    watch = Watch(progress)
    with watch.phase(CAPTURE):
        graph = capture(model, example_inputs, mixed_precision=mixed_precision, on_pass=note)
    chosen = search_plan(graph, cluster, searched, watch) if given is None else given
    check_plan(chosen, graph, cluster)
    if given is not None:
        warn_without_sequence(given, graph)
        check_budget(given, graph, cluster, settings.budget_bytes)
    with watch.phase(LOWERING):
        lower(graph, chosen, cluster, on_pass=note)
    if after is not None and after not in stages:
        raise InputError(f"no pass is called {after!r}: the passes are {', '.join(stages)}")
    wanted = {after: stages[after]} if after is not None else stages
    return "\n".join(f"# ---- after {name} ----\n{text}" for name, text in wanted.items())
