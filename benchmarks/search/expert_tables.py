"""Claim: plans of mixtures of experts are no slower than those that people publish, and folding pays where it is taken.

Prints for each model the simulated step, its share of the devices' peak (products of the model as captured, without
recomputation), memory a rank and seconds of search of: the plan found, the best without tensor and sequence roles
(nothing can be folded then), the best without experts, and mappings that Megatron publishes, entered by hand.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search.expert_models import SETTINGS, Mapping, Setting
from cost_models.graph_cost import graph_cost
from galvatron_fx.errors import BudgetError, TimeLimitError
from galvatron_fx.estimating import estimate
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import BlockPlan, Plan
from galvatron_fx.ir.plan.plan_table import plan_name
from galvatron_fx.ir.plan.strategy import CAPACITY, PIPELINE, ROLES, Strategy
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from passes.analysis.blocks import num_blocks

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
UNFOLDED = ("data", "zero", "expert", PIPELINE)
SPACES: dict[str, tuple[str, ...]] = {
    "found": ROLES,
    "without tensor and sequence roles": UNFOLDED,
    "without experts": tuple(role for role in ROLES if role != "expert"),
}


def by_hand(mapping: Mapping, graph: fx.GraphModule, cluster: gfx.Cluster, imbalance: float) -> Plan:
    """The mapping as a plan: stages cut evenly by layers, embedding and head with the first and the last; room for, and
    prices of, ``imbalance`` times the mean of rows on the busiest rank's experts.
    """
    inside = {meta_of(node).block for node in graph.graph.nodes if node.target is route}
    outer = (PIPELINE,) * (len(cluster.shape) - len(mapping.attention))
    roles = {True: (*outer, *mapping.experts), False: (*outer, *mapping.attention)}
    count, stages = num_blocks(graph), mapping.stages * mapping.rounds
    layers = (count - 2) // 2
    cuts = (0, *(1 + 2 * (layers * stage // stages) for stage in range(1, stages)))
    schedule = "interleaved_1f1b" if mapping.rounds > 1 else "1f1b"
    blocks = [Strategy(roles[block in inside], keep_gathered=True, capacity=imbalance) for block in range(count)]
    return Plan(
        axis_sizes=cluster.shape,
        blocks=tuple(BlockPlan(f"block {i}", strategy, "", 0.0, 0) for i, strategy in enumerate(blocks)),
        graph_fingerprint="",
        step_time_s=0.0,
        peak_memory_bytes=0,
        memory_budget_bytes=None,
        pipelining=Pipelining(stages, mapping.microbatches, schedule, cuts),
        mixed_precision=HALF,
    )


Row = tuple[str, float, int, float, str]
"""A name, seconds of a step, bytes a rank, seconds of search, and what the plan does."""


def rows(
    setting: Setting,
    captured: gfx.Captured,
    spaces: Sequence[str],
    imbalance: float,
    search_seconds: float | None,
    plans: dict[str, Plan],
) -> Iterator[Row]:
    """Search and simulate for experts of some ``imbalance``; ``plans`` takes the plans that are found."""
    cluster = gfx.Cluster.preset(setting.cluster)
    graph = captured.graph_of(setting.inputs())
    options: dict[str, Any] = {
        "search_seconds": search_seconds,
        "simulate_runners_up": False,
        "expert_imbalance": imbalance,
    }
    for space in spaces:
        start = time.process_time()
        try:
            plan = gfx.plan(captured, cluster, setting.inputs(), roles=SPACES[space], **options)
        except (BudgetError, TimeLimitError) as error:
            yield space, float("inf"), 0, time.process_time() - start, str(error).splitlines()[0][:60]
            continue
        plans[space] = plan
        assert plan.report is not None
        spent = time.process_time() - start
        yield space, plan.report.simulated_s, plan.peak_memory_bytes, spent, plan_name(plan)
    for name, mapping in setting.mappings.items():
        start = time.process_time()
        step = estimate(captured, cluster, setting.inputs(), by_hand(mapping, graph, cluster, imbalance))
        yield f"by hand: {name}", step.simulated_s, step.peak_bytes, time.process_time() - start, mapping.source


def report(name: str, setting: Setting, options: argparse.Namespace) -> None:
    """Print the table of one model."""
    console, plans = Console(width=150), dict[str, Plan]()
    cluster = gfx.Cluster.preset(setting.cluster)
    start = time.process_time()
    captured = gfx.Captured(setting.model(), setting.inputs(), mixed_precision=HALF)
    cost = graph_cost(captured.graph_of(setting.inputs()))
    capture_s = time.process_time() - start
    flops = float(cost.at(setting.batch, setting.sequence).products)
    peak = cluster.num_devices * dict(cluster.device.peak_flops)["bfloat16"]
    published = f", published MFU {setting.published_mfu:.1%}" if setting.published_mfu else ""
    title = f"{name} on {setting.cluster}, batch {setting.batch} of {setting.sequence} tokens{published}"
    title += f", imbalance of experts {options.imbalance:g}"
    table = Table("plan", "step", "MFU", "memory/rank", "search (CPU)", "what it does", title=title)
    entries = rows(setting, captured, options.spaces, options.imbalance, options.search_seconds, plans)
    for row, step_s, size, spent, what in entries:
        cells = (
            row,
            format_seconds(step_s),
            f"{flops / peak / step_s:.1%}",
            format_bytes(size),
            f"{spent:.1f} s",
            what,
        )
        print("; ".join(cells), file=sys.stderr, flush=True)
        table.add_row(*cells)
    console.print(table)
    console.print(f"captured in {capture_s:.1f} s of processor time")
    for space, plan in plans.items() if options.plans else ():
        console.print(f"\n{space}:\n{plan}", highlight=False)


def main() -> None:
    """Read options and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--spaces", nargs="*", choices=SPACES, default=list(SPACES))
    parser.add_argument("--search-seconds", type=float, help="of each search, by the wall")
    parser.add_argument(
        "--imbalance", type=float, default=CAPACITY, help="rows of the busiest rank's experts, over the mean"
    )
    parser.add_argument("--plans", action="store_true", help="print the plans that are found")
    options = parser.parse_args()
    print(machine.describe(), flush=True)
    for name in options.models:
        report(name, SETTINGS[name], options)


if __name__ == "__main__":
    main()
