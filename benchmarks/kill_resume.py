"""Kill training with signal 9 at random moments, take it up again under another plan, and compare with one device.

    python benchmarks/kill_resume.py --trials 50

Every trial trains on two ranks and saves after each step; one rank is killed, either as it is about to touch a file of
the checkpoints (every phase of saving is met so) or after a random time. What is left must hold every checkpoint that
was promised, each with its checksums right; training goes on from the last under another random plan, its losses and
parameters equal to one device's to 1e-10 in float64; and the rank that was not killed must end by itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import describe
from tests.checkpoint.kills import Trial


def main() -> None:
    """Run the trials; the first that fails raises AssertionError naming its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(describe())
    moments: Counter[str] = Counter()
    started_s = time.monotonic()
    for seed in range(options.first_seed, options.first_seed + options.trials):
        with tempfile.TemporaryDirectory() as folder:
            moments[Trial(seed).run(Path(folder))] += 1
    for moment, count in moments.most_common():
        print(f"{count:4} killed at: {moment}")
    killed = options.trials - moments["not killed"]
    print(
        f"{options.trials} trials, {killed} kills: all resumed at the last checkpoint and went on as one device does "
        f"({time.monotonic() - started_s:.0f} s)"
    )


if __name__ == "__main__":
    main()
