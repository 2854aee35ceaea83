"""Kill one rank with signal 9 at a random moment of training and saving: what is left is whole and goes on exactly."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from galvatron_fx.checkpoint import Checkpointer, manifest
from galvatron_fx.checkpoint.steps import Steps
from galvatron_fx.errors import CheckpointError, LostRankError
from tests.checkpoint.forked import run_ranks
from tests.checkpoint.resume_ranks import Expected, Setting, compiled_run
from tests.models import zoo
from tests.runtime.beside_plain import full

STEPS = 6
_BEREFT = 3
"""Exit code of a rank whose peer is gone."""
SETTINGS = [Setting((2,), roles) for roles in (("zero",), ("tensor",), ("data",), ("pipeline",))]
_MOST_EVENTS = (150, 20)
"""About how often rank 0, and rank 1, touches the folder."""
_LONGEST_S = 0.6
_NOTICED_S = 20  # a rank killed before groups are joined is missed by the time limit alone
_ON_FILES = ("open", "os.mkdir", "os.rename", "os.listdir", "os.scandir", "shutil.rmtree", "os.remove", "os.rmdir")


class Tower(nn.Module):
    """Layers enough for two stages, and compiled in a fraction of a second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(4))
        self.register_buffer("steps_seen", torch.zeros(()))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": (x - target).square().mean()}


def tower() -> zoo.Case:
    """The tower and a batch."""
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, 4, 8, generator=generator, dtype=torch.float64)
    return zoo.build(Tower), {"x": x, "target": target}


@dataclass(frozen=True)
class Trial:
    """What to do to whom, drawn from ``seed``."""

    seed: int

    @cached_property
    def _draw(self) -> dict[str, Any]:
        dice = random.Random(self.seed)
        victim = dice.randrange(2)
        return {
            "settings": [replace(dice.choice(SETTINGS), asynchronous=dice.random() < 0.5) for _ in range(2)],
            "victim": victim,
            # Half of the kills fall on a call that touches the folder, so that every phase of saving is met.
            "at_event": dice.randrange(1, _MOST_EVENTS[victim]) if dice.random() < 0.5 else None,
            "after_s": dice.uniform(0, _LONGEST_S),
        }

    def run(self, folder: Path) -> str:
        """Kill, check, resume, check; returns where the rank was killed. Raises AssertionError naming the seed."""
        expected = Expected.of(*tower(), steps=STEPS)
        first, second = self._draw["settings"]
        checkpoints, log = folder / "checkpoints", folder / "log"
        log.mkdir(parents=True)
        until_bereft = partial(self._until_bereft, first, checkpoints, log, expected)
        codes = run_ranks(2, until_bereft, timeout_s=60, collective_s=_NOTICED_S)
        assert set(codes) <= {0, _BEREFT, -signal.SIGKILL}, f"seed {self.seed}: exit codes {codes}"
        steps = Steps(checkpoints)
        for step in steps.all():
            manifest.verify(steps.path(step), manifest.read(steps.path(step)).files.values())
        committed = max(steps.all(), default=0)
        promised = max((int(path.name) for path in log.glob("[0-9]*")), default=0)
        assert committed >= promised, f"seed {self.seed}: step {promised} was saved, the last found is {committed}"
        codes = run_ranks(2, partial(_finish, second, checkpoints, expected, committed), timeout_s=60)
        assert codes == [0, 0], f"seed {self.seed}: resuming ended with {codes}"
        killed = log / "killed"
        return killed.read_text() if killed.exists() else "not killed"

    def _until_bereft(self, setting: Setting, folder: Path, log: Path, expected: Expected) -> None:
        try:
            self._train(setting, folder, log, expected)
        except LostRankError:
            os._exit(_BEREFT)
        except (RuntimeError, CheckpointError) as error:
            if "peer" not in str(error):
                raise
            os._exit(_BEREFT)

    def _train(self, setting: Setting, folder: Path, log: Path, expected: Expected) -> None:
        run = compiled_run(tower, setting)
        checkpoints = Checkpointer(folder, keep=2, every=3, asynchronous=setting.asynchronous)
        if dist.get_rank() == self._draw["victim"]:
            self._arm(folder, log)
        for step in range(1, STEPS + 1):
            _step(run, step, expected)
            checkpoints.save(step, **run.state)
            saved = step - 1 if setting.asynchronous else step
            if dist.get_rank() == 0 and saved:
                (log / str(saved)).touch()
        checkpoints.wait()

    def _arm(self, folder: Path, log: Path) -> None:
        """End this process at a moment to come, as a machine that fails would."""

        def kill(moment: str) -> None:
            (log / "killed").write_text(moment)
            os.kill(os.getpid(), signal.SIGKILL)

        if self._draw["at_event"] is None:
            threading.Timer(self._draw["after_s"], kill, ["some time"]).start()
            return
        seen = 0

        def count(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            if event not in _ON_FILES or not str(arguments[0]).startswith((str(folder), "s", "m")):
                return  # rmtree names what it removes relatively: "state.json", "shard-...", "manifest.json"
            seen += 1
            if seen == self._draw["at_event"]:
                kill(f"{event} {_kind(str(arguments[0]))}")

        sys.addaudithook(count)


def _kind(path: str) -> str:
    """A path without what differs from trial to trial."""
    return re.sub(r"\d+(-[0-9a-f]{8})?", "N", "/".join(Path(path).parts[-2:]))


def _finish(setting: Setting, folder: Path, expected: Expected, committed: int) -> None:
    run = compiled_run(tower, setting)
    checkpoints = Checkpointer(folder, keep=2, asynchronous=setting.asynchronous)
    restored = checkpoints.load(**run.state)
    start = restored.step if restored else 0
    assert start == committed, f"went on from step {start}, step {committed} is there"
    for step in range(start + 1, STEPS + 1):
        _step(run, step, expected)
        checkpoints.save(step, **run.state)
    checkpoints.wait()
    left = sorted(path.name for path in folder.iterdir() if not path.name.startswith(("step-", ".lock")))
    assert start == STEPS or not left, f"left in the folder: {left}"


def _step(run: Any, step: int, expected: Expected) -> None:
    """One step as on one device: loss and parameters."""
    loss = run.step()
    assert abs(loss - expected.losses[step - 1]) <= 1e-10 * abs(loss), f"loss of step {step} is {loss!r}"
    for name, parameter in run.model.named_parameters():
        error = float((full(parameter).detach() - expected.parameters[step - 1][name]).abs().max())
        assert error < 1e-10, f"{name} differs by {error:.1e} after step {step}"


def kills(seeds: range, folder: Path) -> None:
    for seed in seeds:
        print(f"seed {seed}: killed at {Trial(seed).run(folder / str(seed))}")


CASES: dict[str, Callable[[Path], None]] = {"kill_9_at_random_moments": partial(kills, range(3))}
