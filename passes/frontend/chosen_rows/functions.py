"""What functions of torch are called, and what they ask of a tensor beside its elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["OF_DATA", "SIZES", "base_name", "is_in_place", "is_mask"]

SIZES = ("shape", "size", "numel", "nelement", "len")
OF_DATA = (
    *("dtype", "device", "ndim", "dim", "is_floating_point", "is_complex", "requires_grad", "layout", "is_cuda"),
    *("is_contiguous", "element_size", "is_sparse", "is_nested", "is_leaf", "is_mps", "is_quantized", "is_meta"),
)
_SPOKEN = {
    **{"truediv": "div", "floordiv": "floor_divide", "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
    **{"invert": "bitwise_not", "not_equal": "ne"},
}


def base_name(func: Any) -> str:
    """The name of a function of torch without what says that it is an operator, or in place."""
    name: str = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    dunder = name.startswith("__") and name.endswith("__")
    name = name.strip("_")
    if dunder and name[:1] in ("r", "i") and name not in ("rshift", "invert", "round") and name[1:]:
        bare = _SPOKEN.get(name[1:], name[1:])
        name = bare if hasattr(torch.ops.aten, bare) and not hasattr(torch.ops.aten, name) else name
    return _SPOKEN.get(name, name)


def is_in_place(func: Any) -> bool:
    """Whether a function of torch changes its first argument."""
    name: str = getattr(func, "__name__", "")
    if not name.endswith("__"):
        return name.endswith("_")
    return name == "__setitem__" or (name.startswith("__i") and base_name(func) not in (name.strip("_"), "bitwise_not"))


def is_mask(value: Any) -> bool:
    """Whether an index picks by booleans."""
    return isinstance(value, Tensor) and value.dtype == torch.bool and value.dim() > 0
