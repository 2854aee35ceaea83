"""The exact search between blocks: a strategy for each block, the fastest chain that fits a memory budget.

Dynamic programming whose state is, for every strategy of the current block, the set of Pareto-optimal (time, memory)
pairs of the chains that end in it; memory is counted in bytes, not in bins. A label is dropped when it is dominated,
when no completion fits the budget, or when its best completion cannot beat a known solution. The last bound is
Lagrangian: with a price of ``price_s_per_byte`` on memory, every completion that fits takes at least

    time + price * memory + to_go(price) - price * budget,

where ``to_go`` is the cheapest completion at that price, which one backward pass gives (Handler & Zang 1980, for
constrained shortest paths). So labels stay few and the answer stays exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from galvatron_fx.ir.arrays import Bools, Floats, Ints
from galvatron_fx.ir.errors import InputError

_PRICE_STEPS = 64  # breakpoints of the dual; a handful is usual
_RELAXED_PRICES = 25
_SLACK = 1e-12  # relative: labels that tie with the incumbent are of no use
_MANY_LABELS = 4096  # from which on those are thinned out that differ by less than the gap allows
_THINNED = 0.25  # of the gap, which all thinning together may cost


@dataclass(frozen=True)
class _Chain:
    """Checked inputs; an impossible strategy has infinite time and no memory, so that no product is undefined."""

    time: Floats
    memory: Floats
    change: Floats
    budget: float
    kinds: Ints
    _rests: dict[float, tuple[Floats, Floats]] = field(default_factory=dict)

    def to_go(self, price: float) -> Floats:
        """``[L,S]``: the cheapest completion after block l in strategy s, at ``price`` seconds a byte."""
        return self._rest(price)[0]

    def before(self, price: float) -> Floats:
        """``[L,K]``: the cheapest completion of a chain that takes a strategy of kind k in block l next."""
        return self._rest(price)[1]

    def _rest(self, price: float) -> tuple[Floats, Floats]:
        if price not in self._rests:
            # What follows depends on a strategy's kind alone, so the cheapest of each is found for all layers first.
            cost = self.time + price * self.memory
            padded = np.concatenate([cost, np.full((len(cost), 1), np.inf)], axis=1)  # where -1 stands for none
            before = padded[:, self.members].min(axis=2)
            after = np.zeros_like(before)
            for layer in range(len(cost) - 2, -1, -1):
                after[layer] = (self.change[layer] + before[layer + 1]).min(axis=1)
                before[layer] += after[layer]
            self._rests[price] = after[:, self.kinds], before
        return self._rests[price]

    def cheapest(self, price: float) -> tuple[list[int], float, float]:
        """The chain that is cheapest at ``price``: its strategies, time and memory."""
        total = self.time + price * self.memory + self.to_go(price)
        picks = [int(total[0].argmin())]
        for layer in range(1, len(total)):
            step = self.change[layer - 1, self.kinds[picks[-1]]]
            picks.append(int((step[self.kinds] + total[layer]).argmin()))
        return picks, *self.measure(picks)

    @cached_property
    def by_memory(self) -> _Chain:
        """The chain with memory for time: its cheapest is the one that takes least."""
        memory = np.where(np.isfinite(self.time), self.memory, np.inf)
        change = np.where(np.isfinite(self.change), 0.0, np.inf)
        return _Chain(memory, self.memory, change, self.budget, self.kinds)

    @cached_property
    def members(self) -> Ints:
        """``[K, most]``: the strategies of each kind, -1 behind them."""
        of_kind = [np.flatnonzero(self.kinds == kind) for kind in range(self.change.shape[1])]
        members = np.full((len(of_kind), max(map(len, of_kind))), -1)
        for row, strategies in zip(members, of_kind, strict=True):
            row[: len(strategies)] = strategies
        return members

    def changes(self, have: Ints, want: Ints) -> Floats:
        """``[L-1]``: seconds of going from a strategy of each block but the last to one of the next block."""
        seconds: Floats = self.change[np.arange(len(have)), self.kinds[have], self.kinds[want]]
        return seconds

    def measure(self, picks: list[int]) -> tuple[float, float]:
        """Time and memory of a chain."""
        layers, strategies = np.arange(len(picks)), np.array(picks)
        time = float(self.time[layers, picks].sum() + self.changes(strategies[:-1], strategies[1:]).sum())
        return time, float(self.memory[layers, picks].sum())


def solve_layers(
    time_s: ArrayLike,
    memory_bytes: ArrayLike,
    transition_s: ArrayLike,
    budget_bytes: float,
    gap: float = 0.0,
    known_s: float = np.inf,
    kinds: ArrayLike | None = None,
) -> tuple[list[int], float, float] | None:
    """Choose a strategy for every layer: the least total time whose total memory is within the budget.

    ``time_s[L, S]`` and ``memory_bytes[L, S]``: of layer l in strategy s (``inf`` where it cannot be);
    ``transition_s[L-1, K, K]``: of going from a strategy of one kind to the next layer's; ``budget_bytes``: for the sum
    of memory. Returns (strategy per layer, total seconds, total bytes), the exact optimum, or with ``gap`` above zero a
    choice whose time is proven to be within that share of it, sooner; None where nothing fits. ``known_s``: where no
    choice is faster than that, any that fits is returned, sooner. ``kinds[S]``: the kind of each strategy, below K
    (each is of its own where None).

    Raises InputError for arrays that do not match.
    """
    costs = _checked(time_s, memory_bytes, transition_s, budget_bytes, kinds)
    _, least, _ = costs.by_memory.cheapest(0.0)
    if not least <= costs.budget:
        return None
    gap = max(gap, _SLACK)
    incumbent, price = _incumbent(costs, known_s * (1 - gap))
    picks = _labels(costs, incumbent, price, gap, known_s)
    return picks, *costs.measure(picks)


def cheapest_layers(time_s: Floats, transition_s: Floats, kinds: Ints) -> list[int]:
    """The fastest strategies for all layers, whatever memory they take; arrays as of :func:`solve_layers`."""
    return _Chain(time_s, np.zeros_like(time_s), transition_s, np.inf, kinds).cheapest(0.0)[0]


def relaxed_s(time_s: Floats, memory_bytes: Floats, counts: Ints, budgets_bytes: Floats) -> Floats:
    """``[B]``: seconds that no choice within a budget beats, without transitions; infinite where there is none.

    ``time_s[B, D, S]`` and ``memory_bytes[B, D, S]`` of the distinct layers by budget, infinite where a strategy cannot
    be, ``counts[D]``: how many there are of each. The Lagrangian bound at the best of some prices of memory.
    """
    bounds = np.full(len(budgets_bytes), np.inf)
    rows = np.flatnonzero(memory_bytes.min(axis=2) @ counts <= budgets_bytes)
    finite, budgets = np.isfinite(memory_bytes[rows]), budgets_bytes[rows, None]
    time, memory = np.where(finite, time_s[rows], np.inf), np.where(finite, memory_bytes[rows], 0.0)
    spread_s = np.where(finite, time, 0.0).max(axis=(1, 2)) - time.min(axis=(1, 2))
    scale = spread_s[:, None] * counts.sum() / np.maximum(budgets, 1.0)
    prices = scale * np.concatenate([[0.0], np.logspace(-3, 3, _RELAXED_PRICES)])
    cost = time[:, None] + prices[:, :, None, None] * memory[:, None]
    bounds[rows] = (cost.min(axis=3) @ counts - prices * budgets).max(axis=1, initial=-np.inf)
    return bounds


def _checked(
    time_s: ArrayLike, memory_bytes: ArrayLike, transition_s: ArrayLike, budget: float, kinds: ArrayLike | None
) -> _Chain:
    time = np.asarray(time_s, dtype=np.float64)
    memory = np.asarray(memory_bytes, dtype=np.float64)
    if time.ndim != 2 or time.shape != memory.shape or 0 in time.shape:
        raise InputError(f"time_s {time.shape} and memory_bytes {memory.shape} must be equal and [layers, strategies]")
    layers, strategies = time.shape
    numbers = np.arange(strategies) if kinds is None else np.asarray(kinds)
    if len(numbers) != strategies:
        raise InputError(f"kinds has {len(numbers)} numbers for {strategies} strategies: give one for each")
    count = int(numbers.max()) + 1 if kinds is None else np.shape(transition_s)[-1]
    transition = np.asarray(transition_s, dtype=np.float64).reshape(-1, count, count)
    if len(transition) != layers - 1:
        raise InputError(f"transition_s has {len(transition)} steps for {layers} layers: give [layers - 1, K, K]")
    for name, values in (("time_s", time), ("memory_bytes", memory), ("transition_s", transition)):
        if np.isnan(values).any() or (values < 0).any():
            raise InputError(f"{name} holds negative numbers or NaN")
    impossible = ~(np.isfinite(time) & np.isfinite(memory))
    time, memory = np.where(impossible, np.inf, time), np.where(impossible, 0.0, memory)
    return _Chain(time, memory, transition, float(budget), numbers)


def _incumbent(costs: _Chain, below_s: float) -> tuple[list[int], float]:
    """A feasible chain and the price of memory that gives the strongest bound, or one that rules out ``below_s``.

    The price moves from one breakpoint of the dual to the next: where the best chains known on both sides of the
    budget cost the same.
    """
    greedy, greedy_time, greedy_memory = costs.cheapest(0.0)
    if greedy_memory <= costs.budget:
        return greedy, 0.0
    feasible = costs.by_memory.cheapest(0.0)[0]
    time, memory = costs.measure(feasible)
    best, best_time, price = feasible, time, 0.0
    for _ in range(_PRICE_STEPS):
        price = (time - greedy_time) / (greedy_memory - memory)
        picks, found_time, found_memory = costs.cheapest(price)
        if found_time + price * found_memory >= (time + price * memory) * (1 - _SLACK):
            break
        if found_memory > costs.budget:
            greedy, greedy_time, greedy_memory = picks, found_time, found_memory
        else:
            feasible, time, memory = picks, found_time, found_memory
        if time < best_time:
            best, best_time = feasible, time
        if found_time + price * (found_memory - costs.budget) >= below_s:
            break
    return _improved(costs, _spliced(costs, greedy, best)), price


def _spliced(costs: _Chain, greedy: list[int], feasible: list[int]) -> list[int]:
    """The fastest feasible chain that is ``greedy`` on one side of a block and ``feasible`` on the other.

    Equal blocks all change their strategy at one price of memory; a mixture of the two sides lies between.
    """
    best, (best_time, _) = feasible, costs.measure(feasible)
    for head, tail in ((greedy, feasible), (feasible, greedy)):
        time, memory = _joined(costs, head, tail)
        fits = np.where(memory <= costs.budget, time, np.inf)
        cut = int(fits.argmin()) if len(fits) else 0
        if len(fits) and fits[cut] < best_time:
            best, best_time = head[: cut + 1] + tail[cut + 1 :], float(fits[cut])
    return best


def _improved(costs: _Chain, picks: list[int]) -> list[int]:
    """The chain after all changes of one layer's strategy that make it faster and fit, the best first.

    A mixture of two chains leaves up to a layer's memory of the budget unused.
    """
    picks = list(picks)
    layers = np.arange(len(picks))
    edge = np.zeros((1, costs.time.shape[1]))
    while True:
        kinds = costs.kinds[picks]
        before = np.concatenate([edge, costs.change[layers[:-1], kinds[:-1]][:, costs.kinds]])
        behind = np.concatenate([costs.change[layers[:-1], :, kinds[1:]][:, costs.kinds], edge])
        time = costs.time + before + behind
        gain = time[layers, picks][:, None] - time
        room = costs.budget - costs.measure(picks)[1]
        gain[costs.memory - costs.memory[layers, picks][:, None] > room] = 0.0
        layer, pick = np.unravel_index(int(gain.argmax()), gain.shape)
        if not gain[layer, pick] > _SLACK * time[layer, picks[layer]]:
            return picks
        picks[layer] = int(pick)


def _joined(costs: _Chain, head: list[int], tail: list[int]) -> tuple[Floats, Floats]:
    """``[L-1]``: time and memory of the chains that are ``head`` up to a layer and ``tail`` behind it."""
    layers = np.arange(len(head))
    before, behind = np.array(head), np.array(tail)
    time_before = costs.time[layers, before].cumsum()[:-1]
    time_before[1:] += costs.changes(before[:-1], before[1:]).cumsum()[:-1]
    reversed_s = costs.time[layers, behind][::-1].cumsum()[:-1]
    reversed_s[1:] += costs.changes(behind[:-1], behind[1:])[::-1].cumsum()[:-1]
    across = costs.changes(before[:-1], behind[1:])
    memory_behind = costs.memory[layers, behind][::-1].cumsum()[:-1][::-1]
    return time_before + across + reversed_s[::-1], costs.memory[layers, before].cumsum()[:-1] + memory_behind


def _labels(costs: _Chain, incumbent: list[int], price: float, gap: float, known_s: float) -> list[int]:
    """Extend Pareto-optimal labels block by block; returns the picks of the best chain, if it is below ``known_s``.

    What follows depends on a strategy's kind alone, so labels of one kind compete, and one change of kind is priced
    once for all the strategies behind it.
    """
    best_s = min(costs.measure(incumbent)[0], known_s)
    thinned = gap * _THINNED
    limits = _Limits(costs, price, best_s * (1 - (gap - thinned)))
    bin_s = best_s * thinned / len(costs.time)
    history: list[tuple[Ints, Ints]] = []
    labels = _Labels(np.zeros(1, dtype=np.intp), np.zeros(1), np.zeros(1), np.full(1, -1), np.zeros(1, dtype=np.intp))
    for layer in range(len(costs.time)):
        entering = labels if not layer else _entering(costs, limits, layer, labels)
        labels = _extended(costs, limits, layer, entering, first=not layer)
        labels = labels.take(_pareto(labels.kind, labels.time, labels.memory))
        if gap > _SLACK and len(labels.time) > _MANY_LABELS:
            labels = labels.take(_thinned(labels, bin_s))
        if not len(labels.time):
            return incumbent
        history.append((labels.pick, labels.parent))
    picks: list[int] = []
    label = int(np.argmin(labels.time))
    for pick, parent in reversed(history):
        picks.append(int(pick[label]))
        label = int(parent[label])
    return picks[::-1]


@dataclass(frozen=True)
class _Labels:
    """Chains up to a block, of each the kind that it ends in, its time and memory, the label that it extends and the
    strategy that it does so by.
    """

    kind: Ints
    time: Floats
    memory: Floats
    parent: Ints
    pick: Ints

    def take(self, keep: Ints) -> _Labels:
        return _Labels(self.kind[keep], self.time[keep], self.memory[keep], self.parent[keep], self.pick[keep])


@dataclass(frozen=True)
class _Limits:
    """What labels must be able to come to: within the budget, and below ``below_s`` seconds."""

    costs: _Chain
    price: float
    below_s: float

    def hold(self, layer: int, picks: Ints, time: Floats, memory: Floats) -> Bools:
        """Whether chains that end in the strategies ``picks`` of ``layer`` may have such a completion."""
        costs = self.costs
        priced = time + self.price * memory + costs.to_go(self.price)[layer][picks] - self.price * costs.budget
        fits: Bools = memory + costs.by_memory.to_go(0.0)[layer][picks] <= costs.budget
        return np.asarray(fits & (np.maximum(time + costs.to_go(0.0)[layer][picks], priced) < self.below_s))

    def hold_before(self, layer: int, kinds: Ints, time: Floats, memory: Floats) -> Bools:
        """The same of chains that have yet to take a strategy of ``kinds`` in ``layer``."""
        costs = self.costs
        priced = time + self.price * memory + costs.before(self.price)[layer][kinds] - self.price * costs.budget
        fits: Bools = memory + costs.by_memory.before(0.0)[layer][kinds] <= costs.budget
        return np.asarray(fits & (np.maximum(time + costs.before(0.0)[layer][kinds], priced) < self.below_s))


def _entering(costs: _Chain, limits: _Limits, layer: int, labels: _Labels) -> _Labels:
    """Labels with the change to every kind that the next block may have; their parents are ``labels``."""
    step = costs.change[layer - 1]
    count, kinds = len(labels.time), step.shape[1]
    time = (labels.time[:, None] + step[labels.kind]).ravel()
    memory, kind = np.repeat(labels.memory, kinds), np.tile(np.arange(kinds), count)
    keep = np.flatnonzero(limits.hold_before(layer, kind, time, memory))
    if kinds < costs.time.shape[1]:
        keep = keep[_pareto(kind[keep], time[keep], memory[keep])]
    return _Labels(kind[keep], time[keep], memory[keep], keep // kinds, keep)


def _extended(costs: _Chain, limits: _Limits, layer: int, entering: _Labels, first: bool) -> _Labels:
    """Labels with every strategy of their kind in ``layer``, as far as these may be completed."""
    members = np.arange(costs.time.shape[1])[None, :] if first else costs.members[entering.kind]
    label, column = np.nonzero(members >= 0)
    pick = members[label, column]
    time, memory = entering.time[label] + costs.time[layer][pick], entering.memory[label] + costs.memory[layer][pick]
    keep = np.flatnonzero(limits.hold(layer, pick, time, memory))
    label, pick = label[keep], pick[keep]
    return _Labels(costs.kinds[pick], time[keep], memory[keep], entering.parent[label], pick)


def _thinned(labels: _Labels, bin_s: float) -> Ints:
    """Positions of the labels that take least memory of those of their kind within ``bin_s`` of each other.

    ``labels`` come in the order of kind and time, as :func:`_pareto` leaves them, so memory falls inside a kind.
    """
    bins = np.floor(labels.time / bin_s)
    last = (labels.kind[1:] != labels.kind[:-1]) | (bins[1:] != bins[:-1])
    return np.flatnonzero(np.append(last, True))


def _pareto(where: Ints, time: Floats, memory: Floats) -> Ints:
    """Positions of the labels that no other label of the same strategy dominates, in a fixed order."""
    order = np.lexsort((memory, time, where))
    sorted_where, sorted_memory = where[order], memory[order]
    changes = np.flatnonzero(sorted_where[1:] != sorted_where[:-1]) + 1
    keep = np.zeros(len(order), dtype=bool)
    bounds = [0, *changes, len(order)] if len(order) else []
    for low, high in pairwise(bounds):
        least = np.minimum.accumulate(sorted_memory[low:high])
        keep[low] = True
        keep[low + 1 : high] = sorted_memory[low + 1 : high] < least[:-1]
    return order[keep]
