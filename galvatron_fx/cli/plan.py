"""``galvatron-fx plan``: search the fastest plan of a model for a cluster."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from galvatron_fx.cli import models, options, output
from galvatron_fx.cli.exits import UsageError
from galvatron_fx.cli.files import check_writable
from galvatron_fx.cli.output import Result
from galvatron_fx.ir.plan.report_json import report_path

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster
    from galvatron_fx.ir.plan.plan import Plan
    from galvatron_fx.report.progress import SearchProgress

HELP = "search the fastest plan of a model for a cluster that need not be here"
EXAMPLES = """\
examples:
  # LLaMA-7B as transformers has it, on 64 A100, with 64 x 2048 tokens a step
  galvatron-fx plan --model llama --cluster 64xA100-80GB

  # other sizes, a memory budget, and the plan into a file
  galvatron-fx plan --model llama --set num_hidden_layers=80 --set hidden_size=8192 --set intermediate_size=28672 \\
      --set num_attention_heads=64 --set num_key_value_heads=8 --cluster 64xA100-80GB \\
      --batch-size 64 --sequence-length 4096 --memory-budget 70GiB --out plan.json

  # a model of your own: build() in train.py returns (model, example_inputs)
  galvatron-fx plan --model train:build --cluster 8xH100-80GB --no-pipeline

  # the batch that trains the most samples a second; with train:build, build(batch) is called for each
  galvatron-fx plan --model llama --cluster 8xA100-80GB --search-batch

  # inference: one forward of 8 x 512 tokens, without backward, gradients and optimizer
  galvatron-fx plan --model llama --cluster 4xA100-80GB --forward-only --batch-size 8 --sequence-length 512

  # the first layer split in two by every axis of the mesh
  galvatron-fx plan --model llama --cluster 4xA100-80GB --no-pipeline --constrain model.layers.0=tensor,tensor

  # for scripts
  galvatron-fx plan --model ./Llama-3-8B --cluster profile.json --json | jq .plan.step_time_s

Use the plan with galvatron_fx.compile(model, mesh, batch, plan=Plan.load("plan.json")).
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    options.add_model(parser)
    options.add_cluster(parser)
    options.add_search(parser)
    parser.add_argument(
        "--search-batch",
        nargs="?",
        const=(),
        type=options.typed(options.batches),
        metavar="N,N",
        help="search the global batch that trains the most samples a second, too: among all, or among these",
    )
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan there, and the reasons beside it")


def run(given: argparse.Namespace) -> Result:
    """Search; raises what :func:`galvatron_fx.plan` and :func:`galvatron_fx.plan_batch` raise, UsageError for a batch
    that is given as well as searched, and OSError where the plan cannot be written.
    """
    if given.search_batch is not None and given.batch_size is not None:
        raise UsageError("--batch-size and --search-batch: the batch is either given or searched")
    for path in (given.out, report_path(given.out)) if given.out else ():
        check_writable(path)
    with output.progress() as progress:
        progress.say("building the model")
        cluster = options.cluster_of(given)
        subject = models.load(given)
        subject, best_plan = _search(given, subject, cluster, progress)
    assert best_plan.report is not None
    lines = [str(subject), output.describe_cluster(cluster)]
    if given.search_batch is not None:
        lines.append(f"searched the batch: {_rate(subject, best_plan):.4g} samples a second")
    lines += ["", str(best_plan), "", str(best_plan.report)]
    if given.out:
        best_plan.save(given.out)
        lines += ["", f"written to {given.out}, the reasons to {report_path(given.out)}"]
    document = {
        "model": subject.document(),
        "plan": json.loads(best_plan.to_json()),
        "report": output.report_document(best_plan.report),
        "samples_per_s": _rate(subject, best_plan),
        "out": given.out,
    }
    return Result("\n".join(lines), document)


def _search(
    given: argparse.Namespace, subject: models.Subject, cluster: Cluster, progress: SearchProgress
) -> tuple[models.Subject, Plan]:
    """What was planned for, with the batch that was found, and the plan."""
    settings = options.search_of(given)
    if given.search_batch is None:
        from galvatron_fx.api import plan

        return subject, plan(subject.model, cluster, subject.inputs, **settings, progress=progress)
    from galvatron_fx.batch_search import plan_batch

    batches = given.search_batch or None
    size, best_plan = plan_batch(
        subject.model, cluster, subject.inputs_of, batches=batches, progress=progress.by_batch(), **settings
    )
    return subject.of_batch(size), best_plan


def _rate(subject: models.Subject, best_plan: Plan) -> float:
    """Samples a second."""
    return subject.batch_size / best_plan.step_time_s
