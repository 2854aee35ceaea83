"""The cases of regret.py, and the plans that are measured in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement, groupby
from random import Random

from benchmarks.common.small_models import Size, Sized, bert, gpt2, llama, t5
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import PIPELINE, ROLES, Strategy

RANKS = 4
AXES = (2, 2)

MODELS: dict[str, Sized] = {
    "gpt2": (gpt2, Size(128, 4, 4, 2048, 16, 128)),
    "llama": (llama, Size(128, 4, 4, 1024, 16, 128)),
    "bert": (bert, Size(128, 4, 4, 2048, 16, 64)),
    "t5": (t5, Size(128, 4, 4, 1024, 16, 64)),
}


@dataclass(frozen=True)
class Case:
    """A model that must fit ``budget_mb`` decimal megabytes a rank."""

    model: str
    budget_mb: int

    @property
    def budget_bytes(self) -> int:
        """As the planner takes it."""
        return self.budget_mb * 10**6

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.model}, {self.budget_mb} MB"


# Each model with all the memory that any plan wants, and with less than any plan has that keeps all activations and
# all parameters.
CASES = tuple(
    Case(model, budget_mb)
    for model, budgets in {"gpt2": (400, 45), "llama": (400, 36), "bert": (400, 28), "t5": (400, 26)}.items()
    for budget_mb in budgets
)


def strategies() -> list[Strategy]:
    """All strategies of a block on two axes of one machine, which are alike: the order of the roles is only a name."""
    found = []
    for roles in combinations_with_replacement([role for role in ROLES if role != PIPELINE], len(AXES)):
        found += [Strategy(roles), Strategy(roles, recompute=True)]
        if "zero" in roles:
            found.append(Strategy(roles, keep_gathered=True))
    return found


def name_of(plan: Plan) -> str:
    """The strategies in the order of the blocks, with how many have each."""
    runs = [(strategy, len(list(run))) for strategy, run in groupby(str(block.strategy) for block in plan.blocks)]
    return runs[0][0] if len(runs) == 1 else " | ".join(f"{count}× {strategy}" for strategy, count in runs)


def uniform_plans(blocks: int) -> list[Plan]:
    """A plan for every strategy."""
    return [Plan.from_roles(AXES, [strategy] * blocks) for strategy in strategies()]


def mixed_plans(picked: Plan, kinds: Sequence[str], seed: int) -> Iterator[Plan]:
    """Plans, without end, that give kinds of blocks unlike strategies: neighbours of a pick and any others, in turns.

    ``kinds``: the fingerprints of the blocks. A neighbour is the pick but for one kind of blocks.
    """
    random, every = Random(seed), strategies()
    names = sorted(set(kinds))
    own = [picked.strategy_of(index, len(kinds)) for index in range(len(kinds))]
    while True:
        changed, other = random.choice(names), random.choice(every)
        yield Plan.from_roles(AXES, [other if kind == changed else own[i] for i, kind in enumerate(kinds)])
        drawn = {kind: random.choice(every) for kind in names}
        yield Plan.from_roles(AXES, [drawn[kind] for kind in kinds])


def same(plan: Plan) -> str:
    """Equal for plans that run alike: the axes may change places, in all blocks at once."""
    block_fingerprints = [(block.strategy.recompute, block.strategy.keep_gathered) for block in plan.blocks]
    tables = [block.strategy.roles for block in plan.blocks]
    turned = [roles[::-1] for roles in tables]
    return f"{min(tables, turned)} {block_fingerprints} {plan.pipelining}"
