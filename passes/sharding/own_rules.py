"""Sharding rules of our own: views that keep strided shards, factories, vocabulary-parallel operators."""

from __future__ import annotations

import operator

import torch

from galvatron_fx.ir.graph.op_call import OpCall
from galvatron_fx.ir.graph.placement import (
    PARTIAL,
    REPLICATE,
    ROUTED_ENDS,
    Exchanged,
    Partial,
    Placement,
    Shard,
    kept_by_view,
    through_view,
)
from galvatron_fx.ir.graph.precision import cast_gradient, cast_parameter
from passes.sharding.gradient_rules import linear_in_gradient
from passes.sharding.rules import OpRule, register_rule, torch_rules

aten = torch.ops.aten

VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
FACTORIES = (
    aten.full.default,
    aten.zeros.default,
    aten.ones.default,
    aten.empty.memory_format,
    aten.scalar_tensor.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.eye.default,
    aten.randperm.default,
)
_UNIFORM_FACTORIES = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
FILLS = (
    aten.full_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
)


def view_rules(call: OpCall, candidates: list[Placement], degree: int) -> list[OpRule]:
    """Rules of a reshape for the shards its input may come in and those its plain output shards need."""
    source, target = call.inputs[0].shape, call.output.shape
    rules = [OpRule((placed,), (placed,)) for placed in (PARTIAL, *{ROUTED_ENDS}.intersection(candidates))]
    shards = [p for p in candidates if isinstance(p, Shard)]
    for shard in shards:
        after = through_view(shard, source, target, degree)
        if after is not None:
            rules.append(OpRule((after,), (shard,)))
    for exchanged in (p for p in candidates if isinstance(p, Exchanged)):
        kept = kept_by_view(exchanged, source, target)
        if kept is not None:
            rules.append(OpRule((kept,), (exchanged,)))
    for dim in range(len(target)):
        if target[dim] % degree == 0:
            before = through_view(Shard(dim), target, source, degree)
            if before is not None:
                rules.append(OpRule((Shard(dim),), (before,)))
    return rules


@register_rule(*VIEWS)
def _view(call: OpCall, degree: int) -> list[OpRule]:
    source = call.inputs[0].shape
    plain: list[Placement] = [Shard(dim) for dim in range(len(source)) if source[dim] % degree == 0]
    return view_rules(call, plain, degree)


@register_rule(cast_parameter, cast_gradient, aten._conj_physical.default)
def _as_it_comes(call: OpCall, degree: int) -> list[OpRule]:
    """Terms of a sum too, which are then summed in the dtype that they are cast to."""
    shards = (Shard(dim) for dim in range(len(call.output.shape)))
    placements: list[Placement] = [*shards, PARTIAL, Partial("avg")]
    return [OpRule((placement,), (placement,)) for placement in placements]


@register_rule(aten.expand.default)
def _expand(call: OpCall, degree: int) -> list[OpRule]:
    source, target = call.inputs[0].shape, call.output.shape
    lead = len(target) - len(source)
    rules = [OpRule((PARTIAL,), (PARTIAL,))]
    for dim, size in enumerate(target):
        grown = dim < lead or source[dim - lead] != size
        rules.append(OpRule((Shard(dim),), (REPLICATE if grown else Shard(dim - lead),)))
    return rules


@register_rule(*FACTORIES)
def _factory(call: OpCall, degree: int) -> list[OpRule]:
    if call.target not in _UNIFORM_FACTORIES:
        return []
    return [*_zero_terms(call), *(OpRule((Shard(dim),), ()) for dim in range(len(call.output.shape)))]


def _zero_terms(call: OpCall) -> list[OpRule]:
    """Zeros are terms of a sum as well."""
    filled = aten.full.default, aten.full_like.default
    zeros = aten.zeros.default, aten.zeros_like.default
    is_zero = call.target in zeros or (call.target in filled and call.args[1] == 0)
    sources: list[Placement] = [REPLICATE, PARTIAL] if call.inputs else [REPLICATE]
    return [OpRule((PARTIAL,), (source,) * len(call.inputs)) for source in sources] if is_zero else []


