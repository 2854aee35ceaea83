"""What one ATen operator costs: flops, bytes read and bytes written, as numbers or as sympy expressions.

Flops of matrix products, convolutions and attention are those of ``torch.utils.flop_counter``, a multiply-add being
two. They are written out again here because its functions compare sizes (``if k != k2``, ``if h_q % h_kv``), which
symbolic sizes cannot answer; the tests hold the two against each other. Three differences are on purpose: causal
attention counts half, because the kernels skip what is masked (Dao 2023, FlashAttention-2, sections 3.1 and 4.1); the
weight gradient of a grouped convolution is not multiplied by the groups; what torch does not count gets a price too.

Bytes are those of dense tensors, each read or written once: caches are not modelled, an expanded tensor counts in full,
lookups read what they look up rather than the whole table, and what writes rows in place reads and writes those.
Collectives have no cost here but in :mod:`cost_models.collectives`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch
from torch._ops import OpOverload

from cost_models.curve_time import operator_curve_s
from galvatron_fx.ir.arrays import Floats
from galvatron_fx.ir.cluster.cluster import Device
from galvatron_fx.ir.cluster.curves import OperatorCurve
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED, all_gather_matmul, products_of
from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.metadata import FREE, OpCost

__all__ = [
    "BROADCAST",
    "Dim",
    "TensorFacts",
    "is_free",
    "is_matmul",
    "kind_of",
    "op_cost",
    "op_time_s",
    "price_class",
    "reads_per_element",
    "writes_rows",
]

Dim: TypeAlias = int | sympy.Expr

BROADCAST = ", broadcast"
"""What stands behind the kind of an operator that repeats elements of an operand."""


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype of a dense tensor; sizes are ints or sympy expressions."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> Dim:
        """Number of elements; an int if every size is one."""
        return _product(self.shape)

    @property
    def size_bytes(self) -> Dim:
        """Bytes of all elements; an int if every size is one."""
        return _product((self.numel, self.dtype.itemsize))


def op_cost(
    target: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[TensorFacts],
    outputs: Sequence[TensorFacts],
) -> OpCost:
    """Return what one call of ``target`` costs.

    ``args`` and ``kwargs`` are those of the fx node, with TensorFacts for tensors. ``inputs`` are the tensors among
    them, in order; ``outputs`` the tensors that come out, absent ones left out. Costs are ints where all sizes are.
    Pointwise operators and all others unknown here take one flop an element of their (first) output.
    """
    name = _name(target)
    if not outputs or is_free(target):
        return FREE
    reads = reads_per_element(target, tuple(x.dtype for x in inputs), tuple(x.dtype for x in outputs))
    read = _total(_product((size, x.numel)) for size, x in zip(reads, (*inputs, *outputs), strict=True))
    written = inputs[-1].size_bytes if writes_rows(target) else _total(tensor.size_bytes for tensor in outputs)
    if is_matmul(target):
        flops = _matmul_flops(target, name, args, kwargs, outputs)
    elif name in _FLOPS_PER_INPUT and inputs:
        flops = _product((_FLOPS_PER_INPUT[name], inputs[0].numel))
    else:
        flops = 0 if name in _MOVES else outputs[0].numel
    return OpCost(flops, read, written)


def is_matmul(target: Callable[..., Any]) -> bool:
    """Tell whether ``target`` is made of matrix products, which tensor cores speed up (convolution, attention too)."""
    name = _name(target)
    return (
        target in CHUNKED
        or name in _LEFT_MATRIX
        or name in _GROUPED
        or name in _CONVOLUTIONS
        or name == "einsum"
        or _is_attention(name)
    )


def kind_of(target: Callable[..., Any]) -> str:
    """Name the kind of operator that has a price of its own, where prices are measured.

    "matmul" for products of matrices, "batched_matmul" for many small ones, "attention" and "attention_backward" for
    its fused kernels, else the operator's name without namespace and overload, in-place or not.
    """
    name = _name(target)
    if name in _BATCHED:
        return "batched_matmul"
    if target in CHUNKED or name in _LEFT_MATRIX or name in _GROUPED or name == "einsum":
        return "matmul"
    if _is_attention(name):
        return "attention_backward" if name.endswith("_backward") else "attention"
    return name.removesuffix("_") if not name.startswith("_") else name


_MATMUL_KINDS = {"matmul", "batched_matmul", "attention", "attention_backward"}


def price_class(device: Device, dtype: str, kind: str) -> str:
    """Return the kind that operators of ``kind`` are priced as on ``device``; equal ones can be priced together.

    A kind that was measured is its own class; those that repeat elements of an operand are "broadcast" where that was.
    Kinds of matrix products that were not are "matmul", and all others "copy" or "pointwise", whether they only move
    data or also compute.
    """
    alone = kind.removesuffix(BROADCAST)
    if kind != alone:
        repeating = BROADCAST.removeprefix(", ")
        return repeating if _curve(device, repeating, dtype) is not None else price_class(device, dtype, alone)
    if _curve(device, kind, dtype) is not None:
        return kind
    if kind in _MATMUL_KINDS or kind in _CONVOLUTIONS:
        return "matmul"
    return "copy" if kind in _MOVES else "pointwise"


def op_time_s(cost: OpCost, dtype: torch.dtype | str, device: Device, kind: str) -> float | Floats:
    """Return the seconds of an operator on ``device``: as measured, else the roofline plus the overhead of a launch.

    ``kind``: as :func:`kind_of` or :func:`price_class` says; ``dtype``: what is computed in. Without a
    curve measured for it, max(flops / attainable flops a second, bytes / attainable bytes a second): Williams,
    Waterman & Patterson 2009, Roofline: an insightful visual performance model. Matrix products reach
    ``matmul_efficiency`` of the peak of their dtype; others at most the rate of float32, as tensor cores do not serve
    them. ``cost`` holds numbers, or arrays of one shape, and so do the seconds. What costs nothing takes no time.

    Raises:
        InputError: for a cost that still holds symbols; evaluate it (``sympy.lambdify``) first.
        ClusterError: if the device lists no rate for the dtype.
    """
    try:
        flops = np.asarray(cost.flops, dtype=np.float64)
        moved = np.asarray(cost.read_bytes, dtype=np.float64) + np.asarray(cost.written_bytes, dtype=np.float64)
    except TypeError:
        raise InputError(
            f"{cost} holds symbols; evaluate it at sizes (sympy.lambdify) before asking its time"
        ) from None
    name = str(dtype).removeprefix("torch.")
    asked = price_class(device, name, kind)
    curve = _curve(device, asked, name)
    seconds = operator_curve_s(curve, flops, moved) if curve else _roofline_s(flops, moved, name, device, asked)
    return seconds if seconds.ndim else float(seconds)


def _curve(device: Device, kind: str, dtype: str) -> OperatorCurve | None:
    """The curve of a kind: of its own dtype, or, as only products of matrices depend on more than bytes, of any."""
    curve = device.curve(kind, dtype)
    return curve if curve or kind in _MATMUL_KINDS or kind in _CONVOLUTIONS else device.curve(kind)


def _roofline_s(flops: Floats, moved: Floats, dtype: str, device: Device, kind: str) -> Floats:
    rate = device.flops_per_s(dtype)
    if kind == "matmul":
        rate *= device.matmul_efficiency
    else:
        rate = min(rate, dict(device.peak_flops).get("float32", rate))
    compute_s = flops / rate
    memory_s = moved / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency)
    return np.where(flops + moved > 0, np.maximum(compute_s, memory_s) + device.launch_overhead_s, 0.0)


def _product(sizes: Iterable[Dim]) -> Dim:
    """The product, as an int if it is one; the ints first, since every sympy product costs microseconds."""
    whole, symbolic = 1, None
    for size in sizes:
        if isinstance(size, int):
            whole *= size
        else:
            symbolic = size if symbolic is None else symbolic * size
    return whole if symbolic is None else _plain(whole * symbolic)


def _total(sizes: Iterable[Dim]) -> Dim:
    """The sum, as an int if it is one."""
    listed = list(sizes)
    whole = sum(size for size in listed if isinstance(size, int))
    symbolic = [size for size in listed if not isinstance(size, int)]
    return _plain(sympy.Add(whole, *symbolic)) if symbolic else whole


def _plain(size: Dim) -> Dim:
    """An int for what sympy knows to be one."""
    return int(size) if isinstance(size, sympy.Integer) else size


def _name(target: Callable[..., Any]) -> str:
    """The operator's name without namespace and overload: "mm" for ``aten.mm.default``."""
    if isinstance(target, OpOverload):
        return str(target._schema.name).partition("::")[2]
    return str(getattr(target, "__name__", target))


