"""Kill ranks of the example trainer with signal 9; torchrun restarts it, and its loss curve is that of the whole run.

    python -m benchmarks.correctness.elastic --kills 5 --ranks 4

Needs the extra packages of ``pip install -e .[test,train]``.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from benchmarks.common import machine
from tests.examples.elastic import MODEL, ROOT, Launch

STEPS_BETWEEN, SAVE_EVERY = 40, 5


def main() -> None:
    """Run the trainer undisturbed, then with kills at random moments, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3, help="of a rank chosen at random (default: 3)")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of ranks and moments")
    options = parser.parse_args()
    steps, dice = STEPS_BETWEEN * (options.kills + 1), random.Random(options.seed)
    print(
        f"{machine.describe()}\n\n{options.ranks} gloo processes, {steps} steps, saved every {SAVE_EVERY}", flush=True
    )
    arguments = [*MODEL, "--memory-budget", "60MB", "--text", str(ROOT / "docs"), "--pattern", "*.md"]
    arguments += ["--steps", str(steps), "--save-every", str(SAVE_EVERY), "--log-every", "1"]
    with tempfile.TemporaryDirectory() as folder:
        whole = Launch.of(Path(folder, "whole"), arguments, options.ranks)
        whole.finish()
        killed = Launch.of(Path(folder, "killed"), arguments, options.ranks, restarts=options.kills)
        for number in range(options.kills):
            wanted = number * STEPS_BETWEEN + SAVE_EVERY * dice.randrange(1, STEPS_BETWEEN // SAVE_EVERY)
            rank = dice.randrange(options.ranks)
            committed = killed.kill_after(wanted, rank)
            begin_s = time.perf_counter()
            resumed = killed.restarted(number + 1)
            spent_s = time.perf_counter() - begin_s
            moment = f"process {rank} killed with checkpoint {committed} there"
            print(f"{moment}; on after step {resumed}, {spent_s:.1f} s later", flush=True)
        killed.finish()
        expected, found = whole.losses(), killed.losses()
    gap = max(abs(expected[step] - found.get(step, float("nan"))) for step in expected)
    print(f"{len(found)} of {steps} steps reported; largest difference of losses {gap:.1e}")
    if found != expected:
        raise SystemExit("the loss curves differ")


if __name__ == "__main__":
    main()
