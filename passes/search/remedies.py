"""What would take less memory where no plan fits: options that were not allowed, with the plan that takes least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import fx

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.plan.budget_error import BudgetError, Remedy
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import OFFLOADABLE, ROLES
from galvatron_fx.ir.plan.text_table import render
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from passes.search.plan_search import SearchOptions, search_plan

__all__ = ["remedies", "with_remedies"]

_HELPS = 0.99  # times the least bytes: what saves less is no remedy
_MORE_MICROBATCHES = (2, 4, 8)  # times as many as were pinned
_NOTHING_FITS = 1  # byte: what takes least is looked for at once

Changes = Mapping[str, Any]
"""Options by the names that users give them."""


def with_remedies(error: BudgetError, graph: fx.GraphModule, cluster: Cluster, options: SearchOptions) -> BudgetError:
    """Return the ``error`` of a search with these arguments, with what would help in its message; itself where nothing
    does, and where the search's seconds are limited.
    """
    found = remedies(error, graph, cluster, options) if options.search_seconds is None else ()
    if not found:
        return error
    budget = options.memory_budget_bytes
    rows = [
        (
            remedy.text,
            format_bytes(remedy.least_bytes),
            format_seconds(remedy.step_s),
            "yes" if remedy.least_bytes <= budget else "no",
        )
        for remedy in found
    ]
    table = render((f"with ... (budget {format_bytes(budget)})", "needs", "step, at most", "fits"), rows, 1)
    step = f" in {format_seconds(error.plan.step_time_s)} a step" if error.plan is not None else ""
    least = f"{format_bytes(error.least_bytes)}{step}"
    lines = "\n".join(table)
    text = f"{error}\nWhat takes less than {least}, by the plan that takes least of each:\n{lines}"
    return BudgetError(text, least_bytes=error.least_bytes, plan=error.plan, remedies=found)


def remedies(error: BudgetError, graph: fx.GraphModule, cluster: Cluster, options: SearchOptions) -> tuple[Remedy, ...]:
    """Return what takes less than the ``error`` of a search with these arguments says, what fits first: one option
    more, up to the first with which a plan fits, or, where none of them is enough, all that help.
    """
    least, budget = _Least(graph, cluster, options, error.plan), options.memory_budget_bytes
    helping: list[Remedy] = []
    for found in least.with_one_more() if not signature(graph).forward_only else ():
        if found is not None and found.least_bytes < _HELPS * error.least_bytes:
            helping.append(found)
            if found.least_bytes <= budget:  # each is a search: who waits for an answer has one
                break
    else:
        lowest = min((each.least_bytes for each in helping), default=0)
        together = least.remedy(_joined([each.changes for each in helping])) if len(helping) > 1 else None
        helping += [together] if together is not None and together.least_bytes < lowest else []
    return tuple(sorted(helping, key=lambda each: (each.least_bytes > budget, each.step_s)))


@dataclass(frozen=True)
class _Least:
    """Looks for the plan of ``graph`` that takes least memory where options are changed; ``leanest``, if known, is the
    one where they are not.
    """

    graph: fx.GraphModule
    cluster: Cluster
    options: SearchOptions
    leanest: Plan | None

    def with_one_more(self) -> Iterator[Remedy | None]:
        """The plans with one option more, those first that keep a step simple."""
        yield from map(self.remedy, _recomputing(self.options))
        yield self.of_microbatches()
        yield from map(self.remedy, _sharing(self.options, self.cluster, self.leanest))

    def remedy(self, changes: Changes) -> Remedy | None:
        """The plan with ``changes``; None where these cannot be."""
        options = replace(self._changed(changes), memory_budget_bytes=_NOTHING_FITS, simulate_runners_up=False)
        try:
            search_plan(self.graph, self.cluster, options)
        except BudgetError as error:
            step_s = inf if error.plan is None else error.plan.step_time_s
            return Remedy(changes, error.least_bytes, step_s)
        except GalvatronError:
            pass
        return None

    def of_microbatches(self) -> Remedy | None:
        """The fewest more micro-batches than were pinned that fit, else the most that were tried."""
        pinned, last = self.options.pins.num_microbatches, None
        for times in _MORE_MICROBATCHES if pinned is not None else ():
            tried = self.remedy({"num_microbatches": times * (pinned or 1)})
            if tried is None or (last is not None and tried.least_bytes >= last.least_bytes):
                break
            last = tried
            if tried.least_bytes <= self.options.memory_budget_bytes:
                break
        return last

    def _changed(self, changes: Changes) -> SearchOptions:
        options, device = self.options, self.cluster.device
        offload = options.offload
        if "offload" in changes and not offload.what:
            offload = replace(offload, host_bytes=float(device.host_memory_bytes or inf))
        offload = replace(offload, what=changes.get("offload", offload.what))
        pins = replace(options.pins, num_microbatches=changes.get("num_microbatches", options.pins.num_microbatches))
        plain = {name: changes[name] for name in ("recompute", "fold_gradients", "roles") if name in changes}
        return replace(options, offload=offload, pins=pins, **plain)


def _recomputing(options: SearchOptions) -> Iterator[Changes]:
    if options.recompute is False:
        yield {"recompute": "auto"}


def _sharing(options: SearchOptions, cluster: Cluster, leanest: Plan | None) -> Iterator[Changes]:
    """Where else parameters, gradients and states may be."""
    if "zero" not in options.roles and cluster.num_devices > 1:
        yield {"roles": tuple(role for role in ROLES if role in (*options.roles, "zero"))}
    runs_once = leanest is not None and leanest.pipelining.is_trivial  # as folding has to
    if not options.fold_gradients and runs_once:
        yield {"fold_gradients": True}
    has = options.offload.what
    for what in OFFLOADABLE if cluster.device.host_bandwidth_bytes_per_s else ():
        if what not in has:
            yield {"offload": _ordered((*has, what))}


def _joined(several: list[Changes]) -> Changes:
    offload = {what for changes in several for what in changes.get("offload", ())}
    together = {name: value for changes in several for name, value in changes.items()}
    if "fold_gradients" in together:
        together.pop("num_microbatches", None)  # gradients of one micro-batch alone are folded
    return {**together, "offload": _ordered(offload)} if offload else together


def _ordered(what: Any) -> tuple[str, ...]:
    return tuple(each for each in OFFLOADABLE if each in what)
