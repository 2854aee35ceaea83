"""``galvatron-fx validate``: whether a file is a sound plan or cluster, and whether a plan fits a model."""

from __future__ import annotations

import argparse
from math import prod
from typing import TYPE_CHECKING

from galvatron_fx.cli import files, models, options, output
from galvatron_fx.cli.exits import UsageError
from galvatron_fx.cli.files import CLUSTER, PLAN
from galvatron_fx.cli.output import Result
from galvatron_fx.ir.strict_json import read_object

if TYPE_CHECKING:
    from galvatron_fx.ir.plan.plan import Plan

HELP = "check a plan or a cluster file, and whether a plan fits a model and a cluster"
EXAMPLES = """\
examples:
  galvatron-fx validate plan.json
  galvatron-fx validate profile.json

  # does the plan fit this cluster, and this model with this batch?
  galvatron-fx validate plan.json --cluster 64xA100-80GB
  galvatron-fx validate plan.json --model llama --cluster 64xA100-80GB

Exit code 3 and a message that names the place say what is wrong.
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("file", metavar="FILE", help="a plan, a cluster or a profile, as JSON")
    parser.add_argument("--kind", choices=(PLAN, CLUSTER), help="what the file is (default: as it looks)")
    options.add_model(parser, required=False)
    options.add_cluster(parser, required=False)


def run(given: argparse.Namespace) -> Result:
    """Check; raises PlanError, ClusterError or InputError with the path for what is wrong."""
    kind = given.kind or files.kind_of(read_object(given.file, "a plan or a cluster")) or PLAN
    if given.model and not given.cluster:
        raise UsageError("--model is checked with a mesh: give --cluster too")
    if kind == CLUSTER:
        if given.cluster:
            raise UsageError(f"{given.file} is a cluster, and --model and --cluster are what a plan is checked against")
        text = output.describe_cluster(files.read_cluster(given.file))
        return Result(f"{given.file} is a sound cluster\n{text}", {"valid": True, "kind": kind})
    plan = files.read_plan(given.file)
    with files.named(given.file):
        checked = _checked(given, plan)
    lines = [f"{given.file} is a sound plan{checked}", "", str(plan)]
    return Result("\n".join(lines), {"valid": True, "kind": kind, "num_ranks": prod(plan.axis_sizes)})


def _checked(given: argparse.Namespace, plan: Plan) -> str:
    """Check the plan against what is given, and say against what."""
    if not given.cluster:
        return ""
    cluster = options.cluster_of(given)
    if not given.model:
        marks = [block.fingerprint for block in plan.blocks]
        plan.check(plan.graph_fingerprint, marks, cluster.shape, plan.mixed_precision, plan.forward_only)
        return f" for {given.cluster}"
    with output.progress() as progress:
        progress.say("building the model")
        options.follow(given, plan)
        subject = models.load(given)
        from galvatron_fx.api import capture
        from passes.lowering.apply_plan import check_plan

        progress.say("capture")
        graph = capture(
            subject.model, subject.inputs, mixed_precision=plan.mixed_precision, forward_only=given.forward_only
        )
        check_plan(plan, graph, cluster)
    return f" for {subject.name} on {given.cluster}"
