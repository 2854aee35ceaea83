"""One rank of shadow_experts.py: steps of all plans in turns, on a trace of skewed loads. Started through torchrun.

A trace is some batches, gone through again and again. The same experts are hot in all of them, as loads change slowly
while a model trains; the tokens of each are drawn anew.

Arguments: a folder; what to do (JSON).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import transformers.integrations.moe  # noqa: F401  (registers operators)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import galvatron_fx as gfx
from benchmarks.common.contender import WARM_UP, Contender
from benchmarks.common.measured_loads import as_measured
from galvatron_fx.ir.kernels.experts import combine, dispatch, route
from galvatron_fx.ir.plan.strategy import CAPACITY
from galvatron_fx.profiling import measure_cluster
from galvatron_fx.runtime.expert_loads import ExpertLoads
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep

Batch = dict[str, Tensor]

COPIES = 2
VARIANTS = (
    ("static", 0, False), ("capacity", 0, False), ("moves", 0, True), ("shadows", 1, False),
    ("shadows and moves", 1, True),
)  # fmt: skip


class Experts(nn.Module):
    """One layer of experts that tokens choose by given scores; what they multiply is learned."""

    def __init__(self, experts: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, 4 * hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, 4 * hidden, hidden) * 0.02)

    def forward(self, tokens: Tensor, scores: Tensor) -> Tensor:
        """The sum of each token's experts; tokens [tokens, hidden], scores [tokens, experts]."""
        weights, chosen = scores.topk(COPIES)
        place, order, ends = route(chosen.reshape(-1), len(self.up))
        rows = F.silu(_product(dispatch(tokens, place, order, COPIES), self.up, ends))
        rows = _product(rows, self.down, ends)
        rows = rows * dispatch(weights.softmax(-1).reshape(-1), place, order, 1).unsqueeze(-1)
        return combine(rows, place, order, COPIES)


class Mixture(nn.Module):
    """Layers of experts, all of which see the same loads."""

    def __init__(self, layers: int, experts: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Experts(experts, hidden) for _ in range(layers))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        """The mean square; x [batch, sequence, hidden], scores [batch, sequence, experts]."""
        tokens = x.flatten(0, 1)
        for layer in self.layers:
            tokens = tokens + layer(tokens, scores.flatten(0, 1))
        return tokens.pow(2).mean()


def _product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)


def trace(task: dict[str, Any]) -> list[Batch]:
    """Batches whose tokens choose experts by Zipf's law with an ``exponent``; which experts are hot is drawn."""
    generator = torch.Generator().manual_seed(task["seed"])
    ranks = 1 + torch.randperm(task["experts"], generator=generator)
    return [_batch(task, ranks, generator) for _ in range(task["batches"])]


def _batch(task: dict[str, Any], ranks: Tensor, generator: torch.Generator) -> Batch:
    """Scores, the largest of which are draws without replacement (Gumbel top-k)."""
    shape = task["batch"], task["sequence"]
    noise = torch.rand(*shape, task["experts"], generator=generator).clamp(1e-6, 1 - 1e-6)
    scores = -task["exponent"] * ranks.log() - (-noise.log()).log()
    return {"x": torch.randn(*shape, task["hidden"], generator=generator), "scores": scores}


@dataclass(frozen=True)
class Loads:
    """Means over a trace: rows of the busiest rank over the mean, and further rounds of a layer. ``room``: the least
    capacity with which no batch of it has any.
    """

    imbalance: float
    rounds: float
    room: float

    @classmethod
    def of(cls, steps: Sequence[ExpertLoads], ranks: int) -> Loads:
        """Those of some steps."""
        rounds = mean(loads.further_rounds / len(loads.layers) for loads in steps)
        return cls(mean(loads.imbalance(ranks) for loads in steps), rounds, max(loads.room for loads in steps))


def _step(model: gfx.DistributedGraphModule, steps: Iterator[Batch]) -> object:
    return model.forward_backward(**next(steps))


def _loads_of_trace(model: gfx.DistributedGraphModule, contender: Contender, num_batches: int) -> list[ExpertLoads]:
    loads = []
    for _ in range(num_batches):
        contender.timed()
        loads.append(model.expert_loads())
    return loads


def main() -> None:
    """Run one rank."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    cluster = measure_cluster(mesh, seconds=task["profile_s"])
    batches, sizes = trace(task), (task["layers"], task["experts"], task["hidden"])
    rows = task["batch"] * task["sequence"] * COPIES / ranks
    graph = gfx.capture(Mixture(*sizes), batches[0])
    found, contenders, room = {}, {}, CAPACITY
    for name, shadows, moves in VARIANTS:
        capacity = room if name == "capacity" else CAPACITY
        plan = gfx.Plan.uniform((ranks,), ("expert",), capacity=capacity, shadows=shadows)
        model = gfx.compile(Mixture(*sizes), mesh, batches[0], plan=plan, cluster=cluster, compare_batches=0)
        optimizer = torch.optim.AdamW(model.parameters())
        contender = contenders[name] = Contender(partial(_step, model, cycle(batches)), optimizer)
        steps = _loads_of_trace(model, contender, len(batches))
        if shadows or moves:
            model.rebalance_experts(optimizer, dry_run=False, moves=moves)
            steps = _loads_of_trace(model, contender, len(batches))
        loads = Loads.of(steps, ranks)
        room = max(room, loads.room)
        lowered = lower(graph, plan, cluster)
        assert isinstance(lowered, Lowered)
        report = SimulateStep(cluster).run(as_measured(lowered, steps, ranks, rows))
        found[name] = {
            "imbalance": loads.imbalance, "rounds": loads.rounds, "capacity": capacity,
            "simulated_s": report.step_time_s, "memory_bytes": report.peak_memory_bytes,
        }  # fmt: skip
    for contender in contenders.values():
        contender.times.clear()
    for _ in range(WARM_UP + task["steps"]):
        for contender in contenders.values():
            contender.timed()
    for name, contender in contenders.items():
        found[name]["measured_s"] = contender.step_s
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
