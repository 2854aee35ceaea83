"""Run by test_compositions.py: compositions of seams on two ranks, one by one, and checks of plans on real ranks.

Arguments: the first seed and how many; then ``check`` to check plans as well. Rank 0 prints a line of JSON for each.
"""

from __future__ import annotations

import json
import sys
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.checking import check as checking
from galvatron_fx.ir.plan.pipelining import Pipelining
from tests.checking.test_check import Tagger, batch
from tests.runtime.launch import fork_ranks
from tests.seams.compositions import draw, run

SECONDS_EACH = 60.0


def say(**what: Any) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps(what), flush=True)


def checks(mesh: DeviceMesh) -> None:
    """A right plan, a staged one, one of another rank's weights, and a module that a rank has broken."""
    torch.manual_seed(dist.get_rank())  # rank 0's weights are everybody's
    model = Tagger(layers=2, coupled=False, dropout=0.3)
    for name, plan in {
        "zero": Plan.uniform((2,), ("zero",)),
        "stages": Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2)),
    }.items():
        found = galvatron_fx.check(model, mesh, batch(), plan, steps=2)
        names = sorted({row.kind for row in found.rows})
        say(check=name, ok=found.ok, kinds=names, notes=found.notes, text=str(found), exact=found.is_exact)
    broken_compile(mesh, model)


def broken_compile(mesh: DeviceMesh, model: torch.nn.Module) -> None:
    """Rank 1 alone gets a gradient that is off; all ranks hear of it."""
    compile = checking.compile

    def broken(*args: Any, **options: Any) -> Any:
        module = compile(*args, **options)
        accumulate = module._accumulate

        def doubled(*step: Any) -> None:
            accumulate(*step)
            if dist.get_rank() == 1:
                module.layers.get_submodule("0").up.bias.grad.to_local().mul_(1.001)

        module._accumulate = doubled
        return module

    checking.compile = broken
    try:
        found = galvatron_fx.check(model, mesh, batch(), Plan.uniform((2,), ("data",)))
    finally:
        checking.compile = compile
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, [(row.kind, row.name) for row in found.different])
    say(check="broken", ok=found.ok, different=verdicts, text=str(found))


def work(seeds: range, with_checks: bool, mesh: DeviceMesh) -> None:
    """On a rank: all of it."""
    if with_checks:
        checks(mesh)
    for seed in seeds:
        outcome = run(draw(seed), mesh)
        say(seed=seed, kind=outcome.kind, reason=outcome.reason)
    say(done=len(seeds))


def main() -> None:
    """Fork two ranks."""
    warnings.simplefilter("ignore")
    first, count = int(sys.argv[1]), int(sys.argv[2])
    on_rank = partial(work, range(first, first + count), "check" in sys.argv[3:])
    prepare = partial(galvatron_fx.capture, Tagger(layers=2, coupled=False, dropout=0.3), batch())
    fork_ranks((2,), on_rank, prepare, timeout_s=SECONDS_EACH * (count + 4))


if __name__ == "__main__":
    main()
