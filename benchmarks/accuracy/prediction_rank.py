"""One rank of prediction.py: measure the machine, write all predictions down, then train. Started through torchrun.

Arguments: a folder; what to do (JSON: names of pairs, seconds of profiling, steps, whether calls are measured).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx as gfx
from benchmarks.accuracy.prediction_pairs import MODELS, PAIRS, Pair
from benchmarks.common.contender import WARM_UP, Contender
from benchmarks.common.small_models import Batch, build
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from galvatron_fx.profiling import measure_calls, measure_cluster
from passes.lowering.apply_plan import lower
from passes.lowering.lower_stages import LoweredStages
from passes.lowering.lower_step import Lowered
from passes.simulation.stages import SimulateStages, StagesReport
from passes.simulation.step import SimulateStep, StepReport


def graphs_of(lowered: Lowered | LoweredStages) -> list[fx.GraphModule]:
    """What a rank runs."""
    if isinstance(lowered, Lowered):
        return [lowered.halves.forward, lowered.halves.backward]
    return [task.graph for stage in lowered.stages for task in stage.tasks.values() if not task.is_empty]


_MEMORY_STEPS = 3  # the least counts: a thread of gloo may let go of a buffer a moment after it is done


@dataclass(frozen=True)
class StepUse:
    """What a step with the optimizer's update takes: seconds, and the most tensor bytes alive on any rank."""

    seconds: float
    peak_bytes: int


def predicted(lowered: Lowered | LoweredStages, pair: Pair, cluster: gfx.Cluster) -> StepUse:
    """What the simulation of lowered graphs says."""
    report: StepReport | StagesReport
    if isinstance(lowered, Lowered):
        report = SimulateStep(cluster).run(lowered)
    else:
        plan = pair.plan()
        axes = [cluster.axes[i] for i in plan.pipeline_axes]
        report = SimulateStages(cluster, plan.pipelining.table(plan.num_pipeline_ranks), axes).run(lowered)
    return StepUse(report.step_time_s, report.peak_memory_bytes)


def measured(model: gfx.DistributedGraphModule, batch: Batch, steps: int) -> StepUse:
    """The median of ``steps`` after some to warm up, each as long as its slowest rank; then the memory of others."""
    contender = Contender(lambda: model.forward_backward(**batch), torch.optim.AdamW(model.parameters()))
    for _ in range(WARM_UP + steps):
        contender.timed()
    peak = torch.tensor(min(_peak_bytes(model, contender, batch) for _ in range(_MEMORY_STEPS)))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return StepUse(contender.step_s, int(peak))


def _peak_bytes(model: gfx.DistributedGraphModule, contender: Contender, batch: Batch) -> int:
    with TensorMemory([*held_tensors(model, contender.optimizer), *batch.values()]) as memory:
        contender.step()
    return memory.peak_bytes


def predict(pairs: list[Pair], mesh: DeviceMesh, cluster: gfx.Cluster, calls_s: float) -> dict[str, StepUse]:
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
    return {pair.name: predicted(lowered[pair.name], pair, cluster) for pair in pairs}


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
    taken: dict[str, StepUse] = {}
    for pair in pairs:
        model, batch = build(MODELS[pair.model])
        compiled = gfx.compile(model, mesh, example_inputs=batch, plan=pair.plan(), cluster=cluster)
        taken[pair.name] = measured(compiled, batch, task["steps"])
    if dist.get_rank() == 0:
        _write(folder / f"measured-{mesh.size()}.json", taken)
    dist.destroy_process_group()


def _write(path: Path, content: dict[str, StepUse]) -> None:
    text = json.dumps({name: asdict(use) for name, use in content.items()}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
