"""``galvatron-fx explain``: the graphs after every pass, or a page about the plan."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from galvatron_fx.cli import files, models, options, output
from galvatron_fx.cli.exits import UsageError
from galvatron_fx.cli.output import Result

if TYPE_CHECKING:
    from galvatron_fx.ir.cluster.cluster import Cluster

HELP = "write down the graph after every pass, or a page that explains the plan"
EXAMPLES = """\
examples:
  # a file for every pass, from capture to the lowered program, into the folder graphs
  galvatron-fx explain --model llama --set num_hidden_layers=4 --cluster 8xA100-80GB --folder graphs

  # the lowered program of a given plan, on the terminal
  galvatron-fx explain --model train:build --cluster 8xA100-80GB --plan plan.json --after Rematerialize

  # one self-contained page: the plan, the candidates, time and memory
  galvatron-fx explain --model llama --cluster 64xA100-80GB --html page.html

Any program tells the same: TORCH_LOGS="+galvatron_fx" prints the graphs, TORCH_TRACE=folder keeps them for tlparse.
"""

_LEAST_SHARED = 2  # samples from which a capture serves other batches


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    options.add_model(parser)
    options.add_cluster(parser)
    options.add_search(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--plan", metavar="PLAN.json", help="explain this plan instead of searching one")
    group.add_argument("--folder", metavar="FOLDER", help="write a file for every pass there (default: graphs)")
    group.add_argument("--after", metavar="PASS", help="print the graph after this pass instead")
    group.add_argument("--html", metavar="PAGE.html", help="write a page about the plan instead")


def run(given: argparse.Namespace) -> Result:
    """Explain; raises what :func:`galvatron_fx.explain` raises, UsageError for outputs that do not go together."""
    if given.html and (given.folder or given.after):
        raise UsageError("--html writes a page, --folder and --after graphs: ask for one of them")
    if given.plan and (given.roles or given.pipeline is not None):
        raise UsageError("--roles and --pipeline say what to search, and --plan is found already: leave out either")
    if given.html:
        files.check_writable(given.html)
    plan = files.read_plan(given.plan) if given.plan else None
    options.follow(given, plan)
    why = [str(plan.report), ""] if plan is not None and plan.report is not None else []
    cluster = options.cluster_of(given)
    with output.progress() as progress, files.named(given.plan):
        progress.say("building the model")
        subject = models.load(given)
        settings: dict[str, Any] = {**options.search_of(given), "plan": plan, "progress": progress}
        if plan is not None:
            settings["mixed_precision"] = settings["mixed_precision"] or plan.mixed_precision
            del settings["roles"]  # a default of the command line
        if given.html:
            _write_page(given.html, subject, cluster, settings)
            return Result("\n".join([*why, f"written to {given.html}"]), {"html": given.html})
        from galvatron_fx.explaining import explain

        folder = given.folder or (None if given.after else "graphs")
        text = explain(subject.model, cluster, subject.inputs, after=given.after, folder=folder, **settings)
    if given.after:
        return Result(text, {"after": given.after, "graph": text})
    written = sorted(map(str, Path(str(folder)).glob("*.py")))
    return Result("\n".join([*why, f"written to {folder}:", *written]), {"folder": folder, "files": written})


def _write_page(path: str, subject: models.Subject, cluster: Cluster, settings: dict[str, Any]) -> None:
    """Write the page of a model, captured for other batches, too, where the batch allows that."""
    from galvatron_fx.captured import Captured
    from galvatron_fx.report.page import write_page

    if subject.batch_size < _LEAST_SHARED:
        write_page(path, subject.model, cluster, subject.inputs, **settings)
        return
    of_capture = {name: settings.pop(name) for name in ("mixed_precision", "forward_only")}
    write_page(path, Captured(subject.model, subject.inputs, **of_capture), cluster, None, **settings)
