"""Prices of all blocks under all strategies, as arrays that the searches work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from cost_models.collectives import collective_s
from galvatron_fx.errors import BudgetError, PlanError
from galvatron_fx.ir.annotations import facts
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.strategy import PIPELINE, Strategy
from passes.assign_shardings import AssignShardings
from passes.find_blocks import fingerprints
from passes.insert_collectives import AxisSharding
from passes.search.block_prices import BlockPrice, BlockPricer, GraphIndex
from passes.search.candidates import batch_ranks
from passes.search.layer_dp import solve_layers
from passes.sharding.prices import Prices
from passes.sharding.roles import BATCH_ROLES, RoleRules

Floats = NDArray[np.float64]

_TRANSIENTS = 12  # bounds on transient memory that are tried
_EXACT_BLOCKS = 16  # longer chains are solved to a proven gap, as the exact optimum of many equal blocks takes long
_GAP = 2e-3
_SPLIT = {"data": "batch", "zero": "batch", "tensor": "", "tensor_sequence": "sequence", "sequence": "sequence"}


@dataclass(frozen=True)
class Chain:
    """Prices of all blocks: arrays over [block, strategy], of one micro-batch where a batch matters.

    ``forward``, ``backward``, ``once`` in seconds; ``static``, ``saved``, ``transient`` in bytes;
    ``transition[block, strategy, strategy]``: seconds from a block to the next; ``crossing``: bytes of activations that
    pass in front of each block; ``allowed``: by the constraints; ``marks``: fingerprints of the blocks.
    """

    strategies: tuple[Strategy, ...]
    parts: int
    forward: Floats
    backward: Floats
    once: Floats
    static: Floats
    saved: Floats
    transient: Floats
    transition: Floats
    crossing: Floats
    allowed: NDArray[np.bool_]
    marks: tuple[str, ...]

    @property
    def time(self) -> Floats:
        """Seconds of a block in each of its micro-batches, what is done once a step shared among them."""
        return self.forward + self.backward + self.once / self.parts

    @property
    def memory(self) -> Floats:
        """Bytes kept with one micro-batch in flight."""
        return self.static + self.saved

    def time_s(self, picks: Sequence[int]) -> float:
        """Predicted seconds of a micro-batch through all blocks: the sum that the search minimises."""
        blocks = sum(float(self.time[i, p]) for i, p in enumerate(picks))
        return blocks + sum(float(self.transition[i, picks[i], picks[i + 1]]) for i in range(len(picks) - 1))


@dataclass
class Pricer:
    """Prices chains of one graph and cluster; solutions of blocks are found once for all of them."""

    graph: fx.GraphModule
    cluster: Cluster
    constraints: Mapping[str, Any]
    _solutions: dict[tuple[str, int], AxisSharding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.marks = fingerprints(self.graph)
        self._first = {mark: self.marks.index(mark) for mark in self.marks}
        symbols = self.graph.meta.get("symbols")
        self.batch = symbols.batch if symbols else 1
        self._crossing = _crossing_bytes(self.graph, len(self.marks))
        self._index = GraphIndex.of(self.graph)
        self._pricers: dict[str, BlockPricer] = {}

    def chain(self, strategies: Sequence[Strategy], parts: int = 1) -> Chain | None:
        """Prices with ``parts`` micro-batches; None where no strategy finds enough samples in one."""
        batch = self.batch // parts
        ranks = {strategy: batch_ranks(strategy, self.cluster.shape) for strategy in strategies}
        usable = tuple(s for s in strategies if batch % ranks[s] == 0)
        usable = usable or tuple(s for s in strategies if ranks[s] <= batch)
        if not usable:
            return None
        self._solve(usable)
        table: dict[str, list[BlockPrice]] = {}
        for mark, index in self._first.items():
            if mark not in self._pricers:
                self._pricers[mark] = BlockPricer(self._index, index, self.cluster, self._solutions)
            table[mark] = [self._pricers[mark].price(strategy, parts) for strategy in usable]
        rows = [table[mark] for mark in self.marks]
        change = _transition(usable, self.cluster)
        crossing = self._crossing / parts
        count = len(usable)

        def array(name: str) -> Floats:
            return np.array([[getattr(price, name) for price in row] for row in rows], dtype=np.float64)

        return Chain(
            usable,
            parts,
            array("forward_s"),
            array("backward_s"),
            array("once_s"),
            array("static_bytes"),
            array("saved_bytes"),
            array("transient_bytes"),
            np.array([change(size) for size in crossing[1:]]).reshape(-1, count, count),
            crossing,
            _allowed(self.graph, usable, self.constraints, len(self.marks)),
            self.marks,
        )

    def _solve(self, strategies: Sequence[Strategy]) -> None:
        """The intra-block solution of every role and degree that a strategy uses, for the distinct blocks."""
        blocks = frozenset(self._first.values())
        for strategy in strategies:
            for group in strategy.groups(self.cluster.shape):
                key = group.role, group.degree
                if key in self._solutions:
                    continue
                twin = self._solved_for_any_degree(group.role) if self.batch % group.degree == 0 else None
                if twin is None:
                    roles = [RoleRules(group.role, group.degree, self.batch)] * len(self.marks)
                    prices = Prices(self.cluster.device, tuple(self.cluster.axes[i] for i in group.axes))
                    twin = AssignShardings(0, roles, prices, only=blocks).run(self.graph)
                self._solutions[key] = twin

    def _solved_for_any_degree(self, role: str) -> AxisSharding | None:
        """Where a degree divides the batch, batch roles split the same dims as for another that does."""
        if role not in BATCH_ROLES:
            return None
        known = [(d, s) for (r, d), s in self._solutions.items() if r == role and self.batch % d == 0]
        return known[0][1] if known else None


def _crossing_bytes(graph: fx.GraphModule, blocks: int) -> Floats:
    """Bytes of the activations that pass in front of each block: made before it, used in it or behind it."""
    change = np.zeros(blocks + 1)
    for node in graph.graph.nodes:
        if node.op != "call_function" or facts(node).multi_output or facts(node).phase != "forward":
            continue
        uses = [facts(u).block for u in node.users if u.op == "call_function" and facts(u).phase == "forward"]
        last, block = max(uses, default=-1), facts(node).block
        if last > block and node.meta.get("seq_nr") is not None and facts(node).spec.dtype.is_floating_point:
            change[block + 1] += facts(node).spec.size_bytes
            change[last + 1] -= facts(node).spec.size_bytes
    return np.cumsum(change)[:blocks]


def _kind(strategy: Strategy) -> tuple[str, ...]:
    """What each axis splits at a block's boundary."""
    return tuple(_SPLIT[role] for role in strategy.roles if role != PIPELINE)


