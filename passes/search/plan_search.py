"""The whole search: strategies for all blocks under a memory budget, checked on the lowered program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import fx

from cost_models.collectives import collective_s
from galvatron_fx.errors import BudgetError, PlanError
from galvatron_fx.ir.annotations import facts
from galvatron_fx.ir.cluster import Cluster
from galvatron_fx.ir.plan import BlockPlan, Plan
from galvatron_fx.ir.strategy import PIPELINE, Strategy
from galvatron_fx.ir.units import format_bytes
from passes.assign_shardings import AssignShardings
from passes.find_blocks import fingerprints, graph_fingerprint
from passes.lower import Lower
from passes.search.block_prices import BlockPrice, BlockPricer
from passes.search.layer_dp import solve_layers
from passes.sharding.prices import Prices
from passes.sharding.roles import BATCH_ROLES, RoleRules
from passes.simulate_step import SimulateStep, StepReport

Floats = NDArray[np.float64]
_CLOSE = 0.01  # of the budget: how closely its estimate is brought to what the lowered program takes
_TRIES = 8
_FREE_AXES = 3  # up to so many mesh axes, every assignment of roles to axes is a candidate
_TRANSIENTS = 12  # bounds on transient memory that are tried


@dataclass(frozen=True)
class Pins:
    """What of the pipeline is decided already; None is searched."""

    num_stages: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None


@dataclass(frozen=True)
class SearchOptions:
    """What to search for; see :func:`galvatron_fx.plan`."""

    memory_budget_bytes: int
    roles: tuple[str, ...]
    recompute: str | bool = "auto"
    constraints: Mapping[str, Any] = field(default_factory=dict)
    pins: Pins = field(default_factory=Pins)


@dataclass(frozen=True)
class _Chain:
    """Prices of all blocks: arrays over [block, strategy], and the strategies."""

    strategies: tuple[Strategy, ...]
    time: Floats
    memory: Floats
    transient: Floats
    transition: Floats
    allowed: NDArray[np.bool_]

    def time_s(self, picks: Sequence[int]) -> float:
        """Predicted seconds of a step: the sum that the search minimises."""
        blocks = sum(float(self.time[i, p]) for i, p in enumerate(picks))
        return blocks + sum(float(self.transition[i, picks[i], picks[i + 1]]) for i in range(len(picks) - 1))


def search_plan(graph: fx.GraphModule, cluster: Cluster, options: SearchOptions) -> Plan:
    """Return the fastest plan whose lowered program stays within the budget.

    The search's own estimate of memory is a sum over blocks; the budget it works with is moved until the lowered
    program of its choice, simulated, comes close to the real one from below.

    Raises BudgetError with the least feasible budget and its plan where none does, and PlanError for constraints on
    modules that the model does not have.
    """
    chain = _priced(graph, cluster, options)
    finish = _Finisher(graph, cluster, options, chain)
    limit = float(options.memory_budget_bytes)
    budget, fits, over = limit, 0.0, np.inf
    found: tuple[float, list[int], StepReport] | None = None
    last: list[int] = []
    for _ in range(_TRIES):
        picks = _best(chain, budget)
        if picks is None:
            over = limit
            break
        if picks == last:
            break  # another budget, the same choice: nothing more to learn
        last = picks
        report = finish.simulate(picks)
        room = limit - report.peak_memory_bytes
        if room >= 0:
            fits = budget
            if found is None or chain.time_s(picks) < found[0]:
                found = chain.time_s(picks), picks, report
        else:
            over = budget
        budget = budget + room if not np.isfinite(over) else max(budget + room, (fits + over) / 2)
        if budget <= fits * (1 + _CLOSE) or budget >= over * (1 - _CLOSE) or abs(room) < _CLOSE * limit:
            break
    return finish.plan(found[1], found[2]) if found is not None else finish.least()


def _priced(graph: fx.GraphModule, cluster: Cluster, options: SearchOptions) -> _Chain:
    marks = fingerprints(graph)
    first = {mark: marks.index(mark) for mark in marks}
    batch = _batch(graph)
    strategies = tuple(s for s in candidates(cluster, options) if batch_ranks(s, cluster.shape) <= batch)
    if not strategies:
        raise PlanError(
            f"roles {', '.join(options.roles)} can only split the batch, and a batch of {batch} is too small for "
            f"{cluster.num_devices} devices: give a larger batch, or allow tensor or sequence roles"
        )
    solutions = _solutions(graph, cluster, strategies, frozenset(first.values()))
    prices: dict[str, list[BlockPrice]] = {}
    for mark, index in first.items():
        pricer = BlockPricer(graph, index, cluster, solutions)
        prices[mark] = [pricer.price(strategy) for strategy in strategies]
    table = [prices[mark] for mark in marks]
    boundary = _boundary_bytes(graph, len(marks))
    change = _transition(strategies, cluster)
    return _Chain(
        strategies,
        np.array([[p.time_s for p in row] for row in table]),
        np.array([[p.static_bytes + p.saved_bytes for p in row] for row in table], dtype=np.float64),
        np.array([[p.transient_bytes for p in row] for row in table], dtype=np.float64),
        np.array([change(size) for size in boundary[:-1]]).reshape(len(marks) - 1, len(strategies), len(strategies)),
        _allowed(graph, strategies, options, len(marks)),
    )


def candidates(cluster: Cluster, options: SearchOptions) -> tuple[Strategy, ...]:
    """All strategies of a block: role tables up to exchanging equal axes, with and without recomputation.

    Two axes of equal size and speed are interchangeable, so only tables whose roles ascend along them are kept. On
    meshes of many axes, tensor and sequence roles take the inner, faster axes, as they talk in every layer.
    """
    axes = [axis for axis in cluster.axes if axis.size > 1]
    sizes = len(cluster.axes) if axes else 0
    tables = []
    inner = [role for role in options.roles if role != PIPELINE]
    for roles in product(range(len(inner)), repeat=sizes):
        twins = ((i, j) for i in range(sizes) for j in range(i + 1, sizes) if _speed(cluster, i) == _speed(cluster, j))
        table = tuple(inner[r] for r in roles)
        if all(roles[i] <= roles[j] for i, j in twins) and (sizes <= _FREE_AXES or _model_roles_inside(table)):
            tables.append(table)
    if not axes:
        tables = [("data",) * len(cluster.axes)] if cluster.axes else [()]
    again = (False, True) if options.recompute == "auto" else (bool(options.recompute),)
    found = []
    for table in tables:
        for recompute in again:
            found.append(Strategy(table, recompute))
            if "zero" in table and not recompute:
                found.append(Strategy(table, recompute, keep_gathered=True))
    return tuple(found)


def _model_roles_inside(table: Sequence[str]) -> bool:
    batch = [role in BATCH_ROLES for role in table]
    return batch == sorted(batch, reverse=True)


def _batch(graph: fx.GraphModule) -> int:
    symbols = graph.meta.get("symbols")
    return symbols.batch if symbols else 1


def batch_ranks(strategy: Strategy, axis_sizes: Sequence[int]) -> int:
    """Ranks among which a strategy splits the batch."""
    sizes = [size for size in axis_sizes if size > 1] if len(strategy.roles) != len(axis_sizes) else axis_sizes
    return prod(size for role, size in zip(strategy.roles, sizes, strict=True) if role in BATCH_ROLES)


def _speed(cluster: Cluster, index: int) -> tuple[int, float, float]:
    axis = cluster.axes[index]
    return axis.size, axis.latency_s, axis.bandwidth_bytes_per_s


def _solutions(
    graph: fx.GraphModule, cluster: Cluster, strategies: Sequence[Strategy], blocks: frozenset[int]
) -> dict[tuple[str, int], Any]:
    """The intra-block solution of every role and degree that a strategy uses, for the distinct blocks."""
    found: dict[tuple[str, int], Any] = {}
    batch = _batch(graph)
    count = 1 + max(facts(n).block for n in graph.graph.nodes if n.op == "call_function")
    for strategy in strategies:
        for group in strategy.groups(cluster.shape):
            if (group.role, group.degree) not in found:
                roles = [RoleRules(group.role, group.degree, batch)] * count
                prices = Prices(cluster.device, tuple(cluster.axes[i] for i in group.axes))
                assign = AssignShardings(0, roles, prices, only=blocks)
                found[group.role, group.degree] = assign.run(graph)
    return found


def _boundary_bytes(graph: fx.GraphModule, blocks: int) -> list[int]:
    """Bytes of the activations that each block passes to the next."""
    sizes = [0] * blocks
    for node in graph.graph.nodes:
        if node.op != "call_function" or facts(node).multi_output or facts(node).phase != "forward":
            continue
        block = facts(node).block
        crosses = any(
            u.op == "call_function" and facts(u).phase == "forward" and facts(u).block > block for u in node.users
        )
        if crosses and node.meta.get("seq_nr") is not None and facts(node).spec.dtype.is_floating_point:
            sizes[block] += facts(node).spec.size_bytes
    return sizes


_SPLIT = {"data": "batch", "zero": "batch", "tensor": "", "tensor_sequence": "sequence", "sequence": "sequence"}


def _transition(strategies: Sequence[Strategy], cluster: Cluster) -> Callable[[int], Floats]:
    """A function from boundary bytes to the [S, S] seconds of passing them on, forward and (backwards) their gradient.

    It depends only on what each axis splits at the boundary, so the few distinct kinds of boundary are priced.
    """
    kinds = [tuple(_SPLIT[role] for role in strategy.roles) for strategy in strategies]
    distinct = sorted(set(kinds))
    index = np.array([distinct.index(kind) for kind in kinds])

    @cache
    def matrix(size: int) -> Floats:
        there = np.array([[_change_s(a, b, float(size), cluster) for b in distinct] for a in distinct])
        both: Floats = (there + there.T)[np.ix_(index, index)]
        return both

    return matrix


def _change_s(have: tuple[str, ...], want: tuple[str, ...], size: float, cluster: Cluster) -> float:
    """Seconds to bring ``size`` bytes from one kind of boundary to another, axis by axis."""
    total = 0.0
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        if a and a != b:
            rest = prod(axis.size for j, axis in enumerate(cluster.axes) if j != i and have[j])
            total += float(collective_s("all_to_all" if b else "all_gather", size / rest, [cluster.axes[i]]))
    return total


def _allowed(
    graph: fx.GraphModule, strategies: Sequence[Strategy], options: SearchOptions, blocks: int
) -> NDArray[np.bool_]:
    """Which strategies each block may take, by the constraints on the modules in it."""
    allowed = np.ones((blocks, len(strategies)), dtype=bool)
    for name, wanted in options.constraints.items():
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


def _best(chain: _Chain, budget: float) -> list[int] | None:
    """The fastest choice whose sum of kept memory and largest transient is within ``budget``, None if there is none."""
    best: tuple[float, list[int]] | None = None
    usable = _useful(chain)
    transient = chain.transient[:, usable]
    for bound in _transient_bounds(transient):
        forbidden = (transient > bound) | ~chain.allowed[:, usable]
        time = np.where(forbidden, np.inf, chain.time[:, usable])
        memory = np.where(forbidden, np.inf, chain.memory[:, usable])
        if not np.isfinite(time).any(axis=1).all():
            continue
        try:
            picks, total, _ = solve_layers(time, memory, chain.transition[:, usable][:, :, usable], budget - bound)
        except BudgetError:
            continue
        if best is None or total < best[0] * (1 - 1e-12):
            best = total, [int(usable[p]) for p in picks]
    return best[1] if best is not None else None


def _useful(chain: _Chain) -> NDArray[np.int64]:
    """Strategies that no other with equal boundaries beats everywhere, in time, memory and transient."""
    boundary = [tuple(_SPLIT[r] for r in s.roles) for s in chain.strategies]
    keep = []
    for i in range(len(chain.strategies)):
        beaten = any(
            i != j
            and boundary[i] == boundary[j]
            and (chain.allowed[:, j] >= chain.allowed[:, i]).all()
            and (chain.time[:, j] <= chain.time[:, i]).all()
            and (chain.memory[:, j] <= chain.memory[:, i]).all()
            and (chain.transient[:, j] <= chain.transient[:, i]).all()
            and (j < i or not _equal(chain, i, j))
            for j in range(len(chain.strategies))
        )
        if not beaten:
            keep.append(i)
    return np.array(keep, dtype=np.int64)


def _equal(chain: _Chain, i: int, j: int) -> bool:
    return all(
        bool((values[:, i] == values[:, j]).all())
        for values in (chain.time, chain.memory, chain.transient, chain.allowed)
    )


def _transient_bounds(transient: Floats) -> list[float]:
    values = np.unique(transient)
    least = transient.min(axis=1).max()
    values = values[values >= least]
    if len(values) > _TRANSIENTS:
        values = values[np.linspace(0, len(values) - 1, _TRANSIENTS).astype(int)]
    return [float(v) for v in values]


@dataclass
class _Finisher:
    """Lowers and simulates choices, and writes them down as plans."""

    graph: fx.GraphModule
    cluster: Cluster
    options: SearchOptions
    chain: _Chain
    cache: dict[Any, Any] = field(default_factory=dict)

    def simulate(self, picks: Sequence[int]) -> StepReport:
        strategies = [self.chain.strategies[p] for p in picks]
        lowered = Lower(strategies, self.cluster, self.cache).run(self.graph)
        return SimulateStep(self.cluster).run(lowered)

    def plan(self, picks: Sequence[int], report: StepReport) -> Plan:
        chain = self.chain
        marks = fingerprints(self.graph)
        blocks = tuple(
            BlockPlan(
                f"block {i}",
                self._planned(chain.strategies[p]),
                marks[i],
                float(chain.time[i, p]),
                int(chain.memory[i, p]),
            )
            for i, p in enumerate(picks)
        )
        return Plan(
            axis_sizes=tuple(size for size in self.cluster.shape if size > 1),
            blocks=blocks,
            graph_fingerprint=graph_fingerprint(self.graph),
            step_time_s=chain.time_s(picks),
            peak_memory_bytes=report.peak_memory_bytes,
            memory_budget_bytes=self.options.memory_budget_bytes,
        )

    def _planned(self, strategy: Strategy) -> Strategy:
        """The strategy as a plan holds it: without axes of one rank."""
        roles = tuple(role for role, size in zip(strategy.roles, self.cluster.shape, strict=True) if size > 1)
        return replace(strategy, roles=roles)

    def least(self) -> Plan:
        """The plan that takes the least memory, if it fits after all; else BudgetError."""
        best: tuple[float, list[int]] | None = None
        chain = self.chain
        for bound in _transient_bounds(np.where(chain.allowed, chain.transient, np.inf)):
            memory = np.where((chain.transient > bound) | ~chain.allowed, np.inf, chain.memory)
            total = float(memory.min(axis=1).sum()) + bound
            if np.isfinite(total) and (best is None or total < best[0]):
                best = total, [int(p) for p in memory.argmin(axis=1)]
        if best is None:
            raise PlanError("the constraints leave no strategy for some block")
        report = self.simulate(best[1])
        plan = self.plan(best[1], report)
        if report.peak_memory_bytes <= self.options.memory_budget_bytes:
            return plan
        raise BudgetError(
            f"no plan fits {format_bytes(self.options.memory_budget_bytes)} per device: the least is "
            f"{format_bytes(report.peak_memory_bytes)} ({report.peak_memory_bytes} bytes), reached by\n{plan}\n"
            f"give more memory, more devices, or a smaller batch",
            least_bytes=report.peak_memory_bytes,
            plan=plan,
        )
