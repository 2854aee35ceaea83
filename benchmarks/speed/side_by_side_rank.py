"""One rank of ``side_by_side.py``, started by it through torchrun: a case by hand and compiled, in turns."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx as gfx
from benchmarks.common.contender import WARM_UP, Contender
from benchmarks.common.tensor_memory import TensorMemory, held_tensors
from benchmarks.speed import side_by_side_model as hand
from benchmarks.speed.side_by_side_model import ByHand, Size, Step
from galvatron_fx.ir.plan.pipelining import Pipelining

_PROFILE_S = 30.0  # of measuring the machine, where the search chooses


@dataclass(frozen=True)
class Case:
    """A strategy: how it is written by hand, and the plan of the same; no roles: the search decides."""

    by_hand: Callable[[Size, int, bool], ByHand]
    mesh: tuple[int, ...]
    roles: tuple[str, ...]
    microbatches: int = 1
    keep_gathered: bool = False

    def plan(self) -> gfx.Plan:
        """The same strategy as a plan."""
        stages = 2 if "pipeline" in self.roles else 1
        schedule = Pipelining(stages, self.microbatches, "1f1b") if self.microbatches > 1 else None
        more: dict[str, Any] = {} if schedule is None else {"pipelining": schedule}
        return gfx.Plan.uniform(self.mesh, self.roles, keep_gathered=self.keep_gathered, **more)


CASES = {
    "one process": Case(hand.alone, (1,), ("data",)),
    "DDP": Case(hand.ddp, (2,), ("data",)),
    "DDP, 4 ranks": Case(hand.ddp, (4,), ("data",)),
    "FSDP2, gathered again": Case(hand.fsdp_again, (2,), ("zero",)),
    "FSDP2, gathered again, 4 ranks": Case(hand.fsdp_again, (4,), ("zero",)),
    "FSDP2, gathered kept": Case(hand.fsdp_kept, (2,), ("zero",), keep_gathered=True),
    "tensor and sequence": Case(hand.tensor_sequence, (2,), ("tensor_sequence",)),
    "FSDP2 x tensor, 4 ranks": Case(hand.fsdp_by_tensor, (2, 2), ("zero", "tensor_sequence")),
    "pipelining, 1F1B": Case(hand.pipeline, (2,), ("pipeline",), microbatches=4),
}


class Trained(Contender):
    """Steps of one module, and its memory."""

    def __init__(self, module: nn.Module, forward_backward: Step, has_kernels: bool = False) -> None:
        super().__init__(forward_backward, torch.optim.AdamW(module.parameters(), fused=True))
        self.module = module
        self.has_kernels = has_kernels

    def peak_bytes(self) -> int:
        """The most tensor bytes of a step on any rank."""
        batch = [torch.empty(0)]
        with TensorMemory([*held_tensors(self.module, self.optimizer), *batch], resizing=True) as memory:
            self.step()
        most = torch.tensor(float(memory.peak_bytes))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        return int(most)

    def result(self) -> tuple[float, int | None]:
        """(median seconds, peak bytes); None where inductor's kernels take memory, which is not seen from outside."""
        return self.step_s, None if self.has_kernels else self.peak_bytes()


def contenders(case: Case, size: Size, free: bool, variants: list[str]) -> dict[str, Trained]:
    """What takes part: the strategy by hand, eager or compiled by torch, our plan of it, and our own choice."""
    batch = hand.new_batch(size)
    ranks = dist.get_world_size()
    made: dict[str, Trained] = {}
    for variant in variants:
        parallel = case.by_hand(size, ranks, variant == "torch.compile")
        made[variant] = Trained(parallel.module, parallel.forward_backward, variant == "torch.compile")
    mesh = init_device_mesh("cpu", case.mesh)

    def ours(**options: Any) -> Trained:
        model = gfx.compile(hand.new_model(size), mesh, batch, **options)
        return Trained(model, lambda: model.forward_backward(**batch), options.get("backend") == "inductor")

    made["ours"] = ours(plan=case.plan())
    if "torch.compile" in variants:
        made["ours, inductor"] = ours(plan=case.plan(), backend="inductor")
    if free:
        made["free choice"] = ours(
            roles=gfx.ir.plan.strategy.ROLES, cluster=gfx.measure_cluster(mesh, seconds=_PROFILE_S)
        )
    return made


def main() -> None:
    """Run one rank: path of the result (JSON, by rank 0), case, size, turns, whether to search, variants by hand."""
    path, name, size, turns, free, variants = Path(sys.argv[1]), sys.argv[2], *map(json.loads, sys.argv[3:7])
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    made = contenders(CASES[name], Size(**size), free, variants)
    for _ in range(WARM_UP + turns):
        for contender in made.values():
            contender.timed()
    found = {variant: contender.result() for variant, contender in made.items()}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
