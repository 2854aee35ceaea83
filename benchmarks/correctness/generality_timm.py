"""Small image models of timm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import zoo

_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
_SWIN = {"img_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
_STAGES = {"depths": (1, 1, 2, 1), "dims": (8, 16, 24, 32)}
_MODELS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _VIT,
    "deit_tiny_distilled_patch16_224": _VIT,
    "beit_base_patch16_224": _VIT,
    "eva02_tiny_patch14_224": _VIT,
    "cait_xxs24_224": _VIT,
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "swin_tiny_patch4_window7_224": {**_SWIN, "drop_path_rate": 0.0},
    "convnext_tiny": _STAGES,
    "convnextv2_tiny": _STAGES,
    "resnet18": {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)},
    "mobilenetv3_small_050": {},
    "regnetx_002": {},
    "densenet121": {"block_config": (2, 2), "growth_rate": 8},
    "edgenext_xx_small": {},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
}


class Classifier(nn.Module):
    """An image model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        scores = self.model(pixel_values)
        return F.cross_entropy(scores[0] if isinstance(scores, tuple) else scores, labels)


def _made(name: str, settings: dict[str, Any]) -> zoo.Case:
    return zoo.build(lambda: Classifier(timm.create_model(name, num_classes=8, **settings))), zoo.images()


def cases() -> dict[str, Callable[[], zoo.Case]]:
    """Models by name."""
    return {f"timm {name}": partial(_made, name, settings) for name, settings in _MODELS.items()}
