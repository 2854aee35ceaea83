"""Products of float32 matrices on CPUs by oneDNN, which torch carries beside MKL.

torch's own operators ask MKL, which leaves AVX-512 unused on processors that are not Intel's: oneDNN takes 0.45 times
as long on an AMD EPYC of family 26 (``benchmarks/speed/products.py``). Both round as float32 does, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.graph.metadata import TensorSpec

__all__ = ["has_onednn", "on_onednn"]

aten = torch.ops.aten

# Multiplications: in smaller products what a call of oneDNN takes, 10 microseconds, is more than it saves.
_LEAST = 2**20

_library = torch.library.Library("galvatron_fx", "DEF")
_library.define("onednn_mm(Tensor a, Tensor b) -> Tensor")
_library.define("onednn_addmm(Tensor bias, Tensor a, Tensor b) -> Tensor")


def has_onednn() -> bool:
    """Whether this build of torch has oneDNN."""
    return bool(torch.backends.mkldnn.is_available())


def on_onednn(target: Callable[..., Any], inputs: Sequence[TensorSpec | None]) -> Callable[..., Any]:
    """What ``target`` is by oneDNN, for tensors like ``inputs``: itself, unless it is a product that gains by it."""
    specs = [spec for spec in inputs if spec is not None]
    if target not in _BY_ONEDNN or len(specs) != len(inputs) or any(spec.dtype != torch.float32 for spec in specs):
        return target
    *bias, left, right = specs
    columns = right.shape[1]
    if any(spec.shape != (columns,) for spec in bias) or left.numel * columns < _LEAST:
        return target
    return _BY_ONEDNN[target]


@torch.library.impl(_library, "onednn_mm", "CPU")
def _mm(a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b, None)


@torch.library.impl(_library, "onednn_addmm", "CPU")
def _addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return _product(a, b, bias)


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a · b (+ bias); a transposed ``a`` is copied, and a ``b`` that is dense neither by rows nor by columns."""
    dense = b if b.is_contiguous() or b.t().is_contiguous() else b.contiguous()
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, dense.t(), bias, "none", [], "")
    return product


@torch.library.register_fake("galvatron_fx::onednn_mm")
def _fake_mm(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.register_fake("galvatron_fx::onednn_addmm")
def _fake_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


_BY_ONEDNN: dict[Any, Callable[..., Any]] = {
    aten.mm.default: torch.ops.galvatron_fx.onednn_mm.default,
    aten.addmm.default: torch.ops.galvatron_fx.onednn_addmm.default,
}
