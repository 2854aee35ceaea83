"""Damage a checkpoint in one place and load it: a bit flipped, a file cut short, removed, or longer by a byte.

    python -m benchmarks.correctness.corrupt_checkpoints --trials 500

Every damage must be refused with the file's name, and leave model and optimizer as they were.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import torch

from benchmarks.common.machine import describe
from galvatron_fx.checkpoint import Checkpointer
from tests.checkpoint.damage import STEP, Damage, save_on_two_ranks, trained


def main() -> None:
    """Run the trials; the first damage that is not refused raises AssertionError naming it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns that one process alone loads
    print(describe())
    refused: Counter[str] = Counter()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder) / "sound"
        save_on_two_ranks(sound)
        model, optimizer = trained()
        for seed in range(options.trials):
            damage = Damage(seed, sound, Path(folder) / str(seed))
            damage.is_refused(model, optimizer)
            refused[f"{damage.kind:6} {damage.file.name}"] += 1
        restored = Checkpointer(sound).load(model=model, optimizer=optimizer)
        assert restored is not None and restored.step == STEP, "the sound checkpoint must load"
    for what, count in sorted(refused.items()):
        print(f"{count:4} refused: {what}")
    print(f"{options.trials} damages, all refused by the file's name ({time.monotonic() - started_s:.0f} s)")


if __name__ == "__main__":
    main()
