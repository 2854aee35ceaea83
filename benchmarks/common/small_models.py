"""Small models of five families, and their batches: what benchmarks train on a few processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

SEED = 0
PATCH = 8  # pixels a side
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Width, layers, heads, words, samples and words a sample; of images, classes and patches."""

    width: int
    layers: int
    heads: int
    words: int
    batch: int
    sequence: int


Sized = tuple[Callable[[Size], nn.Module], Size]


def gpt2(size: Size) -> nn.Module:
    """GPT-2 (Radford et al. 2019), without dropout."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=size.words, n_embd=size.width, n_head=size.heads, n_layer=size.layers, n_positions=size.sequence,
            use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLMLoss",
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def llama(size: Size) -> nn.Module:
    """LLaMA (Touvron et al. 2023)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.words, hidden_size=size.width, intermediate_size=11 * size.width // 4,
            num_hidden_layers=size.layers, num_attention_heads=size.heads, num_key_value_heads=size.heads,
            max_position_embeddings=size.sequence, use_cache=False,
        )
    )  # fmt: skip


def bert(size: Size) -> nn.Module:
    """BERT (Devlin et al. 2019), with its dropout."""
    return BertForMaskedLM(
        BertConfig(
            vocab_size=size.words, hidden_size=size.width, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, intermediate_size=4 * size.width, max_position_embeddings=size.sequence,
        )
    )  # fmt: skip


def t5(size: Size) -> nn.Module:
    """T5 (Raffel et al. 2020), half of the layers in the encoder and half in the decoder."""
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=size.words, d_model=size.width, d_kv=size.width // size.heads, d_ff=4 * size.width,
            num_heads=size.heads, num_layers=size.layers // 2, num_decoder_layers=size.layers // 2,
            decoder_start_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def vit(size: Size) -> nn.Module:
    """ViT (Dosovitskiy et al. 2021); as many words as there are classes, as long as there are patches."""
    return ViTForImageClassification(
        ViTConfig(
            num_labels=size.words, hidden_size=size.width, num_hidden_layers=size.layers,
            num_attention_heads=size.heads, intermediate_size=4 * size.width, image_size=_side(size), patch_size=PATCH,
        )
    )  # fmt: skip


def build(sized: Sized) -> tuple[nn.Module, Batch]:
    """A model with fresh weights and a batch, the same in every process."""
    torch.manual_seed(SEED)
    make, size = sized
    if make is vit:
        images = torch.randn(size.batch, 3, _side(size), _side(size))
        return make(size), {"pixel_values": images, "labels": torch.randint(size.words, (size.batch,))}
    ids = torch.randint(size.words, (size.batch, size.sequence))
    return make(size), {"input_ids": ids, "labels": ids.clone()}


def _side(size: Size) -> int:
    return PATCH * isqrt(size.sequence)
