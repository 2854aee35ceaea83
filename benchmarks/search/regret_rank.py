"""One rank of regret.py: pick a plan for each budget of a model, then train by it and by all others, in turns.

Arguments: a folder; what to do (JSON: model, budgets in bytes, profile, seconds to take one in, steps, mixed plans,
slack).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx as gfx
from benchmarks.common.contender import WARM_UP, Contender
from benchmarks.common.small_models import build
from benchmarks.search.regret_cases import MODELS, mixed_plans, name_of, same, uniform_plans
from galvatron_fx.compiling import compile_captured
from galvatron_fx.plan_fit import staging_of
from galvatron_fx.profiling import measure_cluster
from galvatron_fx.search_settings import SearchSettings
from passes.analysis.blocks import fingerprints
from passes.search.plan_search import search_plan
from passes.simulation.choice import SimulateChoice

_DRAWN = 4  # mixed plans for one that is measured: some do not fit
_FIRST = 2  # steps of all plans; what is far behind after them takes no more


@dataclass(frozen=True)
class Candidate:
    """A plan with its prediction: seconds of a step, and bytes at the peak."""

    name: str
    plan: gfx.Plan
    predicted_s: float
    peak_bytes: int


def all_ranks(own: Any) -> list[Any]:
    """What every rank has."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def mine(items: Sequence[Any]) -> Sequence[Any]:
    """This rank's share of what can be done by any."""
    return items[dist.get_rank() :: dist.get_world_size()]


def picks(graph: fx.GraphModule, cluster: gfx.Cluster, budgets: Sequence[int]) -> dict[int, gfx.Plan]:
    """The planner's plan for every budget; the ranks share the work."""
    own = {
        budget: search_plan(graph, cluster, SearchSettings(memory_budget=budget).on(cluster)).to_json()
        for budget in mine(budgets)
    }
    found = {budget: text for part in all_ranks(own) for budget, text in part.items()}
    return {budget: gfx.Plan.from_json(found[budget]) for budget in budgets}


def predicted(graph: fx.GraphModule, cluster: gfx.Cluster, plans: Sequence[gfx.Plan]) -> list[Candidate]:
    """The plans with their predictions; the ranks share the work."""
    block_fingerprints = fingerprints(graph)
    simulate = SimulateChoice(graph, cluster, block_fingerprints)
    own = {}
    for number in mine(range(len(plans))):
        plan = plans[number]
        strategies = [plan.strategy_of(index, len(block_fingerprints)) for index in range(len(block_fingerprints))]
        step = simulate.run(strategies, plan.pipelining.cuts(len(block_fingerprints)), staging_of(plan, cluster))
        own[number] = step.step_time_s, max(sum(rank.memory.values()) for rank in step.ranks())
    found = {number: numbers for part in all_ranks(own) for number, numbers in part.items()}
    return [Candidate(name_of(plan), plan, *found[number]) for number, plan in enumerate(plans)]


def candidates(
    graph: fx.GraphModule, cluster: gfx.Cluster, picked: dict[int, gfx.Plan], mixed: int
) -> dict[int, list[Candidate]]:
    """What is measured for every budget: the pick first, the uniform plans and so many mixed ones that fit."""
    kinds = fingerprints(graph)
    uniform = predicted(graph, cluster, uniform_plans(len(kinds)))
    found = {}
    first: dict[str, Candidate] = {}  # of those that run alike
    for budget, pick in picked.items():
        drawn = islice(mixed_plans(pick, kinds, seed=budget), _DRAWN * mixed)
        chosen, *others = predicted(graph, cluster, [pick, *drawn])
        fitting = [one for one in others if one.peak_bytes <= budget][:mixed]
        case = [chosen, *(one for one in uniform if one.peak_bytes <= budget), *fitting]
        found[budget] = list(dict.fromkeys(first.setdefault(same(one.plan), one) for one in case))
    return found


def measured(
    cases: Iterable[Sequence[Candidate]], contenders: dict[str, Contender], steps: int, slack: float
) -> dict[str, list[float]]:
    """Seconds of every step by name: ``_FIRST`` of all, ``steps`` of those that are within ``slack`` of the fastest."""
    names = list(contenders)
    for number in range(WARM_UP + steps):
        if number == WARM_UP + _FIRST:
            names = all_ranks(_close(cases, contenders, slack))[0]
        for name in names:
            contenders[name].timed()
    return {name: contender.times[WARM_UP:] for name, contender in contenders.items()}


def _close(cases: Iterable[Sequence[Candidate]], contenders: dict[str, Contender], slack: float) -> list[str]:
    """Names of what may be the fastest of a case, and of the picks."""
    close: dict[str, None] = {}
    for case in cases:
        fastest_s = min(contenders[one.name].step_s for one in case)
        close |= dict.fromkeys(one.name for one in case if contenders[one.name].step_s <= slack * fastest_s)
        close[case[0].name] = None
    return list(close)


def profile(mesh: DeviceMesh, path: Path, seconds: float) -> gfx.Cluster:
    """The profile at ``path``, which is taken first where there is none."""
    is_there = all_ranks(path.exists())[0]
    cluster = gfx.Cluster.load(path) if is_there else measure_cluster(mesh, seconds=seconds)
    dist.barrier()
    if not is_there and dist.get_rank() == 0:
        cluster.save(path)
    return cluster


def main() -> None:
    """Run one rank."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cluster = profile(mesh, Path(task["profile"]), task["profile_s"])
    model, batch = build(MODELS[task["model"]])
    graph = gfx.capture(model, batch)
    cases = candidates(graph, cluster, picks(graph, cluster, task["budgets"]), task["mixed"])
    found = {
        str(budget): [{"name": one.name, "predicted_s": one.predicted_s, "peak_bytes": one.peak_bytes} for one in case]
        for budget, case in cases.items()
    }
    if dist.get_rank() == 0:
        _write(folder / f"predicted-{task['model']}.json", found)
    contenders = {}
    for one in {one.name: one for case in cases.values() for one in case}.values():
        compiled = compile_captured(model, graph, mesh, one.plan, cluster)
        contenders[one.name] = Contender(
            lambda compiled=compiled: compiled.forward_backward(**batch),  # type: ignore[misc]
            torch.optim.AdamW(compiled.parameters()),
        )
    times = measured(list(cases.values()), contenders, task["steps"], task["slack"])
    if dist.get_rank() == 0:
        _write(folder / f"measured-{task['model']}.json", times)
    dist.destroy_process_group()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
