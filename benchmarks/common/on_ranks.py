"""Start a module of the benchmarks on several processes of this machine, one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def on_ranks(
    module: str, ranks: int, *arguments: str, check: bool = True, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``module`` under torchrun; raises CalledProcessError where a rank fails, unless ``check`` is False.

    ``variables``: of the environment, beside those of this process.
    """
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    return subprocess.run(
        [*start, module, *arguments], env={**os.environ, **environment, **(variables or {})}, check=check
    )
