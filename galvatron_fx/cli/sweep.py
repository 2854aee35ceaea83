"""``galvatron-fx sweep``: plan models for many clusters, budgets, batches and sequences at once."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from galvatron_fx.cli import models, options, output
from galvatron_fx.cli.exits import UsageError
from galvatron_fx.cli.files import check_writable
from galvatron_fx.cli.output import Result
from galvatron_fx.figures import require_matplotlib
from galvatron_fx.ir.plan.units import parse_bandwidth

if TYPE_CHECKING:
    from galvatron_fx.captured import Captured
    from galvatron_fx.ir.cluster.cluster import Cluster

HELP = "plan models for many clusters, budgets, batches and sequences, from one capture each"
EXAMPLES = """\
examples:
  # tokens a second and MFU of LLaMA-7B on 8 to 64 GPUs of two kinds, as a table and a picture
  galvatron-fx sweep --model llama --devices 8,16,32,64 --kinds A100-80GB,H100-80GB --batch-size 256 --picture sweep.png

  # tokens a second on 1 to 16 GPUs, as schedulers of clusters take it
  galvatron-fx sweep --model llama --devices 1-16 --kinds A100-80GB --batch-size 48 --by-devices throughput.json

  # two models and what it costs to train them on 2e12 tokens
  galvatron-fx sweep --model ./Llama-3-8B --model ./Llama-3-70B --devices 64,256,1024 --kinds H100-80GB,B200-180GB \\
      --price H100-80GB=2.5 --price B200-180GB=4 --tokens 2e12 --out sweep.csv

  # what fits 24 and 40 GB a device, by batch and sequence, with slower links between nodes
  galvatron-fx sweep --model llama --devices 16 --kinds A100-40GB --memory-budget 24GB,40GB --batch-size 64,256 \\
      --sequence-length 2048,8192 --inter-node 100Gb

