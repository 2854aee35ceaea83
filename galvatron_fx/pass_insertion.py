"""Passes of the user's own, between those of the compiler: what ``passes=`` of :func:`galvatron_fx.compile` takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import TypeAlias

from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.graph.pass_dump import OnPass, dumping
from galvatron_fx.ir.graph.pass_pipeline import GraphPass, PassControl, PassPipeline
from galvatron_fx.ir.plan.arguments import check_arguments, shown
from passes.frontend.pipeline import FRONTEND
from passes.lowering.communication.pipeline import COMMUNICATION
from passes.lowering.lower_stages import STAGING
from passes.lowering.lower_step import LOWERING
from passes.sharding.shard_graph import SHARDING

__all__ = ["LOWERING_PIPELINES", "PIPELINES", "InsertedPasses", "describe_passes", "pass_control", "require_all_ran"]

InsertedPasses: TypeAlias = Mapping[str, GraphPass | Sequence[GraphPass]]
"""Passes to run behind the pass of a name."""

LOWERING_PIPELINES: tuple[PassPipeline, ...] = (SHARDING, LOWERING, STAGING, COMMUNICATION)
PIPELINES: tuple[PassPipeline, ...] = (FRONTEND, *LOWERING_PIPELINES)
"""All pipelines, in the order of compiling."""


def pass_control(
    on_pass: OnPass | None, passes: InsertedPasses | None, pipelines: Sequence[PassPipeline] = PIPELINES
) -> PassControl:
    """What one compilation asks of ``pipelines``: ``on_pass``, the dumps that the environment asks for, and ``passes``.

    Raises InputError for names of no pass, and for what is no pass.
    """
    check_arguments(on_pass=on_pass)
    if passes is not None and not isinstance(passes, Mapping):
        raise InputError(f"passes is {shown(passes)}: give a dict from the name of a pass to those to run behind it")
    inserted: dict[str, tuple[GraphPass, ...]] = {}
    for name, given in (passes or {}).items():
        _check_name(name, pipelines)
        inserted[name] = tuple(given) if isinstance(given, Sequence) else (given,)
        for step in inserted[name]:
            if isinstance(step, type) or not callable(getattr(step, "run", None)):
                raise InputError(
                    f"passes[{name!r}] is {shown(step)}: give an object whose run(graph) returns the graph"
                )
    return PassControl(dumping(on_pass), inserted)


def describe_passes(control: PassControl) -> list[str]:
    """A line for each inserted pass, equal on all ranks where they are given equal passes."""
    return [f"{_text(step)} behind {name}" for name, steps in control.inserted.items() for step in steps]


def require_all_ran(control: PassControl) -> None:
    """Raise PlanError where a pass was to be inserted behind one that this plan does not need."""
    ran = {run.name.partition(".")[0] for run in control.runs}
    for name, steps in control.inserted.items():
        if name not in ran:
            raise PlanError(
                f"passes[{name!r}]: this plan has no such pass, so {_text(steps[0])} did not run: insert it behind one "
                f"that runs under every plan (ShardGraph, Rematerialize, BundleCollectives and those before the search)"
            )


def _check_name(name: str, pipelines: Sequence[PassPipeline]) -> None:
    allowed = list(dict.fromkeys(known for pipeline in pipelines for known in pipeline.names))
    if name in allowed:
        return
    if name in FRONTEND.names:
        raise InputError(
            f"passes[{name!r}] runs when a model is captured: give it to Captured(model, inputs, passes=...)"
        )
    if any(name in pipeline.names for pipeline in PIPELINES):
        raise InputError(
            f"passes[{name!r}] runs when a plan is applied: give it to compile or explain; before the search there are "
            f"{', '.join(allowed)}"
        )
    raise InputError(
        f"passes[{name!r}]: no pass is called so, or none can run behind it (costs are annotated last, of the nodes as "
        f"they are): use {', '.join(allowed)}"
    )


def _text(step: GraphPass) -> str:
    """A pass with its options; one that is no dataclass may print its address, which differs on every rank."""
    return repr(step) if is_dataclass(step) else type(step).__name__
