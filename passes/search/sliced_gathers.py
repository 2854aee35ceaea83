"""Plans whose largest parameters are gathered in slices, made of those that a search found and that take too much."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import fx

from galvatron_fx.ir.errors import PlanError
from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.plan.strategy import Strategy
from passes.analysis.blocks import num_blocks
from passes.search.best_first import Simulated
from passes.simulation.choice import SimulateChoice

__all__ = ["lightest_with_slices", "with_slices"]

_CHOICES = 3  # that are tried, the fastest that promise a faster step than the best
_COUNTS = (2, 4, 8)  # of slices; with more, starting a collective takes longer than what it sends
_LARGE = 0.5  # of the largest parameter of a block: others are gathered whole


def with_slices(
    graph: fx.GraphModule,
    outcomes: Sequence[Simulated],
    best: Simulated | None,
    simulate: SimulateChoice,
    limit: float,
) -> Simulated | None:
    """Return ``best``, or what is faster and keeps to ``limit`` bytes: one of the ``outcomes`` that takes more, with
    the fewest slices with which it does not.

    Tried where gathers and gradients of a block's parameters may be what is too much.
    """
    sizes = _largest_bytes(graph)
    over = [each for each in outcomes if limit < each.peak_bytes <= limit + 2 * max(sizes) and each.is_plain]
    for outcome in sorted(over, key=lambda outcome: outcome.simulated_s)[:_CHOICES]:
        for sliced in _sliced(outcome, sizes, simulate):
            if best is not None and sliced.simulated_s >= best.simulated_s:
                break
            if sliced.fits(limit):
                best = sliced
                break
    return best


def lightest_with_slices(graph: fx.GraphModule, least: Simulated, simulate: SimulateChoice) -> Simulated:
    """Return ``least``, or the same with slices where that takes less."""
    tried = _sliced(least, _largest_bytes(graph), simulate) if least.is_plain else iter(())
    return min([least, *tried], key=lambda outcome: outcome.peak_bytes)


def _sliced(outcome: Simulated, sizes: Sequence[int], simulate: SimulateChoice) -> Iterator[Simulated]:
    """The outcome with ever more slices: of the blocks with the largest parameters, then of all that gather; each as
    long as more slices take less memory.
    """
    strategies = outcome.strategies
    gathering = [i for i, strategy in enumerate(strategies) if _may_slice(strategy)]
    most = max((sizes[i] for i in gathering), default=0)
    large = [i for i in gathering if sizes[i] >= _LARGE * most]
    last = outcome
    for blocks in [large, gathering] if len(large) < len(gathering) else [large]:
        for count in _COUNTS if blocks else ():
            slices = tuple(count if i in blocks else 1 for i in range(len(strategies)))
            sliced = _simulated(outcome, slices, simulate)
            if sliced is None or sliced.peak_bytes >= last.peak_bytes:
                break
            last = sliced
            yield sliced


def _may_slice(strategy: Strategy) -> bool:
    return "zero" in strategy.roles and not strategy.keep_gathered


def _simulated(outcome: Simulated, slices: tuple[int, ...], simulate: SimulateChoice) -> Simulated | None:
    search, choice = outcome.search, outcome.choice
    sliced = replace(outcome, slices=slices)
    try:
        report = simulate.run(sliced.strategies, choice.first_blocks, search.staging)
    except PlanError:
        return None
    return replace(sliced, choice=replace(choice, time_s=report.step_time_s), report=report)


def _largest_bytes(graph: fx.GraphModule) -> list[int]:
    """Of the largest parameter that each block uses."""
    sizes = [0] * num_blocks(graph)
    for port, node in ports(graph):
        for user in node.users if port.kind == "param" else ():
            if user.op == "call_function":
                block = max(meta_of(user).block, 0)
                sizes[block] = max(sizes[block], meta_of(node).spec.size_bytes)
    return sizes
