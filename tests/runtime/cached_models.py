"""Models that keep keys and values from call to call, and greedy decoding with them, for tests of caches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 50


class Kept:
    """A cache of the user's own: tensors in lists and dicts, and how many positions are taken."""

    def __init__(self, layers: int, batch: int, heads: int, longest: int, width: int) -> None:
        self.layers = [
            {part: torch.zeros(batch, heads, longest, width, dtype=torch.float64) for part in ("keys", "values")}
            for _ in range(layers)
        ]
        self.length = 0


class Attention(nn.Module):
    """Causal attention of four heads over what is kept and what is new."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, kept: Any, start: int | Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1]) + start
        for name, new in (("keys", k), ("values", v)):
            kept[name].index_copy_(2, places, new)
        seen = torch.arange(kept["keys"].shape[2])[None] <= places[:, None]
        scores = (q @ kept["keys"].mT / q.shape[-1] ** 0.5).masked_fill(~seen, float("-inf"))
        return self.out((scores.softmax(-1) @ kept["values"]).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Three layers of odd width inside, whose cache may be an object or a list; it returns what it was given."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter, self.leave = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.attend = nn.ModuleList(Attention(width) for _ in range(3))
        self.mix = nn.ModuleList(nn.Sequential(nn.Linear(width, 36), nn.GELU(), nn.Linear(36, width)) for _ in range(3))

    def forward(self, ids: Tensor, cache: Any, start: Tensor | None = None) -> dict[str, Any]:
        x = self.enter(ids)
        for layer, (attend, mix) in enumerate(zip(self.attend, self.mix, strict=True)):
            kept = cache.layers[layer] if isinstance(cache, Kept) else cache[layer]
            x = x + attend(x, kept, cache.length if start is None else start)
            x = x + mix(x)
        if isinstance(cache, Kept):
            cache.length += ids.shape[1]
        return {"logits": self.leave(x), "cache": cache}


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().double().eval()


def llama(seed: int = 0, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": layers, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, max_position_embeddings=64)
    return LlamaForCausalLM(config).double().eval()


def prompts(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def whole(logits: Any, maker: int | None = None) -> Tensor:
    """The whole logits on every rank; ``maker``: the only rank that has them, under stages."""
    if maker is not None:
        held = [logits if dist.get_rank() == maker else None]
        dist.broadcast_object_list(held, maker)
        return held[0]  # type: ignore[return-value]
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


@torch.no_grad()
def greedy(
    model: Any, ids: Tensor, cache: Any, steps: int, mask: Tensor | None = None, maker: int | None = None
) -> tuple[Tensor, Tensor]:
    """Decode a transformers model greedily: tokens [batch, steps] and the logits of each step.

    ``mask``: [batch, positions of the cache], so that all steps after the first are one program.
    """
    tokens, scores = [], []
    for _ in range(steps):
        beside = {} if mask is None else {"attention_mask": mask}
        returned = model(input_ids=ids, past_key_values=cache, **beside)
        assert returned.past_key_values is cache
        scores.append(whole(returned.logits, maker)[:, -1])
        ids = scores[-1].argmax(-1, keepdim=True)
        tokens.append(ids)
    return torch.cat(tokens, 1), torch.stack(scores)
