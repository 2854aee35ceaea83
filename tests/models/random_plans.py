"""Random plans with stages and micro-batches for whole models, each made by one seed, and what becomes of them.

Shared by ``tests/models/test_stages.py``, which runs a fixed sample, and
``benchmarks/correctness/random_stages.py``, which runs as many as one likes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
from torch import fx, nn

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.pipelining import BY_HAND
from galvatron_fx.ir.plan.schedule import SCHEDULES, Action, Schedule, check_schedule, legal, make_schedule
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.analysis.blocks import num_blocks
from tests.fuzz.plans import with_kept_values
from tests.helpers import assert_exact, captured, one_device, simulate_stages
from tests.models import zoo

INNER_ROLES = ("data", "zero", "tensor", "tensor_sequence", "sequence")
PIPELINE_AXES = {2: [2], 4: [2, 2]}

_DEEP: dict[str, dict[str, Any]] = {
    "gpt2": {"layers": 7}, "llama": {"layers": 7}, "bert": {"layers": 7},
    "t5": {"layers": 4}, "swin": {"depths": [4, 4]},
}  # fmt: skip
_BATCHES: dict[str, Callable[[int], dict[str, Any]]] = {
    "gpt2": zoo.tokens,
    "llama": zoo.tokens,
    "bert": zoo.masked_tokens,
    "t5": zoo.tokens,
    "swin": zoo.images,
    "vit": zoo.images,
}
MODELS = ("gpt2", "llama", "bert", "t5", "swin")


@dataclass(frozen=True)
class Prepared:
    """A model, its batch, its captured graph, what one device makes of them, and what was solved of its blocks."""

    model: nn.Module
    inputs: dict[str, Any]
    graph: fx.GraphModule
    expected: dict[str, torch.Tensor]
    solved: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Layer blocks of the graph."""
        return num_blocks(self.graph)


@cache
def prepared(name: str, deep: bool, batch: int) -> Prepared:
    """Capture a model of the zoo, small or with enough blocks for eight stages, and run it on one device."""
    model, _ = zoo.MODELS[name](**(_DEEP[name] if deep else {}))
    inputs = _BATCHES[name](batch)
    return Prepared(model, inputs, captured(model, inputs), one_device(model, inputs))


