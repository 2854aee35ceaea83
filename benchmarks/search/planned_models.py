"""Models that `plan_speed` plans, by their number of layers: decoders of any depth, a ResNet, and loops over time."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    RwkvConfig,
    RwkvForCausalLM,
)

# ---- stacks of equal layers ----


def llama_7b(layers: int) -> nn.Module:
    """LLaMA-7B (Touvron et al. 2023, table 2)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_attention_heads=32,
            num_hidden_layers=layers, max_position_embeddings=2048, use_cache=False,
        )
    )  # fmt: skip


def llama_8b(layers: int) -> nn.Module:
    """LLaMA-8B (Llama Team 2024, The Llama 3 Herd of Models, table 3)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8, num_hidden_layers=layers, max_position_embeddings=8192, use_cache=False,
        )
    )  # fmt: skip


def llama_405b(layers: int) -> nn.Module:
    """LLaMA-405B (Llama Team 2024, The Llama 3 Herd of Models, table 3)."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_attention_heads=128,
            num_key_value_heads=8, num_hidden_layers=layers, max_position_embeddings=8192, use_cache=False,
        )
    )  # fmt: skip


def gpt3_175b(layers: int) -> nn.Module:
    """GPT-3 (Brown et al. 2020, table 2.1)."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50257, n_embd=12288, n_head=96, n_layer=layers, n_positions=2048, use_cache=False,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


def deepseek_v3(layers: int) -> nn.Module:
    """DeepSeek-V3 (DeepSeek-AI 2024, section 4.2), whose first three layers are dense."""
    return DeepseekV3ForCausalLM(DeepseekV3Config(num_hidden_layers=layers, use_cache=False))


# ---- convolutions ----


def resnet_50(stages: int) -> nn.Module:
    """ResNet-50 (He et al. 2016, table 1), or its first stages."""
    widths, depths = (256, 512, 1024, 2048)[:stages], (3, 4, 6, 3)[:stages]
    return ResNetForImageClassification(ResNetConfig(hidden_sizes=list(widths), depths=list(depths), num_labels=1000))


# ---- loops over time ----


class Recurrent(nn.Module):
    """A language model of LSTM layers (Zaremba et al. 2014, section 4.1: the medium one)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10000, 650), nn.Linear(650, 10000)
        self.cells = nn.LSTM(650, 650, layers, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of the labels."""
        scores = self.head(self.cells(self.words(input_ids))[0])
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


def rwkv(layers: int) -> nn.Module:
    """RWKV-4 of 169M parameters (Peng et al. 2023, table 2), whose recurrence is a Python loop."""
    return RwkvForCausalLM(RwkvConfig(vocab_size=50277, hidden_size=768, num_hidden_layers=layers, use_cache=False))


def mamba(layers: int) -> nn.Module:
    """Mamba-130M (Gu and Dao 2023, table 12), whose scan is a Python loop without its kernel."""
    return MambaForCausalLM(MambaConfig(num_hidden_layers=layers, use_cache=False))
