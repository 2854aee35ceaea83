"""Local programs for operators whose sharded form is not the operator itself: vocabulary-parallel lookups and losses,
and the exchange of rows between ranks that hold unlike experts. Those of attention are in
:mod:`passes.sharding.ring_expansions` and :mod:`passes.sharding.shared_heads`.

Each builder writes nodes into the new graph with an :class:`Emitter` and returns the nodes of the outputs. Source of
the vocabulary-parallel loss: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather, all_to_all, gather_mirrored, local_index, only_first, shard
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.placement import Shard
from galvatron_fx.ir.kernels.experts import (
    gather_experts,
    in_round,
    pack,
    part_experts,
    place_by_rank,
    received_order,
    shadows,
    unpack,
    unsort,
)
from passes.sharding.emitter import Builder, Emitter, Outputs
from passes.sharding.exchange_expansions import (
    among_more_orders,
    among_more_packed,
    among_more_places,
    among_more_rounds,
    among_more_unpacked,
)
from passes.sharding.ring_expansions import ring_attention, ring_attention_backward
from passes.sharding.shared_heads import shared_heads_attention, shared_heads_attention_backward

aten = torch.ops.aten


def _like(node: fx.Node, dtype: torch.dtype | None = None) -> TensorSpec:
    """The shape of a value, symbols included: other axes that split its rows may come later."""
    spec = meta_of(node).spec
    return replace(spec, dtype=dtype or spec.dtype)


def _owned_rows(e: Emitter, index: fx.Node, size: int) -> tuple[fx.Node, fx.Node]:
    """Local row numbers clamped into [0, size), and whether each index lies on this rank."""
    shifted = e.emit(local_index, (index, size, e.axis), _like(index))
    above = e.emit(aten.ge.Scalar, (shifted, 0), _like(index, torch.bool))
    below = e.emit(aten.lt.Scalar, (shifted, size), _like(index, torch.bool))
    owned = e.emit(aten.logical_and.default, (above, below), _like(index, torch.bool))
    return e.emit(aten.clamp.default, (shifted, 0, size - 1), _like(index)), owned


def _where(e: Emitter, mask: fx.Node, value: fx.Node) -> fx.Node:
    """``value`` where the mask holds, else zero. A product with the mask would make nan of an infinity."""
    zeros = e.emit(aten.zeros_like.default, (value,), _like(value))
    return e.emit(aten.where.self, (mask, value, zeros), _like(value))


def _unsqueezed(e: Emitter, node: fx.Node, dim: int) -> fx.Node:
    return e.emit(aten.unsqueeze.default, (node, dim), meta_of(node).spec.unsqueezed(dim))


def vocabulary_embedding(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Look up the rows that lie on this rank, zero for the others: a Partial(sum)."""
    weight, index = inputs
    rows, owned = _owned_rows(e, index, meta_of(weight).spec.shape[0])
    vectors = e.emit(aten.embedding.default, (weight, rows), outputs[0])
    return [_where(e, _unsqueezed(e, owned, -1), vectors)]