# Namespaces of collectives, which the links pay for and not the device.
_COLLECTIVES = {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d"}
# Free without being views to torch: one that copies nothing, allocation, and questions about shapes.
_FREE_NAMES = {"_unsafe_view", "detach_", "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"}
_FREE_NAMES |= {"new_empty_strided", "sym_numel", "sym_size", "sym_storage_offset", "sym_stride"}
# Views to torch that copy whenever it is worth writing them.
_COPYING_VIEWS = {"contiguous", "to"}


def is_free(target: Callable[..., Any]) -> bool:
    """Tell whether calls of ``target`` move and compute nothing: views, allocation, questions about shapes."""
    name = _name(target)
    if not isinstance(target, OpOverload):
        return target is operator.getitem or isinstance(target, FurtherRounds)  # which mostly have nothing to do
    if target.namespace in _COLLECTIVES or name in _FREE_NAMES:
        return True
    return target.is_view and name not in _COPYING_VIEWS


# Flops an element of the first input. Reductions: one addition or comparison. Others, counted from their definitions:
# softmax: max, subtract, exp, add, divide; its backward: multiply, add, subtract, multiply; as many for log-softmax.
# Normalisation: add (mean), subtract, square, add (variance), scale, times weight, plus bias; RMS: square, add, scale,
# times weight. Backward of layer norm (Ba, Kiros & Hinton 2016), with x^ = (x - mean) rstd and g = grad weight: g 1,
# x^ 2, sum g 1, sum g x^ 2, rstd (g - mean g - x^ mean(g x^)) 4, parameter gradients 3; RMS has no mean and no bias: 9.
_FLOPS_PER_INPUT = {
    **dict.fromkeys(("sum", "mean", "prod", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all"), 1),
    **dict.fromkeys(("nansum", "cumsum", "count_nonzero", "embedding_dense_backward"), 1),
    **dict.fromkeys(("linalg_vector_norm", "norm"), 2),
    **dict.fromkeys(("var", "var_mean", "std", "std_mean", "logsumexp"), 4),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), 5),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), 4),
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm"), 7),
    **dict.fromkeys(("_native_batch_norm_legit", "_native_batch_norm_legit_functional"), 7),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"), 13),
    "_native_batch_norm_legit_no_training": 2,
    "_fused_rms_norm": 4,
    "_fused_rms_norm_backward": 9,
}
# Lookups: the first input is a table, of which only the elements that come out are read.
_LOOKUPS = {"dispatch", "embedding", "gather", "index", "index_select", "spread", "take", "_unsafe_index"}
_FROM_NOTHING = {"arange", "full", "ones", "scalar_tensor", "zeros"}
# Only the shape of what they are given counts.
_SHAPE_ONLY = {"full_like", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "zeros_like"}
_MOVES = {"_to_copy", "cat", "clone", "constant_pad_nd", "contiguous", "copy", "copy_", "flip", "index_put", "repeat"}
_MOVES |= {"combine", "pack", "roll", "scatter", "select_backward", "select_scatter", "slice_backward", "slice_scatter"}
_MOVES |= {"gather_experts", "part_experts", "stack", "to", "unpack", "unsort"}
_WRITES = {"index_copy_", "index_put_"}
_MOVES |= {"index_copy"} | _WRITES | _LOOKUPS | _FROM_NOTHING | _SHAPE_ONLY