Steps and memory are the estimates that a search minimises; --simulate searches and simulates every point.
"""
_LEAST = 2  # samples of a capture that serves every batch


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    numbers = options.typed(options.batches)
    group = parser.add_argument_group("models")
    group.add_argument("--model", action="append", required=True, metavar="MODEL", help="as of plan (repeatable)")
    options.add_configuration(group)
    group.add_argument("--batch-size", type=numbers, metavar="N,N", help="global samples a step (default: 64)")
    group.add_argument("--sequence-length", type=numbers, metavar="N,N", help="tokens a sample (default: 2048)")
    group = parser.add_argument_group("clusters")
    group.add_argument(
        "--devices",
        type=options.typed(options.counts),
        metavar="N,N-N",
        help="how many, for each of --kinds, such as 1-8,16",
    )
    group.add_argument("--kinds", type=options.names, default=(), metavar="A,B", help="devices such as H100-80GB")
    group.add_argument(
        "--cluster", action="append", default=[], metavar="CLUSTER", help="one more, as of plan (repeatable)"
    )
    bandwidth = options.typed(parse_bandwidth)
    group.add_argument(
        "--inter-node", type=bandwidth, metavar="SPEED", help="of a device to other nodes, such as 400Gb or 48GB/s"
    )
    group.add_argument("--intra-node", type=bandwidth, metavar="SPEED", help="of a device inside its node")
    options.add_disk(group)
    group.add_argument("--device-memory", type=options.typed(options.size), metavar="SIZE", help="such as 96GiB")
    group.add_argument(
        "--memory-budget",
        type=options.typed(lambda text: tuple(map(options.size, text.split(",")))),
        metavar="SIZE,SIZE",
        help="per device, each of them (default: the device's memory)",
    )
    group = parser.add_argument_group("search")
    options.add_space(group)
    group.add_argument("--simulate", action="store_true", help="search and simulate every point: half a minute each")
    group = parser.add_argument_group("costs and output")
    group.add_argument(
        "--price",
        action="append",
        default=[],
        type=options.typed(_price),
        metavar="DEVICE=USD",
        help="dollars an hour of one device (repeatable)",
    )
    group.add_argument(
        "--tokens", type=options.positive(float, "tokens"), metavar="N", help="to train on, for days: 2e12"
    )
    group.add_argument("--out", metavar="FILE", help="write the points there: JSON where it ends in .json, else CSV")
    group.add_argument(
        "--by-devices", metavar="FILE", help="write tokens/s on 1, 2, ... devices there, for schedulers: JSON or CSV"
    )
    group.add_argument("--picture", metavar="FILE", help="draw tokens/s and MFU by devices there, PNG or SVG")


def run(given: argparse.Namespace) -> Result:
    """Sweep; raises what :func:`galvatron_fx.sweep` raises, UsageError for no cluster, OSError for files."""
    for path in filter(None, (given.out, given.by_devices, given.picture)):
        check_writable(path)
    if given.picture:
        require_matplotlib()
    clusters = _clusters(given)
    from galvatron_fx.sweeping.sweep import sweep

    with output.steps() as progress:
        progress.step(0, 1, "building the models")
        captured = _captured(given)
        result = sweep(
            captured,
            clusters,
            budgets=given.memory_budget or (None,),
            batches=given.batch_size or (None,),
            sequences=given.sequence_length or (None,),
            roles=options.roles_of(given),
            recompute=options.recompute_of(given),
            optimizer=given.optimizer,
            offload=tuple(given.offload),
            host_memory=given.host_memory,
            storage=given.storage,
            fold_gradients=given.fold_gradients,
            usd_per_hour=_prices(given),
            tokens=given.tokens,
            simulate=given.simulate,
            progress=progress.step,
        )
    lines = [str(result)]
    if given.out:
        result.save(given.out)
        lines += ["", f"written to {given.out}"]
    if given.by_devices:
        result.save_by_devices(given.by_devices)
        lines += ["", f"throughput by devices written to {given.by_devices}"]
    if given.picture:
        result.draw(given.picture)
        lines += ["", f"drawn in {given.picture}"]
    return Result("\n".join(lines), {"points": json.loads(result.to_json()), "out": given.out})


def _clusters(given: argparse.Namespace) -> list[Cluster]:
    if bool(given.devices) != bool(given.kinds):
        raise UsageError("--devices and --kinds go together: give the counts and the kinds of devices")
    clusters = [_of_kind(kind, count) for kind in given.kinds for count in given.devices]
    clusters += map(options.cluster_named, given.cluster)
    if not clusters:
        raise UsageError("no cluster: give --devices and --kinds, or --cluster")
    return [
        cluster.having(
            memory_bytes=given.device_memory,
            inside_bytes_per_s=given.intra_node,
            between_bytes_per_s=given.inter_node,
            disk_bytes_per_s=given.disk_bandwidth,
        )
        for cluster in clusters
    ]


def _of_kind(kind: str, count: int) -> Cluster:
    """So many devices of a kind, the last node half empty where they do not fill it."""
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.cluster.presets import preset_called

    preset = preset_called(kind)
    nodes, rest = divmod(count, preset.per_node) if preset is not None else (0, 0)
    if preset is not None and nodes and rest:
        return Cluster.from_nodes([(kind, preset.per_node)] * nodes + [(kind, rest)])
    return Cluster.preset(f"{count}x{kind}")


def _captured(given: argparse.Namespace) -> dict[str, Captured]:
    """Every model, captured at its largest batch and sequence when a graph is asked for."""
    from galvatron_fx.captured import Captured

    captured = {}
    for name in given.model:
        if name in captured:
            raise UsageError(f"--model {name} is given twice: leave out one")
        flags = {**vars(given), "model": name, "batch_size": None, "sequence_length": None}
        if ":" not in name or Path(name).exists():
            flags["batch_size"] = max(_LEAST, *given.batch_size) if given.batch_size else None
            flags["sequence_length"] = max(given.sequence_length) if given.sequence_length else None
        subject = models.load(argparse.Namespace(**flags))
        captured[name] = Captured(subject.model, subject.inputs, mixed_precision=options.policy_of(given))
    return captured


def _prices(given: argparse.Namespace) -> dict[str, float]:
    from galvatron_fx.ir.cluster.presets import preset_called

    presets = {name: preset_called(name) for name, _ in given.price}
    return {preset.device.name if (preset := presets[name]) else name: price for name, price in given.price}


def _price(text: str) -> tuple[str, float]:
    name, separator, price = text.partition("=")
    if not separator or not name:
        raise ValueError(f"{text[:80]!r} is no price: write DEVICE=USD, such as H100-80GB=2.5")
    return name, float(options.positive(float, "dollars")(price))
