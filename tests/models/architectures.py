"""Tiny configurations of many transformers architectures beside those of zoo.py, for the sweep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from tests.models import zoo

Make = Callable[[], zoo.Case]

_DECODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "use_cache": False, "attention_dropout": 0.0, "hidden_dropout": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": 8}
_ENCODER: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip
_SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "dropout": 0.0, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 8,
}  # fmt: skip


def _made(name: str, settings: dict[str, Any], inputs: Callable[[], dict[str, Any]], config: str = "") -> Make:
    """A case from the class ``name`` and its configuration, whose name is guessed unless given."""
    kind = config or name.partition("For")[0].replace("LMHeadModel", "") + "Config"
    return lambda: (zoo.build(lambda: getattr(hf, name)(getattr(hf, kind)(**settings))), inputs())


def _labelled() -> dict[str, Any]:
    return {"input_ids": zoo.tokens()["input_ids"], "labels": torch.tensor([0, 1, 1, 0])}


class ClipLoss(nn.Module):
    """CLIP with its contrastive loss."""

    def __init__(self) -> None:
        super().__init__()
        text = {**_ENCODER, "attention_dropout": 0.0, "eos_token_id": 2, "bos_token_id": 1}
        vision = {**_VISION, "attention_dropout": 0.0}
        self.clip = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))

    def forward(self, input_ids: Tensor, pixel_values: Tensor) -> Tensor:
        return self.clip(input_ids=input_ids, pixel_values=pixel_values, return_loss=True).loss


def _clip() -> zoo.Case:
    ids = zoo.tokens()["input_ids"].clone()
    ids[:, -1] = 2
    return zoo.build(ClipLoss), {"input_ids": ids, "pixel_values": zoo.images()["pixel_values"]}


def _speech() -> dict[str, Any]:
    features = torch.randn(4, 80, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return {"input_features": features, "labels": zoo.tokens()["labels"]}


def _experts() -> zoo.Case:
    """Mixtral with experts that know float64."""
    settings = {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = zoo.build(lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**settings)))
    model.set_experts_implementation("eager")
    return model, zoo.tokens()


_WHISPER = {
    **_SEQ2SEQ, "num_mel_bins": 80, "max_source_positions": 16, "max_target_positions": 32, "encoder_layerdrop": 0.0,
}  # fmt: skip
_GPT_OLD = {
    "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

ARCHITECTURES: dict[str, Make] = {
    # decoders
    "qwen2": _made("Qwen2ForCausalLM", _GROUPED, zoo.tokens),
    "qwen3": _made("Qwen3ForCausalLM", _GROUPED, zoo.tokens),
    "mistral": _made("MistralForCausalLM", {**_GROUPED, "sliding_window": 8}, zoo.tokens),
    "gemma": _made("GemmaForCausalLM", _GROUPED, zoo.tokens),
    "gemma2": _made("Gemma2ForCausalLM", {**_GROUPED, "sliding_window": 8}, zoo.tokens),
    "phi": _made("PhiForCausalLM", {**_DECODER, "resid_pdrop": 0.0}, zoo.tokens),
    "phi3": _made("Phi3ForCausalLM", {**_GROUPED, "resid_pdrop": 0.0}, zoo.tokens),
    "gpt_neox": _made("GPTNeoXForCausalLM", _DECODER, zoo.tokens),
    "gptj": _made("GPTJForCausalLM", {**_GPT_OLD, "rotary_dim": 4}, zoo.tokens),
    "opt": _made("OPTForCausalLM", {**_DECODER, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}, zoo.tokens),
    "bloom": _made("BloomForCausalLM", {**_DECODER, "n_layer": 2, "n_head": 4}, zoo.tokens),
    "falcon": _made("FalconForCausalLM", {**_DECODER, "alibi": False}, zoo.tokens),
    "olmo2": _made("Olmo2ForCausalLM", _GROUPED, zoo.tokens),
    "starcoder2": _made(
        "Starcoder2ForCausalLM", {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}, zoo.tokens
    ),
    "mixtral": _experts,
    "llama4": _made(
        "Llama4ForCausalLM",
        {**_GROUPED, "intermediate_size_mlp": 64, "num_local_experts": 4, "num_experts_per_tok": 1},
        zoo.tokens,
        "Llama4TextConfig",
    ),
    "llama classifier": _made("LlamaForSequenceClassification", {**_GROUPED, "num_labels": 2}, _labelled),
    "mamba": _made("MambaForCausalLM", {**_DECODER, "state_size": 4, "time_step_rank": 4}, zoo.tokens),
    # encoders
    "bert classifier": _made("BertForSequenceClassification", {**_ENCODER, "num_labels": 2}, _labelled),
    "roberta": _made("RobertaForMaskedLM", _ENCODER, zoo.masked_tokens),
    "electra": _made("ElectraForMaskedLM", {**_ENCODER, "embedding_size": 16}, zoo.masked_tokens),
    "albert": _made("AlbertForMaskedLM", {**_ENCODER, "embedding_size": 16}, zoo.masked_tokens),
    "distilbert": _made(
        "DistilBertForMaskedLM",
        {
            "vocab_size": 64,
            "dim": 32,
            "hidden_dim": 64,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "attention_dropout": 0.0,
        },
        zoo.masked_tokens,
    ),
    "deberta-v2": _made(
        "DebertaV2ForMaskedLM",
        {**_ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        zoo.masked_tokens,
    ),
    # encoders with decoders
    "bart": _made("BartForConditionalGeneration", _SEQ2SEQ, zoo.tokens),
    "pegasus": _made("PegasusForConditionalGeneration", _SEQ2SEQ, zoo.tokens),
    "whisper": _made("WhisperForConditionalGeneration", _WHISPER, _speech),
    # images, and images with text
    "deit": _made("DeiTForImageClassification", _VISION, zoo.images),
    "beit": _made("BeitForImageClassification", {**_VISION, "drop_path_rate": 0.0}, zoo.images),
    "convnext": _made(
        "ConvNextForImageClassification",
        {"hidden_sizes": [8, 16], "depths": [2, 2], "num_stages": 2, "num_labels": 8, "image_size": 32},
        zoo.images,
    ),
    "clip": _clip,
}
