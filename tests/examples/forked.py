"""Runs an example by the agent of torchrun, on forks of this process, which has imported what takes seconds.

forked.py RANKS RESTARTS SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import os
import runpy
import sys

from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def main() -> None:
    """Ends with an error where a rank fails once more than it may be started again."""
    ranks, restarts, *command = sys.argv[1:]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # which restarts need
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        max_restarts=int(restarts),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
    )
    elastic_launch(agent, _rank)(*command)
    print("all ended well")


def _rank(script: str, *arguments: str) -> None:
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
