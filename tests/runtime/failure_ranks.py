"""Run by test_failures_on_ranks.py: ranks that stop, skip a step or come with something else, forked from one process.

Prints ``ok <case>`` for each case that holds, ``FAILED <case>`` after the errors of its ranks otherwise.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from galvatron_fx import Plan, _version
from galvatron_fx.errors import InputError, LostRankError, PlanError, StorageError
from galvatron_fx.runtime.lost_ranks import ANSWER_S
from galvatron_fx.runtime.store_calls import DEADLINE_S
from tests.checkpoint.forked import run_ranks

STORAGE = "STORAGE"  # in the environment: a folder of its own
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


def stops(step: int, for_s: float = TIMEOUT_S + GRACE_S - 1) -> bool:
    """Stop this process at step 3, as a machine that hangs would; a child wakes it up again."""
    if step == 3:
        if os.fork() == 0:
            time.sleep(for_s)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        return False
    return True


REFUSALS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"width": 12}, r"ranks \[1\] hold another parameter or buffer than rank 0 \(up\.weight \(12, 6\)"),
    ({"role": "tensor"}, r"ranks \[1\] hold another plan than rank 0"),
    ({"batch": 12}, r"ranks \[1\] hold another batch than rank 0 \(.*\(12, 6\).*, and .*\(6, 6\)"),
    ({"version": "0.0.9"}, r"ranks \[1\] hold another version of galvatron_fx than rank 0 \(0\.0\.9, and"),
)


def refuses_what_differs() -> None:
    """All ranks hear at compile which rank has come with what."""
    version = _version.__version__
    for difference, message in REFUSALS:
        odd = dict(difference) if dist.get_rank() == VICTIM else {}
        _version.__version__ = odd.pop("version", version)
        try:
            compiled(**odd)
        except PlanError as error:
            assert re.search(message, str(error)), error
        else:
            raise AssertionError(f"the ranks were let go with {difference}")


def brings_other_shapes() -> None:
    """Two steps that are not compared; then all ranks hear at once who has come with another batch."""
    model = compiled()
    for rows in (6, 6, 6, 12, 6):
        model.forward_backward(x=torch.ones(rows, 6))
    begin_s = time.monotonic()
    try:
        model.forward_backward(x=torch.ones(9 if dist.get_rank() == VICTIM else 6, 6))
    except InputError as error:
        message = r"ranks \[1\] bring another batch than rank 0 in call 6 of the module \(x \(9, 6\) .*x \(6, 6\)"
        assert re.search(message, str(error)), error
    else:
        raise AssertionError("other rows were taken")
    assert time.monotonic() - begin_s < TIMEOUT_S + GRACE_S
    time.sleep(TIMEOUT_S if dist.get_rank() == VICTIM else 0)  # there, as one that catches the error


def hosts_the_store_and_stops(port: int) -> None:
    """The others do not wait for the store of a process group that rank 0 hosts."""
    dist.destroy_process_group()
    rank = int(os.environ["LOCAL_RANK"])
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0, timeout=datetime.timedelta(seconds=60))
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    model = compiled()
    for _ in range(4):
        model.forward_backward(x=torch.ones(6, 6))
    if rank == 0:
        stops(step=3, for_s=TIMEOUT_S + ANSWER_S + DEADLINE_S + 2)
        os._exit(0)
    begin_s = time.monotonic()
    try:
        model.forward_backward(x=torch.ones(6, 6))
    except LostRankError as error:
        assert error.ranks == (0,) and "store of the process group does not answer" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    assert time.monotonic() - begin_s < TIMEOUT_S + ANSWER_S + DEADLINE_S + 1, f"{time.monotonic() - begin_s:.1f} s"
    os._exit(0)  # as torchrun would end it


def with_states_on_disk() -> galvatron_fx.DistributedGraphModule:
    torch.manual_seed(0)
    plan = Plan.uniform((RANKS,), ("data",), offload_states=True)
    away = replace(plan.blocks[0].strategy, states_on_disk=True)
    plan = replace(plan, blocks=(replace(plan.blocks[0], strategy=away),))
    mesh = init_device_mesh("cpu", (RANKS,))
    return galvatron_fx.compile(Layer(), mesh, {"x": torch.ones(6, 6)}, plan=plan, storage=os.environ[STORAGE])


def fails(code: int, *_: Any) -> None:
    raise OSError(code, os.strerror(code))


def finds_the_disk_full() -> None:
    """When its states are made: that rank says so, and so do those that miss it, in time; no file is left."""
    if dist.get_rank() == VICTIM:
        os.posix_fallocate = partial(fails, errno.ENOSPC)
    model = with_states_on_disk()
    optimizer = torch.optim.AdamW(model.parameters())
    begin_s, error = time.monotonic(), None
    try:
        for _ in range(2):
            model.forward_backward(x=torch.ones(6, 6))
            optimizer.step()
    except (StorageError, LostRankError) as caught:
        error = caught
    is_victim = dist.get_rank() == VICTIM
    kind, start = (StorageError, "") if is_victim else (LostRankError, r"lost the others in step 2: rank 1 said: ")
    message = start + r"storage .*no room for .* of optimizer states .*free some, .*resume from the last checkpoint"
    assert isinstance(error, kind) and re.search(message, str(error)), error
    assert time.monotonic() - begin_s < TIMEOUT_S + GRACE_S and not os.listdir(os.environ[STORAGE])
    os._exit(0)  # as one that does not catch it


def cannot_write() -> None:
    """All ranks are refused where one has no such folder: none waits for it in a first step."""
    if dist.get_rank() == VICTIM:
        opened = os.open
        os.open = lambda path, flags, *mode, **named: (  # type: ignore[assignment]
            fails(errno.ENOENT) if flags & os.O_TMPFILE == os.O_TMPFILE else opened(path, flags, *mode, **named)
        )
    try:
        with_states_on_disk()
    except (StorageError, PlanError) as error:
        is_victim = dist.get_rank() == VICTIM
        kind, start = (StorageError, "") if is_victim else (PlanError, r"rank 1 could not compile, .*")
        assert isinstance(error, kind) and re.search(start + "storage .* cannot be written to", str(error)), error
    else:
        raise AssertionError("nobody was refused")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


MISSING = r"rank [02] lost the others in step 3: no answer from ranks \[1\] \(rank 1 last began step 2\)"
CASES: dict[str, Callable[[], None]] = {
    "a_rank_that_stops": partial(loses_a_rank, stops),
    "a_rank_that_skips_a_step": partial(loses_a_rank, lambda step: step != 2),
    "another_model_plan_batch_or_version": refuses_what_differs,
    "a_rank_with_other_shapes": brings_other_shapes,
    "a_rank_whose_disk_is_full": finds_the_disk_full,
    "a_rank_that_cannot_write": cannot_write,
    "a_host_of_the_store_that_stops": partial(hosts_the_store_and_stops, free_port()),
}


def main(folder: Path) -> None:
    os.environ |= {
        "TORCH_FR_BUFFER_SIZE": "100",
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "record_"),
        STORAGE: str(folder / "states"),
    }
    (folder / "states").mkdir()
    torch.set_num_threads(1)
    galvatron_fx.capture(Layer(), {"x": torch.ones(6, 6)})  # what the first capture imports, the ranks then have
    for name, work in CASES.items():
        try:
            codes = run_ranks(RANKS, work, timeout_s=80, collective_s=TIMEOUT_S)
            assert codes == [0] * RANKS, f"exit codes {codes}"
            print(f"ok {name}", flush=True)
        except Exception:
            print(f"{traceback.format_exc()}\nFAILED {name}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
