"""Rules of operators that do the same to every sample, and that torch has no rule for, or a wrong one.

All their tensors have the batch (and what else the operator repeats itself over) in the same leading dims.
"""

from __future__ import annotations

from typing import TypeGuard

import torch

from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Placement, Shard
from galvatron_fx.ir.kernels.ctc import ctc_loss, ctc_loss_backward
from passes.sharding.rules import OpRule, register_rule

aten = torch.ops.aten

# Operators by how many of the last dims of their first tensor belong together.
POOLS = {
    aten.max_pool3d_with_indices.default: 3,
    aten.max_pool3d_with_indices_backward.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool2d_backward.default: 2,
    aten.adaptive_max_pool3d.default: 3,
    aten.adaptive_max_pool3d_backward.default: 3,
    aten._adaptive_avg_pool3d.default: 3,
    aten._adaptive_avg_pool3d_backward.default: 3,
}
PADS = {
    aten.reflection_pad1d.default: 1,
    aten.reflection_pad1d_backward.default: 1,
    aten.reflection_pad2d.default: 2,
    aten.reflection_pad2d_backward.default: 2,
    aten.reflection_pad3d.default: 3,
    aten.reflection_pad3d_backward.default: 3,
    aten.replication_pad1d.default: 1,
    aten.replication_pad1d_backward.default: 1,
    aten.replication_pad2d.default: 2,
    aten.replication_pad2d_backward.default: 2,
    aten.replication_pad3d.default: 3,
    aten.replication_pad3d_backward.default: 3,
}
MATRICES = dict.fromkeys(
    (
        aten._linalg_eigh.default,
        aten.linalg_eig.default,
        aten._linalg_svd.default,
        aten.linalg_qr.default,
        aten.linalg_inv_ex.default,
        aten.linalg_cholesky_ex.default,
        aten.linalg_lu.default,
        aten.linalg_lu_factor_ex.default,
        aten.linalg_lu_solve.default,
        aten._linalg_solve_ex.default,
        aten.linalg_solve_triangular.default,
        aten._linalg_det.default,
        aten._linalg_slogdet.default,
        aten.linalg_matrix_exp.default,
        aten.cholesky_inverse.default,
        aten._cholesky_solve_helper.default,
    ),
    2,
)
ELEMENTWISE = dict.fromkeys((aten.hardshrink_backward.default,), 0)
BATCHED = {**POOLS, **PADS, **MATRICES, **ELEMENTWISE}
# They give sums for sums: of the input (or gradient) that comes first.
LINEAR = {*PADS, *(op for op in POOLS if "backward" in op.name() or "avg" in op.name())}


# Solves, by which of their tensors has the right-hand sides: each is solved by itself, and sums give sums.
SOLVES = {
    aten.linalg_lu_solve.default: 2,
    aten.linalg_solve_triangular.default: 1,
    aten._linalg_solve_ex.default: 1,
    aten._cholesky_solve_helper.default: 0,
}


@register_rule(*BATCHED)
def _batched(call: OpCall, degree: int) -> list[OpRule]:
    """Split any of the leading dims, where all tensors have them, and right-hand sides of solves."""
    first = call.inputs[0].shape
    lead = first[: len(first) - BATCHED[call.target]]
    rules = []
    if all(spec.shape[: len(lead)] == lead for spec in (*call.inputs, *call.outputs) if _is_there(spec)):
        for dim in range(len(lead)):
            rules.append(OpRule(_placed(call.outputs, Shard(dim)), _placed(call.inputs, Shard(dim))))
    if call.target in LINEAR and len(call.outputs) == 1:
        rules.append(OpRule((PARTIAL,), (PARTIAL, *(REPLICATE,) * (len(call.inputs) - 1))))
    return [*rules, *_solved(call)]


def _solved(call: OpCall) -> list[OpRule]:
    """Rules of the right-hand sides of a solve: columns, or rows where they stand left of the matrix."""
    position = SOLVES.get(call.target)
    if position is None:
        return []
    sides, solution = call.inputs[position].shape, call.outputs[0]
    placements: list[Placement] = [PARTIAL]
    if solution is not None and solution.shape == sides and len(sides) >= len(call.inputs[position - 1].shape):
        placements.append(Shard(len(sides) - (1 if dict(call.kwargs).get("left", True) else 2)))
    others = (REPLICATE,) * (len(call.outputs) - 1)
    return [
        OpRule((each, *others), tuple(each if at == position else REPLICATE for at in range(len(call.inputs))))
        for each in placements
    ]


def _is_there(spec: TensorSpec | None) -> TypeGuard[TensorSpec]:
    """Some outputs are absent, or empty where they are not asked for."""
    return spec is not None and 0 not in spec.shape


def _placed(specs: tuple[TensorSpec | None, ...] | tuple[TensorSpec, ...], shard: Shard) -> tuple[Placement, ...]:
    return tuple(shard if _is_there(spec) else REPLICATE for spec in specs)


