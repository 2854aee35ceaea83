"""Small whole models in float64, without dropout, and a batch for each: what the exactness tests train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

Case = tuple[nn.Module, dict[str, Any]]

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS = 4, 16, 64, 32, 4


def tokens(batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Token ids with labels, some of them ignored, unevenly over the batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, vocabulary, (batch, sequence), generator=generator)
    labels = ids.clone()
    labels[0, 3 : sequence // 2 + 1] = -100
    labels[batch - 1, : sequence // 4] = -100
    return {"input_ids": ids, "labels": labels}


def masked_tokens(batch: int = BATCH, sequence: int = SEQUENCE, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Tokens for masked language models: a padding mask and few labels, padding ignored."""
    inputs = tokens(batch, sequence, vocabulary)
    mask = torch.ones(batch, sequence, dtype=torch.long)
    mask[1, sequence - 4 :] = 0
    inputs["labels"] = torch.where(mask == 0, -100, inputs["labels"])
    inputs["labels"][:, ::3] = -100
    return {**inputs, "attention_mask": mask}


def images(batch: int = BATCH, classes: int = 8, size: int = 32) -> dict[str, Any]:
    """Random images with class labels."""
    generator = torch.Generator().manual_seed(2)
    pixels = torch.randn(batch, 3, size, size, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels, "labels": torch.randint(classes, (batch,), generator=generator)}


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model from a fixed seed, in float64, without touching the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = make().double()
    return model


def gpt2(layers: int = 3, **changes: Any) -> Case:
    """GPT-2 with tied embeddings."""
    settings = {
        "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": layers, "n_head": HEADS, "n_positions": 32,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0,
        "use_cache": False, **changes,
    }  # fmt: skip
    inputs = tokens(vocabulary=settings["vocab_size"])
    return build(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**settings))), inputs


def llama(layers: int = 3, **changes: Any) -> Case:
    """LLaMA with grouped-query attention: twice as many query heads as key heads."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": layers,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS // 2, "use_cache": False, **changes,
    }  # fmt: skip
    inputs = tokens(vocabulary=settings["vocab_size"])
    return build(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**settings))), inputs


def bert(layers: int = 3, **changes: Any) -> Case:
    """BERT with the masked language modelling head, ignored labels and a padding mask."""
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "intermediate_size": 64, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, **changes,
    }  # fmt: skip
    inputs = masked_tokens(vocabulary=settings["vocab_size"])
    return build(lambda: hf.BertForMaskedLM(hf.BertConfig(**settings))), inputs


def vit(layers: int = 3, **changes: Any) -> Case:
    """A vision transformer: 17 tokens, a number that no axis divides."""
    settings = {
        "hidden_size": HIDDEN, "num_hidden_layers": layers, "num_attention_heads": HEADS, "intermediate_size": 64,
        "image_size": 32, "patch_size": 8, "num_labels": 8, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, **changes,
    }  # fmt: skip
    return build(lambda: hf.ViTForImageClassification(hf.ViTConfig(**settings))), images()


def t5(layers: int = 2, **changes: Any) -> Case:
    """T5: encoder and decoder, tied embeddings, relative position bias computed in the first layer of each."""
    settings = {
        "vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": HEADS,
        "decoder_start_token_id": 0, "dropout_rate": 0.0, "use_cache": False, "tie_word_embeddings": True, **changes,
    }  # fmt: skip
    return build(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**settings))), tokens()


def swin(**changes: Any) -> Case:
    """Swin: shifted windows, two stages of unlike width."""
    settings = {
        "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
        "num_labels": 8, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0,
        **changes,
    }  # fmt: skip
    return build(lambda: hf.SwinForImageClassification(hf.SwinConfig(**settings))), images()


MODELS: dict[str, Callable[[], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "t5": t5,
    "swin": swin,
}
