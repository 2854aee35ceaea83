"""One rank of prediction.py: measure the machine, write all predictions down, then train. Started through torchrun.

Arguments: a folder; what to do (JSON: names of pairs, seconds of profiling, steps, whether calls are measured).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contender import WARM_UP, Contender
from prediction_pairs import MODELS, PAIRS, Pair
from small_models import Batch, build
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx as gfx
from galvatron_fx.api import lower
from galvatron_fx.profiling import measure_calls, measure_cluster
from passes.lower import Lowered
from passes.lower_stages import LoweredStages
from passes.simulate_stages import SimulateStages
from passes.simulate_step import SimulateStep


def graphs_of(lowered: Lowered | LoweredStages) -> list[fx.GraphModule]:
    """What a rank runs."""
    if isinstance(lowered, Lowered):
        return [lowered.halves.forward, lowered.halves.backward]
    return [task.graph for stage in lowered.stages for task in stage.tasks.values() if not task.is_empty]


def predicted_s(lowered: Lowered | LoweredStages, pair: Pair, cluster: gfx.Cluster) -> float:
    """Seconds of a step with the optimizer's update."""
    if isinstance(lowered, Lowered):
        return SimulateStep(cluster).run(lowered).step_time_s
    plan = pair.plan()
    axes = [cluster.axes[i] for i in plan.pipeline_axes]
    return SimulateStages(cluster, plan.pipelining.table(plan.num_pipeline_ranks), axes).run(lowered).step_time_s


def measured_s(model: gfx.DistributedGraphModule, batch: Batch, steps: int) -> float:
    """The median of ``steps`` after some to warm up; a step is as long as its slowest rank."""
    contender = Contender(lambda: model.forward_backward(**batch), torch.optim.AdamW(model.parameters()))
    for _ in range(WARM_UP + steps):
        contender.timed()
    return contender.step_s


def predict(pairs: list[Pair], mesh: DeviceMesh, cluster: gfx.Cluster, calls_s: float) -> dict[str, float]:
    """The predictions, by name of pair; ``calls_s``: to measure the calls of all of them in, 0 for curves only."""
    lowered = {}
    graphs: dict[str, fx.GraphModule] = {}
    for pair in pairs:
        if pair.model not in graphs:
            graphs[pair.model] = gfx.capture(*build(MODELS[pair.model]))
        lowered[pair.name] = lower(graphs[pair.model], pair.plan(), cluster)
    if calls_s:
        every = [graph for low in lowered.values() for graph in graphs_of(low)]
        cluster = measure_calls(cluster, mesh, every, seconds=calls_s)
    return {pair.name: predicted_s(lowered[pair.name], pair, cluster) for pair in pairs}


def main() -> None:
    """Run one rank."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    pairs = [pair for pair in PAIRS if pair.name in task["pairs"]]
    cluster = measure_cluster(mesh, seconds=task["profile_s"])
    found = predict(pairs, mesh, cluster, task["calls_s"])
    if dist.get_rank() == 0:
        cluster.save(folder / f"profile-{mesh.size()}.json")
        _write(folder / f"predicted-{mesh.size()}.json", found)
    dist.barrier()
    measured: dict[str, float] = {}
    for pair in pairs:
        model, batch = build(MODELS[pair.model])
        compiled = gfx.compile(model, mesh, example_inputs=batch, plan=pair.plan(), cluster=cluster)
        measured[pair.name] = measured_s(compiled, batch, task["steps"])
    if dist.get_rank() == 0:
        _write(folder / f"measured-{mesh.size()}.json", measured)
    dist.destroy_process_group()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
