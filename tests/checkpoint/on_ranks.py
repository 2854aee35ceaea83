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

from tests.checkpoint import error_ranks, kills, resume_ranks, weights_ranks
from tests.checkpoint.resume_ranks import ALONE, DATA_ZERO, MORE_STAGES, STAGES, TENSOR, Setting
from tests.models import zoo
from tests.runtime.launch import runs
from tests.runtime.shared_captures import share_captures
from tests.runtime.shared_lowerings import compile_before_the_fork

CASES = resume_ranks.CASES | weights_ranks.CASES | error_ranks.CASES | kills.CASES


def compiled_models() -> Iterator[tuple[zoo.Case, tuple[Setting, ...]]]:
    """What the cases compile, and under which settings, each as often as one rank does."""
    yield zoo.gpt2(layers=2), (DATA_ZERO, TENSOR, STAGES, MORE_STAGES)
    if runs("llama_from_stages_to_one_rank"):
        yield zoo.llama(layers=1), (MORE_STAGES, ALONE)
    if runs("weights_in_files_to_tensor"):
        yield zoo.llama(layers=2), (TENSOR,)
    if runs("half_precision_in_one_file_to_stages"):
        yield weights_ranks.half(partial(zoo.llama, layers=2)), (MORE_STAGES,)
    if runs("dropout_goes_on"):
        yield resume_ranks.with_dropout(), (TENSOR, TENSOR)
    yield kills.tower(), tuple(kills.SETTINGS)


def main(folder: Path, names: list[str]) -> None:
    """Run the cases called ``names``, or all."""
    torch.set_num_threads(1)
    share_captures()
    for (model, inputs), settings in compiled_models():  # the ranks have the programs then, and what these import
        for setting in settings:
            compile_before_the_fork(setting.mesh, [(model, inputs, [setting.plan()])])
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
