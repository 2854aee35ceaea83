"""Random plans for any program: roles that differ from block to block, axes, stages, micro-batches, and rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from galvatron_fx.ir.plan.schedule import Schedule, legal, make_schedule
from galvatron_fx.ir.plan.spread_ends import make_spread_schedule
from galvatron_fx.ir.plan.strategy import CAPACITY, PIPELINE, Strategy
from passes.lowering.apply_plan import with_spread_ends

ROLES = ("data", "zero", "tensor", "tensor_sequence", "sequence", "context", "expert", "expert_sequence")
MESHES = ((2,), (2,), (3,), (2, 2), (2, 2), (2, 2), (2, 2), (2, 3), (3, 2), (2, 2, 2))
SCHEDULES = ("1f1b", "gpipe", "zb_h1")
_VALUES = 24


@dataclass(frozen=True)
class PlanDraw:
    """A plan that fits any number of blocks.

    ``sizes`` of the mesh axes; ``strategies`` are dealt to the blocks in turn; ``stages`` and ``microbatches`` by
    ``schedule``, where there are any; ``rules``: the seed that picks the rules of operators, None picks by price;
    ``is_spread``: whether all pipeline ranks compute the first and the last block, where others are left for all.
    """

    sizes: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    stages: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    rules: int | None = None
    is_spread: bool = False

    def spreads(self, blocks: int) -> bool:
        """Whether that can be of so many blocks."""
        return self.is_spread and 1 < self.stages <= blocks - 2

    def dealt(self, blocks: int) -> list[Strategy]:
        """A strategy for each block."""
        strategies = [self.strategies[i % len(self.strategies)] for i in range(blocks)]
        return with_spread_ends(strategies) if self.spreads(blocks) else strategies

    @property
    def has_stages(self) -> bool:
        """Whether the step is cut into stages or micro-batches."""
        return self.stages > 1 or self.microbatches > 1

    def first_blocks(self, blocks: int) -> list[int]:
        """The first block of every stage."""
        if self.spreads(blocks):
            return [0, *(1 + stage * (blocks - 2) // self.stages for stage in range(self.stages)), blocks - 1]
        return [stage * blocks // self.stages for stage in range(self.stages)]

    def table(self, blocks: int) -> Schedule:
        """The schedule."""
        make = make_spread_schedule if self.spreads(blocks) else make_schedule
        return make(self.schedule, self.stages, self.stages, self.microbatches)


def draw_plan(random: Random, blocks: int, batch: int) -> PlanDraw:
    """A plan for so many blocks and samples."""
    sizes = random.choice(MESHES)
    share = random.random()
    rules = random.randrange(1 << 30) if random.random() < 0.4 else None
    if share < 0.35:
        role = (
            tuple(random.choice(ROLES) for _ in sizes)
            if random.random() < 0.6
            else (random.choice(ROLES),) * len(sizes)
        )
        return PlanDraw(sizes, (_strategy(random, role),), rules=rules)
    if share < 0.8:
        count = min(blocks, random.choice((2, 2, 3, 5)))
        tables = tuple(_strategy(random, tuple(random.choice(ROLES) for _ in sizes)) for _ in range(count))
        return PlanDraw(sizes, tables, rules=rules)
    return _staged(random, blocks, batch, rules)


def _staged(random: Random, blocks: int, batch: int, rules: int | None) -> PlanDraw:
    stages = 2 if blocks > 1 and random.random() < 0.7 else 1
    microbatches = random.choice([n for n in (1, 2, 4) if batch % n == 0 and (n > 1 or stages > 1)] or [1])
    name = random.choice([name for name in SCHEDULES if legal(name, stages, stages, microbatches) is None] or ["1f1b"])
    inner = random.choice(((), (2,), (2,), (3,), (2, 2)))
    lead: tuple[str, ...] = (PIPELINE,) if stages > 1 else ()
    sizes = (*((2,) if stages > 1 else ()), *inner) or (2,)
    lacking = len(sizes) - len(lead)
    tables = tuple(
        _strategy(random, (*lead, *(random.choice(ROLES) for _ in range(lacking)))) for _ in range(min(blocks, 3))
    )
    drawn = PlanDraw(sizes, tables, stages, microbatches, name, rules)
    return replace(drawn, is_spread=Random(f"{drawn}, spread").random() < 0.4)


def _strategy(random: Random, roles: tuple[str, ...]) -> Strategy:
    capacity = random.choice((0.25, 0.5, 1.0, 1.25, 2.0)) if "expert" in roles else CAPACITY
    strategy = Strategy(roles, random.random() < 0.3, random.random() < 0.3, capacity=capacity)
    strategy = with_kept_values(strategy, Random(repr(strategy)))
    shadows = Random(f"{strategy}, shadows").choice((0, 0, 1, 2)) if roles.count("expert") == 1 else 0
    strategy = with_offloaded_values(replace(strategy, shadows=shadows), Random(f"{strategy}, on the host"))
    return with_slices(strategy, Random(f"{strategy}, in slices"))


def with_kept_values(strategy: Strategy, random: Random) -> Strategy:
    """Every second strategy that recomputes, with some of a block's values kept; numbers that it has not mean none."""
    if not strategy.recompute or random.random() < 0.5:
        return strategy
    keeps = sorted(random.sample(range(_VALUES), random.randint(1, _VALUES // 2)))
    return replace(strategy, keeps=tuple(keeps), num_values=_VALUES)


def with_offloaded_values(strategy: Strategy, random: Random) -> Strategy:
    """Every third strategy, with some of what it keeps waiting on the host, and every sixth with states there, with
    parameters or without.
    """
    if random.random() < 0.67:
        return strategy
    kept = strategy.keeps if strategy.recompute else range(_VALUES)
    offloads = tuple(number for number in kept if random.random() < 0.7)
    entering, values = random.random() < 0.7, _VALUES if offloads or strategy.keeps else 0
    states = random.random() < 0.5
    homes = {"offload_states": states, "offload_parameters": states and random.random() < 0.5}
    return replace(strategy, offloads=offloads, offload_entering=entering, num_values=values, **homes)


def with_slices(strategy: Strategy, random: Random) -> Strategy:
    """Every second strategy that gathers what it used again, with gathers in slices."""
    may_slice = "zero" in strategy.roles and not strategy.keep_gathered
    return replace(strategy, split_gathers=random.choice((1, 1, 2, 3, 4))) if may_slice else strategy


def simpler(plan: PlanDraw) -> Iterator[PlanDraw]:
    """Plans that ask for less."""
    if plan.rules is not None:
        yield replace(plan, rules=None)
    if plan.has_stages:
        yield replace(plan, stages=1, microbatches=1, strategies=tuple(map(_without_stages, plan.strategies)))
        if plan.is_spread:
            yield replace(plan, is_spread=False)
        if plan.microbatches > 1:
            yield replace(plan, microbatches=plan.microbatches // 2)
    if len(plan.strategies) > 1:
        yield from (replace(plan, strategies=(strategy,)) for strategy in plan.strategies)
        yield from (
            replace(plan, strategies=(*plan.strategies[:i], *plan.strategies[i + 1 :]))
            for i in range(len(plan.strategies))
        )
    if len(plan.sizes) > 1:
        yield from (_without_axis(plan, axis) for axis in range(len(plan.sizes)))
    for i, strategy in enumerate(plan.strategies):
        here = strategy.without_offload()
        keeps_all = replace(here, recompute=False, keeps=(), num_values=0)
        whole = replace(strategy, split_gathers=1)
        fewer = replace(strategy, keep_gathered=False), replace(strategy, shadows=0)
        for plain in {here, keeps_all, whole, *fewer} - {strategy}:
            yield replace(plan, strategies=(*plan.strategies[:i], plain, *plan.strategies[i + 1 :]))


def _without_stages(strategy: Strategy) -> Strategy:
    return replace(strategy, roles=tuple("data" if role == PIPELINE else role for role in strategy.roles))


def _without_axis(plan: PlanDraw, axis: int) -> PlanDraw:
    def cut(strategy: Strategy) -> Strategy:
        return replace(strategy, roles=(*strategy.roles[:axis], *strategy.roles[axis + 1 :]))

    if PIPELINE in (strategy.roles[axis] for strategy in plan.strategies):
        return plan
    return replace(
        plan, sizes=(*plan.sizes[:axis], *plan.sizes[axis + 1 :]), strategies=tuple(map(cut, plan.strategies))
    )
