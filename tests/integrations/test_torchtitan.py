"""torchtitan's LLaMA, with torchtitan's own loss (needs torchtitan 0.2 or 0.3 and what that imports)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import galvatron_fx
from galvatron_fx import Plan

llama3 = pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)
titan_loss = pytest.importorskip("torchtitan.components.loss", exc_type=ImportError)


def small_model() -> Any:
    """Of 0.2, or of 0.3 with torch's attention, as FlexAttention has no backward on CPUs."""
    if hasattr(llama3, "Transformer"):
        return llama3.Transformer(llama3.TransformerModelArgs(dim=32, n_layers=3, n_heads=4, vocab_size=64))
    attention = pytest.importorskip("torchtitan.models.common.attention")
    config = llama3.llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:3]
    for layer in config.layers:
        layer.attention.inner_attention = attention.ScaledDotProductAttention.Config()
    return config.build()


@pytest.mark.parametrize("role", ["zero", "tensor"])
def test_trains_as_one_device(role: str) -> None:
    torch.manual_seed(0)
    model = small_model()
    with torch.no_grad():
        model.init_weights()
    ids = torch.randint(64, (8, 16))
    inside = galvatron_fx.with_loss(model, titan_loss.cross_entropy_loss)
    galvatron_fx.check(inside, 2, (ids, ids), plan=Plan.uniform((2,), (role,)))
