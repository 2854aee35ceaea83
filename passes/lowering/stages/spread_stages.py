"""Stages that all pipeline ranks compute together: which they are, and what they cannot share with others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.collectives import COLLECTIVES, RANK_LOCAL, RING_STEPS
from galvatron_fx.ir.graph.layout import Layout
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy, original_name
from passes.lowering.stages.split_stages import Stage

_REMEDY = "use vocabulary='ends', which leaves embedding and head to the first and the last stage"


def spread_stages(strategies: Sequence[Strategy], first_blocks: Sequence[int]) -> frozenset[int]:
    """Stages whose blocks give another role to the axes that hold stages to other blocks."""
    holding = {axis for strategy in strategies for axis, role in enumerate(strategy.roles) if role == PIPELINE}
    return frozenset(
        stage
        for stage, first in enumerate(first_blocks)
        if any(strategies[first].roles[axis] != PIPELINE for axis in holding)
    )


def check_copies(graph: fx.GraphModule, stage_of: Sequence[int], spread: frozenset[int]) -> None:
    """Raise PlanError where a stage of one rank uses a parameter that all ranks have parts of."""
    takers: dict[str, set[int]] = {}
    for port, node in ports(graph):
        if port.kind == "param":
            calls = (user for user in node.users if user.op == "call_function")
            takers.setdefault(original_name(port.name), set()).update(stage_of[max(meta_of(n).block, 0)] for n in calls)
    for name, stages in takers.items():
        if stages & spread and stages - spread:
            raise PlanError(
                f"parameter '{name}' is split over all pipeline ranks, for stage {min(stages & spread)}, and stage "
                f"{min(stages - spread)}, which is on one of them, uses all of it: untie the two, or {_REMEDY}"
            )


def check_alone(stages: Sequence[Stage], placed: Layout) -> None:
    """Raise PlanError where a stage of one rank would communicate with other pipeline ranks."""
    column = next((i for i, column in enumerate(placed.merged_axes) if PIPELINE in column.roles), None)
    for stage in stages:
        for name, task in stage.tasks.items():
            for node in task.graph.graph.nodes:
                moves = node.target in COLLECTIVES or node.target in RANK_LOCAL or node.target in RING_STEPS
                if moves and node.args[-1] == column:
                    raise PlanError(
                        f"'{node.name}' of stage {stage.index} ({name}) would need parts of a value that embedding or "
                        f"head split over all pipeline ranks, which are not there at that time: {_REMEDY}"
                    )
