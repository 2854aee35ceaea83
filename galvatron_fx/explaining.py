"""The graph after every pass, as text to read: :func:`explain`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import fx, nn

from galvatron_fx.api import capture, lower, search_options
from galvatron_fx.errors import InputError
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.plan import Plan
from galvatron_fx.ir.printer import readable
from passes.capture import ExampleInputs
from passes.find_blocks import fingerprints, graph_fingerprint
from passes.search.plan_search import search_plan

__all__ = ["explain"]


def explain(
    model: nn.Module,
    cluster: Cluster,
    example_inputs: ExampleInputs,
    *,
    plan: Plan | None = None,
    after: str | None = None,
    folder: str | Path | None = None,
    **options: Any,
) -> str:
    """Return the graph as readable Python after each pass, from capture to the lowered program.

    ``after``: only that pass; ``folder``: also write one file a pass there; ``plan``: lower by it instead of searching;
    ``options``: those of :func:`galvatron_fx.plan`. Raises InputError naming the passes where ``after`` is none of
    them. If a pass fails, the graphs until then are written before the error is raised.
    """
    stages: dict[str, str] = {}

    def note(name: str, graph: fx.GraphModule) -> None:
        stages[name] = readable(graph)

    try:
        graph = capture(model, example_inputs, on_pass=note)
        if plan is None:
            plan = search_plan(graph, cluster, search_options(cluster, **options))
        plan.check(graph_fingerprint(graph), fingerprints(graph), cluster.shape)
        lower(graph, plan, cluster, on_pass=note)
    finally:
        if folder is not None:
            _write(stages, Path(folder))
    if after is not None and after not in stages:
        raise InputError(f"no pass is called {after!r}: the passes are {', '.join(stages)}")
    wanted = {after: stages[after]} if after is not None else stages
    return "\n".join(f"# ---- after {name} ----\n{text}" for name, text in wanted.items())


def _write(stages: Mapping[str, str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for index, (name, text) in enumerate(stages.items()):
        (folder / f"{index:02d}_{name}.py").write_text(text)