def vocabulary_embedding_backward(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Gradient of this rank's rows: indices of other ranks, and the padding index, go to one extra row cut off
    again.
    """
    gradient, index = inputs
    out = outputs[0]
    assert out is not None
    size, hidden = out.shape
    shifted = e.emit(local_index, (index, size, e.axis), _like(index))
    above = e.emit(aten.ge.Scalar, (shifted, 0), _like(index, torch.bool))
    below = e.emit(aten.lt.Scalar, (shifted, size), _like(index, torch.bool))
    owned = e.emit(aten.logical_and.default, (above, below), _like(index, torch.bool))
    padding = node.args[3]
    if isinstance(padding, int) and padding >= 0:
        counted = e.emit(aten.ne.Scalar, (index, padding), _like(index, torch.bool))
        owned = e.emit(aten.logical_and.default, (owned, counted), _like(index, torch.bool))
    spill = e.emit(aten.full_like.default, (shifted, size), _like(index))
    rows = e.emit(aten.where.self, (owned, shifted, spill), _like(index))
    padded = TensorSpec((size + 1, hidden), out.dtype)
    full = e.emit(aten.embedding_dense_backward.default, (gradient, rows, size + 1, -1, node.args[4]), padded)
    return [e.emit(aten.slice.Tensor, (full, 0, 0, size), out)]


def vocabulary_log_softmax(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """log_softmax over a sharded dim: the maximum and the sum of exponentials are all-reduced, the scores never
    move.
    """
    (scores,) = inputs
    out = outputs[0]
    assert out is not None
    dim: Any = node.args[1]
    one = out.resized(dim, 1)
    largest = e.reduced(e.emit(aten.amax.default, (scores, [dim], True), one), "max")
    centred = e.emit(aten.sub.Tensor, (scores, largest), out)
    exponentials = e.emit(aten.exp.default, (centred,), out)
    total = e.reduced(e.emit(aten.sum.dim_IntList, (exponentials, [dim], True), one))
    return [e.emit(aten.sub.Tensor, (centred, e.emit(aten.log.default, (total,), one)), out)]


def vocabulary_log_softmax_backward(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """gradient - exp(log-probabilities) * sum(gradient), the sum all-reduced."""
    gradient, scores = inputs
    out = outputs[0]
    assert out is not None
    dim: Any = node.args[2]
    one = out.resized(dim, 1)
    total = e.reduced(e.emit(aten.sum.dim_IntList, (gradient, [dim], True), one))
    probabilities = e.emit(aten.exp.default, (scores,), out)
    shares = e.emit(aten.mul.Tensor, (probabilities, total), out)
    return [e.emit(aten.sub.Tensor, (gradient, shares), out)]


def _counted(e: Emitter, node: fx.Node, targets: fx.Node) -> tuple[fx.Node, int]:
    ignore = int(node.args[4])  # type: ignore[arg-type]
    return e.emit(aten.ne.Scalar, (targets, ignore), _like(targets, torch.bool)), ignore


def _count(e: Emitter, counted: fx.Node, dtype: torch.dtype) -> fx.Node:
    cast = e.emit(aten._to_copy.default, (counted,), _like(counted, dtype), dtype=dtype)
    return e.emit(aten.sum.default, (cast,), TensorSpec((), dtype))


def row_nll_loss(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]) -> Outputs:
    """Rows are sharded: sum the local losses, divide by the global count of targets that are not ignored."""
    scores, targets = inputs
    dtype = meta_of(scores).spec.dtype
    scalar = TensorSpec((), dtype)
    counted, ignore = _counted(e, node, targets)
    total = e.reduced(_count(e, counted, dtype))
    summed = e.emit_multi(aten.nll_loss_forward.default, (scores, targets, None, 2, ignore), (scalar, scalar))
    loss = e.emit(operator.getitem, (summed, 0), scalar)
    if node.args[3] == 1:
        loss = e.emit(aten.div.Tensor, (loss, total), scalar)
    return [loss, total]


def gathered_nll_loss(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Rows are sharded: gather each row's log-probability of its target and sum them in the order of one device.

    For losses in a narrower dtype than the parameters', where summing terms would round visibly otherwise.
    """
    scores, targets = inputs
    rows, dtype = meta_of(scores).spec.shape[0], meta_of(scores).spec.dtype
    whole, ignore = rows * e.degree, node.args[4]
    index = e.emit(aten.clamp.default, (targets, 0), _like(targets))
    picked = e.emit(aten.gather.default, (scores, 1, _unsqueezed(e, index, -1)), _like(targets, dtype).unsqueezed(-1))
    left_out = e.emit(aten.eq.Scalar, (targets, ignore), _like(targets, torch.bool))
    zero = e.emit(aten.zeros_like.default, (targets,), _like(targets))
    marks = e.emit(aten.masked_fill.Scalar, (zero, left_out, ignore), _like(targets))
    split = e.rule.inputs[0]
    assert isinstance(split, Shard)
    gather, runs = gather_mirrored if split.mirrored else all_gather, split.split_factor
    all_picked = e.emit(gather, (picked, 0, runs, e.axis), TensorSpec((whole, 1), dtype))
    all_marks = e.emit(gather, (marks, 0, runs, e.axis), TensorSpec((whole,), meta_of(marks).spec.dtype))
    counted = e.emit(aten.ne.Scalar, (all_marks, ignore), _like(all_marks, torch.bool))
    pair = (TensorSpec((), dtype), TensorSpec((), dtype))
    loss_and_weight = e.emit_multi(
        aten.nll_loss_forward.default, (all_picked, all_marks, None, node.args[3], ignore), pair
    )
    return [e.emit(operator.getitem, (loss_and_weight, 0), pair[0]), _count(e, counted, dtype)]


def vocabulary_nll_loss(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Classes are sharded: each rank picks the targets that it owns; a Partial(sum) of the loss.

    The total weight is the count of targets that are not ignored, and zero where the losses are not reduced.
    """
    scores, targets = inputs
    spec = meta_of(scores).spec
    row = _like(targets, spec.dtype)
    counted, _ = _counted(e, node, targets)
    index, owned = _owned_rows(e, targets, spec.shape[1])
    mine = e.emit(aten.logical_and.default, (owned, counted), _like(targets, torch.bool))
    picked = e.emit(aten.gather.default, (scores, 1, _unsqueezed(e, index, -1)), row.unsqueezed(-1))
    flat = e.emit(aten.squeeze.dim, (picked, 1), row)
    losses = e.emit(aten.neg.default, (_where(e, mine, flat),), row)
    if node.args[3] == 0:
        options = {"dtype": spec.dtype, "device": torch.device("cpu")}
        return [losses, e.emit(aten.zeros.default, ([],), TensorSpec((), spec.dtype), **options)]
    total = _count(e, counted, spec.dtype)
    loss = e.emit(aten.sum.default, (losses,), TensorSpec((), spec.dtype))
    if node.args[3] == 1:
        loss = e.emit(aten.div.Tensor, (loss, total), TensorSpec((), spec.dtype))
    return [loss, total]


def vocabulary_nll_loss_backward(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """-gradient at the target's class where this rank owns it, zero elsewhere."""
    gradient, scores, targets, total = inputs
    spec = meta_of(scores).spec
    rows, size = spec.shape
    counted = e.emit(aten.ne.Scalar, (targets, node.args[5]), _like(targets, torch.bool))
    index, owned = _owned_rows(e, targets, size)
    mine = e.emit(aten.logical_and.default, (owned, counted), _like(targets, torch.bool))
    scale = gradient
    if node.args[4] == 1:
        scale = e.emit(aten.div.Tensor, (gradient, total), _like(gradient))
    row = _like(targets, spec.dtype)
    if not meta_of(scale).spec.shape:
        scale = e.emit(aten.expand.default, (scale, [rows]), row)
    negative = e.emit(aten.neg.default, (_where(e, mine, scale),), row)
    zeros = e.emit(aten.zeros_like.default, (scores,), spec)
    column = _unsqueezed(e, negative, -1)
    return [e.emit(aten.scatter.src, (zeros, 1, _unsqueezed(e, index, -1), column), outputs[0])]


def exchanging_route(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Each rank holds a run of the experts: tell all others how many rows come for each of these, and place as many
    as there is room for in the first round.
    """
    (experts,) = inputs
    place_spec, order_spec, ends_spec = outputs
    assert place_spec is not None and order_spec is not None
    num_experts, rows = int(node.args[1]), place_spec.shape[0] * e.degree  # type: ignore[arg-type]
    num_shadows, slots = e.exchange.shadows, e.exchange.slots(rows, e.degree)
    num_counts = num_experts + num_shadows
    to_place: tuple[Any, ...] = (experts, num_experts, e.degree)
    if num_shadows:
        to_place = (*to_place, e.emit(shadows, (num_shadows,), _counts(num_shadows)))
    by_rank, counts = _outputs(e, place_by_rank, to_place, (place_spec, _counts(num_counts)))
    all_counts = e.emit(all_gather, (counts, 0, 1, e.axis), _counts(e.degree * num_counts))
    of_ranks = e.emit(aten.reshape.default, (all_counts, [e.degree, num_counts]), _counts(e.degree, num_counts))
    if num_shadows:
        of_ranks = e.emit(aten.slice.Tensor, (of_ranks, 1, 0, num_experts), _counts(e.degree, num_experts))
    received = e.emit(shard, (of_ranks, 1, 1, e.axis), _counts(e.degree, num_experts // e.degree))
    if not num_shadows:
        place = e.emit(in_round, (by_rank, all_counts, e.degree, slots), place_spec)
        return [place, *_outputs(e, received_order, (received, slots), (order_spec, ends_spec))]
    kept = {"shadow_slots": e.exchange.shadow_slots(rows, e.degree)}
    place = e.emit(in_round, (by_rank, all_counts, e.degree, slots), place_spec, **kept)
    own = e.emit(aten.slice.Tensor, (counts, 0, num_experts, num_counts), _counts(num_shadows))
    ends_spec = TensorSpec((num_experts // e.degree + num_shadows,), torch.int32)
    return [place, *_outputs(e, received_order, (received, slots, own), (order_spec, ends_spec), **kept)]


def _counts(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.int64)


def _outputs(
    e: Emitter, target: Any, args: tuple[Any, ...], specs: Sequence[TensorSpec | None], **kwargs: Any
) -> Outputs:
    """Append a call with several outputs, and what takes them apart."""
    call = e.emit_multi(target, args, specs, **kwargs)
    return [e.emit(operator.getitem, (call, i), spec) for i, spec in enumerate(specs)]


def exchanging_dispatch(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Send copies of this rank's tokens to the ranks of their experts, and sort what has come by expert."""
    x, place, order = inputs
    out = outputs[0]
    assert out is not None
    rows = _exchanged(e, e.emit(pack, (x, place, node.args[3], out.shape[0]), out), meta_of(place).spec.shape[0])
    return [e.emit(aten.index_select.default, (rows, 0, order), out)]


def exchanging_combine(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """Send rows back to the ranks of their tokens, and add up the copies of each."""
    rows, place, order = inputs
    by_rank = _exchanged(e, e.emit(unsort, (rows, order), _like(rows)), meta_of(place).spec.shape[0])
    return [e.emit(unpack, (by_rank, place, node.args[3]), outputs[0])]


def _exchanged(e: Emitter, x: fx.Node, rows: int) -> fx.Node:
    """Send each rank's part of the rows in the slots of ``x``; those behind, of shadows, stay. ``rows``: of a rank."""
    size, *rest = meta_of(x).spec.shape
    dtype, kept = meta_of(x).spec.dtype, e.exchange.shadow_slots(rows * e.degree, e.degree)
    parts = []
    for start, end in ((0, size - kept), (size - kept, size)) if kept else ():
        parts.append(e.emit(aten.slice.Tensor, (x, 0, start, end), TensorSpec((end - start, *rest), dtype)))
    received = _to_ranks(e, parts[0] if kept else x)
    by_rank = TensorSpec((size - kept, *rest), dtype)
    moved = e.emit(aten.reshape.default, (received, list(by_rank.shape)), by_rank)
    return e.emit(aten.cat.default, ([moved, parts[1]],), meta_of(x).spec) if kept else moved


def _to_ranks(e: Emitter, x: fx.Node) -> fx.Node:
    """Send a run of ``x`` along its first dim to each rank: [ranks, length of a run, ...], by the rank it came from."""
    size, *rest = meta_of(x).spec.shape
    dtype = meta_of(x).spec.dtype
    one = e.emit(aten.unsqueeze.default, (x, 0), TensorSpec((1, size, *rest), dtype))
    return e.emit(all_to_all, (one, 0, 1, 1, 1, e.axis), TensorSpec((e.degree, size // e.degree, *rest), dtype))


def own_experts(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]) -> Outputs:
    """All of the weights of this rank's experts, of a part of each expert's."""
    part = meta_of(inputs[0]).spec
    parts = e.emit(gather_experts, (inputs,), TensorSpec((len(inputs), *part.shape), part.dtype))
    return [e.emit(all_to_all, (parts, 1, 1, 0, 1, e.axis), outputs[0])]


def parts_of_all_experts(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """The transpose of :func:`own_experts`."""
    part = outputs[0]
    assert part is not None
    moved = TensorSpec((len(outputs), *part.shape), part.dtype)
    return _outputs(e, part_experts, (e.emit(all_to_all, (inputs[0], 0, 1, 1, 1, e.axis), moved),), outputs)


def terms_of_all_experts(
    e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: tuple[TensorSpec | None, ...]
) -> Outputs:
    """What each rank's experts have, as terms of sums like what other ranks add: the first rank's, of all of them."""
    spec = meta_of(inputs[0]).spec
    whole = TensorSpec((len(outputs), *spec.shape[1:]), spec.dtype)
    gathered = e.emit(all_gather, (inputs[0], 0, 1, e.axis), whole)
    return _outputs(e, part_experts, (e.emit(only_first, (gathered, e.axis), whole),), outputs)


EXPANSIONS: dict[str, Builder] = {
    builder.__name__: builder
    for builder in (
        vocabulary_embedding,
        vocabulary_embedding_backward,
        vocabulary_log_softmax,
        vocabulary_log_softmax_backward,
        row_nll_loss,
        gathered_nll_loss,
        vocabulary_nll_loss,
        vocabulary_nll_loss_backward,
        exchanging_route,
        exchanging_dispatch,
        exchanging_combine,
        own_experts,
        parts_of_all_experts,
        terms_of_all_experts,
        among_more_places,
        among_more_rounds,
        among_more_orders,
        among_more_packed,
        among_more_unpacked,
        ring_attention,
        ring_attention_backward,
        shared_heads_attention,
        shared_heads_attention_backward,
    )
}