@register_rule(*FILLS)
def _fill(call: OpCall, degree: int) -> list[OpRule]:
    """The result does not depend on the input's values, so the input may come in any way that gives the right sizes."""
    rules = [OpRule((Shard(dim),), (Shard(dim),)) for dim in range(len(call.output.shape))]
    return [*rules, OpRule((REPLICATE,), (PARTIAL,)), *_zero_terms(call)]


@register_rule(aten.new_zeros.default)
def _new_zeros(call: OpCall, degree: int) -> list[OpRule]:
    """As torch says; and zeros are terms of a sum as well."""
    return [*torch_rules(call, degree), *(OpRule((PARTIAL,), (source,)) for source in (REPLICATE, PARTIAL))]


@register_rule(aten.tril.default, aten.triu.default)
def _triangle(call: OpCall, degree: int) -> list[OpRule]:
    """[..., rows, columns]: split what comes before the matrices; of a sum, each term has its triangle."""
    rules = [OpRule((Shard(dim),), (Shard(dim),)) for dim in range(len(call.output.shape) - 2)]
    return [*rules, OpRule((PARTIAL,), (PARTIAL,))]


@register_rule(aten.unfold.default, aten.unfold_backward.default)
def _windows(call: OpCall, degree: int) -> list[OpRule]:
    """Windows along one dim, each in a new last dim, or what they are made of: split the others; linear."""
    forward = call.target is aten.unfold.default
    whole, dim = (call.inputs[0], call.args[1]) if forward else (call.output, call.args[2])
    rank = len(whole.shape)
    rules = [OpRule((Shard(at),), (Shard(at),)) for at in range(rank) if at != int(dim) % rank]
    return [*rules, OpRule((PARTIAL,), (PARTIAL,))]


@register_rule(
    aten.mean.default,
    aten.mean.dim,
    aten.clone.default,
    aten.stack.default,
    aten.slice_scatter.default,
    aten.select_scatter.default,
)
def _linear(call: OpCall, degree: int) -> list[OpRule]:
    """As torch says; and of the terms of a sum each by itself."""
    return [*torch_rules(call, degree), OpRule((PARTIAL,), (PARTIAL,) * len(call.inputs))]


@register_rule(aten._fft_c2c.default, aten._fft_c2r.default, aten._fft_r2c.default)
def _transform(call: OpCall, degree: int) -> list[OpRule]:
    """As torch says, but for the largest and smallest of terms: the transform of these is no largest of transforms."""
    sums = {PARTIAL, Partial("avg")}
    return [
        rule
        for rule in torch_rules(call, degree)
        if all(place in sums for place in rule.inputs if isinstance(place, Partial))
    ]


@register_rule(aten.where.self)
def _where(call: OpCall, degree: int) -> list[OpRule]:
    """condition, chosen, other, broadcast against each other: split alike, or choose between terms of sums."""
    target = call.output.shape
    rules = [OpRule((PARTIAL,), (REPLICATE, PARTIAL, PARTIAL))]
    for dim in range(len(target)):
        places: list[Placement] = []
        for spec in call.inputs:
            input_dim = dim - (len(target) - len(spec.shape))
            places.append(Shard(input_dim) if input_dim >= 0 and spec.shape[input_dim] == target[dim] else REPLICATE)
        rules.append(OpRule((Shard(dim),), tuple(places)))
    return rules


@register_rule(aten.polar.default, aten.complex.default)
def _complex(call: OpCall, degree: int) -> list[OpRule]:
    """Two tensors, element by element; parts of a complex number, unlike its length and angle, may be terms."""
    if call.inputs[0].shape != call.inputs[1].shape:
        return []
    terms = [OpRule((PARTIAL,), (PARTIAL,) * 2)] if call.target is aten.complex.default else []
    return [*terms, *(OpRule((Shard(dim),), (Shard(dim),) * 2) for dim in range(len(call.output.shape)))]


@register_rule(operator.getitem)
def _getitem(call: OpCall, degree: int) -> list[OpRule]:
    raise AssertionError("getitem takes the placement of the output that it picks")


def argument(call: OpCall, position: int, name: str, default: object) -> object:
    """An argument of a call, by position or by name."""
    if len(call.args) > position:
        return call.args[position]
    return dict(call.kwargs).get(name, default)