def _transition(strategies: Sequence[Strategy], cluster: Cluster) -> Callable[[float], Floats]:
    """A function from boundary bytes to the [S, S] seconds of passing them on, forward and (backwards) their gradient.

    It depends only on what each axis splits at the boundary, so the few distinct kinds of boundary are priced.
    """
    kinds = [_kind(strategy) for strategy in strategies]
    distinct = sorted(set(kinds))
    index = np.array([distinct.index(kind) for kind in kinds])
    axes = cluster.axes[len(cluster.axes) - len(distinct[0]) :]

    @cache
    def matrix(size: float) -> Floats:
        there = np.array([[_change_s(a, b, size, axes) for b in distinct] for a in distinct])
        both: Floats = (there + there.T)[np.ix_(index, index)]
        return both

    return matrix


def _change_s(have: tuple[str, ...], want: tuple[str, ...], size: float, axes: Sequence[Any]) -> float:
    """Seconds to bring ``size`` bytes from one kind of boundary to another, axis by axis."""
    total = 0.0
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        if a and a != b:
            rest = prod(axis.size for j, axis in enumerate(axes) if j != i and have[j])
            total += float(collective_s("all_to_all" if b else "all_gather", size / rest, [axes[i]]))
    return total


def _allowed(
    graph: fx.GraphModule, strategies: Sequence[Strategy], constraints: Mapping[str, Any], blocks: int
) -> NDArray[np.bool_]:
    """Which strategies each block may take, by the constraints on the modules in it."""
    allowed = np.ones((blocks, len(strategies)), dtype=bool)
    for name, wanted in constraints.items():
        members = {
            facts(n).block
            for n in graph.graph.nodes
            if n.op == "call_function" and (facts(n).module == name or facts(n).module.startswith(f"{name}."))
        }
        if not members:
            raise PlanError(f"constraint on module {name!r}: the model has no such module that computes anything")
        fits = np.array([_matches(s, wanted) for s in strategies])
        if not fits.any():
            raise PlanError(
                f"constraint {wanted} on module {name!r}: no searched strategy is like it; check roles and axes"
            )
        for block in members:
            allowed[block] &= fits
            if not allowed[block].any():
                raise PlanError(f"the constraints on block {block} (module {name!r}) contradict each other")
    return allowed


