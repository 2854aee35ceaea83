"""Run by test_on_ranks.py: all cases that need several processes, from one process that they are forks of.

Prints ``ok <case>`` for each case that holds, ``FAILED <case>`` after the errors of its ranks otherwise.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

import galvatron_fx
from tests.checkpoint import error_ranks, kills, resume_ranks, weights_ranks
from tests.models import zoo
from tests.runtime.shared_captures import share_captures

CASES = resume_ranks.CASES | weights_ranks.CASES | error_ranks.CASES | kills.CASES


def trained_models() -> Iterator[zoo.Case]:
    """What the cases train."""
    for layers in (1, 2):
        yield zoo.gpt2(layers)
        yield zoo.llama(layers)
    yield weights_ranks.half(partial(zoo.llama, layers=2))
    yield resume_ranks.with_dropout()
    yield kills.tower()


def main(folder: Path, names: list[str]) -> None:
    """Run the cases called ``names``, or all."""
    torch.set_num_threads(1)
    share_captures()
    for model, inputs in trained_models():  # the ranks have the graphs then, and what capture imports
        galvatron_fx.capture(model, inputs)
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
