"""The objects of a training run that a checkpoint is of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer


class HasState(Protocol):
    """A scheduler, a loader: anything whose state is a dict of plain values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take a state."""


@dataclass(frozen=True)
class Training:
    """The objects of a training run that have state."""

    model: nn.Module
    optimizer: Optimizer | None
    scheduler: HasState | None
    loader: HasState | None
