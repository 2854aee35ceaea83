"""Plans that people know by name: what a search holds its own against."""

from __future__ import annotations

from collections.abc import Callable

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.search.open_configurations import OpenConfigurations
from passes.search.solvers.stage_search import StageSearch


def known_plans(opened: OpenConfigurations, limit: float) -> dict[str, StageSearch]:
    """Plans that people know, by name: the search among those strategies that such a plan has in all blocks.

    Tensor parallelism is that of the axes in a node. Of stages and micro-batches what is best by estimates; a plan
    without stages has one micro-batch.
    """
    inside = _axes_in_nodes(opened.pricer.cluster)

    def roles_are(near: tuple[str, ...], far: str) -> Callable[[Strategy], bool]:
        return lambda strategy: all(
            role in near if is_near else role == far
            for role, is_near in zip(strategy.roles, inside, strict=True)
            if is_near is not None
        )

    tensor = ("tensor", "tensor_sequence")
    wanted = {
        "DDP": roles_are(("data",), "data"),
        "FSDP": roles_are(("zero",), "zero"),
        "TP + FSDP": roles_are(tensor, "zero"),
        "TP + PP": roles_are(tensor, PIPELINE),
    }
    usual = [search for search in opened.searches if search.num_ranks > 1 or search.configuration.is_trivial]
    if all(is_near is not False for is_near in inside):
        # One node, one axis: there is nothing beside tensor parallelism.
        wanted = {name: fits for name, fits in wanted.items() if not name.startswith("TP")} | {
            "TP": wanted["TP + FSDP"]
        }
    plans = {}
    for name, fits in wanted.items():
        searches = [among for among in (search.among(fits) for search in usual) if among is not None]
        if searches:
            plans[name] = min(searches, key=lambda search: (search.estimate_s(limit), search.least_bytes))
    return plans


def _axes_in_nodes(cluster: Cluster) -> list[bool | None]:
    """Whether an axis lies within a node: is one of the fastest, or, of equally fast ones, not the outermost.

    None for axes of one rank.
    """
    real = [axis for axis in cluster.axes if axis.size > 1]
    fastest = max((axis.bandwidth_bytes_per_s for axis in real), default=0.0)
    alike = len(real) > 1 and all(axis.bandwidth_bytes_per_s == fastest for axis in real)
    return [
        None if axis.size == 1 else axis.bandwidth_bytes_per_s == fastest and not (alike and axis is real[0])
        for axis in cluster.axes
    ]
