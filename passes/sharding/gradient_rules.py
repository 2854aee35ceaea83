"""Sharding rules of backward's operators on what forward had: linear in the gradient, of whose terms each goes alone.

Terms come where backward leaves what all samples share: a network that makes the weights or biases of others from
positions. Micro-batches, which cannot talk to each other, need to go on with them.
"""

from __future__ import annotations

import torch

from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import PARTIAL, REPLICATE, Shard
from passes.sharding.rules import OpRule, register_rule, torch_rules

aten = torch.ops.aten


def linear_in_gradient(call: OpCall) -> OpRule:
    """The rule of terms of the gradient, the first input."""
    return OpRule((PARTIAL,) * len(call.outputs), (PARTIAL, *(REPLICATE,) * (len(call.inputs) - 1)))


@register_rule(
    aten.gelu_backward.default, aten.native_dropout_backward.default, aten.sigmoid_backward.default,
    aten.silu_backward.default, aten.tanh_backward.default, aten.threshold_backward.default,
)  # fmt: skip
def _as_torch_says(call: OpCall, degree: int) -> list[OpRule]:
    return [*torch_rules(call, degree), linear_in_gradient(call)]


@register_rule(aten.hardsigmoid_backward.default)
def _element_by_element(call: OpCall, degree: int) -> list[OpRule]:
    """gradient, input. Broken up, it would divide by 6 more exactly than the operator does."""
    return [
        *(OpRule((Shard(dim),), (Shard(dim),) * 2) for dim in range(len(call.output.shape))),
        linear_in_gradient(call),
    ]


@register_rule(aten.native_layer_norm_backward.default)
def _layer_norm(call: OpCall, degree: int) -> list[OpRule]:
    """gradient, x, (shape), mean, rstd, weight, bias -> those of x, and of weight and bias as sums over rows.

    Torch's rule has nothing of a weight without a bias that is frozen, as that of an adapter's model.
    """
    rows = len(call.inputs[0].shape) - len(call.args[2])
    others = (REPLICATE,) * (len(call.inputs) - 4)
    split = [OpRule((Shard(dim), PARTIAL, PARTIAL), ((Shard(dim),) * 4 + others)) for dim in range(rows)]
    return [*split, linear_in_gradient(call)]