@register_rule(aten.diagonal.default)
def _diagonal(call: OpCall, degree: int) -> list[OpRule]:
    """x, (offset), (one dim), (another) -> the other dims, in order, and the diagonal: split the others; linear."""
    rank = len(call.inputs[0].shape)
    square = {int(dim) % rank for dim in (*call.args[2:4], *(0, 1)[len(call.args[2:4]) :])}
    others = [dim for dim in range(rank) if dim not in square]
    rules = [OpRule((Shard(after),), (Shard(before),)) for after, before in enumerate(others)]
    return [*rules, OpRule((PARTIAL,), (PARTIAL,))]


@register_rule(aten.diag_embed.default)
def _diagonal_matrices(call: OpCall, degree: int) -> list[OpRule]:
    """x, (offset), (one dim), (another): its last dim becomes two: split the others; linear."""
    rank = len(call.output.shape)
    square = {int(dim) % rank for dim in (*call.args[2:4], *(-2, -1)[len(call.args[2:4]) :])}
    others = [dim for dim in range(rank) if dim not in square]
    rules = [OpRule((Shard(after),), (Shard(before),)) for before, after in enumerate(others)]
    return [*rules, OpRule((PARTIAL,), (PARTIAL,))]


@register_rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def _grid_sampler(call: OpCall, degree: int) -> list[OpRule]:
    """input [batch, channels, ...], grid [batch, ..., 2 or 3] -> [batch, channels, ...]: split either; linear."""
    return [
        OpRule((Shard(0),), (Shard(0), Shard(0))),
        OpRule((Shard(1),), (Shard(1), REPLICATE)),
        OpRule((PARTIAL,), (PARTIAL, REPLICATE)),
    ]


@register_rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def _grid_sampler_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient, input, grid -> gradients of input and grid, which all channels have in common."""
    return [
        OpRule((Shard(0), Shard(0)), (Shard(0),) * 3),
        OpRule((Shard(1), PARTIAL), (Shard(1), Shard(1), REPLICATE)),
    ]


@register_rule(aten._cdist_forward.default)
def _distances(call: OpCall, degree: int) -> list[OpRule]:
    """a [..., P, M], b [..., R, M] -> [..., P, R]: split the batch, the points of a, or those of b."""
    rows = len(call.output.shape) - 2
    of_a = OpRule((Shard(rows),), (_points(call, 0), REPLICATE))
    return [*_of_batch(call, rows), of_a, OpRule((Shard(rows + 1),), (REPLICATE, _points(call, 1)))]


@register_rule(aten._cdist_backward.default)
def _distances_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient [..., P, R], a, b, (p), distances [..., P, R] -> [..., P, M]: a sum over the points of b; linear."""
    rows = len(call.output.shape) - 2
    of_a = OpRule((Shard(rows),), (Shard(rows), _points(call, 1), REPLICATE, Shard(rows)))
    of_b = OpRule((PARTIAL,), (Shard(rows + 1), REPLICATE, _points(call, 2), Shard(rows + 1)))
    return [*_of_batch(call, rows), of_a, of_b, OpRule((PARTIAL,), (PARTIAL, REPLICATE, REPLICATE, REPLICATE))]


def _of_batch(call: OpCall, dims: int) -> list[OpRule]:
    """Split one of the first ``dims`` of the output: whole are the inputs that are repeated along it."""

    def of_input(spec: TensorSpec, dim: int) -> Placement:
        at = dim + len(spec.shape) - len(call.output.shape)
        return Shard(at) if at >= 0 and spec.shape[at] == call.output.shape[dim] else REPLICATE

    return [OpRule((Shard(dim),), tuple(of_input(spec, dim) for spec in call.inputs)) for dim in range(dims)]


def _points(call: OpCall, position: int) -> Shard:
    return Shard(len(call.inputs[position].shape) - 2)


@register_rule(aten._standard_gamma_grad.default, aten._dirichlet_grad.default)
def _gradients_of_draws(call: OpCall, degree: int) -> list[OpRule]:
    """By what a random number changes with what it was drawn by; each element by itself: split any dim."""
    return _of_batch(call, len(call.output.shape))


_CTC = (Shard(1), Shard(0), Shard(0), Shard(0))


@register_rule(ctc_loss)
def _ctc(call: OpCall, degree: int) -> list[OpRule]:
    """log_probs [T, B, C], targets [B, S], lengths of both [B] -> losses [B]: split the batch."""
    return [OpRule((Shard(0),), _CTC)]


@register_rule(ctc_loss_backward)
def _ctc_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient [B], log_probs [T, B, C], targets [B, S], lengths of both [B] -> [T, B, C]: likewise; linear."""
    return [OpRule((Shard(1),), (Shard(0), *_CTC)), OpRule((PARTIAL,), (PARTIAL, *(REPLICATE,) * 4))]


@register_rule(aten.searchsorted.Tensor)
def _searches(call: OpCall, degree: int) -> list[OpRule]:
    """sorted [n], values [...] -> places [...]: split the values. Or sorted [..., n], values [..., m] -> [..., m], row
    by row; an order [..., n] of what is sorted may come third.
    """
    in_one_row, last = len(call.inputs[0].shape) == 1, len(call.output.shape) - 1
    rules = []
    for dim in range(last + 1):
        rows: Placement = REPLICATE if in_one_row or dim == last else Shard(dim)
        rules.append(OpRule((Shard(dim),), (rows, Shard(dim), rows)[: len(call.inputs)]))
    return rules
