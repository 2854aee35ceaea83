"""Start the example trainer, under torchrun or on forks, kill a rank of it, and read the loss curves that it wrote."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.runtime.launch import launched, started

ROOT = Path(__file__).resolve().parents[2]
FORKED = Path(__file__).with_name("forked.py")
TIMEOUT_S = 300
MODEL = [
    "--model", "llama", "--set", "hidden_size=32", "--set", "intermediate_size=64", "--set", "num_hidden_layers=1",
    "--set", "num_attention_heads=2", "--set", "num_key_value_heads=2", "--set", "vocab_size=256",
    "--batch-size", "4", "--sequence-length", "32",
]  # fmt: skip


def on_forks(ranks: int, example: str, arguments: Sequence[str]) -> str:
    """Run an example without torchrun, and return what it printed. Raises AssertionError where a rank fails."""
    log = launched(FORKED, str(ranks), "0", str(ROOT / "examples" / example), *arguments)
    assert log.endswith("all ended well\n"), log[-6000:]
    return log


@dataclass
class Run:
    """A training run, all of whose files are in ``folder``."""

    folder: Path

    @property
    def places(self) -> list[str]:
        """The arguments that say where its files are."""
        return ["--checkpoints", str(self.folder / "checkpoints"), "--tensorboard", str(self.folder / "board")]

    def committed(self) -> int:
        """The last step that is in the folder of checkpoints, or 0."""
        steps = (self.folder / "checkpoints").glob("step-*")
        return max((int(path.name.removeprefix("step-")) for path in steps), default=0)

    def losses(self, tag: str = "train/loss") -> dict[int, float]:
        """What TensorBoard shows: the number of every step that was reported."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(self.folder / "board")).Reload()
        return {event.step: event.value for event in board.Scalars(tag)}


@dataclass
class OnForks:
    """A process of :func:`tests.runtime.launch.started`, as subprocess has them."""

    process: BaseProcess

    @property
    def pid(self) -> int:
        """That of the agent."""
        assert self.process.pid is not None
        return self.process.pid

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self.process.exitcode

    def wait(self, timeout_s: float) -> int:
        """The exit code, at its end."""
        self.process.join(timeout_s)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("forked.py", timeout_s)
        return code

    def terminate(self) -> None:
        """The agent passes it on to its ranks."""
        self.process.terminate()


@dataclass
class Launch(Run):
    """One under torchrun, or under its agent on forks."""

    process: subprocess.Popen[bytes] | OnForks

    @classmethod
    def on_forks(cls, folder: Path, arguments: list[str], ranks: int, restarts: int = 0) -> Launch:
        """As :meth:`of`, by torchrun's agent, whose ranks are forks and import nothing."""
        log = folder / "log"
        folder.mkdir(parents=True, exist_ok=True)
        log.touch()
        every = [str(ROOT / "examples/train.py"), *arguments, *Run(folder).places]
        return cls(folder, OnForks(started(FORKED, str(ranks), str(restarts), *every, log=log)))

    @classmethod
    def of(cls, folder: Path, arguments: list[str], ranks: int, restarts: int = 0) -> Launch:
        """Start it; the output goes to ``folder/log``."""
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["--max-restarts", str(restarts), "--monitor-interval", "0.1", str(ROOT / "examples/train.py")]
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        every = [*command, *arguments, *Run(folder).places]
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(every, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        return cls(folder, process)

    @property
    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def finish(self) -> None:
        """Wait for its end. Raises AssertionError, with the end of the log, where it fails or takes too long."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # torchrun passes it on to its ranks
            code = self.process.wait(60)
        assert code == 0, f"exit code {code}:\n{self.log[-6000:]}"

    def kill_after(self, step: int, rank: int) -> int:
        """End ``rank`` with signal 9 once a checkpoint of ``step`` or later is there; returns the step that is."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while self.committed() < step:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-6000:]
            time.sleep(0.02)
        os.kill(self.ranks()[rank], signal.SIGKILL)
        return self.committed()

    def restarted(self, times: int = 1) -> int:
        """Wait until the job goes on for the ``times``-th time; returns the step after which it does."""
        said = "going on after step "
        deadline_s = time.monotonic() + TIMEOUT_S
        while len(found := self.log.split(said)) <= times or "\n" not in found[times]:
            assert self.process.poll() is None and time.monotonic() < deadline_s, self.log[-6000:]
            time.sleep(0.02)
        return int(found[times].split()[0])

    def ranks(self) -> list[int]:
        """Process ids of the ranks that run now, in the order of their start."""
        threads = Path(f"/proc/{self.process.pid}/task").iterdir()
        children = [pid for thread in threads for pid in (thread / "children").read_text().split()]
        if isinstance(self.process, OnForks):
            return sorted(map(int, children))
        return sorted(int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes())
