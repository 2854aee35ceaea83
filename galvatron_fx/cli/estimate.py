"""``galvatron-fx estimate``: time and memory of a given plan, simulated on the lowered graphs."""

from __future__ import annotations

import argparse

from galvatron_fx.cli import files, models, options, output
from galvatron_fx.cli.exits import OK, TOO_LARGE
from galvatron_fx.cli.output import Result
from galvatron_fx.ir.plan.units import format_bytes

HELP = "lower a given plan and simulate it: time by cause and memory by kind on every rank"
EXAMPLES = """\
examples:
  galvatron-fx estimate plan.json --model llama --cluster 64xA100-80GB

  # the same plan on other hardware
  galvatron-fx estimate plan.json --model llama --cluster 64xH100-80GB

  # does it still fit? exit code 4 says no
  galvatron-fx estimate plan.json --model llama --cluster 64xA100-80GB --memory-budget 30GiB --json

Model, batch and cluster are those that the plan is for: the same flags as with plan.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("plan", metavar="PLAN.json")
    options.add_model(parser)
    options.add_cluster(parser)
    parser.add_argument(
        "--memory-budget",
        type=options.typed(options.size),
        metavar="SIZE",
        help="per device, such as 40GiB (default: the device's memory); exit code 4 where the plan takes more",
    )


def run(given: argparse.Namespace) -> Result:
    """Simulate; raises what :func:`galvatron_fx.estimate` raises, PlanError with the plan's path."""
    plan = files.read_plan(given.plan)
    options.follow(given, plan)
    cluster = options.cluster_of(given)
    with output.progress() as progress:
        progress.say("building the model")
        subject = models.load(given)
        from galvatron_fx.estimating import estimate

        with files.named(given.plan):
            prediction = estimate(
                subject.model, cluster, subject.inputs, plan, progress=progress, forward_only=given.forward_only
            )
    limit = given.memory_budget or cluster.device.memory_bytes
    fits = prediction.peak_bytes <= limit
    verdict = f"{'fits' if fits else 'does not fit'} a budget of {format_bytes(limit)} per device"
    text = "\n".join([str(subject), output.describe_cluster(cluster), "", str(prediction), "", verdict])
    document = {
        "model": subject.document(),
        "step_time_s": prediction.simulated_s,
        "peak_memory_bytes": prediction.peak_bytes,
        "budget_bytes": limit,
        "fits": fits,
        "ranks": output.ranks_document(prediction.ranks),
    }
    return Result(text, document, OK if fits else TOO_LARGE)
