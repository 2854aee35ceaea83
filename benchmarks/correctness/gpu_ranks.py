"""Claim: ranks with CUDA tensors, streams and NCCL train as one device does.

Run by torchrun, with one GPU for each rank or one for all (which NCCL 2.30 and later allow where
``NCCL_MULTI_RANK_GPU_ENABLE=1``). Checks tiny models of the test suite against eager on the same GPU, in float64 to
1e-10: roles side by side, gathers that start a block ahead, collectives that travel in chunks beside products, states
and parameters on the host, experts, rings and every schedule of stages. Ends with status 1 where anything differs or
fails, or nothing was checked; --device cpu tries the script.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx as gfx
from benchmarks.common import machine
from galvatron_fx.errors import GalvatronError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.torch_compat import dtensors
from tests.helpers import slow_products
from tests.models import zoo
from tests.models.architectures import ARCHITECTURES

MODELS: dict[str, Callable[[], Any]] = {**zoo.MODELS, **ARCHITECTURES}
MESH = (2, 2)
PLANS: dict[str, gfx.Plan] = {
    "data, tensor": gfx.Plan.uniform(MESH, ("data", "tensor")),
    "zero, tensor_sequence, recomputed": gfx.Plan.uniform(MESH, ("zero", "tensor_sequence"), recompute=True),
    "sequence, zero": gfx.Plan.uniform(MESH, ("sequence", "zero"), keep_gathered=True),
    "context, data": gfx.Plan.uniform(MESH, ("context", "data")),
    "zero, zero on the host": gfx.Plan.uniform(MESH, ("zero", "zero"), offload_states=True, offload_parameters=True),
    "data, zero in micro-batches": gfx.Plan.uniform(MESH, ("data", "zero"), pipelining=Pipelining(1, 2)),
    "expert, data": gfx.Plan.uniform(MESH, ("expert", "data")),
    "expert, tensor": gfx.Plan.uniform(MESH, ("expert", "tensor")),
    **{
        f"stages of {role}, {schedule}": gfx.Plan.uniform(MESH, ("pipeline", role), pipelining=pipelining)
        for schedule, role, pipelining in (
            ("1f1b", "zero", Pipelining(2, 2, "1f1b")),
            ("zb_h1", "tensor", Pipelining(2, 2, "zb_h1")),
            ("zbv", "data", Pipelining(4, 4, "zbv")),
            ("dualpipev", "tensor_sequence", Pipelining(4, 4, "dualpipev")),
            ("interleaved_1f1b", "data", Pipelining(4, 2, "interleaved_1f1b")),
        )
    },
}


def all_at_once(cluster: Cluster) -> Cluster:
    """Where computing and communicating at once pays, so that gathers start ahead and collectives travel in chunks."""
    return replace(slow_products([axis.size for axis in cluster.axes]), overlap=Overlap(1.0, 1.0, chunks=True))


def checked(mesh: DeviceMesh, names: list[str], plans: list[str], end_s: float) -> Iterator[tuple[str, str]]:
    """What each of the ``plans`` of each model came to: "" where it is right."""
    own_cluster, beside = Cluster.from_mesh, dist.new_group(backend="gloo")
    for what, name in itertools.product(plans, names):
        over = torch.tensor(time.monotonic() > end_s)
        dist.broadcast(over, 0, group=beside)
        if over:
            return
        model, once = MODELS[name]()
        batch = {key: torch.cat([value, value.flip(0)]) for key, value in once.items()}
        try:
            with patch.object(Cluster, "from_mesh", lambda mesh: all_at_once(own_cluster(mesh))):
                report = gfx.check(model, mesh, batch, PLANS[what], steps=2)
            found = "" if report.ok else f"DIFFERS\n{report}"
        except GalvatronError as error:
            found = f"refused: {str(error).splitlines()[0]}"
        yield f"{name}, {what}", found


def main() -> None:
    """Check the models that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="some of the tests' (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which what is left is left out")
    parser.add_argument(
        "--any-torch", action="store_true", help="also torch before 2.13, some of whose rules are wrong"
    )
    parser.add_argument(
        "--plans", nargs="+", default=[""], help="those whose names have one of these words (default: all)"
    )
    options = parser.parse_args()
    plans = [name for name in PLANS if any(word in name for word in options.plans)]
    if not plans:
        parser.error(f"no plan has one of the words {options.plans}: there are {', '.join(map(repr, PLANS))}")
    warnings.simplefilter("ignore")
    if options.any_torch:
        dtensors.has_sharding_rules = lambda: True
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", timeout=timedelta(seconds=60))
    console = Console(soft_wrap=True, highlight=False, width=200, quiet=dist.get_rank() > 0)
    console.print(machine.describe())
    mesh = init_device_mesh(options.device, MESH)
    right, problems = 0, 0
    end_s = time.monotonic() + options.seconds
    for what, found in checked(mesh, options.models or list(MODELS), plans, end_s):
        right += not found
        problems += found.startswith("DIFFERS")
        console.print(f"{time.monotonic() - end_s + options.seconds:.0f} s: {what}: {found or 'right'}")
    console.print(f"{right} right, {problems} wrong")
    dist.destroy_process_group()
    sys.exit(bool(problems) or not right)


if __name__ == "__main__":
    main()
