"""Small models of packages that nobody looked at before: torchvision, MONAI, segmentation_models_pytorch, vit-pytorch,
x-transformers. Those of a package that is not here are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.models import zoo

Case = tuple[str, Callable[[], nn.Module], tuple[int, ...]]

_VIT = {"image_size": 32, "patch_size": 8, "num_classes": 8, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 64}
_VITS: dict[str, tuple[str, dict[str, Any]]] = {
    **dict.fromkeys(("vit", "simple_vit", "parallel_vit", "deepvit", "simple_vit_with_qk_norm"), ("", _VIT)),
    **dict.fromkeys(("simple_vit_with_register_tokens", "simple_vit_with_value_residual"), ("", _VIT)),
    **dict.fromkeys(("normalized_vit", "vit_with_decorr", "vit_with_keel_post_ln", "vit_5"), ("", _VIT)),
    **dict.fromkeys(("vit_for_small_dataset", "simple_flash_attn_vit"), ("", _VIT)),
    **dict.fromkeys(("vit_with_patch_merger", "simple_vit_attn_residual"), ("", _VIT)),
    "simple_vit_with_fft": ("", {**_VIT, "freq_patch_size": 8}),
    "simple_vit_with_hyper_connections": ("", {**_VIT, "num_residual_streams": 2}),
    "cait": ("CaiT", {**_VIT, "cls_depth": 1}),
    "pit": ("PiT", {**_VIT, "depth": (1, 1)}),
    "rvt": ("RvT", _VIT),
    "cvt": ("CvT", {"num_classes": 8, **{f"s{i}_emb_dim": 16 for i in (1, 2, 3)}, "s3_depth": 1}),
    "levit": ("LeViT", {"image_size": 32, "num_classes": 8, "dim": 16, "depth": 1, "heads": 2, "mlp_mult": 2}),
    "scalable_vit": ("ScalableViT", {"num_classes": 8, "dim": 8, "heads": 2, "depth": (1, 1), "ssa_dim_key": 8,
                                     "reduction_factor": (2, 1), "window_size": (8, None)}),
    "nest": ("NesT", {"image_size": 32, "patch_size": 4, "dim": 16, "heads": 2, "num_hierarchies": 2,
                      "block_repeats": (1, 1), "num_classes": 8}),
    "mobile_vit": ("MobileViT", {"image_size": (64, 64), "dims": [16, 24, 32], "num_classes": 8,
                                 "channels": [8, 8, 8, 8, 16, 16, 16, 16, 16, 16, 32]}),
    "xcit": ("XCiT", {**_VIT, "cls_depth": 1}),
    "max_vit": ("MaxViT", {"num_classes": 8, "dim": 16, "dim_head": 8, "depth": (1, 1), "window_size": 4,
                            "dim_conv_stem": 8}),
}  # fmt: skip

_IMAGES = ("squeezenet1_1", "shufflenet_v2_x0_5", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small")
_IMAGES += ("regnet_x_400mf", "regnet_y_400mf", "efficientnet_b0", "googlenet")

_VOLUMES: dict[str, dict[str, Any]] = {
    "UNet": {"channels": (4, 8, 16), "strides": (2, 2)},
    "AttentionUnet": {"channels": (4, 8, 16), "strides": (2, 2)},
    "BasicUNet": {"features": (4, 4, 8, 8, 8, 4)},
    "DynUNet": {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (4, 8, 8)},
    "SegResNet": {"init_filters": 8, "blocks_down": (1, 1), "blocks_up": (1,)},
    "HighResNet": {},
    "AutoEncoder": {"channels": (4, 8), "strides": (2, 2)},
    "UNETR": {"img_size": 16, "feature_size": 4, "hidden_size": 24, "mlp_dim": 32, "num_heads": 2},
    "SwinUNETR": {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)},
    "MedNeXt": {"init_filters": 4, "blocks_down": (1, 1), "blocks_up": (1, 1), "encoder_expansion_ratio": (2, 2),
                "decoder_expansion_ratio": (2, 2), "bottleneck_expansion_ratio": 2},
    "ResNet": {"block": "basic", "layers": (1, 1, 1, 1), "block_inplanes": (4, 8, 8, 16), "num_classes": 8},
    "DenseNet": {"init_features": 8, "growth_rate": 4, "block_config": (2, 2)},
    "ViT": {"img_size": 16, "patch_size": 4, "hidden_size": 24, "mlp_dim": 32, "num_layers": 2, "num_heads": 4,
            "classification": True},
}  # fmt: skip

_SEGMENTERS = ("Unet", "UnetPlusPlus", "FPN", "Linknet", "PSPNet", "DeepLabV3", "DeepLabV3Plus", "Segformer")

_WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "relative positions": {"rel_pos_bias": True},
    "gated, RMS norm": {"ff_glu": True, "ff_swish": True, "use_rmsnorm": True},
    "grouped queries": {"attn_kv_heads": 2},
    "one head of keys": {"attn_one_kv_head": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "normed queries": {"attn_qk_norm": True},
    "memory": {"attn_num_mem_kv": 4},
    "sandwich": {"sandwich_coef": 1},
    "macaron": {"macaron": True},
    "residual attention": {"residual_attn": True},
    "sparse top-k": {"attn_sparse_topk": 4},
    "gate over values": {"attn_gate_values": True},
    "shifted tokens": {"shift_tokens": 1},
    "scaled residuals": {"scale_residual": True},
    "hyper connections": {"num_residual_streams": 2},
    "sandwich norm": {"sandwich_norm": True},
    "laser": {"attn_laser": True},
    "flash": {"attn_flash": True},
}


class Scored(nn.Module):
    """The mean square of all that a model returns, or the cross entropy of next words."""

    def __init__(self, model: nn.Module, words: bool = False) -> None:
        super().__init__()
        self.model, self.words = model, words

    def forward(self, x: Tensor) -> Tensor:
        out = self.model(x)
        if self.words:
            return F.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())
        values = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.stack([value.sigmoid().square().mean() for value in values]).sum()


def _torchvision() -> Iterator[Case]:
    models = importlib.import_module("torchvision.models")
    for name in _IMAGES:
        settings: dict[str, Any] = {"aux_logits": False, "init_weights": False} if name == "googlenet" else {}
        yield name, partial(getattr(models, name), num_classes=8, **settings), (4, 3, 64, 64)
    vit = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 64}
    yield "VisionTransformer", partial(models.VisionTransformer, num_classes=8, **vit), (4, 3, 32, 32)
    swin = {"patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4]}
    yield "SwinTransformer", partial(models.SwinTransformer, num_classes=8, **swin), (4, 3, 32, 32)
    volumes = {
        "patch_size": [2, 4, 4],
        "embed_dim": 12,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "window_size": [2, 4, 4],
    }
    video = models.video
    yield "SwinTransformer3d", partial(video.SwinTransformer3d, num_classes=8, **volumes), (4, 3, 4, 32, 32)
    maxvit = {"input_size": (64, 64), "stem_channels": 8, "partition_size": 2, "block_channels": [8, 16],
              "block_layers": [1, 1], "head_dim": 8, "stochastic_depth_prob": 0.0}  # fmt: skip
    yield "MaxVit", partial(models.MaxVit, num_classes=8, **maxvit), (4, 3, 64, 64)
    next_ = importlib.import_module("torchvision.models.convnext")
    stages = [next_.CNBlockConfig(8, 16, 1), next_.CNBlockConfig(16, None, 1)]
    yield "ConvNeXt", partial(models.ConvNeXt, stages, num_classes=8), (4, 3, 32, 32)
    yield "DenseNet", partial(models.DenseNet, 8, (2, 2), 16, num_classes=8), (4, 3, 32, 32)
    segmentation = models.segmentation
    weights = {"weights": None, "weights_backbone": None, "num_classes": 5}
    yield "LRASPP", partial(segmentation.lraspp_mobilenet_v3_large, **weights), (4, 3, 64, 64)


def _monai() -> Iterator[Case]:
    nets = importlib.import_module("monai.networks.nets")
    for name, settings in _VOLUMES.items():
        sides = {"SwinUNETR": (64, 64), "AttentionUnet": (16, 16), "BasicUNet": (32, 32)}.get(name, (16, 16, 16))
        known = {"spatial_dims": len(sides), "in_channels": 1}
        if name == "ResNet":
            known = {"spatial_dims": len(sides), "n_input_channels": 1}
        elif name != "ViT":
            known["out_channels"] = 2
        yield name, partial(getattr(nets, name), **known, **settings), (4, 1, *sides)


def _segmenters() -> Iterator[Case]:
    package = importlib.import_module("segmentation_models_pytorch")
    for name in _SEGMENTERS:
        settings: dict[str, Any] = {"encoder_name": "timm-mobilenetv3_small_minimal_100", "encoder_weights": None}
        if name in ("Unet", "UnetPlusPlus"):
            settings |= {"decoder_channels": (32, 16, 16, 8, 8)}
        yield name, partial(getattr(package, name), classes=5, **settings), (4, 3, 64, 64)


def _vits() -> Iterator[Case]:
    for module, (name, settings) in _VITS.items():
        size = settings.get("image_size", 64)
        side = size[0] if isinstance(size, tuple) else size
        yield module, partial(_vit, module, name, settings), (4, 3, side, side)


def _vit(module: str, name: str, settings: dict[str, Any]) -> nn.Module:
    package = importlib.import_module(f"vit_pytorch.{module}")
    classes = [
        kind for kind in vars(package).values() if isinstance(kind, type) and kind.__module__ == package.__name__
    ]
    made: nn.Module = (getattr(package, name) if name else classes[-1])(**settings)
    return made


def _words() -> Iterator[Case]:
    package = importlib.import_module("x_transformers")
    for name, settings in _WORDS.items():
        layers = partial(package.Decoder, dim=32, depth=2, heads=4, attn_dim_head=8, **settings)
        yield name, partial(_model_of_words, package, layers), (4, 16)


def _model_of_words(package: Any, layers: Callable[[], nn.Module]) -> nn.Module:
    made: nn.Module = package.TransformerWrapper(num_tokens=64, max_seq_len=16, attn_layers=layers())
    return made


def _case(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> zoo.Case:
    generator = torch.Generator().manual_seed(3)
    words = len(shape) == 2
    x = torch.randint(64, shape, generator=generator) if words else torch.randn(shape, generator=generator).double()
    return zoo.build(lambda: Scored(make(), words)), (x,)


_PACKAGES = {"torchvision": _torchvision, "monai": _monai, "smp": _segmenters, "vit_pytorch": _vits}
_PACKAGES |= {"x_transformers": _words}


def cases() -> dict[str, Callable[[], zoo.Case]]:
    """Models by name."""
    found: dict[str, Callable[[], zoo.Case]] = {}
    for package, models in _PACKAGES.items():
        try:
            found |= {f"{package} {name}": partial(_case, make, shape) for name, make, shape in models()}
        except ImportError:
            continue
    return found
