"""Training of one weight, which holds the step that it was saved at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from galvatron_fx.checkpoint import Checkpointer, lock


class Training:
    """A parameter that holds the step that it was saved at."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.checkpoints = Checkpointer(folder, **options)

    def save(self, *steps: int) -> None:
        for step in steps:
            nn.init.constant_(self.model.weight, step)
            self.checkpoints.save(step, model=self.model)
        self.checkpoints.wait()

    def load(self, step: int | None = None) -> int | None:
        """The step that was loaded, having seen that it holds what was saved."""
        restored = self.checkpoints.load(model=self.model, step=step)
        assert restored is None or self.model.weight.item() == restored.step
        return None if restored is None else restored.step


def steps(folder: Path) -> list[str]:
    """Names in the folder: steps as numbers, others as they are, without what makes them unique."""
    names = (path.name.removeprefix("step-").lstrip("0") for path in folder.iterdir() if path.name != lock.NAME)
    return sorted(name.rpartition("-")[0] if name.startswith("abandoned") else name for name in names)


def flip(folder: Path, step: int) -> None:
    """Flip one bit of the tensors of a step."""
    (shard,) = (folder / f"step-{step:010d}").glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
