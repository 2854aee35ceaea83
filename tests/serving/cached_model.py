"""A small decoder with keys and values in lists, which is no model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, VOCABULARY = 4, 8, 64


class Layer(nn.Module):
    """Attention to a cache, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        hidden = HEADS * WIDTH
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, cache: dict[str, Tensor], at: Tensor, mask: Tensor) -> Tensor:
        """Write new keys and values, attend to all."""
        query, key, value = (
            part(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        cache["keys"].index_copy_(2, at, key)
        cache["values"].index_copy_(2, at, value)
        mixed = F.scaled_dot_product_attention(query, cache["keys"], cache["values"], attn_mask=mask)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(x)))


class CachedDecoder(nn.Module):
    """Logits of new tokens behind those whose keys are in the caches."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, caches: list[dict[str, Tensor]]) -> Tensor:
        """Return logits [batch, tokens, vocabulary]."""
        at = torch.arange(ids.shape[1], device=ids.device)
        places = torch.arange(caches[0]["keys"].shape[2], device=ids.device)
        mask = places <= at[:, None]
        x = self.embed(ids)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, at, mask)
        return self.head(x)  # type: ignore[no-any-return]


def build(layers: int = 3) -> CachedDecoder:
    """The model on the meta device."""
    with torch.device("meta"):
        return CachedDecoder(layers).eval()


def inputs(requests: int, tokens: int, keys: int, layers: int = 3) -> dict[str, Any]:
    """Ids and empty caches for so many keys."""

    def cache() -> dict[str, Tensor]:
        return {name: torch.zeros(requests, HEADS, keys, WIDTH, device="meta") for name in ("keys", "values")}

    ids = torch.zeros(requests, tokens, dtype=torch.int64, device="meta")
    return {"ids": ids, "caches": [cache() for _ in range(layers)]}


def served() -> tuple[nn.Module, Any]:
    """What module:function returns."""
    return build(), inputs
