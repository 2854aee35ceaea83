"""``galvatron-fx plan``: search the fastest plan of a model for a cluster."""

from __future__ import annotations

import argparse
import json

from galvatron_fx.cli import models, options, output
from galvatron_fx.cli.output import Result

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

  # for scripts
  galvatron-fx plan --model ./Llama-3-8B --cluster profile.json --json | jq .plan.step_time_s

Use the plan with galvatron_fx.compile(model, mesh, batch, plan=Plan.load("plan.json")).
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    options.add_model(parser)
    options.add_cluster(parser)
    options.add_search(parser)
    parser.add_argument("--out", metavar="PLAN.json", help="write the plan there")


def run(given: argparse.Namespace) -> Result:
    """Search; raises what :func:`galvatron_fx.plan` raises, and OSError where the plan cannot be written."""
    with output.progress() as progress:
        progress.say("building the model")
        cluster = options.cluster_of(given)
        subject = models.load(given)
        from galvatron_fx.api import plan

        found = plan(subject.model, cluster, subject.inputs, **options.search_of(given), progress=progress)
    assert found.report is not None
    lines = [str(subject), output.describe_cluster(cluster), "", str(found), "", str(found.report)]
    if given.out:
        found.save(given.out)
        lines += ["", f"written to {given.out}"]
    document = {
        "model": subject.document(),
        "plan": json.loads(found.to_json()),
        "report": output.report_document(found.report),
        "out": given.out,
    }
    return Result("\n".join(lines), document)
