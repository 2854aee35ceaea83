"""Plans stay what they were, byte by byte: a change that is meant to move code alone moves no plan.

Where a change is meant to alter plans, write them anew: ``SAVE_PLANS=1 pytest
tests/passes/search/test_saved_plans.py``, and look at what differs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import galvatron_fx
from galvatron_fx import Cluster

PLANS = Path(__file__).parent / "saved_plans"
TOKENS, LABELS = (16, 128), (16,)


def text() -> dict[str, torch.Tensor]:
    ids = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def pictures() -> dict[str, torch.Tensor]:
    pixels = torch.zeros(LABELS[0], 3, 64, 64, device="meta")
    return {"pixel_values": pixels, "labels": torch.zeros(LABELS, dtype=torch.long, device="meta")}


def llama() -> nn.Module:
    config = LlamaConfig(vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2,
                         num_attention_heads=16, num_key_value_heads=4, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=4096, n_positions=128))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, vocab_size=4096))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                                               intermediate_size=1024, image_size=64))  # fmt: skip


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]], str, dict[str, Any]]] = {
    "llama": (llama, text, "2xA100-80GB", {"mixed_precision": HALF}),
    "llama-tight": (
        llama,
        text,
        "4xA100-80GB",
        {"memory_budget": "500MB", "roles": ("data", "zero", "tensor_sequence")},
    ),
    "gpt2-stages": (
        gpt2,
        text,
        "4xH100-80GB",
        {"num_microbatches": 4, "roles": ("data", "zero", "pipeline"), "memory_budget": "120MB"},
    ),
    "bert": (bert, text, "4xTITAN-RTX-24GB", {"recompute": True, "roles": ("data", "sequence")}),
    "vit": (
        vit,
        pictures,
        "4xA100-40GB",
        {"num_stages": 2, "num_microbatches": 4, "roles": ("data", "tensor", "pipeline")},
    ),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", CASES)
def test_plan_is_as_saved(name: str) -> None:
    make, batch, cluster, options = CASES[name]
    with torch.device("meta"):
        model = make()
    plan = galvatron_fx.plan(model, Cluster.preset(cluster), batch(), **options).to_json()
    path = PLANS / f"{name}.json"
    if os.environ.get("SAVE_PLANS"):
        path.write_text(plan, encoding="utf-8")
    assert plan == path.read_text(encoding="utf-8")
