"""Products of matrices and attention: the sizes at which they are measured."""

from __future__ import annotations

import torch

from galvatron_fx.ir.kernels.select import Kernels
from galvatron_fx.profiling.kernels import Kernel, kernel
from galvatron_fx.profiling.tensors import Pool

__all__ = ["attention_kernels", "product_kernels"]

aten = torch.ops.aten

# (batch, m, k, n): square ones from a launch to 2 GFLOP, and the long and flat ones that training has: activations by
# weights, gradients of either, heads of attention.
_SHAPES = (
    (1, 8, 8, 8), (1, 32, 32, 32), (1, 64, 64, 64), (1, 128, 128, 128), (1, 256, 256, 256), (1, 512, 512, 512),
    (1, 128, 256, 768), (1, 256, 128, 128), (1, 512, 64, 512), (1, 1024, 256, 256), (1, 256, 1024, 256),
    (1, 1024, 256, 1024), (1, 1024, 1024, 256), (1, 2048, 256, 704), (1, 704, 2048, 256), (1, 512, 256, 4096),
    (1, 1024, 128, 128), (1, 1024, 128, 352), (1, 352, 1024, 128), (1, 64, 512, 512), (1, 1024, 1024, 1024),
    (8, 32, 16, 32), (32, 64, 32, 64), (32, 128, 64, 128), (64, 128, 128, 32),
    (16, 256, 64, 256),
)  # fmt: skip
_LARGE_SHAPES = ((1, 2048, 2048, 2048), (1, 4096, 4096, 4096), (1, 8192, 4096, 4096), (64, 1024, 64, 1024))
# (batch, heads, sequence, width of a head)
_ATTENTIONS = ((1, 1, 16, 16), (2, 4, 64, 32), (8, 4, 128, 32), (4, 4, 128, 64), (4, 4, 256, 64), (2, 4, 512, 64))
_LARGE_ATTENTIONS = ((8, 16, 1024, 64), (8, 16, 1024, 128), (2, 16, 4096, 64), (2, 16, 4096, 128), (1, 16, 8192, 128))


def product_kernels(pool: Pool, dtype: torch.dtype) -> list[Kernel]:
    """Each product as forward has it (the right side transposed), as gradients of weights (the left), and of inputs."""
    shapes = _SHAPES + (_LARGE_SHAPES if pool.device == "cuda" else ())
    return [_product(pool, dtype, shape, transposed) for shape in shapes for transposed in range(3)]


def _product(pool: Pool, dtype: torch.dtype, shape: tuple[int, int, int, int], transposed: int) -> Kernel:
    batch, m, k, n = shape

    def make(variant: int) -> list[torch.Tensor]:
        left = pool.tensor((batch, k, m) if transposed == 1 else (batch, m, k), dtype, variant)
        right = pool.tensor((batch, n, k) if transposed == 0 else (batch, k, n), dtype, variant + 1)
        left = left.transpose(1, 2) if transposed == 1 else left
        right = right.transpose(1, 2) if transposed == 0 else right
        return [left, right] if batch > 1 else [left[0], right[0]]

    return kernel(aten.bmm.default if batch > 1 else aten.mm.default, make, dtype)


def attention_kernels(pool: Pool, dtype: torch.dtype) -> list[Kernel]:
    """The kernels that causal attention is lowered to.

    Without causality these kernels take less than twice as long, since of short sequences they skip nothing.
    """
    shapes = _ATTENTIONS + (_LARGE_ATTENTIONS if pool.device == "cuda" else ())
    return [attention for shape in shapes for attention in _attention(pool, dtype, shape)]


def _attention(pool: Pool, dtype: torch.dtype, shape: tuple[int, int, int, int]) -> list[Kernel]:
    batch, heads, sequence, width = shape
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def inputs(variant: int) -> list[torch.Tensor]:
        rows = [pool.tensor((batch, sequence, heads, width), dtype, variant + i).transpose(1, 2) for i in range(3)]
        return rows

    def again(variant: int) -> list[object]:
        query, key, value = inputs(variant)
        out, sums = Kernels(pool.device).of(forward, (), {})(query, key, value, 0.0, True)
        grad = pool.tensor((batch, sequence, heads, width), dtype, variant).transpose(1, 2)
        return [grad, query, key, value, out, sums, 0.0, True]

    return [
        kernel(forward, lambda variant: [*inputs(variant), 0.0, True], dtype),
        kernel(backward, again, dtype),
    ]
