"""What the step would be with other devices, memory or samples: by the prices of a survey, from the same capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from cost_models.graph_cost import throughput
from cost_models.optimizer import optimizer_model
from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.plan_table import choice_name
from galvatron_fx.ir.plan.units import format_bytes
from passes.search.cost_table.cost_table import Pricer
from passes.search.survey import Survey, Surveyed

__all__ = ["WhatIf", "what_ifs"]


@dataclass(frozen=True)
class WhatIf:
    """The best plan by estimates under another condition, ``name``; ``reason``: why there is none."""

    name: str
    step_s: float | None = None
    rate: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    plan: str = ""
    reason: str = ""


def what_ifs(
    graph: fx.GraphModule,
    plan: Plan,
    cluster: Cluster,
    roles: tuple[str, ...],
    resized: Callable[[int], fx.GraphModule | None],
) -> Iterator[WhatIf]:
    """As it is, with half and twice the memory and devices, and with half and twice the batch.

    ``resized``: the graph at another batch, None where it cannot be had. All are estimates of one kind, so that they
    compare; the plan itself was simulated.
    """
    budget = plan.memory_budget_bytes or cluster.device.memory_bytes
    pricer = Pricer(graph, cluster, {}, optimizer_model(plan.optimizer)).on(cluster)
    yield _surveyed("as it is", pricer, budget, roles)
    for factor, name in ((0.5, "half the memory budget"), (2.0, "twice the memory budget")):
        yield _surveyed(f"{name}, {format_bytes(budget * factor)}", pricer, int(budget * factor), roles)
    for other in (_halved(cluster), _doubled(cluster)):
        if other is not None:
            yield _surveyed(f"{other.num_devices} devices", pricer.on(other), budget, roles)
    batch = pricer.batch
    for size in (batch // 2, 2 * batch):
        name = f"a batch of {size:,}"
        try:
            at_size = resized(size) if size > 1 else None
        except GalvatronError as error:
            yield WhatIf(name, reason=str(error).partition("\n")[0])
            continue
        if at_size is not None:
            yield _surveyed(name, Pricer(at_size, cluster, {}, optimizer_model(plan.optimizer)), budget, roles)


def _surveyed(name: str, pricer: Pricer, budget: int, roles: tuple[str, ...]) -> WhatIf:
    try:
        best = Survey(pricer, roles, "auto").best(float(budget))
    except GalvatronError as error:
        return WhatIf(name, reason=str(error).partition("\n")[0])
    if not isinstance(best, Surveyed):
        return WhatIf(name, reason=str(best))
    rates, setting = throughput(pricer.graph, pricer.cluster), best.search.configuration
    return WhatIf(
        name,
        best.step_s,
        rates.per_s(best.step_s) if rates is not None else None,
        rates.mfu(best.step_s) if rates is not None else None,
        best.peak_bytes,
        choice_name(
            best.search.strategies(best.choice),
            pricer.cluster.shape,
            setting.num_stages,
            setting.num_microbatches,
            setting.schedule,
        ),
    )


def _doubled(cluster: Cluster) -> Cluster | None:
    """Twice the devices, over links as slow as the slowest there are; None for unlike nodes."""
    if cluster.nodes is not None:
        return None
    slowest = min(cluster.axes, key=lambda axis: axis.bandwidth_bytes_per_s)
    added = Axis("doubled", 2, slowest.latency_s, slowest.bandwidth_bytes_per_s)
    return replace(cluster, axes=(added, *cluster.axes))


def _halved(cluster: Cluster) -> Cluster | None:
    """Half the devices, without an outermost axis of two; None where there is none, and for unlike nodes."""
    if cluster.nodes is not None or cluster.axes[0].size != 2 or len(cluster.axes) == 1:
        return None
    return replace(cluster, axes=cluster.axes[1:])