def writes_rows(target: Callable[..., Any]) -> bool:
    """Tell whether calls of ``target`` write the rows that are their last input into the first, in place."""
    return _name(target) in _WRITES


@lru_cache(maxsize=4096)
def reads_per_element(
    target: Callable[..., Any], inputs: tuple[torch.dtype, ...], outputs: tuple[torch.dtype, ...]
) -> tuple[int, ...]:
    """Return the bytes that a call of ``target`` reads for each element of its ``inputs``, then of its ``outputs``.

    Most operators read their inputs once and nothing for their outputs. A rank that holds a part of a tensor reads
    that part of its bytes.
    """
    name = _name(target)
    reads = [*(dtype.itemsize for dtype in inputs), *(0 for _ in outputs)]
    if name in _SHAPE_ONLY:
        return (0,) * len(reads)
    if name in _LOOKUPS:
        reads[0], reads[len(inputs)] = 0, inputs[0].itemsize
    elif name in _WRITES:
        reads[0] = 0
    elif name in ("nll_loss_forward", "nll_loss2d_forward"):  # self, target: one of self for each of target
        reads[0], reads[1] = 0, inputs[1].itemsize + inputs[0].itemsize
    elif name in ("nll_loss_backward", "nll_loss2d_backward"):  # grad, self, target: the gradient does not need self
        reads[1] = 0
    return tuple(reads)


# For each product, which argument is the left matrix [..., m, k] of [..., m, k] x [..., k, n].
_LEFT_MATRIX = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1, "linear": 0, "matmul": 0, "mv": 0, "addmv": 1, "dot": 0}
_LEFT_MATRIX |= {"_scaled_mm": 0, "_int_mm": 0}
_BATCHED = {"bmm", "baddbmm"}
_GROUPED = {"_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"}
# Causal ones are half of the products of their chunks, at every step.
_RINGS = {"ring_attention", "ring_attention_backward", "ring_step", "ring_step_backward"}
_CONVOLUTIONS = {"convolution", "_convolution", "convolution_overrideable", "convolution_backward"}


def _is_attention(name: str) -> bool:
    """Tell whether ``name`` is one of torch's attention kernels, for any device, forward or backward."""
    return name in _RINGS or (name.startswith("_scaled_dot_product_") and "attention" in name)


