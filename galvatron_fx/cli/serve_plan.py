"""``galvatron-fx serve-plan``: rank ways to serve a model under a trace of requests."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from galvatron_fx.cli import models, options, output
from galvatron_fx.cli.files import check_writable
from galvatron_fx.cli.output import Result
from galvatron_fx.figures import require_matplotlib

if TYPE_CHECKING:
    from galvatron_fx.serving.captures import RequestInputs

HELP = "rank plans and policies to serve a model under a trace of requests, by simulation"
EXAMPLES = """\
examples:
  # trace.csv has the columns arrival_s,prompt,output: a line for each request
  galvatron-fx serve-plan --model llama --cluster 8xA100-80GB --trace trace.csv

  # chunked prefill against whole prompts, with and without two half-batches side by side, as a picture and a table
  galvatron-fx serve-plan --model ./Llama-3-8B --cluster 4xH100-80GB --trace trace.csv --policies mixed,chunked \\
      --chunks 256,512,1024 --halves --out serving.csv --picture serving.png --rank-by gap_p99_s

  # the plan of one replica of the best, for galvatron_fx.compile(..., plan="serve.json")
  galvatron-fx serve-plan --model llama --cluster 8xA100-80GB --trace trace.csv --plan serve.json
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    group = parser.add_argument_group("model and cluster")
    group.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="as of plan; a module:function returns the model and a function from numbers of requests, new tokens and "
        "keys to example inputs with a cache",
    )
    options.add_configuration(group)
    options.add_cluster(parser)
    group.add_argument(
        "--memory-budget", type=options.typed(options.size), metavar="SIZE", help="per device (default: its memory)"
    )
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--trace",
        required=True,
        metavar="FILE",
        help="CSV with the columns arrival_s (seconds), prompt, output (tokens)",
    )
    group = parser.add_argument_group("server")
    group.add_argument(
        "--policies",
        type=options.names,
        default=("prefill_first", "chunked"),
        metavar="A,B",
        help="of prefill_first, mixed and chunked (default: prefill_first,chunked)",
    )
    numbers = options.typed(options.batches)
    group.add_argument(
        "--chunks", type=numbers, default=(512,), metavar="N,N", help="new tokens of a step of chunked (default: 512)"
    )
    group.add_argument(
        "--most-tokens",
        type=options.positive(int, "tokens"),
        default=2048,
        metavar="N",
        help="new tokens of a step of the others, which one longer prompt may exceed (default: %(default)s)",
    )
    group.add_argument(
        "--most-requests",
        type=options.positive(int, "requests"),
        default=256,
        metavar="N",
        help="that a replica has under way at once (default: %(default)s)",
    )
    group.add_argument(
        "--cache",
        choices=("paged", "reserved"),
        default="paged",
        help="whether requests take room for keys and values as they grow, or all at their beginning",
    )
    group.add_argument(
        "--halves",
        action="store_true",
        help="try each also with two half-batches, one computing while one communicates",
    )
    group.add_argument(
        "--only", action="append", metavar="LAYOUT", help='such as "2 replicas, tensor 4" (repeatable; default: all)'
    )
    group = parser.add_argument_group("output")
    group.add_argument(
        "--rank-by",
        default="e2e_p90_s",
        metavar="FIELD",
        help="tokens_per_s, ttft_p50_s, gap_p99_s (default: e2e_p90_s)",
    )
    group.add_argument("--out", metavar="FILE", help="write all there: JSON where it ends in .json, else CSV")
    group.add_argument("--picture", metavar="FILE", help="draw latencies and tokens a second there, PNG or SVG")
    group.add_argument("--plan", metavar="FILE", help="write the plan of one replica of the best there")


def run(given: argparse.Namespace) -> Result:
    """Simulate; raises what :func:`galvatron_fx.serve_plan` raises, and OSError for files."""
    from galvatron_fx.serving.requests import read_trace
    from galvatron_fx.serving.serve_plan import serve_plan

    for path in filter(None, (given.out, given.picture, given.plan)):
        check_writable(path)
    if given.picture:
        require_matplotlib()
    cluster, trace = options.cluster_of(given), read_trace(given.trace)
    flags = {**vars(given), "batch_size": None, "sequence_length": None, "forward_only": True}
    with output.steps() as progress:
        progress.step(0, 1, "building the model")
        subject = models.load(argparse.Namespace(**flags))
        inputs: RequestInputs | None = subject.inputs if callable(subject.inputs) else None
        result = serve_plan(
            subject.model,
            cluster,
            trace,
            inputs=inputs,
            memory_budget=given.memory_budget,
            policies=given.policies,
            chunks=given.chunks,
            most_tokens=given.most_tokens,
            halves=(False, True) if given.halves else (False,),
            most_requests=given.most_requests,
            cache=given.cache,
            only=given.only,
            rank_by=given.rank_by,
            progress=progress.step,
        )
    lines = [str(result)]
    if given.out:
        result.save(given.out)
        lines += ["", f"written to {given.out}"]
    if given.picture:
        result.draw(given.picture)
        lines += ["", f"drawn in {given.picture}"]
    if given.plan:
        result.plan(result.best).save(given.plan)
        lines += ["", f"the plan of one replica ({result.best.plan}) is in {given.plan}"]
    return Result("\n".join(lines), {"points": json.loads(result.to_json()), "out": given.out})
