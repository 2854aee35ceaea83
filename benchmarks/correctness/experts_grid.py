"""Claim: experts that ranks hold in parts compute what one device does, whatever the plan, the routing and the room.

Tiny mixtures of transformers under mixes of roles, routings from even to all tokens at the same experts, and rooms from
a quarter of the mean to all rows, on simulated ranks in float64. Prints the largest relative difference of loss and
gradients of every family and routing; exits with 1 where one is above 1e-10. The whole grid takes some minutes of one
core; ``--families``, ``--routings`` and ``--capacities`` run a slice of it, each row being printed as it is done.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import torch
from rich.console import Console
from torch import Tensor, fx, nn

from benchmarks.common import machine
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from tests.helpers import one_device, relative_errors, simulate, simulate_stages, uniform
from tests.models.test_experts import FAMILIES, case, routers

TOLERANCE = 1e-10
CAPACITIES = (0.25, 1.0, 4.0)  # the last: room for all rows of the largest axis
MIXES: dict[str, tuple[tuple[str, ...], bool]] = {
    "expert": (("expert",), False),
    "expert, recomputed": (("expert",), True),
    "expert + data": (("data", "expert"), False),
    "expert + zero": (("zero", "expert"), False),
    "expert + tensor": (("expert", "tensor"), False),
    "expert + tensor_sequence": (("expert", "tensor_sequence"), True),
    "two expert axes": (("expert", "expert"), False),
    "expert_sequence + data": (("data", "expert_sequence"), False),
}
FOLDED = (("tensor_sequence", "expert"), ("expert", "expert"))  # in turns: axes of unlike roles in neighbours
STAGED = ("mixtral", "gpt_oss")  # routers in float32 round otherwise for fewer tokens
SHADOWS = 1  # experts of a block that every rank computes, in a second run of the mixes

Results = dict[str, Tensor]
Runs = Iterator[tuple[str, Results]]


def as_it_is(weight: Tensor) -> None:
    """Tokens spread over experts as the initial router happens to."""


def nearly_all_to_one(weight: Tensor) -> None:
    """Where its score is positive, an expert wins by far; where negative, it loses."""
    weight[-1] *= 50


def without_order(weight: Tensor) -> None:
    """Equal scores: all tokens to the same experts, none to all others."""
    weight.zero_()


ROUTINGS: dict[str, Callable[[Tensor], None]] = {
    "as initialised": as_it_is,
    "most to one expert": nearly_all_to_one,
    "ties, experts and ranks without a token": without_order,
}


def runs(
    family: str, graph: fx.GraphModule, model: nn.Module, inputs: dict[str, Tensor], capacities: Sequence[float]
) -> Runs:
    """What every plan computes, by name."""
    blocks = num_blocks(graph)
    for capacity in capacities:
        for (name, (roles, recompute)), shadows in product(MIXES.items(), (0, SHADOWS)):
            strategies = uniform(graph, *roles, recompute=recompute, capacity=capacity, shadows=shadows)
            called = f"{name}, {capacity}{', shadows' if shadows else ''}"
            yield called, simulate(graph, model, inputs, (2,) * len(roles), strategies, {})
        folded = [Strategy(FOLDED[i % 2], capacity=capacity) for i in range(blocks)]
        yield f"folded, {capacity}", simulate(graph, model, inputs, (2, 2), folded, {})
        if family in STAGED:
            schedule, first = make_schedule("1f1b", 2, 2, 2), (0, blocks // 2)
            for role in ("expert", "expert_sequence"):
                staged = uniform(graph, "pipeline", role, capacity=capacity)
                got = simulate_stages(graph, model, inputs, (2, 2), staged, first, schedule)
                yield f"stages of {role}, {capacity}", got


def main() -> None:
    """Run; exits with 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="which (default: all)")
    parser.add_argument("--routings", nargs="*", choices=list(ROUTINGS), default=list(ROUTINGS), help="default: all")
    parser.add_argument("--capacities", nargs="*", type=float, default=list(CAPACITIES), help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    console.print("Largest relative difference: family | routing | plans | worst | plan")
    worst, count = 0.0, 0
    for family in options.families.split(","):
        trained, inputs, graph, _ = case(family)
        for routing in options.routings:
            model = copy.deepcopy(trained)
            with torch.no_grad():
                for weight in routers(model):
                    ROUTINGS[routing](weight)
            expected = one_device(model, inputs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results = runs(family, graph, model, inputs, options.capacities)
                errors = {n: max(relative_errors(r, expected).values()) for n, r in results}
            plan = max(errors, key=errors.__getitem__)
            worst, count = max(worst, errors[plan]), count + len(errors)
            console.print(f"{family} | {routing} | {len(errors)} | {errors[plan]:.1e} | {plan}")
    console.print(f"{count} plans, the worst {worst:.1e} where {TOLERANCE:.0e} is allowed")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