def _matches(strategy: Strategy, wanted: Any) -> bool:
    if isinstance(wanted, Strategy):
        return strategy == wanted
    return sorted(strategy.roles) == sorted(wanted)


@dataclass(frozen=True)
class Section:
    """Blocks that share one device's memory, with the micro-batches that each has in flight."""

    blocks: tuple[int, ...]
    in_flight: tuple[int, ...]


def best_picks(chain: Chain, section: Section, budget: float) -> list[int] | None:
    """The fastest strategies of a section whose kept memory and largest transient are within ``budget``, or None.

    Blocks that follow each other in the model are joined by the chain's transitions, others by nothing.
    """
    rows = list(section.blocks)
    held = chain.static[rows] + chain.saved[rows] * np.array(section.in_flight, dtype=np.float64)[:, None]
    time, allowed = chain.time[rows], chain.allowed[rows]
    usable = _useful(chain, time, held, chain.transient[rows], allowed)
    time, held, allowed = time[:, usable], held[:, usable], allowed[:, usable]
    transient = chain.transient[rows][:, usable]
    nothing = np.zeros((len(usable), len(usable)))
    steps = [chain.transition[a][usable][:, usable] if b == a + 1 else nothing for a, b in pairwise(rows)]
    transition = np.array(steps).reshape(-1, len(usable), len(usable))
    best: tuple[float, list[int]] | None = None
    for bound in _transient_bounds(transient):
        forbidden = (transient > bound) | ~allowed
        if forbidden.all(axis=1).any():
            continue
        try:
            picks, total, _ = solve_layers(
                np.where(forbidden, np.inf, time),
                np.where(forbidden, np.inf, held),
                transition,
                budget - bound,
                _GAP if len(chain.marks) > _EXACT_BLOCKS else 0.0,
            )
        except BudgetError:
            continue
        if best is None or total < best[0] * (1 - 1e-12):
            best = total, [int(usable[p]) for p in picks]
    return best[1] if best is not None else None


def least_picks(chain: Chain, section: Section) -> list[int]:
    """The strategies that take the least memory. Raises PlanError where the constraints leave none."""
    rows = list(section.blocks)
    held = chain.static[rows] + chain.saved[rows] * np.array(section.in_flight, dtype=np.float64)[:, None]
    transient = np.where(chain.allowed[rows], chain.transient[rows], np.inf)
    best: tuple[float, list[int]] | None = None
    for bound in _transient_bounds(transient):
        memory = np.where((transient > bound) | ~chain.allowed[rows], np.inf, held)
        total = float(memory.min(axis=1).sum()) + bound
        if np.isfinite(total) and (best is None or total < best[0]):
            best = total, [int(p) for p in memory.argmin(axis=1)]
    if best is None:
        raise PlanError("the constraints leave no strategy for some block")
    return best[1]


def _useful(
    chain: Chain, time: Floats, memory: Floats, transient: Floats, allowed: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Strategies that no other with equal boundaries beats everywhere, in time, memory and transient."""
    kinds = [_kind(strategy) for strategy in chain.strategies]
    rows = [np.flatnonzero([kind == other for other in kinds]) for kind in kinds]
    keep = []
    for i, twins in enumerate(rows):
        others = twins[twins != i]
        better = (
            (allowed[:, others] >= allowed[:, [i]]).all(axis=0)
            & (time[:, others] <= time[:, [i]]).all(axis=0)
            & (memory[:, others] <= memory[:, [i]]).all(axis=0)
            & (transient[:, others] <= transient[:, [i]]).all(axis=0)
        )
        same = (
            (time[:, others] == time[:, [i]]).all(axis=0)
            & (memory[:, others] == memory[:, [i]]).all(axis=0)
            & (transient[:, others] == transient[:, [i]]).all(axis=0)
            & (allowed[:, others] == allowed[:, [i]]).all(axis=0)
        )
        if not (better & ((others < i) | ~same)).any():
            keep.append(i)
    return np.array(keep, dtype=np.int64)


def _transient_bounds(transient: Floats) -> list[float]:
    finite = transient[np.isfinite(transient)]
    values = np.unique(finite)
    least = transient.min(axis=1).max() if len(transient) else 0.0
    values = values[values >= least]
    if len(values) > _TRANSIENTS:
        values = values[np.linspace(0, len(values) - 1, _TRANSIENTS).astype(int)]
    return [float(v) for v in values]
