"""A model small enough to plan in seconds, as the command line names models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

ARGUMENTS = [
    "--model", "llama", "--set", "num_hidden_layers=2", "--set", "hidden_size=64", "--set", "intermediate_size=128",
    "--set", "num_attention_heads=4", "--set", "num_key_value_heads=2", "--set", "vocab_size=256",
    "--batch-size", "8", "--sequence-length", "32",
]  # fmt: skip
CLUSTER = ["--cluster", "4xA100-80GB"]


class Perceptron(nn.Module):
    """Two linear layers and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return self.down(self.up(x).relu()).square().mean()


def build(batch: int = 16) -> tuple[nn.Module, dict[str, Any]]:
    """What module:function returns."""
    with torch.device("meta"):
        return Perceptron(), {"x": torch.zeros(batch, 32)}


def build_alone() -> nn.Module:
    """A model without a batch."""
    return build()[0]


def build_nothing() -> tuple[nn.Module, dict[str, Any]]:
    """A function that fails."""
    raise RuntimeError("no data here")


class Branching(Perceptron):
    """A model whose path depends on values, which cannot be captured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return super().forward(x) if x.sum() > 0 else x.mean()


def build_branching() -> tuple[nn.Module, dict[str, Any]]:
    """A model that cannot be captured."""
    return Branching(), {"x": torch.zeros(16, 32)}


def build_of_none() -> tuple[nn.Module, dict[str, Any]]:
    """A function that takes no batch."""
    return build()
