"""Claim: models of any size are planned on any machine, without weights, in seconds, whatever their depth.

Prints for each case the seconds of import, capture, search and lowering (of the processor, as machines are shared), the
goal of their sum, and the most memory that the process ever held; then the time of the strategies of one chain under
budgets that bind, and the search of one model at 24 and at 96 layers. Every case runs in a process of its own, so all
are cold.
"""

from __future__ import annotations

import argparse
import json
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx, nn

import galvatron_fx as gfx
from benchmarks.common import machine
from benchmarks.search import irregular_models
from benchmarks.search import planned_models as models
from galvatron_fx.errors import BudgetError
from galvatron_fx.ir.plan.plan import Plan
from galvatron_fx.ir.plan.strategy import ROLES
from galvatron_fx.ir.plan.units import format_bytes
from passes.lowering.lower_stages import LowerStages
from passes.lowering.lower_step import Lower
from passes.search.configurations import Pins
from passes.search.cost_table.cost_table import Pricer
from passes.search.open_configurations import OpenConfigurations
from passes.search.plan_search import SearchOptions, search_plan
from passes.search.solvers.sections import Section, best_picks, least_picks
from passes.search.solvers.step_times import stages_waiting

_IMPORT_S = time.process_time()

Inputs = dict[str, torch.Tensor]


def tokens(batch: int, sequence: int) -> Inputs:
    """Token ids and labels, [batch, sequence]."""
    ids = torch.zeros(batch, sequence, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def images(batch: int, name: str = "x") -> Inputs:
    """Images, [batch, 3, 224, 224], and their classes, [batch]."""
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    return {name: torch.zeros(batch, 3, 224, 224, device="meta"), "labels": labels}


def noisy_images(batch: int) -> Inputs:
    """Images and their noise, [batch, 3, 64, 64], and embedded times, [batch, 128]."""
    pixels = torch.zeros(batch, 3, 64, 64, device="meta")
    return {"x": pixels, "time": torch.zeros(batch, 128, device="meta"), "noise": pixels}


def residue_pairs(batch: int, residues: int) -> Inputs:
    """Features of pairs, [batch, residues, residues, 128], and bins of their distances."""
    pairs = torch.zeros(batch, residues, residues, 128, device="meta")
    return {"pairs": pairs, "bins": torch.zeros(batch, residues, residues, dtype=torch.int64, device="meta")}


@dataclass(frozen=True)
class Case:
    """A model on a cluster with a batch, and the seconds in which it should be planned and lowered."""

    make: Callable[[int], nn.Module]
    layers: int
    cluster: str
    inputs: Callable[[], Inputs]
    goal_s: float
    dtype: torch.dtype = torch.bfloat16

    def capture(self, layers: int) -> fx.GraphModule:
        """The graph of the model, of ``layers`` layers, on the meta device."""
        with torch.device("meta"):
            model = self.make(layers).to(self.dtype)
        return gfx.capture(model, self.inputs())


_A100, _F32 = "8xA100-80GB", torch.float32
CASES = {
    "llama-7b": Case(models.llama_7b, 32, _A100, lambda: tokens(64, 2048), 5),
    "llama-8b": Case(models.llama_8b, 32, _A100, lambda: tokens(64, 2048), 6.5),
    "gpt3-175b": Case(models.gpt3_175b, 96, "1024xA100-80GB", lambda: tokens(1536, 2048), 15),
    "llama-405b": Case(models.llama_405b, 126, "16384xH100-80GB", lambda: tokens(2048, 8192), 15),
    "llama-405b, nothing fits": Case(models.llama_405b, 126, "64xH100-80GB", lambda: tokens(64, 8192), 5, _F32),
    "llama-8b, a million tokens": Case(models.llama_8b, 32, "256xH100-80GB", lambda: tokens(4, 2**20), 30),
    "llama-405b, 128k tokens": Case(models.llama_405b, 126, "1024xH100-80GB", lambda: tokens(16, 2**17), 30),
    "256 layers": Case(models.llama_7b, 256, "64xA100-80GB", lambda: tokens(256, 2048), 15),
    "deepseek-v3": Case(models.deepseek_v3, 6, "2048xH100-80GB", lambda: tokens(4096, 4096), 15),
    "deepseek-v3, whole": Case(models.deepseek_v3, 61, "2048xH100-80GB", lambda: tokens(15360, 4096), 30),
    "lstm, 64 steps": Case(models.Recurrent, 2, _A100, lambda: tokens(64, 64), 5, _F32),
    "rwkv, 128 steps": Case(models.rwkv, 2, _A100, lambda: tokens(64, 128), 5, _F32),
    "mamba, 16 steps": Case(models.mamba, 2, _A100, lambda: tokens(64, 16), 5, _F32),
    "resnet-50": Case(models.resnet_50, 4, _A100, lambda: images(256, "pixel_values"), 10, _F32),
    "guided unet": Case(irregular_models.GuidedUNet, 3, _A100, lambda: noisy_images(64), 10, _F32),
    "maxvit": Case(irregular_models.MaxViT, 5, _A100, lambda: images(256), 10, _F32),
    "triangle attention": Case(irregular_models.PairStack, 2, _A100, lambda: residue_pairs(16, 128), 10, _F32),
}
PHASES = ("import", "capture", "search", "lowering")
_RUNS = 3  # in turns, of which the least counts, as machines are shared
_BUDGETS = (0.2, 0.4, 0.6, 0.8)  # of the way from the least memory of a chain to that of its fastest strategies
_REPEATS = 5


class Clock:
    """Seconds of this process since it was asked last."""

    def __init__(self) -> None:
        self.last_s = time.process_time()

    def read(self) -> float:
        before, self.last_s = self.last_s, time.process_time()
        return self.last_s - before


def run_case(case: Case, layers: int, lower: bool) -> dict[str, Any]:
    """Plan one case in this process."""
    clock, cluster = Clock(), gfx.Cluster.preset(case.cluster)
    graph = case.capture(layers)
    row: dict[str, Any] = {"import": _IMPORT_S, "capture": clock.read()}
    try:
        plan = search_plan(graph, cluster, SearchOptions(cluster.device.memory_bytes, ROLES))
        row |= {"search": clock.read(), "plan": f"{plan}\n\n{plan.report}"}
    except BudgetError as error:
        row |= {"search": clock.read(), "plan": f"BudgetError: {error}"}
        plan = None
    if lower and plan is not None:
        _lower(plan, graph, cluster)
        row["lowering"] = clock.read()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**row, "peak_bytes": peak}