def _matmul_flops(
    target: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[TensorFacts],
) -> Dim:
    """Flops of the operators that :func:`is_matmul` tells."""
    if target in CHUNKED:
        rows = (outputs if target is all_gather_matmul else args[0])[0].shape[0]
        return _total(_product((2, rows, *weight.shape)) for _, weight, _ in products_of(target, args))
    if name in _LEFT_MATRIX:
        # m n outputs of k multiply-adds; adding a bias is not counted, as in torch.
        return _product((2, outputs[0].numel, _argument(target, args, kwargs, _LEFT_MATRIX[name]).shape[-1]))
    if name in _GROUPED:
        left, right = (_argument(target, args, kwargs, which) for which in (0, 1))
        if name.endswith("backward"):  # rows and weights, as in forward: a product for the gradient of each
            return _product((4, left.numel, right.shape[-1]))
        return _grouped_flops(left, right, outputs[0])
    if name == "einsum":
        return _einsum_flops(_argument(target, args, kwargs, "equation"), _argument(target, args, kwargs, "tensors"))
    if name in _CONVOLUTIONS:
        return _convolution_flops(target, name, args, kwargs, outputs)
    return _attention_flops(target, name, args, kwargs)


def _argument(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], which: str | int) -> Any:
    """The argument called ``which`` (or at that position in the schema), or its default."""
    if not isinstance(target, OpOverload):
        position = which if isinstance(which, int) else [*signature(target).parameters].index(which)
        return args[position]
    for position, formal in enumerate(target._schema.arguments):
        if which in (position, formal.name):
            given = args[position] if position < len(args) else kwargs.get(formal.name)
            return formal.default_value if given is None else given
    raise AssertionError(f"{target} has no argument {which!r}")


def _grouped_flops(left: TensorFacts, right: TensorFacts, out: TensorFacts) -> Dim:
    """Products of groups of rows (or of k): every element of ``left`` meets n columns once, however groups are cut."""
    if len(left.shape) == len(right.shape) == 2:  # [m, k] x [k, n] -> [groups, m, n], the groups sharing out k
        return _product((2, left.numel, right.shape[-1]))
    return _product((2, out.numel, left.shape[-1]))


def _einsum_flops(equation: str, tensors: Sequence[TensorFacts]) -> Dim:
    """Two flops for every combination of all indices: exact for a product of two tensors, a bound for more."""
    extents: dict[str, Dim] = {}
    for term, tensor in zip(equation.replace(" ", "").partition("->")[0].split(","), tensors, strict=True):
        before, dots, after = term.partition("...")
        hidden = [f".{place}" for place in range(len(tensor.shape) - len(before) - len(after), 0, -1)] if dots else []
        for index, size in zip([*before, *hidden, *after], tensor.shape, strict=True):
            if extents.get(index, 1) == 1:  # a size of 1 is broadcast to the other operand's
                extents[index] = size
    return _product((2 if len(tensors) > 1 else 1, *extents.values()))


def _convolution_flops(
    target: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    outputs: Sequence[TensorFacts],
) -> Dim:
    """Every position of the output (input, if transposed) meets the whole weight [c_out, c_in / groups, *kernel].

    As in ``torch.utils.flop_counter.conv_flop_count``, padding counts and the bias does not. In the backward, the
    gradients of input and of weight, where asked for, each take as many multiply-adds as the forward.
    """
    backward = name == "convolution_backward"
    image, weight = _argument(target, args, kwargs, "input"), _argument(target, args, kwargs, "weight")
    out = _argument(target, args, kwargs, "grad_output") if backward else outputs[0]
    products = sum(_argument(target, args, kwargs, "output_mask")[:2]) if backward else 1
    positions = image if _argument(target, args, kwargs, "transposed") else out
    return _product((2 * products, image.shape[0], *positions.shape[2:], weight.numel))


def _attention_flops(target: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Dim:
    """Attention of query [..., s_q, d], key [..., s_k, d] and value [..., s_k, d_v], key heads repeated as needed.

    Forward: scores and output, 2 s_q s_k (d + d_v) a head. Backward: scores once more, then the gradients of the
    probabilities, value, query and key: 2 s_q s_k (3 d + 2 d_v). Half of it with ``is_causal``.
    """
    query, key, value = (_argument(target, args, kwargs, which) for which in ("query", "key", "value"))
    wide, tall = (3, 2) if name.endswith("_backward") else (1, 1)
    width = _total((_product((wide, query.shape[-1])), _product((tall, value.shape[-1]))))
    per_pair = 1 if _argument(target, args, kwargs, "is_causal") else 2
    return _product((per_pair, *query.shape[:-1], key.shape[-2], width))