@register_rule(aten.embedding.default)
def _embedding(call: OpCall, degree: int) -> list[OpRule]:
    """weight [vocabulary, hidden], ids [...]: split ids, hidden, or the vocabulary (each rank looks up its own
    rows).
    """
    ids = call.inputs[1].shape
    rules = [OpRule((Shard(dim),), (REPLICATE, Shard(dim))) for dim in range(len(ids))]
    rules.append(OpRule((Shard(len(ids)),), (Shard(1), REPLICATE)))
    return [*rules, OpRule((PARTIAL,), (Shard(0), REPLICATE), "vocabulary_embedding")]


@register_rule(aten.embedding_dense_backward.default)
def _embedding_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient [..., hidden], ids [...] -> [vocabulary, hidden].

    Where the gradient is scaled by frequency every rank needs all ids: how often each occurs divides its gradient.
    """
    ids, by_frequency = call.inputs[1].shape, call.args[4]
    rules = [] if by_frequency else [OpRule((PARTIAL,), (Shard(dim), Shard(dim))) for dim in range(len(ids))]
    rules.append(OpRule((Shard(1),), (Shard(len(ids)), REPLICATE)))
    rules.append(OpRule((PARTIAL,), (PARTIAL, REPLICATE)))
    return [*rules, OpRule((Shard(0),), (REPLICATE, REPLICATE), "vocabulary_embedding_backward")]


@register_rule(aten._log_softmax.default, aten._softmax.default)
def _softmax(call: OpCall, degree: int) -> list[OpRule]:
    ndim = len(call.output.shape)
    axis = int(call.args[1]) % ndim if ndim else 0
    rules = [OpRule((Shard(dim),), (Shard(dim),)) for dim in range(ndim) if dim != axis]
    if call.target is aten._log_softmax.default:
        rules.append(OpRule((Shard(axis),), (Shard(axis),), "vocabulary_log_softmax"))
    return rules


@register_rule(aten._log_softmax_backward_data.default, aten._softmax_backward_data.default)
def _softmax_backward(call: OpCall, degree: int) -> list[OpRule]:
    ndim = len(call.output.shape)
    axis = int(call.args[2]) % ndim if ndim else 0
    rules = [OpRule((Shard(dim),), (Shard(dim),) * 2) for dim in range(ndim) if dim != axis]
    if call.target is aten._log_softmax_backward_data.default:
        rules.append(OpRule((Shard(axis),), (Shard(axis),) * 2, "vocabulary_log_softmax_backward"))
    return [*rules, linear_in_gradient(call)]


@register_rule(aten.logsumexp.default)
def _logsumexp(call: OpCall, degree: int) -> list[OpRule]:
    """Torch's rule takes ``keepdim`` to be a keyword, and mistakes dims that are kept for others."""
    ndim, given = len(call.inputs[0].shape), call.args[1]
    summed = {dim % ndim for dim in (given if isinstance(given, tuple) else (given,))} if ndim else set()
    keeps = bool(argument(call, 2, "keepdim", False))
    free = [dim for dim in range(ndim) if summed and dim not in summed]
    return [
        OpRule((Shard(dim if keeps else dim - sum(other < dim for other in summed)),), (Shard(dim),)) for dim in free
    ]


@register_rule(aten.nll_loss_forward.default)
def _nll_loss(call: OpCall, degree: int) -> list[OpRule]:
    """log-probabilities [rows, classes], targets [rows]: split rows or classes (unweighted losses)."""
    weighted = len(call.inputs) > 2
    scores = call.inputs[0].shape
    if weighted or len(scores) != 2:
        return []
    reduction = call.args[3]
    if reduction == 0:
        return [
            OpRule((Shard(0), REPLICATE), (Shard(0), Shard(0))),
            OpRule((PARTIAL, REPLICATE), (Shard(1), REPLICATE), "vocabulary_nll_loss"),
        ]
    return [
        OpRule((PARTIAL, REPLICATE), (Shard(0), Shard(0)), "row_nll_loss"),
        OpRule((REPLICATE, REPLICATE), (Shard(0), Shard(0)), "gathered_nll_loss"),
        OpRule((PARTIAL, REPLICATE), (Shard(1), REPLICATE), "vocabulary_nll_loss"),
    ]