@dataclass(frozen=True)
class Combination:
    """A model with a plan and a schedule; ``sizes`` are the mesh axes and ``strategies`` one a block."""

    seed: int
    name: str
    deep: bool
    batch: int
    sizes: tuple[int, ...]
    strategies: tuple[Strategy, ...]
    first_blocks: tuple[int, ...]
    schedule: Schedule

    @property
    def key(self) -> str:
        """The model and its variant."""
        return f"{self.name}{' deep' if self.deep else ''}, batch {self.batch}"

    def check(self) -> None:
        """Compare loss, outputs and all gradients with one device; raises AssertionError where they differ."""
        given = prepared(self.name, self.deep, self.batch)
        got = simulate_stages(
            given.graph,
            given.model,
            given.inputs,
            self.sizes,
            self.strategies,
            self.first_blocks,
            self.schedule,
            given.solved,
        )
        assert_exact(got, given.expected, f"seed {self.seed}")

    def __str__(self) -> str:
        """Return all that is needed to make the combination by hand."""
        table = self.schedule
        lines = [
            f"seed {self.seed}: {self.key}, mesh {self.sizes}, first blocks {self.first_blocks}, schedule {table.name} "
            f"of {table.num_microbatches} micro-batches on ranks {table.rank_of_stage}",
            *(f"  block {index}: {strategy}" for index, strategy in enumerate(self.strategies)),
        ]
        if table.name == BY_HAND:
            lines += [f"  rank {rank}: {' '.join(map(str, order))}" for rank, order in enumerate(table.orders)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Outcome:
    """What became of a combination: ``kind`` is "exact", "refused" (PlanError), "wrong" or "crashed"."""

    combination: Combination
    kind: str
    error: str = ""


def draw(seed: int) -> Combination:
    """Make the combination of a seed; equal seeds give equal combinations."""
    random = Random(seed)
    name, deep, batch = random.choice(MODELS), random.random() < 0.5, random.choice((4, 8))
    blocks = prepared(name, deep, batch).num_blocks
    ranks = random.choice((2, 4))
    schedule = _draw_schedule(random, ranks, blocks, random.choice([n for n in (1, 2, 4, 8) if n <= batch]))
    inner = random.random() < 0.7
    axes = [(size, PIPELINE) for size in PIPELINE_AXES[ranks]]
    place = random.randrange(len(axes) + 1) if inner else None
    sizes = [size for size, _ in axes]
    if place is not None:
        sizes.insert(place, 2)
    drawn = [_draw_strategy(random, len(axes), place) for _ in range(blocks)]
    strategies = tuple(with_kept_values(strategy, Random(seed + block)) for block, strategy in enumerate(drawn))
    later = random.sample(range(1, blocks), schedule.num_stages - 1)
    return Combination(seed, name, deep, batch, tuple(sizes), strategies, (0, *sorted(later)), schedule)


def run(combination: Combination) -> Outcome:
    """Run a combination, whatever comes of it."""
    try:
        combination.check()
    except PlanError as error:
        return Outcome(combination, "refused", str(error))
    except AssertionError as error:
        return Outcome(combination, "wrong" if "differs" in str(error) else "crashed", traceback.format_exc(limit=-6))
    except Exception:
        return Outcome(combination, "crashed", traceback.format_exc(limit=-6))
    return Outcome(combination, "exact")


def random_table(random: Random, num_ranks: int, num_stages: int, num_microbatches: int) -> Schedule:
    """Make a schedule by drawing, again and again, any action that nothing keeps from running."""
    owners = [*range(num_ranks), *(random.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    random.shuffle(owners)
    orders: list[list[Action]] = [[] for _ in range(num_ranks)]
    ready = [Action("F", 0, index) for index in range(num_microbatches)]
    # Some tables halve every backward, some none, most some.
    halved = random.choice((0.0, 0.5, 0.5, 1.0))
    while ready:
        action = ready.pop(random.randrange(len(ready)))
        orders[owners[action.stage]].append(action)
        ready += _freed(random, action, num_stages, halved)
    made = Schedule(BY_HAND, tuple(owners), num_microbatches, tuple(map(tuple, orders)))
    check_schedule(made)
    return made


def _freed(random: Random, action: Action, num_stages: int, halved: float) -> list[Action]:
    """What can run since ``action`` has: the next forward, the backward before, the weight gradients."""
    kind, stage, index = action.kind, action.stage, action.microbatch
    backward = "I" if random.random() < halved else "B"
    if kind == "F":
        return [Action("F", stage + 1, index)] if stage + 1 < num_stages else [Action(backward, stage, index)]
    freed = [Action("W", stage, index)] if kind == "I" else []
    if kind != "W" and stage > 0:
        freed.append(Action(backward, stage - 1, index))
    return freed


def _draw_schedule(random: Random, ranks: int, blocks: int, microbatches: int) -> Schedule:
    """One of the named schedules, or a table by hand, as far as there are blocks for its stages."""
    choices: list[tuple[str, int]] = [
        (name, stages)
        for name in SCHEDULES
        for stages in range(ranks, min(blocks, 3 * ranks) + 1)
        if legal(name, ranks, stages, microbatches) is None
    ]
    by_name = sorted({name for name, _ in choices})
    if random.random() < 0.25 or not by_name:
        return random_table(random, ranks, random.randint(ranks, min(blocks, 2 * ranks)), microbatches)
    name = random.choice(by_name)
    return make_schedule(name, ranks, random.choice([s for n, s in choices if n == name]), microbatches)


def _draw_strategy(random: Random, pipeline_axes: int, inner: int | None) -> Strategy:
    roles = [PIPELINE] * pipeline_axes
    if inner is not None:
        roles.insert(inner, random.choice(INNER_ROLES))
    return Strategy(tuple(roles), recompute=random.random() < 0.35, keep_gathered=random.random() < 0.5)
