"""Run by test_on_ranks.py: all cases that need several processes, from one process that they are forks of.

Prints ``ok <case>`` for each case that holds, ``FAILED <case>`` after the errors of its ranks otherwise.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

import torch

import galvatron_fx
from tests.checkpoint import error_ranks, kills, resume_ranks, weights_ranks
from tests.models import zoo

CASES = resume_ranks.CASES | weights_ranks.CASES | error_ranks.CASES | kills.CASES


def main(folder: Path, names: list[str]) -> None:
    """Run the cases called ``names``, or all."""
    torch.set_num_threads(1)
    galvatron_fx.capture(*zoo.gpt2(layers=1))  # what the first capture imports and caches, the ranks then have
    for name, work in CASES.items():
        if names and name not in names:
            continue
        place = folder / name
        place.mkdir(parents=True)
        started_s = time.monotonic()
        try:
            work(place)
            print(f"ok {name}\n{name} took {time.monotonic() - started_s:.1f} s", flush=True)
        except Exception:
            print(f"{traceback.format_exc()}\nFAILED {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
