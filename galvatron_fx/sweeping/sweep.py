"""Plans of captured models for many clusters, budgets, batches and sequences: :func:`sweep`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product

from torch import fx

from cost_models.graph_cost import graph_cost, model_seconds, throughput
from cost_models.optimizer import optimizer_model
from galvatron_fx.captured import Captured
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.device import Device
from galvatron_fx.ir.errors import GalvatronError, InputError
from galvatron_fx.ir.gc_tuning import fewer_collections
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.optimizers import ADAM
from galvatron_fx.ir.plan.plan_table import choice_name, plan_name
from galvatron_fx.ir.plan.search_report import SIMULATED
from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.ir.plan.units import parse_bytes
from galvatron_fx.search_settings import SearchSettings
from galvatron_fx.sweeping.points import SweepPoint
from galvatron_fx.sweeping.result import Sweep
from passes.search.cost_table.cost_table import Pricer
from passes.search.plan_search import search_plan
from passes.search.survey import Survey, Surveyed

__all__ = ["sweep"]

_MTOKEN = 1e6
_HOUR_S, _DAY_S = 3600.0, 86400.0
Told = Callable[[int, int, str], None]


@fewer_collections()
def sweep(
    captured: Captured | Mapping[str, Captured],
    clusters: Iterable[Cluster],
    *,
    budgets: Sequence[str | int | None] = (None,),
    batches: Sequence[int | None] = (None,),
    sequences: Sequence[int | None] = (None,),
    roles: Sequence[str] = ROLES,
    recompute: str | bool = "auto",
    optimizer: str = ADAM,
    offload: Sequence[str] = (),
    host_memory: str | int | None = None,
    fold_gradients: bool = False,
    storage: str | os.PathLike[str] | None = None,
    usd_per_hour: Mapping[str, float] | None = None,
    tokens: float | None = None,
    simulate: bool = False,
    progress: Told | None = None,
) -> Sweep:
    """Plan each model for each cluster, memory budget, batch and sequence, and return all that came of it.

    ``captured``: a captured model, or several by name; ``clusters``: presets, profiles, or such with other links
    (:meth:`galvatron_fx.Cluster.having`); ``budgets``: per device, None for its memory; ``batches``, ``sequences``:
    None for those that were captured; ``roles``, ``recompute``, ``optimizer``, ``offload``,
    ``host_memory``, ``fold_gradients``, ``storage``: as of :func:`galvatron_fx.plan`;
    ``usd_per_hour``: of one device, by its name; ``tokens``: how many a training is to see, for days and dollars;
    ``simulate``: search and simulate each point as :func:`galvatron_fx.plan` does, about half a minute each, instead of
    taking the best by estimates, about a second each; ``progress``: called with the points that are
    done, those in all, and what is done now.

    Points without a plan stand in the result, with the reason. Raises InputError for empty lists and wrong numbers,
    and what a capture raises.
    """
    models = captured if isinstance(captured, Mapping) else {captured.name: captured}
    machines = list(clusters)
    given = {"captured": models, "clusters": machines, "budgets": budgets, "batches": batches, "sequences": sequences}
    for name, values in given.items():
        if not values:
            raise InputError(f"{name} of a sweep is empty: give one or more")
    prices = dict(usd_per_hour or {})
    unknown = sorted(set(prices) - {machine.device.name for machine in machines})
    if unknown or any(not price >= 0 for price in prices.values()):
        raise InputError(
            f"usd_per_hour of {unknown or list(prices)}: give dollars an hour of one device, of at least 0, by the "
            f"names {', '.join(sorted({machine.device.name for machine in machines}))}"
        )
    if tokens is not None and not tokens > 0:
        raise InputError(f"tokens is {tokens!r}: give a number above 0")
    check_arguments(roles=roles, recompute=recompute, offload=offload, fold_gradients=fold_gradients, storage=storage)
    settings = SearchSettings(
        roles=roles,
        recompute=recompute,
        optimizer=optimizer,
        offload=offload,
        host_memory=host_memory,
        fold_gradients=fold_gradients,
        storage=storage,
    )
    for machine in machines:
        settings.check_storage(machine.device)
    if host_memory is not None:
        settings.on(machines[0])  # or every point had the same reason
    sweeper = _Sweeper(settings, machines, [None if b is None else parse_bytes(b) for b in budgets], simulate)
    total = len(models) * len(machines) * len(budgets) * len(batches) * len(sequences)
    points: list[SweepPoint] = []
    for (name, model), batch, sequence in product(models.items(), batches, sequences):

        def tell(what: str, name: str = name) -> None:
            if progress is not None:
                progress(len(points), total, f"{name}: {what}")

        tell("capture")
        with _few_warnings():
            graph = model.graph(batch, sequence)
        for point in sweeper.points(name, graph, tell):
            points.append(_paid(point, prices.get(point.device), tokens))
    if progress is not None:
        progress(total, total, "done")
    return Sweep(tuple(sorted(points, key=_order(list(models), machines))))


@dataclass
class _Sweeper:
    settings: SearchSettings
    clusters: Sequence[Cluster]
    budgets: Sequence[int | None]
    simulate: bool

    def points(self, name: str, graph: fx.GraphModule, tell: Callable[[str], None]) -> Iterator[SweepPoint]:
        """All points of one graph: clusters of one device side by side, large ones first, whose prices serve others."""
        sizes = graph.meta["symbols"]
        parameters = graph_cost(graph).parameters
        pricer: Pricer | None = None
        alone_s: dict[Device, float] = {}
        for cluster in sorted(self.clusters, key=lambda cluster: (cluster.device.name, -cluster.num_devices)):
            tell(f"{cluster.num_devices} {cluster.device.name}")
            if pricer is None:
                model = optimizer_model(self.settings.optimizer)
                pricer = Pricer(graph, cluster, {}, model, coarse=True, folds=self.settings.fold_gradients)
            pricer = pricer.on(cluster)
            survey: Survey | None = None
            if cluster.device not in alone_s:
                alone_s[cluster.device] = model_seconds(graph, cluster.device)
            rates = throughput(graph, cluster, alone_s[cluster.device])
            for budget in self.budgets:
                limit = cluster.device.memory_bytes if budget is None else min(budget, cluster.device.memory_bytes)
                empty = SweepPoint(
                    name,
                    parameters,
                    cluster.device.name,
                    cluster.num_devices,
                    limit,
                    sizes.batch,
                    sizes.sequence or 0,
                )
                try:
                    if self.simulate:
                        yield self._searched(empty, graph, cluster)
                        continue
                    options = self.settings.on(cluster)
                    survey = survey or Survey(pricer, options.roles, options.recompute, options.offload)
                    yield _surveyed(empty, survey, rates)
                except GalvatronError as error:
                    yield replace(empty, reason=str(error).partition("\n")[0])

    def _searched(self, point: SweepPoint, graph: fx.GraphModule, cluster: Cluster) -> SweepPoint:
        settings = replace(self.settings, memory_budget=point.budget_bytes)
        plan = search_plan(graph, cluster, settings.on(cluster))
        assert plan.report is not None
        peak = plan.report.chosen.peak_bytes or 0
        return _known(point, plan_name(plan), SIMULATED, plan.report.simulated_s, peak, plan.throughput)


def _surveyed(point: SweepPoint, survey: Survey, rates: Throughput | None) -> SweepPoint:
    best = survey.best(float(point.budget_bytes))
    if not isinstance(best, Surveyed):
        return replace(point, reason=str(best))
    setting = best.search.configuration
    name = choice_name(
        best.search.strategies(best.choice),
        survey.pricer.cluster.shape,
        setting.num_stages,
        setting.num_microbatches,
        setting.schedule,
    )
    return _known(point, name, best.known, best.step_s, best.peak_bytes, rates)


def _known(
    point: SweepPoint, plan: str, known: str, step_s: float, peak_bytes: int, rates: Throughput | None
) -> SweepPoint:
    return replace(
        point,
        plan=plan,
        known=known,
        step_s=step_s,
        peak_bytes=peak_bytes,
        tokens_per_s=rates.per_s(step_s) if rates is not None else None,
        mfu=rates.mfu(step_s) if rates is not None else None,
    )


def _paid(point: SweepPoint, usd_per_hour: float | None, tokens: float | None) -> SweepPoint:
    """The point with what it costs to train a million tokens, or all of them."""
    if not point.tokens_per_s:
        return point
    days = tokens / point.tokens_per_s / _DAY_S if tokens is not None else None
    if usd_per_hour is None:
        return replace(point, days=days)
    usd_per_token = usd_per_hour * point.devices / _HOUR_S / point.tokens_per_s
    return replace(
        point,
        usd_per_mtoken=usd_per_token * _MTOKEN,
        days=days,
        usd=usd_per_token * tokens if tokens is not None else None,
    )


def _order(models: Sequence[str], clusters: Sequence[Cluster]) -> Callable[[SweepPoint], tuple[int, ...]]:
    devices = list(dict.fromkeys(cluster.device.name for cluster in clusters))
    return lambda point: (
        models.index(point.model),
        devices.index(point.device),
        point.devices,
        -point.budget_bytes,
        point.batch,
        point.sequence,
    )


@contextmanager
def _few_warnings() -> Iterator[None]:
    """Each warning of captures once."""
    with warnings.catch_warnings():
        warnings.simplefilter("once")
        yield
