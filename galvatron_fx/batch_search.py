"""The global batch of most throughput, as Galvatron searches it: batches grow until nothing fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from galvatron_fx.api import plan
from galvatron_fx.arguments import check_model
from galvatron_fx.captured import Captured
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.errors import InputError, PlanError
from galvatron_fx.ir.plan.arguments import check_arguments
from galvatron_fx.ir.plan.budget_error import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.progress import Observer, Progress
from galvatron_fx.search_settings import SearchSettings
from passes.frontend.capture.capture import ExampleInputs

__all__ = ["plan_batch"]

_RISES = 1.01  # a batch whose throughput is less than this times the best before it is no better
_PATIENCE = 2  # doublings in a row that are no better, after which larger batches are not tried
_CLOSE = 8  # batches nearer to the best than this part of it are not told apart
_SIZES = ("batch", "sequence")  # which are searched, or those of the inputs
_OF_CAPTURE = ("mixed_precision", "on_pass", "passes", "batch_dim", "forward_only")
_OF_REPORT = ("simulate_runners_up",)
_LEAST_SHARED = 2  # samples from which batches share a capture: one alone is broadcast
_MOST_TOO_SMALL = 16  # samples a device up to which batches may be too small for roles and pins


def plan_batch(
    model: nn.Module | Captured,
    cluster: Cluster,
    inputs_of: Callable[[int], ExampleInputs],
    *,
    batches: Sequence[int] | None = None,
    progress: Observer | None = None,
    **options: Any,
) -> tuple[int, Plan]:
    """Search the global batch, and its plan, that train the most samples a second within the memory budget.

    ``inputs_of``: gives the example inputs of a global batch of so many samples, real or meta tensors, [batch, ...];
    ``batches``: the batches to try, all of them. By default these are the number of devices and its doubles, until
    nothing fits or throughput has not risen by a hundredth twice in a row, then batches between the best and those
    beside it, down to an eighth of it; halves of the number of devices where that does not fit or is best.
    ``progress``: called with every :class:`galvatron_fx.ir.plan.progress.Progress`, which says its batch;
    ``options``: those of :func:`galvatron_fx.plan`; ``search_seconds`` are those of each batch.

    Micro-batches, with which larger batches fit, are searched only where ``pipeline`` is among the roles.
    Batches that are too small or cannot be divided for the roles and pins are left out. Raises InputError for batches
    that are no positive numbers and for inputs of another batch than asked for, BudgetError (of the smallest batch)
    where none fits, and what :func:`galvatron_fx.plan` raises; PlanError if it refuses every batch.

    The model is captured once, as of :class:`galvatron_fx.Captured`, or is captured already.
    """
    of_capture = {name: value for name, value in options.items() if name in _OF_CAPTURE}
    check_model(model, **of_capture)
    check_arguments(inputs_of=inputs_of, batches=batches, progress=progress)
    _check_names(options)

    def plan_of(batch: int) -> Plan:
        def tell(moment: Progress, /) -> None:
            if progress is not None:
                progress(replace(moment, batch=batch))

        inputs = _inputs(inputs_of, batch)
        if batch < _LEAST_SHARED:
            return plan(model, cluster, inputs, progress=tell, **options)
        return plan(captures.of(inputs), cluster, inputs, progress=tell, **searched)

    searched = {name: value for name, value in options.items() if name not in _OF_CAPTURE}
    captures = _Captures(model, of_capture)
    # What is wrong with the options alone is said before anything is traced.
    SearchSettings(**{name: value for name, value in searched.items() if name not in _OF_REPORT}).on(cluster)
    tried = _Tried(plan_of)
    if batches is None:
        _walk(tried, cluster.num_devices)
    else:
        for batch in _checked(batches):
            tried.rate(batch)
    return tried.result()


@dataclass
class _Captures:
    """One capture for all batches, of the inputs that come first."""

    model: nn.Module | Captured
    options: dict[str, Any]

    def of(self, inputs: ExampleInputs) -> Captured:
        """The capture, which is traced when a graph of it is asked for."""
        if not isinstance(self.model, Captured):
            self.model = Captured(self.model, inputs, **self.options)
        return self.model


@dataclass
class _Tried:
    """Throughput by batch, in samples a second, 0 where there is no plan; and the best plan so far."""

    plan_of: Callable[[int], Plan]
    rates: dict[int, float] = field(default_factory=dict)
    refusals: dict[int, PlanError | BudgetError] = field(default_factory=dict)
    batch: int = 0
    plan: Plan | None = None

    @property
    def best_rate(self) -> float:
        """Samples a second of the best batch, 0 if there is none."""
        return self.rates[self.batch] if self.batch else 0.0

    def rate(self, batch: int) -> float:
        """Samples a second of a batch, searched once."""
        if batch not in self.rates:
            self.rates[batch] = self._searched(batch)
        return self.rates[batch]

    def _searched(self, batch: int) -> float:
        try:
            candidate = self.plan_of(batch)
        except (PlanError, BudgetError) as error:
            self.refusals[batch] = error.with_traceback(None)  # frames would keep the batch's graph
            return 0.0
        rate = batch / candidate.step_time_s
        if rate > self.best_rate:
            self.rates[batch] = rate
            self.batch, self.plan = batch, candidate
        return rate

    def is_refused(self, batch: int) -> bool:
        """Whether roles and pins, rather than memory, rule the batch out."""
        self.rate(batch)
        return isinstance(self.refusals.get(batch), PlanError)

    def result(self) -> tuple[int, Plan]:
        """Return the best batch and plan; raises the smallest batch's BudgetError, else the largest one's PlanError."""
        if self.plan is not None:
            return self.batch, self.plan
        too_large = [batch for batch, error in self.refusals.items() if isinstance(error, BudgetError)]
        raise self.refusals[min(too_large) if too_large else max(self.refusals)]


def _walk(tried: _Tried, devices: int) -> None:
    """Double the batch from the number of devices, halve it where that is better, then look between."""
    batch = devices
    while tried.is_refused(batch) and batch < _MOST_TOO_SMALL * devices:
        batch *= 2
    if tried.is_refused(batch):
        return
    less = batch
    while not tried.rate(less) and less > 1:
        less //= 2
    worse = 0
    best = 0.0
    while worse < _PATIENCE and tried.rate(batch):
        worse = 0 if tried.rate(batch) > _RISES * best else worse + 1
        best = max(best, tried.rate(batch))
        batch *= 2
    while tried.batch > 1 and tried.batch == min(tried.rates):
        tried.rate(tried.batch // 2)
    if tried.batch:
        _look_between(tried, devices)


def _look_between(tried: _Tried, devices: int) -> None:
    """Halve the gaps on both sides of the best batch until they are small."""
    while True:
        best = tried.batch
        above = min((batch for batch in tried.rates if batch > best), default=best)
        below = max((batch for batch in tried.rates if batch < best), default=best)
        nearer = [middle for other in (above, below) if (middle := _middle(best, other, devices)) not in tried.rates]
        if not nearer:
            return
        tried.rate(nearer[0])


def _middle(best: int, other: int, devices: int) -> int:
    """A batch halfway, which every device can share in where the batches are that large; ``best`` if too near."""
    step = devices if min(best, other) >= devices else 1
    middle = (best + other) // 2 // step * step
    return middle if abs(middle - best) * _CLOSE >= best else best


def _check_names(options: dict[str, Any]) -> None:
    """Refuse options that :func:`galvatron_fx.plan` does not have, as a call of it would."""
    named = (name for name, option in signature(plan).parameters.items() if option.kind is option.KEYWORD_ONLY)
    known = [name for name in named if name not in _SIZES]
    for name in options:
        if name not in known:
            raise TypeError(f"plan_batch() has no option {name!r}: the options are {', '.join(known)}")


def _checked(batches: Sequence[int]) -> list[int]:
    wrong = [batch for batch in batches if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1]
    if wrong or not batches:
        raise InputError(f"batches are {list(batches)!r}: give numbers of samples from 1, or None to search them")
    return sorted(set(batches))


def _inputs(inputs_of: Callable[[int], ExampleInputs], batch: int) -> ExampleInputs:
    inputs = inputs_of(batch)
    shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, torch.Tensor)]
    if not any(shape[:1] == (batch,) for shape in shapes):
        raise InputError(
            f"inputs_of({batch}) gives no tensor of {batch} samples but shapes {shapes}: give inputs whose first size "
            f"is the batch it is called with"
        )
    return inputs
