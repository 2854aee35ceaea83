"""Caches that other stages hold: on this rank they have a shape, and whoever reads one is told why there is no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.errors import InputError

__all__ = ["AbsentCache"]


class AbsentCache(Tensor):
    """Stands for a cache that the ranks of another stage hold.

    It has the shape and dtype of the whole one, prints, and may be set to zero, as all ranks do it; whatever else is
    asked of it raises InputError, which names the cache.
    """

    _name: str

    @staticmethod
    def __new__(cls, name: str, shape: Sequence[int], dtype: torch.dtype, device: str) -> AbsentCache:
        cache: AbsentCache = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        cache._name = name
        return cache

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what it stands for."""
        return f"<cache '{self._name}' of shape {tuple(self.shape)}, which is not on this rank>"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.zero_.default:
            return args[0]
        if func is torch.ops.aten.detach.default:
            cache = args[0]
            return cls(cache._name, cache.shape, cache.dtype, cache.device.type)
        cache = next(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, cls))
        raise InputError(
            f"cache '{cache._name}' is not on this rank: under stages the ranks of its layer's stage hold it. Read it "
            f"there, or compile with num_stages=1"
        )
