"""``galvatron-fx profile``: measure the machine that it runs on."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from galvatron_fx.cli import options, output
from galvatron_fx.cli.files import check_writable
from galvatron_fx.cli.models import DTYPES
from galvatron_fx.cli.output import SILENT, Result

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

HELP = "measure the devices and links of this machine into a file for --cluster"
EXAMPLES = """\
examples:
  # one device by itself
  galvatron-fx profile --out profile.json --seconds 30

  # all devices and the links between them
  torchrun --nproc-per-node 8 -m galvatron_fx profile --out profile.json

  # then plan with what was measured
  galvatron-fx plan --model llama --cluster profile.json
"""

CPU, CUDA = "cpu", "cuda"


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--out", required=True, metavar="PROFILE.json", help="write the profile there")
    parser.add_argument("--device", choices=(CPU, CUDA), help="what to measure (default: cuda where there is one)")
    parser.add_argument(
        "--dtype",
        action="append",
        choices=DTYPES,
        help="of matrix products; all else is measured in the first (repeatable; default: float32, and on cuda "
        "bfloat16 before it)",
    )
    parser.add_argument(
        "--seconds",
        type=options.positive(float, "seconds"),
        default=60.0,
        metavar="S",
        help="about how long to measure (default: 60)",
    )
    parser.add_argument(
        "--storage",
        metavar="FOLDER",
        help="measure the disk of this folder as well, for plan --storage: 128 MiB a rank, for some seconds",
    )


def run(given: argparse.Namespace) -> Result:
    """Measure; rank 0 writes and tells. Raises what ``measure_cluster`` raises, and OSError where it cannot write."""
    check_writable(given.out)
    import torch

    from galvatron_fx.ir.plan import plan_json
    from galvatron_fx.profiling import ProfileProgress, measure_cluster

    device = given.device or (CUDA if torch.cuda.is_available() else CPU)
    dtypes = [getattr(torch, name) for name in given.dtype] if given.dtype else None
    with _mesh(device) as mesh, ExitStack() as shown:
        is_first = mesh.get_rank() == 0
        line = shown.enter_context(output.progress()) if is_first else None

        def tell(moment: ProfileProgress) -> None:
            if line is not None:
                line.say(f"measuring {moment.phase}: {moment.share:.0%}")

        cluster = measure_cluster(mesh, seconds=given.seconds, dtypes=dtypes, storage=given.storage, progress=tell)
    if not is_first:
        return SILENT
    plan_json.write(given.out, cluster.to_json())
    text = f"{output.describe_cluster(cluster)}\nwritten to {given.out}"
    return Result(text, {"cluster": json.loads(cluster.to_json()), "out": given.out})


@contextmanager
def _mesh(device: str) -> Iterator[DeviceMesh]:
    """A mesh over the ranks that torchrun started, or over this process alone."""
    import torch
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if device == CUDA:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if device == CUDA else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()
