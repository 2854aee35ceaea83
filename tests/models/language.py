"""A small language model that computes its loss in its own dtype, so that its head may be split in float64, too."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class Layer(nn.Module):
    """A normalised feed-forward layer with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """Embedding, layers, head, and the mean loss of labels that are not -100."""

    def __init__(self, layers: int, vocabulary: int, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=not is_tied)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        return {"loss": F.cross_entropy(scores.flatten(0, 1), labels.flatten()), "logits": scores}


def language(
    layers: int, vocabulary: int = 24, is_tied: bool = False, batch: int = 8
) -> tuple[nn.Module, dict[str, Any]]:
    """The model in float64, and a batch in which the first samples have no label at all."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (batch, 6), generator=generator)
    labels = ids.roll(1, 1)
    labels[:2], labels[3, 2:] = -100, -100
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Language(layers, vocabulary, is_tied).double()
    return model, {"ids": ids, "labels": labels}
