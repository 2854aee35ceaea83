"""Run by test_failures_on_ranks.py: ranks that stop, skip a step or come with something else, forked from one process.

Prints ``ok <case>`` for each case that holds, ``FAILED <case>`` after the errors of its ranks otherwise.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.errors import LostRankError, PlanError
from tests.checkpoint.forked import run_ranks

RANKS, TIMEOUT_S, GRACE_S, VICTIM = 3, 4.0, 5.0, 1


class Layer(nn.Module):
    """A layer and a loss."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width), nn.Linear(width, 6)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": self.down(self.up(x).relu()).square().mean()}


def compiled(width: int = 6, role: str = "data", batch: int = 6) -> galvatron_fx.DistributedGraphModule:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (RANKS,))
    return galvatron_fx.compile(Layer(width), mesh, {"x": torch.ones(batch, 6)}, plan=Plan.uniform((RANKS,), (role,)))


def loses_a_rank(at_victim: Callable[[int], bool]) -> None:
    """The others end within the timeout and five seconds, say which rank is missing, and keep the record.

    ``at_victim``: called by the rank in question before each step; whether it takes part.
    """
    model = compiled()
    took_s, error = 0.0, None
    for step in range(1, 4):
        if dist.get_rank() == VICTIM and not at_victim(step):
            continue
        begin_s = time.monotonic()
        try:
            model.forward_backward(x=torch.ones(6, 6))
        except LostRankError as caught:
            took_s, error = time.monotonic() - begin_s, caught
            break
    if dist.get_rank() == VICTIM:
        time.sleep(TIMEOUT_S + GRACE_S - 1)  # there, but elsewhere
        os._exit(0)
    assert error is not None, "nobody noticed"
    assert TIMEOUT_S - 1 < took_s < TIMEOUT_S + GRACE_S, f"{took_s:.1f} s"
    assert error.ranks == (VICTIM,) and re.search(MISSING, str(error)), error
    record = re.search(r"dump is in (\S+\.json)", str(error))
    assert record and json.loads(Path(record[1]).read_text())["entries"], error


def stops(step: int) -> bool:
    """Stop this process at step 3, as a machine that hangs would; a child wakes it up again."""
    if step == 3:
        if os.fork() == 0:
            time.sleep(TIMEOUT_S + GRACE_S - 1)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return False
    return True


REFUSALS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"width": 12}, r"ranks \[1\] hold another model than rank 0"),
    ({"role": "tensor"}, r"ranks \[1\] hold another plan than rank 0"),
    ({"batch": 12}, r"ranks \[1\] hold another batch than rank 0 \(.*\(12, 6\).*, and .*\(6, 6\)"),
    ({"version": "0.0.9"}, r"ranks \[1\] hold another version of galvatron_fx than rank 0 \(0\.0\.9, and"),
)


def refuses_what_differs() -> None:
    """All ranks hear at compile which rank has come with what."""
    version = galvatron_fx.__version__
    for difference, message in REFUSALS:
        odd = dict(difference) if dist.get_rank() == VICTIM else {}
        galvatron_fx.__version__ = odd.pop("version", version)
        try:
            compiled(**odd)
        except PlanError as error:
            assert re.search(message, str(error)), error
        else:
            raise AssertionError(f"the ranks were let go with {difference}")


MISSING = r"rank [02] lost the others in step 3: no answer from ranks \[1\] \(rank 1 last began step 2\)"
CASES: dict[str, Callable[[], None]] = {
    "a_rank_that_stops": partial(loses_a_rank, stops),
    "a_rank_that_skips_a_step": partial(loses_a_rank, lambda step: step != 2),
    "another_model_plan_batch_or_version": refuses_what_differs,
}


def main(folder: Path) -> None:
    os.environ |= {"TORCH_FR_BUFFER_SIZE": "100", "TORCH_FR_DUMP_TEMP_FILE": str(folder / "record_")}
    torch.set_num_threads(1)
    galvatron_fx.capture(Layer(), {"x": torch.ones(6, 6)})  # what the first capture imports, the ranks then have
    for name, work in CASES.items():
        try:
            codes = run_ranks(RANKS, work, timeout_s=40, collective_s=TIMEOUT_S)
            assert codes == [0] * RANKS, f"exit codes {codes}"
            print(f"ok {name}", flush=True)
        except Exception:
            print(f"{traceback.format_exc()}\nFAILED {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
