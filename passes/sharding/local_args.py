"""Arguments that spell out sizes: what they become when tensors are local."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of

aten = torch.ops.aten

# Operators whose argument at this position is the shape of their (first) output.
_OUTPUT_SHAPE_AT: dict[Any, int] = {
    aten.view.default: 1,
    aten._unsafe_view.default: 1,
    aten.reshape.default: 1,
    aten.expand.default: 1,
    aten.full.default: 0,
    aten.zeros.default: 0,
    aten.ones.default: 0,
    aten.empty.memory_format: 0,
    aten.slice_backward.default: 1,
    aten.select_backward.default: 1,
    aten.unfold_backward.default: 1,
    aten.index_select_backward.default: 1,
    aten.diagonal_backward.default: 1,
    aten._adaptive_avg_pool2d.default: -1,
    **{
        getattr(aten, f"{name}_backward").default: 2
        for name in (
            *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
            *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"),
            *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d", "upsample_bicubic2d"),
            *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        )
    },
}

# Operators whose kernels refuse tensors that do not lie in memory in order, or read them as if they did, or factor
# the transpose of those that do (``traced_layouts.py``), and the positions of those arguments. Attention and windows
# see to their own (``galvatron_fx/ir/kernels``).
DENSE_ARGUMENTS: dict[Any, tuple[int, ...]] = {
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_group_norm_backward.default: (0, 1, 2, 3, 4),
    aten.native_layer_norm_backward.default: (3, 4),
    aten._weight_norm_interface_backward.default: (0, 1, 2, 3),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten.fractional_max_pool2d_backward.default: (4,),
    aten.fractional_max_pool3d_backward.default: (4,),
    aten._pdist_forward.default: (0,),
    aten._pdist_backward.default: (1, 3),
    aten._embedding_bag.default: (1, 2),
    aten._embedding_bag_backward.default: (1, 2, 3),
    aten._embedding_bag_per_sample_weights_backward.default: (2, 3, 4),
    aten.linalg_matrix_exp.default: (0,),
    **dict.fromkeys((aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default), (0,)),
}


def localize_args(target: Any, args: tuple[Any, ...], outputs: tuple[TensorSpec | None, ...]) -> tuple[Any, ...]:
    """Return ``args`` with global sizes replaced by those of the local ``outputs``."""
    args = tuple(args)
    position = _OUTPUT_SHAPE_AT.get(target, -1)
    out = outputs[0]
    if position >= 0 and out is not None:
        args = _replaced(args, position, list(out.shape))
    if target is aten.embedding_dense_backward.default and out is not None:
        args = _replaced(args, 2, out.shape[0])
    if target is aten.convolution.default and out is not None:
        args = _replaced(args, 8, _groups(args[0], args[1], out, args[6]))
    if target is aten.convolution_backward.default:
        args = _replaced(args, 9, _groups_backward(args[0], args[1], args[2], outputs, args[7]))
    if target is aten.convolution_backward.default and outputs[2] is not None:
        args = _replaced(args, 3, list(outputs[2].shape))
    if target in (aten.split.Tensor, aten.split_with_sizes.default) and out is not None:
        dim = args[2] if len(args) > 2 else 0
        sizes = [out.shape[dim] if spec is None else spec.shape[dim] for spec in outputs]
        args = _replaced(args, 1, sizes[0] if target is aten.split.Tensor else sizes)
    if target is aten.native_group_norm.default and out is not None:
        args = _replaced(args, 3, out.shape[0])
    if target is aten.native_group_norm_backward.default and out is not None:
        args = _replaced(args, 5, out.shape[0])
    return args


def _groups(x: Any, weight: Any, out: TensorSpec, transposed: bool) -> int:
    """The groups of a convolution that makes ``out`` [batch, channels, ...] with whole groups of x [batch, channels,
    ...] and weight, which are specs or nodes; one where there is one, however channels are split.
    """
    (_, inputs, *_), (rows, columns, *_) = _shape(x), _shape(weight)
    if transposed:
        return out.shape[1] // columns
    return 1 if inputs == columns else inputs // columns * out.shape[1] // rows


def _groups_backward(
    gradient: Any, x: Any, weight: Any, outputs: tuple[TensorSpec | None, ...], transposed: bool
) -> int:
    """The same, of the gradients of x, weight and bias."""
    (_, made, *_), (_, inputs, *_), (rows, columns, *_) = map(_shape, (gradient, x, weight))
    groups = made // columns if transposed else inputs // columns
    wholes = (inputs, 1), (rows, 0), (made, 0)
    parts = (spec and (spec.shape[dim], whole) for spec, (whole, dim) in zip(outputs, wholes, strict=True))
    held, whole = next(part for part in parts if part)
    return 1 if groups == 1 else groups * held // whole


def _shape(value: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = meta_of(value).spec.shape if isinstance(value, fx.Node) else value.shape
    return shape


def _replaced(args: tuple[Any, ...], position: int, value: Any) -> tuple[Any, ...]:
    return (*args[:position], value, *args[position + 1 :])


def lowered_target(target: Any) -> Any:
    """``view`` needs strides that a local tensor may not have; ``reshape`` is the same without that need."""
    return aten.reshape.default if target in (aten.view.default, aten._unsafe_view.default) else target


def map_inputs(value: Any, replacements: list[fx.Node]) -> Any:
    """Rebuild an argument tree, taking the next of ``replacements`` for every node in order."""
    rest = iter(replacements)
    return fx.map_arg(value, lambda _: next(rest))
