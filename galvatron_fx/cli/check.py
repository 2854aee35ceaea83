"""``galvatron-fx check``: whether a plan trains as one device does, on simulated ranks."""

from __future__ import annotations

import argparse
from math import isfinite

from galvatron_fx.cli import files, models, options, output
from galvatron_fx.cli.exits import BUG, OK
from galvatron_fx.cli.output import Result

HELP = "train a step by a plan on simulated ranks and, eager, on one device, and say where the two differ"
EXAMPLES = """\
examples:
  # a small LLaMA on four ranks, by the plan that is searched
  galvatron-fx check --model llama --cluster 4xA100-80GB --set num_hidden_layers=2 --set hidden_size=64 \\
      --set intermediate_size=128 --set num_attention_heads=4 --set num_key_value_heads=4 --set vocab_size=256 \\
      --batch-size 8 --sequence-length 16

  # a plan of one's own, for three steps
  galvatron-fx check --plan plan.json --model train:build --cluster 8xA100-80GB --steps 3

All ranks are simulated in this process, one after the other: take few layers, and small ones. Weights and batch are
random. Exit code 1 says that something differs.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    options.add_model(parser)
    options.add_cluster(parser)
    parser.add_argument("--plan", metavar="PLAN.json", help="the plan to check (default: one is searched)")
    parser.add_argument("--steps", type=options.positive(int, "steps"), default=1, metavar="N", help="default: 1")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, batch and dropout (default: 0)")
    parser.add_argument(
        "--own-precision",
        action="store_true",
        help="in the dtypes of the model, held against the rounding of eager (default: all in float64, exact)",
    )


def run(given: argparse.Namespace) -> Result:
    """Check; raises what :func:`galvatron_fx.check` raises, PlanError with the plan's path."""
    plan = files.read_plan(given.plan) if given.plan else None
    options.follow(given, plan)
    cluster = options.cluster_of(given)
    subject = models.load(given)
    from galvatron_fx.checking.check import check

    policy = plan.mixed_precision if plan is not None else None
    settings = {"steps": given.steps, "exact": not given.own_precision, "seed": given.seed, "mixed_precision": policy}
    settings["forward_only"] = given.forward_only
    with files.named(given.plan):
        report = check(subject.model, cluster, subject.values_of(given.seed), plan, **settings)
    text = "\n".join([str(subject), output.describe_cluster(cluster), "", str(report)])
    rows = [
        {**vars(row), "absolute": _finite(row.absolute), "relative": _finite(row.relative), "is_equal": row.is_equal}
        for row in report.rows
    ]
    document = {"model": subject.document(), "ok": report.ok, "rows": rows, "notes": list(report.notes)}
    return Result(text, document, OK if report.ok else BUG)


def _finite(number: float) -> float | None:
    return number if isfinite(number) else None
