"""Shadow experts: the weights that owners lend to all ranks, and the gradients that they get back.

Every rank computes the shadows for its own tokens, so their rows do not travel. Which experts have shadows is data
(:data:`galvatron_fx.ir.kernels.experts.shadows`). He et al. 2022 (FasterMoE) name them so; Nie et al. 2023
(FlexMoE) replicate experts by the loads of the steps before.
"""

from __future__ import annotations

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import local_index
from galvatron_fx.ir.graph.local_program import record_program
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.kernels.experts import give_back, lend, place_by_rank, with_shadows
from passes.sharding.emitter import Emitter

__all__ = ["lent_weights", "returned_gradients", "shadows_of"]

_PROGRAM = "shadow experts"


def shadows_of(ends: fx.Node) -> fx.Node:
    """The node that says which experts have shadows; ``ends``: of the rows of a rank's experts."""
    node = ends
    while node.target is not place_by_rank:
        node = node.all_input_nodes[-1]  # of counts, those of shadows
    return node.all_input_nodes[1]


def lent_weights(e: Emitter, weights: fx.Node, shadows: fx.Node) -> fx.Node:
    """Write what a rank computes with: the weights of its own experts, and of shadows behind them."""
    spec = meta_of(weights).spec
    num_experts, *rest = spec.shape
    num_shadows = meta_of(shadows).spec.shape[0]
    lent_spec = TensorSpec((num_shadows, *rest), spec.dtype)
    lent = e.reduced(e.emit(lend, (weights, _own(e, shadows, num_experts)), lent_spec))
    whole = e.emit(with_shadows, (weights, lent), TensorSpec((num_experts + num_shadows, *rest), spec.dtype))
    _record(e, whole, weights)
    return whole


def returned_gradients(e: Emitter, gradients: fx.Node, shadows: fx.Node) -> fx.Node:
    """Write the gradients of a rank's own experts; ``gradients``: of these, and of shadows behind them."""
    spec = meta_of(gradients).spec
    whole, *rest = spec.shape
    num_shadows = meta_of(shadows).spec.shape[0]
    num_experts = whole - num_shadows
    of_shadows = TensorSpec((num_shadows, *rest), spec.dtype)
    lent = e.reduced(e.emit(torch.ops.aten.slice.Tensor, (gradients, 0, num_experts, whole), of_shadows))
    args = gradients, lent, _own(e, shadows, num_experts)
    own = e.emit(give_back, args, TensorSpec((num_experts, *rest), spec.dtype))
    _record(e, own, gradients)
    return own


def _own(e: Emitter, shadows: fx.Node, num_experts: int) -> fx.Node:
    """The numbers of experts among those that the rank holds."""
    return e.emit(local_index, (shadows, num_experts, e.axis), meta_of(shadows).spec)


def _record(e: Emitter, result: fx.Node, source: fx.Node) -> None:
    """What ends a program lies as what it began with."""
    placements = meta_of(source).placements
    record_program(_PROGRAM, e.written, {result: placements}, len(placements[0]))
