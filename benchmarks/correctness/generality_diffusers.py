"""Tiny diffusion models of diffusers with a mean squared error."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import zoo

_UNET = {
    "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 4, "attention_head_dim": 8,
    "sample_size": 16,
}  # fmt: skip
_DIT = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "sample_size": 16, "patch_size": 4, "norm_num_groups": 4,
}  # fmt: skip
_SD3 = {
    "sample_size": 16, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
    "num_attention_heads": 4, "joint_attention_dim": 32, "caption_projection_dim": 32, "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}  # fmt: skip
_FLUX = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
_KL = {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
}  # fmt: skip


class Denoiser(nn.Module):
    """A model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, **inputs: Tensor) -> Tensor:
        return F.mse_loss(self.model(**inputs, return_dict=False)[0], target)


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _image(channels: int, name: str = "sample", *, timed: bool = True) -> dict[str, Tensor]:
    inputs = {"target": _noise(4, channels, 16, 16), name: _noise(4, channels, 16, 16)}
    return inputs | ({"timestep": torch.tensor([1, 10, 100, 500])} if timed else {})


def _flux() -> dict[str, Tensor]:
    return {
        "target": _noise(4, 16, 4), "hidden_states": _noise(4, 16, 4), "timestep": _noise(4).sigmoid(),
        "encoder_hidden_states": _noise(4, 6, 32), "pooled_projections": _noise(4, 16),
        "txt_ids": torch.zeros(6, 3, dtype=torch.float64), "img_ids": torch.arange(48).reshape(16, 3).double() % 4,
    }  # fmt: skip


def _cases() -> dict[str, tuple[dict[str, Any], Callable[[], dict[str, Tensor]]]]:
    text = _noise(4, 6, 32)
    attention = {
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    }
    crossing = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"), "cross_attention_dim": 32,
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }  # fmt: skip
    return {
        "UNet2DModel": ({**_UNET, **attention}, lambda: _image(3)),
        "UNet2DConditionModel": ({**_UNET, **crossing}, lambda: {**_image(4), "encoder_hidden_states": text}),
        "DiTTransformer2DModel": (_DIT, lambda: {**_image(4, "hidden_states"), "class_labels": torch.arange(4)}),
        "PixArtTransformer2DModel": (
            {**_DIT, "cross_attention_dim": 32, "caption_channels": 32, "use_additional_conditions": False},
            lambda: {**_image(4, "hidden_states"), "encoder_hidden_states": text},
        ),
        "SD3Transformer2DModel": (
            _SD3,
            lambda: {
                **_image(4, "hidden_states"),
                "timestep": _noise(4).sigmoid(),
                "encoder_hidden_states": text,
                "pooled_projections": _noise(4, 16),
            },
        ),
        "FluxTransformer2DModel": (_FLUX, _flux),
        "AutoencoderKL": (_KL, lambda: _image(3, timed=False)),
        "VQModel": ({**_KL, "num_vq_embeddings": 16}, lambda: _image(3, timed=False)),
    }


def _made(name: str, settings: dict[str, Any], inputs: Callable[[], dict[str, Tensor]]) -> zoo.Case:
    return zoo.build(lambda: Denoiser(getattr(diffusers, name)(**settings))), inputs()


def cases() -> dict[str, Callable[[], zoo.Case]]:
    """Models by name."""
    return {f"diffusers {name}": partial(_made, name, *case) for name, case in _cases().items()}
