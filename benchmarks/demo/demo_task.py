"""What the demo trains: a byte-level language model of the LLaMA architecture on the source of Python's library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

SEED = 0
BATCH, SEQUENCE = 16, 128
MOST_BYTES = 4_000_000
LEARNING_RATE, LARGEST_NORM = 1e-3, 1.0


def build_model() -> nn.Module:
    """The model with fresh weights, the same in every process."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Text:
    """Bytes to learn from, and the batches taken from them."""

    data: Tensor

    @classmethod
    def of_standard_library(cls) -> Text:
        """The modules of this Python's standard library, one behind the other in order of their names."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(folder.glob("*.py"))
        if not files:
            raise SystemExit(f"there are no .py files in {folder}: use a Python that has the source of its library")
        joined = b"".join(file.read_bytes() for file in files)[:MOST_BYTES]
        return cls(torch.frombuffer(bytearray(joined), dtype=torch.uint8))

    def batch(self, step: int) -> dict[str, Tensor]:
        """The global batch of one step, [BATCH, SEQUENCE]: a function of the step's number alone."""
        generator = torch.Generator().manual_seed(SEED + step)
        starts = torch.randint(len(self.data) - SEQUENCE, (BATCH,), generator=generator)
        ids = torch.stack([self.data[start : start + SEQUENCE] for start in starts.tolist()]).long()
        return {"input_ids": ids, "labels": ids}


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients, take one step with them, and drop them."""
    clip = getattr(model, "clip_grad_norm_", None)  # a compiled model sums over the parameters of all stages
    if clip is not None:
        clip(LARGEST_NORM)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    optimizer.step()
    optimizer.zero_grad()
