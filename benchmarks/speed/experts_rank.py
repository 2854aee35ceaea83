"""One rank of experts.py: steps of all contenders in turns. Started through torchrun.

Arguments: a folder; what to do (JSON: the model's sizes, steps, seconds of profiling).
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed import DistributedConfig

import galvatron_fx as gfx
from benchmarks.common.contender import WARM_UP, Contender
from benchmarks.common.measured_loads import as_measured
from galvatron_fx.profiling import measure_calls, measure_cluster
from galvatron_fx.runtime.expert_loads import ExpertLoads
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep

Batch = dict[str, Tensor]


def tokens(task: dict[str, Any]) -> Batch:
    """The same on every rank."""
    shape = task["batch"], task["sequence"]
    ids = torch.randint(task["model"]["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def mixtral(task: dict[str, Any]) -> nn.Module:
    """The library's model, as it initialises it."""
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**task["model"], use_cache=False)
    return transformers.MixtralForCausalLM(config).train()


def theirs(folder: Path, task: dict[str, Any]) -> Contender:
    """The library's own expert parallelism: all-to-alls between experts, FSDP for all else."""
    if dist.get_rank() == 0:
        mixtral(task).save_pretrained(folder / "mixtral")
    dist.barrier()
    ranks = dist.get_world_size()
    config = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    model = transformers.MixtralForCausalLM.from_pretrained(folder / "mixtral", distributed_config=config).train()
    rows = {name: value.chunk(ranks)[dist.get_rank()] for name, value in tokens(task).items()}
    return Contender(lambda: model(**rows).loss.backward(), torch.optim.AdamW(model.parameters(), foreach=False))


def compiled(
    task: dict[str, Any], mesh: DeviceMesh, cluster: gfx.Cluster, plan: gfx.Plan
) -> tuple[gfx.DistributedGraphModule, Contender]:
    """Ours under a plan."""
    batch = tokens(task)
    model = gfx.compile(mixtral(task), mesh, batch, plan=plan, cluster=cluster)
    return model, Contender(lambda: model.forward_backward(**batch), torch.optim.AdamW(model.parameters()))


def plans(task: dict[str, Any], mesh: DeviceMesh, cluster: gfx.Cluster) -> dict[str, gfx.Plan]:
    """What contends; the search once more with the room that the first step of the plan with experts needs."""
    captured = gfx.Captured(mixtral(task), tokens(task))
    pinned = {"num_stages": 1, "num_microbatches": 1}
    of_roles = {role: gfx.Plan.uniform((mesh.size(),), (role,)) for role in ("expert", "data", "tensor")}
    first = gfx.compile(mixtral(task), mesh, tokens(task), plan=of_roles["expert"], cluster=cluster)
    first.forward_backward(**tokens(task))
    room = first.expert_loads().room
    return {
        "search": gfx.plan(captured, cluster, tokens(task), **pinned),
        "search, room": gfx.plan(captured, cluster, tokens(task), expert_imbalance=room, **pinned),
        **of_roles,
    }


def predicted(
    task: dict[str, Any],
    mesh: DeviceMesh,
    cluster: gfx.Cluster,
    all_plans: Mapping[str, gfx.Plan],
    loads: Mapping[str, ExpertLoads],
) -> dict[str, float]:
    """Seconds of a step under each plan, at the loads of experts that its last step had."""
    graph = gfx.capture(mixtral(task), tokens(task))
    rows = task["batch"] * task["sequence"] * task["model"]["num_experts_per_tok"] / mesh.size()
    lowered = {name: lower(graph, plan, cluster) for name, plan in all_plans.items()}
    programs = {
        name: as_measured(low, [loads[name]], mesh.size(), rows)
        for name, low in lowered.items()
        if isinstance(low, Lowered) and name in loads
    }
    halves = [half for low in programs.values() for half in (low.halves.forward, low.halves.backward)]
    measured = measure_calls(cluster, mesh, halves, seconds=task["calls_s"])
    return {name: SimulateStep(measured).run(low).step_time_s for name, low in programs.items()}


def main() -> None:
    """Run one rank."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cluster = measure_cluster(mesh, seconds=task["profile_s"])
    all_plans = plans(task, mesh, cluster)
    models: dict[str, gfx.DistributedGraphModule] = {}

    def ours(name: str) -> Contender:
        models[name], contender = compiled(task, mesh, cluster, all_plans[name])
        return contender

    makers: dict[str, Callable[[], Contender]] = {"transformers": lambda: theirs(folder, task)}
    makers |= {name: partial(ours, name) for name in all_plans}
    contenders: dict[str, Contender] = {}
    failed: dict[str, str] = {}
    for name, make in makers.items():
        try:
            contenders[name] = make()
            contenders[name].timed()
        except Exception as error:  # whatever it is: the others go on, and the table says so
            contenders.pop(name, None)
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            if dist.get_rank() == 0:
                traceback.print_exc()
    for _ in range(WARM_UP - 1 + task["steps"]):
        for contender in contenders.values():
            contender.timed()
    loads = {name: model.expert_loads() for name, model in models.items() if name in contenders}
    seconds = predicted(task, mesh, cluster, all_plans, loads)
    if dist.get_rank() == 0:
        steps = {name: contender.step_s for name, contender in contenders.items()}
        rounds = {name: each.further_rounds for name, each in loads.items()}
        found = {"measured": steps, "predicted": seconds, "failed": failed, "plan": str(all_plans["search, room"])}
        found["rounds"] = rounds
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
