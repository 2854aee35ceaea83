"""Small image models of timm: some by hand, and one of every other of its modules, as small as it gets."""

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


# How a constructor may be told to build less, tried in this order.
_SMALLER: tuple[dict[str, Any], ...] = (
    _VIT,
    {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    {**_SWIN, "drop_path_rate": 0.0},
    {**_STAGES, "drop_path_rate": 0.0},
    _STAGES,
    {"depths": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64), "num_heads": (1, 2, 4, 4)},
    {"layers": (1, 1, 1, 1), "embed_dims": (16, 32, 48, 64)},
    {"layers": (1, 1, 1, 1), "channels": (8, 16, 24, 32)},
    {"depths": (1, 1, 1, 1)},
    {"img_size": 64},
    {},
)
_SMALL_NAMES = ("atto", "femto", "pico", "nano", "xxs", "xx_small", "_xs", "zero", "tiny", "_s0", "_b0", "_t0", "_002")
_SMALL_NAMES += ("_s12", "_050", "small", "18", "_m0", "_0", "26", "b1", "_t")


class Classifier(nn.Module):
    """An image model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        scores = self.model(pixel_values)
        return F.cross_entropy(scores[0] if isinstance(scores, tuple) else scores, labels)


def _made(name: str, settings: dict[str, Any]) -> zoo.Case:
    model = zoo.build(lambda: Classifier(timm.create_model(name, num_classes=8, **settings)))
    return model, zoo.images()


def _shrunk(name: str) -> zoo.Case:
    """A model as small as its constructor can be told to make it."""
    for settings in _SMALLER:
        try:
            model, _ = _made(name, settings)
            size = settings.get("img_size", 64)
            batch = zoo.images(size=size)
            model(**batch)
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError, KeyError):
            continue
        return model, batch
    raise ValueError("it cannot be told to get small")


def _smallest(module: str) -> str:
    """The model of a module whose name promises the least, and the shortest of those."""
    names = timm.list_models(module=module)
    last = len(_SMALL_NAMES)
    promise = {name: next((i for i, part in enumerate(_SMALL_NAMES) if part in name), last) for name in names}
    return min(names, key=lambda name: (promise[name], len(name), name))


def cases() -> dict[str, Callable[[], zoo.Case]]:
    """Models by name."""
    found = {f"timm {name}": partial(_made, name, settings) for name, settings in _MODELS.items()}
    taken = {timm.models.model_entrypoint(name).__module__.rsplit(".", 1)[-1] for name in _MODELS}
    others = [module for module in sorted(timm.list_modules()) if module not in taken]
    names = dict.fromkeys(_smallest(module) for module in others if timm.list_models(module=module))
    return found | {f"timm {name}": partial(_shrunk, name) for name in names}
