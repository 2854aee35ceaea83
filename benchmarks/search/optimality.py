"""Claim: on small instances the search finds the best of all plans, elsewhere its bounds hold; balances are weighed.

Compares the search with trying every plan, on random chains and on a GPT-2 on eight devices, all priced by one model;
prints how its bounds and estimates lie to the best plan; and how much is gained over cuts that balance the time or
the memory of stages alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from galvatron_fx.ir.plan.schedule import legal
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.solvers.cuts import Cuts, balanced
from passes.search.solvers.stage_search import StageChoice, StageSearch
from tests.passes.search.small_chains import SCHEDULES, brute_force, chain_of, search_of
from tests.passes.search.small_models import every_search, exhaustive

FEW_ROLES = ("zero", "tensor", "pipeline")  # so that all plans can be tried
BUDGETS = (1.05, 1.4, 4.0)  # times the least that is possible
ROUNDING = 1e-9
MOST_PLANS = 256


def time_s(found: StageChoice | None) -> float:
    """Seconds of a choice, infinite for none."""
    return found.time_s if found is not None else float(np.inf)


def alone(search: StageSearch) -> StageSearch:
    """The search that picks the strategies of each stage on its own, as it does where blocks are many."""
    apart = replace(search)
    apart.is_small = False
    return apart


def random_search(random: np.random.Generator) -> StageSearch:
    """A configuration of random prices, few enough to try all plans."""
    while True:
        ranks = int(random.integers(2, 5))
        schedule = str(random.choice(list(SCHEDULES)))
        stages = ranks * SCHEDULES[schedule]
        parts = int(random.choice((1, 2, 4, 6, 9, 16)))
        if stages <= 6 and legal(schedule, ranks, stages, parts) is None:
            break
    blocks = int(random.integers(stages, 7))
    count = max(2, min(4, int(MOST_PLANS ** (1 / blocks))))
    prices = random.integers(0, 10, (7, blocks, count)).astype(float)
    prices[:4] += 1
    change = random.integers(0, 4, (blocks, count, count)) * (1.0 - np.eye(count))
    chain = chain_of(prices, random.integers(0, 5, blocks).tolist(), change + change.transpose(0, 2, 1), ranks, parts)
    return search_of(chain, ranks, schedule, parts)


def table(title: str, *headings: str) -> Table:
    """An empty table; all columns but the first hold numbers."""
    made = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        made.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return made


def random_chains(count: int) -> tuple[Table, bool]:
    """The search and its bounds on random chains, and whether all is as claimed."""
    random = np.random.default_rng(0)
    ratios: dict[str, list[float]] = {"search": [], "stages each on their own": [], "estimate": [], "bound": []}
    while len(ratios["search"]) < count:
        search = random_search(random)
        budget = float(random.choice((1.0, 1.1, 1.3, 1.6, 2.5))) * search.least_bytes
        best = brute_force(search, budget)
        if np.isfinite(best):
            ratios["search"].append(time_s(search.run(budget)) / best)
            ratios["stages each on their own"].append(time_s(alone(search).run(budget)) / best)
            ratios["estimate"].append(search.estimate_s(budget) / best)
            ratios["bound"].append(search.bound_s(budget) / best)
    made = table(
        f"{count} random chains: seconds over those of the best plan",
        "",
        "least",
        "median",
        "most",
        "equal",
        "infinite",
    )
    for name, values in ratios.items():
        found = np.array(values)
        finite = found[np.isfinite(found)]
        numbers = f"{finite.min():.3f}", f"{np.median(finite):.3f}", f"{finite.max():.3f}"
        equal = int((np.abs(found - 1) <= ROUNDING).sum())
        made.add_row(name, *numbers, str(equal), str(len(found) - len(finite)))
    exact = max(abs(ratio - 1) for ratio in ratios["search"]) <= ROUNDING
    return made, exact and max(*ratios["estimate"], *ratios["bound"]) <= 1 + ROUNDING


def real_model() -> tuple[Table, bool]:
    """GPT-2 of two layers on eight devices: the best plan of every pipeline degree, and whether the search finds it."""
    searches = list(every_search(2, FEW_ROLES))
    least = min(search.least_bytes for search in searches)
    headings = "budget / least", "pipeline ranks", "configurations", "every plan ms", "search ms", "each on its own ms"
    made = table(f"GPT-2, 2 layers, 8 devices, roles {', '.join(FEW_ROLES)}", *headings)
    holds = True
    for share in BUDGETS:
        for ranks in sorted({search.num_ranks for search in searches}):
            own = [search for search in searches if search.num_ranks == ranks]
            best = float(np.inf)
            for search in own:
                best = exhaustive(search, share * least, best)
            found = min(time_s(search.run(share * least)) for search in own)
            apart = min(time_s(alone(search).run(share * least)) for search in own)
            holds &= found == best or abs(found / best - 1) <= ROUNDING
            made.add_row(f"{share:.2f}", str(ranks), str(len(own)), *(f"{1e3 * s:.5f}" for s in (best, found, apart)))
    return made, holds


def balances(layers: int, vocabulary: int) -> tuple[Table, Table, bool]:
    """Larger models: what the search gains over cuts that balance one thing, and how its estimates lie."""
    headings = "stages", "parts", "budget", "time", "memory", "search", "cuts: time, memory, search"
    what = f"GPT-2, {layers} layers, {vocabulary} words, 8 devices"
    made = table(f"{what}: ms of a step by cuts that balance time, memory, or both", "schedule", *headings)
    lies = table(f"{what}: seconds over those found", "", "least", "median", "most")
    ratios: dict[str, list[float]] = {"estimate": [], "bound": []}
    holds = True
    for search in (each for each in every_search(layers, ROLES, vocabulary) if each.num_ranks in (2, 4)):
        setting = search.configuration
        weights = search.costs.fastest, search.costs.memory.min(axis=1)
        cuts = [balanced(weight, setting.num_stages) for weight in weights]
        for share in (1.1, 1.6):
            budget = share * search.least_bytes
            found = search.run(budget)
            if found is None:
                continue
            ratios["estimate"].append(search.estimate_s(budget) / found.time_s)
            ratios["bound"].append(search.bound_s(budget) / found.time_s)
            either = [time_s(search.run_at(way, budget)) for way in cuts]
            holds &= found.time_s <= min(either) * (1 + ROUNDING)
            if cuts[0] != cuts[1] and found.time_s < 0.99 * min(either):
                times = (f"{1e3 * s:.2f}" for s in (*either, found.time_s))
                parts = str(setting.num_stages), str(setting.num_microbatches), f"{share:.1f}"
                made.add_row(setting.schedule, *parts, *times, _cuts_text([*cuts, found.first_blocks]))
    for name, values in ratios.items():
        lies.add_row(name, *(f"{value:.3f}" for value in np.quantile(values, (0, 0.5, 1))))
    return made, lies, holds


def _cuts_text(ways: Iterable[Cuts]) -> str:
    return "  ".join(",".join(map(str, way[1:])) for way in ways)


def report(console: Console, tables: Sequence[Table], claim: str, holds: bool) -> bool:
    """Print tables and whether the claim about them holds."""
    for made in tables:
        console.print(made)
    console.print(f"{'holds' if holds else 'FAILS'}: {claim}\n")
    return holds


def main() -> None:
    """Compare and print; exits with 1 where a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="random chains (default: 300)")
    parser.add_argument("--layers", type=int, default=12, help="of the larger model (default: 12)")
    parser.add_argument("--vocabulary", type=int, default=50304, help="of the larger model (default: 50304)")
    options, console = parser.parse_args(), Console(width=150, highlight=False)
    console.print(f"{machine.describe()}\n")
    chains, exact = random_chains(options.count)
    claims = [report(console, [chains], "the search equals the best of all plans, and no bound exceeds it", exact)]
    model, exact = real_model()
    claims.append(report(console, [model], "the search equals the best of all plans", exact))
    better, lies, holds = balances(options.layers, options.vocabulary)
    claims.append(report(console, [better, lies], "the search is never worse than either balance", holds))
    sys.exit(not all(claims))


if __name__ == "__main__":
    main()
