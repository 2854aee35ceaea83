"""Start a script on several processes of this machine, one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def on_ranks(script: str, ranks: int, *arguments: str) -> None:
    """Run ``script``, a file of this folder, under torchrun; raises CalledProcessError where a rank fails."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*start, str(Path(__file__).with_name(script)), *arguments]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}, check=True)
