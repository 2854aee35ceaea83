"""Runs an example on forks of this process, which has imported what takes seconds: what torchrun does else.

forked.py RANKS SCRIPT ARGUMENTS...
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence


def main() -> None:
    """Ends with an error where a rank fails."""
    ranks, script, *arguments = sys.argv[1:]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=_rank, args=(rank, ranks, port, script, arguments)) for rank in range(int(ranks))]
    for process in started:
        process.start()
    for process in started:
        process.join()
    codes = [process.exitcode for process in started]
    print(f"exit codes {codes}" if any(codes) else "all ended well")


def _rank(rank: int, ranks: str, port: int, script: str, arguments: Sequence[str]) -> None:
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
