"""What functions of torch do with rows: which compute every row by itself, and along which dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ORDERED", "is_for_each_row", "makes_rows", "reduced_dims", "takes_rows", "takes_sizes", "touches"]

# Where the dim along which values are mixed stands among the arguments, and what it is if it is left out.
_DIMS: dict[str, tuple[int, int | None]] = {
    **dict.fromkeys(("softmax", "log_softmax", "cumsum", "cumprod", "logsumexp", "var", "std", "unbind"), (1, None)),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax", "argmin", "all", "any", "prod"), (1, None)),
    **dict.fromkeys(("max", "min", "gather", "select", "narrow"), (1, None)),
    **dict.fromkeys(("sort", "argsort", "glu"), (1, -1)),
    **dict.fromkeys(("topk",), (2, -1)),
    **dict.fromkeys(("chunk", "split", "tensor_split"), (2, 0)),
    **dict.fromkeys(("norm",), (2, None)),
    **dict.fromkeys(("normalize", "cosine_similarity"), (2, 1)),
    **dict.fromkeys(("cat", "concat"), (1, 0)),
}  # fmt: skip
_SHAPED = (
    *("view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "transpose", "swapaxes", "permute", "t"),
    *("rand_like", "randn_like"),
    *("expand", "expand_as", "view_as", "reshape_as", "movedim", "stack", "clone", "contiguous", "detach", "mT", "T"),
    *("to", "type", "type_as", "float", "double", "half", "bfloat16", "long", "int", "bool"),
    *("zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones", "new_empty"),
)
# Those that read elements in their order, whatever the dims are.
ORDERED = ("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as")
_FOR_EACH_ROW = (
    *("linear", "matmul", "mm", "bmm", "baddbmm", "embedding", "one_hot", "dropout", "layer_norm", "rms_norm"),
    *("einsum", "masked_fill", "where", "clamp", "gelu", "relu", "silu", "mish", "hardswish", "relu6"),
    *("leaky_relu", "elu", "selu", "celu", "softplus", "logsigmoid", "hardtanh", "prelu", "threshold"),
    *("softsign", "tanhshrink", "pad"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "gaussian_nll_loss", "poisson_nll_loss"),
)
# Functions of samples, which lie along the first dim.
_FOR_EACH_SAMPLE = (
    *("conv1d", "conv2d", "conv3d", "group_norm", "instance_norm", "scaled_dot_product_attention", "interpolate"),
    *("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d"),
)
_NEW = ("zeros", "ones", "empty", "rand", "randn", "new_zeros", "new_ones", "new_empty")


def is_pointwise(name: str) -> bool:
    """Whether an operator of that name computes every element by itself."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in overloads)


def takes_rows(name: str) -> bool:
    """Whether the tensors that a function of that name is given lie row by row beside each other, if they have as many
    dims.
    """
    return name in ("cat", "concat", "stack", "where", "masked_fill") or name.endswith("_loss") or is_pointwise(name)


def is_for_each_row(name: str, dim: int) -> bool:
    """Whether a function of that name computes rows along ``dim`` by themselves, if none of the dims along which it
    mixes values is that of the rows.
    """
    if name in _FOR_EACH_SAMPLE:
        return dim == 0
    return name in _DIMS or name in _SHAPED or name in _FOR_EACH_ROW or is_pointwise(name)


def takes_sizes(name: str) -> bool:
    """Whether a number that a function of that name is given may be a size; others compute with it."""
    return name in _SHAPED or name in _NEW


def makes_rows(name: str) -> bool:
    """Whether a function of that name makes rows of the number of rows that it is given."""
    return name in _NEW


def reduced_dims(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], ndim: int) -> tuple[int, ...] | None:
    """The dims along which a function mixes values, all where none is given; None where it mixes along no dim."""
    if name in ("layer_norm", "rms_norm"):
        normalized = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        count = 1 if isinstance(normalized, int) else len(normalized)
        return tuple(range(ndim - count, ndim))
    if name == "pad":
        given = args[1] if len(args) > 1 else kwargs["pad"]
        return tuple(ndim - 1 - at for at in range(len(given) // 2) if any(given[2 * at : 2 * at + 2]))
    if name not in _DIMS or (name in ("max", "min") and len(args) > 1 and isinstance(args[1], Tensor)):
        return None
    place, default = _DIMS[name]
    dims = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("axis", default))
    if dims is None or dims == ():
        return tuple(range(ndim))
    return tuple(dim % ndim for dim in ((dims,) if isinstance(dims, int) else dims))


def touches(index: Any, ndim: int, dim: int) -> bool:
    """Whether ``x[index]`` picks among the rows along ``dim`` of an x of ``ndim`` dims."""
    entries = list(index) if isinstance(index, tuple) else [index]
    taken = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    spread: list[Any] = []
    for entry in entries:
        spread += [slice(None)] * (ndim - taken) if entry is Ellipsis else [entry]
    consuming = [entry for entry in spread if entry is not None]
    return dim < len(consuming) and consuming[dim] != slice(None)