def _lower(plan: Plan, graph: fx.GraphModule, cluster: gfx.Cluster) -> None:
    strategies, pipelining = [block.strategy for block in plan.blocks], plan.pipelining
    if pipelining.num_stages > 1 or pipelining.num_microbatches > 1:
        lower = LowerStages(strategies, pipelining.first_blocks or (0,), pipelining.num_microbatches, cluster)
        stages = lower.run(graph).stages
        for index in pipelining.table(plan.num_pipeline_ranks).stages_of(0):
            stages[index].write()  # as a rank does
    else:
        Lower(strategies, cluster).run(graph)


def cold(name: str, layers: int, lower: bool, limit_s: int) -> dict[str, Any] | None:
    """Plan a case in a new process; None where it takes more than ``limit_s`` seconds of the processor."""
    command = [sys.executable, "-m", "benchmarks.search.plan_speed", "--one", name, "--layers", str(layers)]
    command += ["--limit", str(limit_s), *(["--lower"] if lower else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode == -signal.SIGXCPU:
        return None
    done.check_returncode()
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def chain_ms() -> tuple[int, float]:
    """(strategies, milliseconds) of the strategies of LLaMA2-7B's blocks on 8 devices, under budgets that bind."""
    case = CASES["llama-7b"]
    pricer = Pricer(case.capture(case.layers), gfx.Cluster.preset(case.cluster), {})
    opened = OpenConfigurations(pricer, ROLES, "auto", Pins(num_stages=1, num_microbatches=1))
    opened.open_first()
    search = max(opened.searches, key=lambda search: len(search.costs.strategies))
    blocks = range(len(search.costs.block_fingerprints))
    section = Section(tuple(blocks), stages_waiting(search.filled) * len(blocks))
    low = section.bytes(search.costs, least_picks(search.costs, section))
    fastest = best_picks(search.costs, section, float("inf"))
    assert fastest is not None
    high = section.bytes(search.costs, fastest)
    seconds = []
    for budget in (low + share * (high - low) for share in _BUDGETS):
        clock = Clock()
        for _ in range(_REPEATS):
            best_picks(search.costs, section, budget)
        seconds.append(clock.read() / _REPEATS)
    return len(search.costs.strategies), 1e3 * median(seconds)


def case_table(names: list[str], limit_s: int, console: Console, shows_plans: bool) -> Table:
    """A row a case."""
    table = Table("model", "cluster", *PHASES, "all", "goal", "peak memory")
    for name in names:
        case = CASES[name]
        row = cold(name, case.layers, True, limit_s)
        if row is None:
            table.add_row(name, case.cluster, *["" for _ in PHASES], f"> {limit_s} s", f"{case.goal_s:g} s", "")
            continue
        seconds = [f"{row[phase]:.1f} s" if phase in row else "" for phase in PHASES]
        all_s = sum(row.get(phase, 0.0) for phase in PHASES)
        ends = f"{all_s:.1f} s", f"{case.goal_s:g} s", format_bytes(row["peak_bytes"])
        table.add_row(f"{name}, {case.layers} layers", case.cluster, *seconds, *ends)
        if shows_plans:
            console.print(f"{name}\n{row['plan']}\n")
    return table


def main() -> None:
    """Run the cases one by one and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--plans", action="store_true", help="print the plans and their reports as well")
    parser.add_argument("--limit", type=int, default=300, help="seconds of the processor that a case may take")
    parser.add_argument("--no-depth", action="store_true", help="leave out the chain and the two depths")
    parser.add_argument("--one", choices=list(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lower", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit + 5))
        print(json.dumps(run_case(CASES[options.one], options.layers, options.lower)))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    console.print(case_table(options.cases, options.limit, console, options.plans))
    console.print("seconds of the processor")
    if options.no_depth:
        return
    strategies, milliseconds = chain_ms()
    console.print(f"strategies of llama-7b, one of {strategies} a block, budget binding: {milliseconds:.1f} ms")
    turns = [[cold("gpt3-175b", layers, False, options.limit) for layers in (24, 96)] for _ in range(_RUNS)]
    short, long = (min(row["search"] for row in rows if row is not None) for rows in zip(*turns, strict=True))
    console.print(f"search of gpt3-175b, 96 layers against 24: {long:.1f} s / {short:.1f} s = {long / short:.2f}")


if __name__ == "__main__":
    main()
