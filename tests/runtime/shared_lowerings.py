"""Plans that all ranks of a launch lower alike, lowered before the fork, each for one compilation of every rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

import galvatron_fx
from galvatron_fx import compiling
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.graph.pass_pipeline import PassControl
from galvatron_fx.ir.plan.plan import Plan
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered
from tests.ir.cluster.test_cluster import described

Compiled = tuple[nn.Module, Any, Sequence[Plan]]
"""A model, a batch, and the plans by which each rank compiles it, as often as it does."""

_lower = compiling.lower
_lowered: defaultdict[tuple[Any, ...], list[tuple[Lowered | LoweredStages, dict[Any, Any]]]] = defaultdict(list)


def compile_before_the_fork(sizes: Sequence[int], compiled: Iterable[Compiled], forward_only: bool = False) -> None:
    """Capture and lower what ranks compile by :func:`galvatron_fx.compile` on a CPU mesh of ``sizes``, each model as it
    is when it comes: one may come twice, switched otherwise.
    """
    cluster = described(tuple(sizes))
    for model, inputs, plans in compiled:
        graph = galvatron_fx.capture(model, inputs, forward_only=forward_only)
        for plan in plans:
            lower_before_the_fork(graph, plan.with_forward_only(forward_only), cluster)


def lower_before_the_fork(graph: fx.GraphModule, plan: Plan, cluster: Cluster) -> None:
    """Lower ``plan``, for one compilation of it on ``graph`` in each fork of this process.

    ``cluster``: that of the compilation, which ``tests.ir.cluster.test_cluster.described`` has before there are ranks.
    """
    compiling.lower = _lower_or_take
    cache: dict[Any, Any] = {}
    _lowered[_key(graph, plan, cluster)].append((_lower(graph, plan, cluster, cache), cache))


def _lower_or_take(
    graph: fx.GraphModule,
    plan: Plan,
    cluster: Cluster,
    cache: dict[Any, Any] | None = None,
    fixed: Mapping[str, Any] | None = None,
    control: PassControl | None = None,
    training: bool = True,
) -> Lowered | LoweredStages:
    key = _key(graph, plan, cluster)
    as_then = training and not fixed and (control is None or control == PassControl())
    if as_then and _lowered[key]:
        lowered, solved = _lowered[key].pop()  # the module changes it as its own
        if cache is not None:
            cache.update(solved)
        return lowered
    return _lower(graph, plan, cluster, cache, fixed, control, training)


def _key(graph: fx.GraphModule, plan: Plan, cluster: Cluster) -> tuple[Any, ...]:
    return id(graph), replace(plan, notes=()).digest(), cluster.to_json()
