"""One rank of ``side_by_side.py``, started by it through torchrun: a case by hand or compiled, in turns."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import side_by_side_model as hand
import torch
import torch.distributed as dist
from contender import WARM_UP, Contender
from side_by_side_model import ByHand, Size, Step
from tensor_memory import TensorMemory, held_tensors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from turns import Turns

import galvatron_fx as gfx
from galvatron_fx.ir.pipelining import Pipelining

EAGER, TORCH_COMPILE = "eager", "torch.compile"  # by hand
OURS, INDUCTOR, FREE_CHOICE = "ours", "ours, inductor", "free choice"

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


def contender(case: Case, size: Size, variant: str) -> Trained:
    """The strategy by hand, eager or compiled by torch, or by our plan of it, eager or with inductor, or freely."""
    if variant in (EAGER, TORCH_COMPILE):
        parallel = case.by_hand(size, dist.get_world_size(), variant == TORCH_COMPILE)
        return Trained(parallel.module, parallel.forward_backward, variant == TORCH_COMPILE)
    batch, mesh = hand.new_batch(size), init_device_mesh("cpu", case.mesh)
    options: dict[str, Any] = {"plan": case.plan(), "backend": "inductor" if variant == INDUCTOR else "eager"}
    if variant == FREE_CHOICE:
        options = {"roles": gfx.ir.strategy.ROLES, "cluster": gfx.Cluster.measure(mesh, seconds=_PROFILE_S)}
    model = gfx.compile(hand.new_model(size), mesh, batch, **options)
    return Trained(model, lambda: model.forward_backward(**batch), variant == INDUCTOR)


def turns_of_a_side(turns: int) -> int:
    """So many turns: to make the contenders, to warm up, the counted ones, and one for results."""
    return 1 + WARM_UP + turns + 1


def main() -> None:
    """Run one rank: path of the result (JSON, by rank 0), the conductor's port, case, size, turns, variants."""
    path, port, name, size, turns, variants = (
        Path(sys.argv[1]),
        int(sys.argv[2]),
        sys.argv[3],
        *map(json.loads, sys.argv[4:7]),
    )
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    own = Turns(path.stem, port)
    with own.next():
        made = {variant: contender(CASES[name], Size(**size), variant) for variant in variants}
    for _ in range(WARM_UP + turns):
        with own.next():
            for one in made.values():
                one.timed()
    with own.next():
        found = {variant: one.result() for variant, one in made.items()}
        if dist.get_rank() == 0:
            path.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
