"""Calls of every operator that has a sharding rule, small enough to run each rule of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (registers operators)
from torch import Tensor

from galvatron_fx.ir.graph.precision import cast_gradient, cast_parameter
from galvatron_fx.ir.graph.random_ops import random_uniform
from galvatron_fx.ir.kernels.ctc import ctc_loss, ctc_loss_backward
from galvatron_fx.ir.kernels.experts import combine, dispatch, gather_experts, part_experts
from passes.sharding.own_rules import VIEWS

aten = torch.ops.aten
f64 = torch.float64


class In:
    """A tensor argument: its value on one device."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def real(*shape: int) -> In:
    return In(torch.randn(shape, dtype=f64, generator=GENERATOR))


def whole(high: int, *shape: int, boolean: bool = False) -> In:
    value = torch.randint(high, shape, generator=GENERATOR)
    return In(value.bool() if boolean else value)


def complex_numbers(*shape: int) -> In:
    return In(torch.randn(shape, dtype=torch.complex128, generator=GENERATOR))


GENERATOR = torch.Generator().manual_seed(0)

# Operator, arguments, keyword arguments; every size that may be split is a multiple of 4 (two ranks, two runs).
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def attention(causal: bool, mask: In | None = None, key_heads: int = 4) -> list[Call]:
    q, k, v = real(4, 4, 8, 4), real(4, key_heads, 8, 4), real(4, key_heads, 8, 4)
    keywords = {} if mask is None else {"attn_mask": mask}
    plain = {} if mask is None else {"attn_mask": mask.value}
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = forward(q.value, k.value, v.value, 0.0, causal, **plain)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    gradient = (real(4, 4, 8, 4), q, k, v, In(out), In(logsumexp), 0.0, causal)
    return [(forward, (q, k, v, 0.0, causal), keywords), (backward, gradient, keywords)]


def losses(reduction: int, ignore: int) -> list[Call]:
    scores, targets = In(torch.log_softmax(real(8, 4).value, 1)), whole(4, 8)
    forward = aten.nll_loss_forward.default
    total = forward(scores.value, targets.value, None, reduction, ignore)[1]
    gradient = real(8) if reduction == 0 else real()
    backward = (gradient, scores, targets, None, reduction, ignore, In(total))
    return [(forward, (scores, targets, None, reduction, ignore), {}), (aten.nll_loss_backward.default, backward, {})]


def masked_losses(reduction: int) -> list[Call]:
    """Scores that are masked away: minus infinity everywhere but at the targets and one more class."""
    targets = torch.arange(8) % 4
    away = torch.ones(8, 4, dtype=torch.bool).scatter(1, torch.stack([targets, (targets + 1) % 4], 1), False)
    scores = In(torch.log_softmax(real(8, 4).value.masked_fill(away, float("-inf")), 1))
    return [(aten.nll_loss_forward.default, (scores, In(targets), None, reduction, -100), {})]


def infinite_rows() -> Call:
    """A lookup in a table with infinities in rows that nothing asks for."""
    table = real(8, 4).value
    table[[1, 6]] = torch.inf
    return aten.embedding.default, (In(table), In(torch.tensor([[0, 2, 3, 4], [5, 7, 0, 2]])), -1), {}


