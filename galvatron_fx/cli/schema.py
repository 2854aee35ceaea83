"""``galvatron-fx schema``: the JSON Schema of the files that are read and written."""

from __future__ import annotations

import argparse
import json
from importlib.resources import files

from galvatron_fx.cli.output import Result

HELP = "print the JSON Schema of plans or of clusters"
EXAMPLES = """\
examples:
  galvatron-fx schema plan > plan.schema.json
  galvatron-fx schema cluster
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("kind", choices=("plan", "cluster"), help="of which files")


def run(given: argparse.Namespace) -> Result:
    """Print it; the same with and without ``--json``."""
    text = files("galvatron_fx.ir").joinpath(f"{given.kind}_schema.json").read_text(encoding="utf-8")
    document = json.loads(text)
    return Result(text.rstrip(), document)
