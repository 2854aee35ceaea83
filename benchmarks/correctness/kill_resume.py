"""Kill training with signal 9 at random moments, take it up again under another plan, and compare with one device.

    python -m benchmarks.correctness.kill_resume --trials 50 --runs 50

Every trial trains on two ranks and saves after each step; one rank is killed, either as it is about to touch a file of
the checkpoints (every phase of saving is met so) or after a random time. What is left must hold every checkpoint that
was promised, each with its checksums right; training goes on from the last under another random plan, its losses and
parameters equal to one device's to 1e-10 in float64; and the rank that was not killed must end by itself.

A kill loses nothing of what was written, a power loss does. So every run of one process, which saves and begins again
from any step, is recorded, and loaded from every state that a power loss may leave at any moment: contents that were
not synced lost, kept or torn, names in any order. Each fsync is then left out in turn, and has to be missed.
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
from tests.checkpoint import disk
from tests.checkpoint.kills import Trial
from tests.checkpoint.power import branching, drawn, needless


def main() -> None:
    """Run the trials; the first that fails raises AssertionError naming its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--runs", type=int, default=50, help="runs that lose power at every moment")
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
    _lose_power(range(options.first_seed, options.first_seed + options.runs))


def _lose_power(seeds: range) -> None:
    """Check every state that power losses leave of one run per seed, and that every fsync is needed."""
    warnings.simplefilter("ignore")  # what is torn is left out with a warning
    started_s = time.monotonic()
    states = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            place = Path(folder) / str(seed)
            place.mkdir()
            run = drawn(seed, place / "run")
            states += run.check(run.recorder.events, place, set())
        run, seen = branching(Path(folder) / "branching"), set[bytes]()
        events = run.recorder.events
        states += run.check(events, Path(folder), seen)
        hollow = needless(events, lambda fewer: run.check(fewer, Path(folder), set(seen)))
    assert not hollow, f"nobody misses the fsync of {hollow}"
    print(
        f"{len(seeds) + 1} runs, {states} states after power losses: nothing promised was lost; each of "
        f"{len(disk.sites(events))} fsyncs is missed when it is left out ({time.monotonic() - started_s:.0f} s)"
    )


if __name__ == "__main__":
    main()
