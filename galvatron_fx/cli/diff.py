"""``galvatron-fx diff``: what differs between two plans."""

from __future__ import annotations

import argparse

from galvatron_fx.cli import files
from galvatron_fx.cli.exits import DIFFERENT, OK
from galvatron_fx.cli.output import Result

HELP = "say what differs between two plans, block by block, and in predicted time and memory"
EXAMPLES = """\
examples:
  galvatron-fx diff a.json b.json

  # for scripts: exit code 7 where they differ
  galvatron-fx diff a.json b.json --exit-code --json
"""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("first", metavar="A.json")
    parser.add_argument("second", metavar="B.json")
    parser.add_argument("--exit-code", action="store_true", help="exit with 7 where the plans differ")


def run(given: argparse.Namespace) -> Result:
    """Compare; raises PlanError and InputError for files that are no plans."""
    from galvatron_fx.cli.plan_diff import compare

    difference = compare(files.read_plan(given.first), files.read_plan(given.second))
    return Result(
        str(difference), difference.document(), DIFFERENT if given.exit_code and not difference.is_equal else OK
    )
