"""The models of Galvatron's published tables (Miao et al. 2022, section 5.1), without weights, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    SwinConfig,
    SwinForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

# Attention with its scores in memory, as models were written at the time.
_WRITTEN_OUT: dict[str, Any] = {"attn_implementation": "eager"}


def bert_huge(layers: int) -> nn.Module:
    """BERT with a hidden size of 1280 and a masked-language head."""
    config = BertConfig(
        hidden_size=1280, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=5120,
        max_position_embeddings=512, **_WRITTEN_OUT,
    )  # fmt: skip
    return BertForMaskedLM(config)


def vit_huge(layers: int) -> nn.Module:
    """ViT-H/14 (Dosovitskiy et al. 2021, table 1) of ``layers`` layers."""
    config = ViTConfig(
        hidden_size=1280, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=5120, patch_size=14,
        num_labels=1000, **_WRITTEN_OUT,
    )  # fmt: skip
    return ViTForImageClassification(config)


def swin_huge(layers: int) -> nn.Module:
    """Swin with 320 channels at first and heads of 32; all layers but six are in the third of four stages."""
    config = SwinConfig(
        embed_dim=320, depths=[2, 2, layers - 6, 2], num_heads=[10, 20, 40, 80], drop_path_rate=0.0, num_labels=1000,
        **_WRITTEN_OUT,
    )  # fmt: skip
    return SwinForImageClassification(config)


def t5_large(layers: int) -> nn.Module:
    """T5-Large (Raffel et al. 2020, section 3.7), half of ``layers`` in the encoder and half in the decoder."""
    config = T5Config(
        d_model=1024, d_kv=64, d_ff=4096, num_heads=16, num_layers=layers // 2, num_decoder_layers=layers // 2,
        decoder_start_token_id=0, use_cache=False, **_WRITTEN_OUT,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def masked_text(batch: int) -> dict[str, torch.Tensor]:
    """Token ids and labels, [batch, 512]."""
    ids = torch.zeros(batch, 512, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def images(batch: int) -> dict[str, torch.Tensor]:
    """Images, [batch, 3, 224, 224], and their classes, [batch]."""
    labels = torch.zeros(batch, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.zeros(batch, 3, 224, 224, device="meta"), "labels": labels}


@dataclass(frozen=True)
class Published:
    """A model by its number of layers, and its global batches."""

    build: Callable[[int], nn.Module]
    layers: int
    inputs_of: Callable[[int], dict[str, torch.Tensor]]

    def model(self) -> nn.Module:
        """Return the model on the meta device, float32, in training mode."""
        with torch.device("meta"):
            return self.build(self.layers)


_FAMILIES = {
    "bert-huge": (bert_huge, masked_text),
    "vit-huge": (vit_huge, images),
    "swin-huge": (swin_huge, images),
    "t5-large": (t5_large, masked_text),
}
MODELS = {
    f"{name}-{layers}": Published(build, layers, inputs_of)
    for layers in (32, 48)
    for name, (build, inputs_of) in _FAMILIES.items()
}