@register_rule(aten.nll_loss_backward.default)
def _nll_loss_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient, log-probabilities [rows, classes], targets, (weight), total weight -> [rows, classes]."""
    if len(call.inputs) != 4 or len(call.inputs[1].shape) != 2:
        return []
    gradient: Placement = Shard(0) if call.inputs[0].shape else REPLICATE
    return [
        OpRule((Shard(0),), (gradient, Shard(0), Shard(0), REPLICATE)),
        OpRule((Shard(1),), (REPLICATE, Shard(1), REPLICATE, REPLICATE), "vocabulary_nll_loss_backward"),
    ]


@register_rule(aten.convolution.default)
def _convolution(call: OpCall, degree: int) -> list[OpRule]:
    """input [batch, in, ...], weight [out, in, ...], (bias [out]): split the batch, or, ungrouped, either kind of
    channels; or both alike, by groups.
    """
    transposed, groups = bool(call.args[6]), call.args[8]
    bias: tuple[Placement, ...] = (REPLICATE,) if len(call.inputs) > 2 else ()
    rules = [OpRule((Shard(0),), (Shard(0), REPLICATE, *bias))]
    if groups > 1 and groups % degree == 0:
        rules.append(OpRule((Shard(1),), (Shard(1), Shard(0), *(Shard(0) for _ in bias))))
    if groups == 1 and not transposed:
        rules.append(OpRule((Shard(1),), (REPLICATE, Shard(0), *(Shard(0) for _ in bias))))
        if not bias:
            rules.append(OpRule((PARTIAL,), (Shard(1), Shard(1))))
    return rules


@register_rule(aten.convolution_backward.default)
def _convolution_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient [batch, out, ...], input, weight -> gradients of input, weight and bias."""
    transposed, groups = bool(call.args[7]), call.args[9]
    rules = [OpRule((Shard(0), PARTIAL, PARTIAL), (Shard(0), Shard(0), REPLICATE))]
    if groups > 1 and groups % degree == 0:
        rules.append(OpRule((Shard(1), Shard(0), Shard(0)), (Shard(1), Shard(1), Shard(0))))
    if groups == 1 and not transposed:
        rules.append(OpRule((PARTIAL, Shard(0), Shard(0)), (Shard(1), REPLICATE, Shard(0))))
        rules.append(OpRule((Shard(1), Shard(1), REPLICATE), (REPLICATE, Shard(1), Shard(1))))
    return [*rules, linear_in_gradient(call)]


@register_rule(aten._native_batch_norm_legit_no_training.default)
def _frozen_batch_norm(call: OpCall, degree: int) -> list[OpRule]:
    """input [batch, channels, ...], what channels have each -> output alike, and two that are empty (on some devices of
    channels, too): by known statistics, so any dim can be split. Torch's rule splits channels alone.
    """
    saved, rules = call.outputs[1], list[OpRule]()
    for dim in range(len(call.inputs[0].shape)):
        channels: Placement = Shard(0) if dim == 1 else REPLICATE
        kept = channels if saved is not None and saved.numel else REPLICATE
        rules.append(OpRule((Shard(dim), kept, kept), (Shard(dim), *[channels] * (len(call.inputs) - 1))))
    return rules


@register_rule(aten.avg_pool2d_backward.default, aten.avg_pool3d_backward.default)
def _average_pool_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient [(batch), channels, ...], input alike: split what is not pooled; linear in the gradient."""
    pooled = 2 if call.target is aten.avg_pool2d_backward.default else 3
    rules = [OpRule((Shard(dim),), (Shard(dim),) * 2) for dim in range(len(call.output.shape) - pooled)]
    return [*rules, linear_in_gradient(call)]


@register_rule(aten._weight_norm_interface_backward.default)
def _weight_norm_backward(call: OpCall, degree: int) -> list[OpRule]:
    """gradient, direction, length, norms -> gradients of direction and length: split the dim that has a length each."""
    dim = int(call.args[4])
    return [
        OpRule((Shard(dim),) * 2, (Shard(dim),) * 4),
        linear_in_gradient(call),
    ]