def convolutions(*, bias: bool, transposed: bool = False, groups: int = 1) -> list[Call]:
    image = real(4, 4, 5, 5)
    weight = real(4, 4 // groups, 3, 3)
    options = ([1, 1], [1, 1], [1, 1], transposed, [0, 0], groups)
    shift = real(4) if bias else None
    forward = (image, weight, shift, *options)
    sizes = [4] if bias else None
    backward = (real(4, 4, 5, 5), image, weight, sizes, *options, [True, True, bias])
    return [(aten.convolution.default, forward, {}), (aten.convolution_backward.default, backward, {})]


def embeddings(padding: int, by_frequency: bool) -> list[Call]:
    ids = whole(8, 4, 4)
    forward = (aten.embedding.default, (real(8, 4), ids, padding), {})
    return [forward, (aten.embedding_dense_backward.default, (real(4, 4, 4), ids, 8, padding, by_frequency), {})]


def layer_norms() -> list[Call]:
    x, weight, bias = real(4, 8, 4), real(4), real(4)
    _, mean, rstd = aten.native_layer_norm.default(x.value, [4], weight.value, bias.value, 1e-5)
    saved = (In(mean), In(rstd), weight, bias, [True, True, True])
    frozen = (*saved[:3], None, [True, False, False])
    backward, gradient = aten.native_layer_norm_backward.default, real(4, 8, 4)
    return [(backward, (gradient, x, [4], *saved), {}), (backward, (gradient, x, [4], *frozen), {})]


def frozen_batch_norms() -> list[Call]:
    target, x, y, of_channels = aten._native_batch_norm_legit_no_training.default, real(4, 8, 4), real(4, 8), real(8)
    known = (real(8), In(real(8).value.square()), 0.1, 1e-5)
    return [(target, (x, of_channels, real(8), *known), {}), (target, (y, None, None, *known), {})]


def softmaxes(dim: int, shift: float = 0.0) -> list[Call]:
    """``shift`` moves all scores so far that their exponentials overflow."""
    x, gradient = In(real(4, 8).value + shift), real(4, 8)
    made: list[Call] = []
    for forward, backward in (
        (aten._softmax.default, aten._softmax_backward_data.default),
        (aten._log_softmax.default, aten._log_softmax_backward_data.default),
    ):
        made.append((forward, (x, dim, False), {}))
        made.append((backward, (gradient, In(forward(x.value, dim, False)), dim, f64), {}))
    return made


def ctc_losses() -> list[Call]:
    log_probs, targets = In(real(6, 4, 4).value.log_softmax(-1)), In(torch.tensor([[1, 2], [3, 3], [2, 9], [1, 1]]))
    given = log_probs, targets, In(torch.tensor([6, 5, 4, 3])), In(torch.tensor([2, 2, 1, 2])), 0, True
    return [(ctc_loss, given, {}), (ctc_loss_backward, (real(4), *given), {})]


def pools() -> list[Call]:
    flat, deep = ([2, 2], [2, 2]), ([2, 2, 2], [2, 2, 2])
    return [
        (aten.avg_pool2d_backward.default, (real(4, 4, 2, 2), real(4, 4, 4, 4), *flat, [0, 0], False, True, None), {}),
        (aten.avg_pool2d_backward.default, (real(4, 2, 2), real(4, 4, 4), *flat, [0, 0], False, True, None), {}),
        (
            aten.avg_pool3d_backward.default,
            (real(4, 4, 2, 2, 2), real(4, 4, 4, 4, 4), *deep, [0, 0, 0], False, True, None),
            {},
        ),
    ]


def weight_norms() -> list[Call]:
    direction, length = real(8, 4), real(8, 1)
    _, norms = aten._weight_norm_interface.default(direction.value, length.value, 0)
    backward = aten._weight_norm_interface_backward.default
    return [(backward, (real(8, 4), direction, length, In(norms), 0), {})]


def experts() -> list[Call]:
    """Four experts that take 2, 0, 5 and 1 of eight rows; torch's own kernel knows only bfloat16 here."""
    ends = In(torch.tensor([2, 2, 7, 8], dtype=torch.int32))
    rows, weights, gradient = (real(*shape) for shape in ((8, 8), (4, 8, 16), (8, 16)))
    small = [torch.randint(-2, 3, shape, generator=GENERATOR).bfloat16() for shape in ((8, 16), (4, 16, 32), (8, 32))]
    forward = torch.ops.transformers.grouped_mm_fallback.default
    backward = torch.ops.transformers.grouped_mm_fallback_backward.default
    order = In(torch.tensor([3, 5, 0, 1, 6, 7, 2, 4]))
    return [
        (forward, (rows, weights, ends), {}),
        (backward, (rows, weights, ends, gradient), {}),
        (aten._grouped_mm.default, (In(small[0]), In(small[1]), ends), {}),
        (aten._grouped_mm.default, (In(small[0].t().contiguous()), In(small[2]), ends), {}),
        (dispatch, (real(4, 8), order, order, 2), {}),
        (combine, (real(8, 8), order, order, 2), {}),
    ]


def matrices() -> list[Call]:
    """What of linear algebra is repeated over the leading dims; matrices far from singular."""
    square = In(real(4, 8, 4, 4).value + 4 * torch.eye(4))
    positive = In(square.value @ square.value.mT)
    lower, _ = aten.linalg_cholesky_ex.default(positive.value)
    factors, pivots, _ = aten.linalg_lu_factor_ex.default(square.value)
    triangle, right = In(lower), real(4, 8, 4, 2)
    left = {"upper": False, "left": True, "unitriangular": False}
    return [
        (aten._linalg_eigh.default, (positive, "L", False), {}),
        (aten.linalg_eig.default, (square,), {}),
        (aten._linalg_svd.default, (square, False, False), {}),
        (aten.linalg_qr.default, (square,), {}),
        (aten.linalg_inv_ex.default, (square,), {}),
        (aten.linalg_cholesky_ex.default, (positive,), {}),
        (aten.linalg_lu.default, (square,), {}),
        (aten.linalg_lu_factor_ex.default, (square,), {}),
        (aten.linalg_lu_solve.default, (In(factors), In(pivots), right), {}),
        (aten._linalg_solve_ex.default, (square, right), {}),
        (aten._linalg_solve_ex.default, (square, real(4, 8, 4)), {}),
        (aten.linalg_solve_triangular.default, (triangle, right), left),
        (aten.linalg_solve_triangular.default, (triangle, real(4, 8, 2, 4)), {**left, "left": False}),
        (aten.linalg_solve_triangular.default, (In(lower[0, 0]), real(4, 8)), left),
        (aten._linalg_solve_ex.default, (In(square.value[0, 0]), real(8, 4)), {"left": False}),
        (aten._linalg_det.default, (square,), {}),
        (aten._linalg_slogdet.default, (square,), {}),
        (aten.linalg_matrix_exp.default, (square,), {}),
        (aten.cholesky_inverse.default, (triangle,), {}),
        (aten._cholesky_solve_helper.default, (right, triangle, False), {}),
        (aten.diagonal.default, (square,), {}),
        (aten.diagonal.default, (square, 0, -2, -1), {}),
        (aten.diagonal.default, (square, 1, 0, 2), {}),
        (aten.diag_embed.default, (real(4, 8, 4),), {}),
        (aten.diag_embed.default, (real(4, 8, 4), 0, 0, 2), {}),
    ]


def repeated_pools() -> list[Call]:
    """Pools and pads that are repeated over batch and channels."""
    flat, deep = real(4, 4, 4, 4), real(4, 4, 4, 4, 4)
    window = ([2, 2, 2], [2, 2, 2], [0, 0, 0], [1, 1, 1], False)
    places = In(aten.max_pool3d_with_indices.default(deep.value, *window)[1])
    flat_places = In(aten.adaptive_max_pool2d.default(flat.value, [2, 2])[1])
    deep_places = In(aten.adaptive_max_pool3d.default(deep.value, [2, 2, 2])[1])
    calls: list[Call] = [
        (aten.max_pool3d_with_indices.default, (deep, *window), {}),
        (aten.max_pool3d_with_indices_backward.default, (real(4, 4, 2, 2, 2), deep, *window, places), {}),
        (aten.adaptive_max_pool2d.default, (flat, [2, 2]), {}),
        (aten.adaptive_max_pool2d_backward.default, (real(4, 4, 2, 2), flat, flat_places), {}),
        (aten.adaptive_max_pool3d.default, (deep, [2, 2, 2]), {}),
        (aten.adaptive_max_pool3d_backward.default, (real(4, 4, 2, 2, 2), deep, deep_places), {}),
        (aten._adaptive_avg_pool3d.default, (deep, [2, 2, 2]), {}),
        (aten._adaptive_avg_pool3d_backward.default, (real(4, 4, 2, 2, 2), deep), {}),
    ]
    for dims in (1, 2, 3):
        for kind in ("reflection", "replication"):
            forward, backward = (getattr(aten, f"{kind}_pad{dims}d{end}").default for end in ("", "_backward"))
            image, border = real(4, 4, *[4] * dims), [1, 2] * dims
            calls.append((forward, (image, border), {}))
            calls.append((backward, (real(4, 4, *[7] * dims), image, border), {}))
    return calls


def distances() -> list[Call]:
    """Between points, of equal batches and of a batch and one table."""
    a, b = real(4, 4, 8), real(4, 8, 8)
    gradient, calls = real(4, 4, 8), []
    for table in (b, real(1, 8, 8), real(8, 8)):
        between = In(aten._cdist_forward.default(a.value, table.value, 2.0, None))
        calls.append((aten._cdist_forward.default, (a, table, 2.0, None), {}))
        calls.append((aten._cdist_backward.default, (gradient, a, table, 2.0, between), {}))
    return [
        *calls,
        (aten._cdist_forward.default, (real(1, 4, 8), b, 1.0, None), {}),
        (aten._cdist_forward.default, (real(4, 8), real(8, 8), 2.0, None), {}),
        (aten.searchsorted.Tensor, (In(torch.arange(8)), whole(8, 4, 8)), {"right": True}),
        (aten.searchsorted.Tensor, (In(torch.arange(32).view(4, 8)), whole(32, 4, 8)), {"right": True}),
    ]


def gradients_of_draws() -> list[Call]:
    """Of gamma and Dirichlet numbers."""
    concentration, drawn = In(real(4, 8).value.exp()), In(real(4, 8).value.softmax(-1))
    total = In(concentration.value.sum(-1, keepdim=True).expand(4, 8).contiguous())
    return [
        (aten._standard_gamma_grad.default, (concentration, drawn), {}),
        (aten._standard_gamma_grad.default, (In(concentration.value[0]), drawn), {}),
        (aten._dirichlet_grad.default, (drawn, concentration, total), {}),
    ]


def samplers() -> list[Call]:
    """Images read at places between their pixels."""
    image, grid = real(4, 4, 4, 4), In(real(4, 4, 4, 2).value.tanh())
    deep, deep_grid = real(4, 4, 4, 4, 4), In(real(4, 4, 4, 4, 3).value.tanh())
    how = (0, 0, False)
    return [
        (aten.grid_sampler_2d.default, (image, grid, *how), {}),
        (aten.grid_sampler_2d_backward.default, (real(4, 4, 4, 4), image, grid, *how, [True, True]), {}),
        (aten.grid_sampler_3d.default, (deep, deep_grid, *how), {}),
        (aten.grid_sampler_3d_backward.default, (real(4, 4, 4, 4, 4), deep, deep_grid, *how, [True, True]), {}),
    ]


def transforms() -> list[Call]:
    """Fourier transforms, as those of long convolutions, and what their backward writes into."""
    return [
        (aten._conj_physical.default, (complex_numbers(4, 8),), {}),
        (aten._fft_c2c.default, (complex_numbers(4, 4, 8), [2], 0, True), {}),
        (aten._fft_r2c.default, (real(4, 4, 8), [2], 0, True), {}),
        (aten._fft_c2r.default, (complex_numbers(4, 4, 5), [2], 2, 8), {}),
        (aten.slice_scatter.default, (real(4, 8, 4), real(4, 4, 4), 1, 0, 4), {}),
        (aten.select_scatter.default, (real(4, 8, 4), real(4, 4), 1, 2), {}),
    ]


CALLS: list[Call] = [
    *(
        (getattr(aten, f"{op}_backward").default, (real(4, 8), real(4, 8)), {})
        for op in ("gelu", "sigmoid", "silu", "tanh", "hardsigmoid")
    ),
    (aten.native_dropout_backward.default, (real(4, 8), whole(2, 4, 8, boolean=True), 2.0), {}),
    *layer_norms(),
    *frozen_batch_norms(),
    (aten.threshold_backward.default, (real(4, 8), real(4, 8), 0), {}),
    *matrices(),
    *repeated_pools(),
    *distances(),
    *gradients_of_draws(),
    *samplers(),
    *transforms(),
    (gather_experts, ([real(4, 8) for _ in range(4)],), {}),
    (part_experts, (real(4, 4, 8),), {}),
    (aten.hardshrink_backward.default, (real(4, 8), real(4, 8), 0.5), {}),
    *((aten.scatter_reduce.two, (real(4, 8), 1, whole(8, 4, 4), real(4, 4), how), {}) for how in ("sum", "amax")),
    (aten.gather.default, (real(4, 8), 1, whole(8, 4, 4)), {}),
    (aten.gather.default, (real(4, 8), 0, whole(4, 6, 8)), {}),
    (aten.scatter_add.default, (real(4, 8), 1, whole(8, 4, 4), real(4, 4)), {}),
    (aten.scatter_add.default, (real(4, 8), 0, whole(4, 6, 8), real(6, 8)), {}),
    (aten.index_add.default, (real(4, 8), 0, whole(4, 6), real(6, 8)), {}),
    (aten.index_add.default, (real(4, 8), -1, whole(8, 6), real(4, 6)), {"alpha": 2}),
    (aten.scatter_reduce.two, (real(4, 8), 0, whole(4, 6, 8), real(6, 8), "amax"), {}),
    (aten.scatter_reduce.two, (real(4, 8), 0, whole(4, 6, 8), real(6, 8), "amin"), {"include_self": False}),
    (aten.scatter_reduce.two, (real(4, 8), 0, whole(4, 6, 8), real(6, 8), "mean"), {}),
    (aten.mean.default, (real(4, 8),), {}),
    *((aten.mean.dim, (real(4, 8, 4), [-1], keep), {}) for keep in (True, False)),
    (aten.clone.default, (real(4, 8),), {}),
    *((view, (real(4, 8, 4), shape), {}) for view in VIEWS for shape in ([32, 4], [4, 4, 2, 4], [4, 32], [128])),
    (aten.view.default, (real(4, 1, 8), [1, 4, 8]), {}),
    (aten.expand.default, (real(4, 1, 8), [4, 4, 4, 8]), {}),
    (aten.expand.default, (real(4, 1, 8), [-1, 4, -1]), {}),
    (aten.full.default, ([4, 8], 2.5), {"dtype": f64}),
    (aten.zeros.default, ([4, 8],), {"dtype": f64}),
    (aten.ones.default, ([4, 8],), {"dtype": f64}),
    (aten.scalar_tensor.default, (2.5,), {"dtype": f64}),
    (aten.arange.default, (8,), {}),
    (aten.arange.start, (2, 10), {}),
    (aten.arange.start_step, (0, 16, 2), {}),
    (aten.linspace.default, (0, 1, 8), {"dtype": f64}),
    (aten.eye.default, (8,), {"dtype": f64}),
    (aten.full_like.default, (real(4, 8), 2.5), {}),
    (aten.zeros_like.default, (real(4, 8),), {}),
    (aten.new_zeros.default, (real(4, 8), [8, 4]), {}),
    (aten.scatter.src, (real(4, 8), 1, In(torch.arange(4).expand(4, 4).contiguous()), real(4, 4)), {}),
    (aten.ones_like.default, (real(4, 8),), {}),
    (aten.tril.default, (real(4, 8, 8),), {}),
    (aten.triu.default, (real(4, 4, 8, 8), 1), {}),
    (aten.unfold.default, (real(4, 8, 4), -2, 4, 2), {}),
    (aten.unfold_backward.default, (real(4, 3, 4, 4), [4, 8, 4], 1, 4, 2), {}),
    (aten.polar.default, (real(4, 8), real(4, 8)), {}),
    (aten.complex.default, (real(4, 8), real(4, 8)), {}),
    (aten.index_put.default, (real(4, 8), [whole(4, 4)], real(4, 8), True), {}),
    (aten.index_put.default, (real(4, 8), [whole(4, 4, 2), whole(8, 4, 2)], real(4, 2), True), {}),
    (aten.index_put.default, (real(4, 8), [None, whole(8, 4)], real(4, 4), True), {}),
    (aten.index_put.default, (real(4, 8), [In(torch.arange(4).flip(0))], real(4, 8)), {}),
    (aten.index_select.default, (real(4, 8), 0, whole(4, 8)), {}),
    *pools(),
    *weight_norms(),
    *experts(),
    *attention(False),
    *attention(True),
    *attention(False, real(4, 1, 8, 8)),
    *attention(False, real(8, 8)),
    *attention(True, key_heads=1),
    *embeddings(-1, False),
    *embeddings(3, False),
    infinite_rows(),
    *softmaxes(0),
    *softmaxes(1),
    *softmaxes(-1),
    *softmaxes(1, 1000.0),
    # Rows and columns of one size: a shard of the wrong one fits, too.
    *((aten.logsumexp.default, (real(4, 8, 4, 4), *how), {}) for how in (([1], True), ([1],), ([-1, 0], True), ([2],))),
    *losses(0, -100),
    *losses(1, -100),
    *losses(1, 2),
    *losses(2, 2),
    *(call for reduction in (0, 1, 2) for call in masked_losses(reduction)),
    (aten.where.self, (whole(2, 4, 8, boolean=True), real(4, 8), real(4, 8)), {}),
    (aten.where.self, (whole(2, 8, boolean=True), real(4, 8), real()), {}),
    *ctc_losses(),
    *convolutions(bias=True),
    *convolutions(bias=False),
    *convolutions(bias=True, groups=4),
    *convolutions(bias=False, groups=4),
    *convolutions(bias=True, groups=2),
    *convolutions(bias=False, transposed=True),
    *convolutions(bias=False, transposed=True, groups=2),
    (cast_parameter, (whole(9, 4, 8), f64), {}),
    (cast_gradient, (whole(9, 4, 8), f64), {}),
    (random_uniform, (In(torch.tensor(7)), 3, [4, 8], [In(torch.arange(4)[:, None]), In(torch.arange(8)[None])]), {}),
    (aten.stack.default, ([real(4, 8), real(4, 8)], 1), {}),
]
# Operators with torch's own rules, as models use them.
TORCH_CALLS: list[Call] = [
    (aten.mm.default, (real(4, 8), real(8, 4)), {}),
    (aten.bmm.default, (real(4, 8, 4), real(4, 4, 8)), {}),
    (aten.addmm.default, (real(8), real(4, 8), real(8, 8)), {}),
    (aten.addmm.default, (real(8), real(4, 8), real(8, 8)), {"beta": 2, "alpha": 3}),
    (aten.baddbmm.default, (real(4, 8, 8), real(4, 8, 4), real(4, 4, 8)), {"beta": 0.5}),
    (aten.t.default, (real(4, 8),), {}),
    (aten.transpose.int, (real(4, 8, 4), 0, 2), {}),
    (aten.permute.default, (real(4, 8, 4), [2, 0, 1]), {}),
    (aten.unsqueeze.default, (real(4, 8), 1), {}),
    (aten.squeeze.dim, (real(4, 1, 8), 1), {}),
    *(
        (op, (real(4, 8, 4), dim), {})
        for op in (aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default)
        for dim in (-1, -2, 1)
    ),
    (aten.unsqueeze.default, (real(4, 8), -1), {}),
    *(
        (op, (real(4, 8), real(4, 8)), {})
        for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
    ),
    *((op, (real(4, 8), real(8)), {}) for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)),
    *((op, (real(4, 8), 3.0), {}) for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)),
    *((op, (real(4, 8), real()), {}) for op in (aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor)),
    (aten.add.Tensor, (real(4, 8), real(4, 8)), {"alpha": 2}),
    (aten.rsub.Scalar, (real(4, 8), 2.0), {}),
    *(
        (getattr(aten, op).default, (real(4, 8),), {})
        for op in ("relu", "neg", "exp", "tanh", "gelu", "silu", "sigmoid")
    ),
    (aten.pow.Tensor_Scalar, (real(4, 8), 2), {}),
    (aten.pow.Tensor_Scalar, (real(4, 8), 1), {}),
    (aten.pow.Scalar, (2.0, real(4, 8)), {}),
    (aten._to_copy.default, (real(4, 8),), {"dtype": torch.float32}),
    (aten._to_copy.default, (real(4, 8),), {"dtype": torch.int64}),
    (aten.clamp.default, (real(4, 8), -0.5, 0.5), {}),
    (aten.sum.default, (real(4, 8),), {}),
    *((aten.sum.dim_IntList, (real(4, 8, 4), [0, 2], keep), {}) for keep in (True, False)),
    *((op, (real(4, 8), [1], True), {}) for op in (aten.amax.default, aten.amin.default)),
    (aten.max.dim, (real(4, 8), 1), {}),
    (aten.var.correction, (real(4, 8), [1]), {"correction": 1, "keepdim": True}),
    (aten.cumsum.default, (real(4, 8), 1), {}),
    (aten.argmax.default, (real(4, 8), 1), {}),
    (aten.topk.default, (real(4, 8), 4), {}),
    (aten.native_layer_norm.default, (real(4, 8, 4), [4], real(4), real(4), 1e-5), {}),
    (aten._fused_rms_norm.default, (real(4, 8, 4), [4], real(4), 1e-5), {}),
    (aten.cat.default, ([real(4, 8), real(8, 8)], 0), {}),
    (aten.split.Tensor, (real(4, 8), 4, 1), {}),
    (aten.slice.Tensor, (real(4, 8), 1, 0, 4), {}),
    (aten.slice.Tensor, (real(4, 8), 1, 0, 9223372036854775807), {}),
    (aten.slice_backward.default, (real(4, 4), [4, 8], 1, 0, 4, 1), {}),
    (aten.select.int, (real(4, 8), 1, 3), {}),
    (aten.select_backward.default, (real(4), [4, 8], 1, 3), {}),
    (aten.select_backward.default, (real(4), [4, 8], -1, 3), {}),
    (aten.index.Tensor, (real(4, 8), [whole(4, 4)]), {}),
    (aten.index.Tensor, (real(4, 8), [None, whole(8, 4)]), {}),
    (aten.index_put.default, (real(4, 8), [whole(2, 4, 8, boolean=True)], real()), {}),
    (aten.index_select.default, (real(4, 8), 0, whole(4, 4)), {}),
    *(
        (backward.default, (real(4, 4, 4, 4), [4, 4], [4, 4, 2, 2], *more), {})
        for backward, more in (
            (aten.upsample_nearest2d_backward, ()),
            (aten.upsample_bilinear2d_backward, (False,)),
            (aten._upsample_bicubic2d_aa_backward, (False,)),
        )
    ),
    (aten.flip.default, (real(4, 8), [1]), {}),
    (aten.roll.default, (real(4, 8), [1], [1]), {}),
    (aten.repeat.default, (real(4, 8), [2, 1]), {}),
    (aten.constant_pad_nd.default, (real(4, 8), [1, 3], 0.0), {}),
    (aten.masked_fill.Scalar, (real(4, 8), whole(2, 4, 8, boolean=True), 2.0), {}),
    (aten.where.ScalarSelf, (whole(2, 4, 8, boolean=True), 1.0, real(4, 8)), {}),
    (aten.eq.Scalar, (whole(4, 4, 8), 2), {}),
    (aten.linalg_vector_norm.default, (real(4, 8), 2, [1], True), {}),
    (aten.linalg_vector_norm.default, (real(4, 8), 2), {}),
]
# What these give is memory that nobody wrote, or numbers that torch draws anew.
WITHOUT_VALUES = {aten.empty.memory_format, aten.empty_like.default, aten.randperm.default}
