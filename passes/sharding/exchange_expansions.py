"""The exchange of rows between experts, among the ranks of one more axis than it is lowered for already.

Ranks are told apart by two numbers then, ``rank`` on the axes before and ``part`` on this one. Rows are packed for
both, and pass along this axis before they go along the others, or come back behind them: two all-to-alls in a row
bring ``[to rank, to part]`` to ``[from rank, from part]``, whichever is first. Every pair of ranks has ``degree ** 2``
times fewer slots than it had, as each of both sends a part of the tokens and holds a part of the experts.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.collectives import all_gather, all_to_all
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.kernels.experts import in_round, pack, place_by_rank, received_order, unpack
from passes.sharding.emitter import Emitter, Outputs

aten = torch.ops.aten
_Specs = tuple[TensorSpec | None, ...]


def among_more_places(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: _Specs) -> Outputs:
    """Where the rows of this part of the tokens go, among all ranks."""
    num_experts, ranks = _int(node, 1), _int(node, 2)
    return _outputs(e, place_by_rank, (inputs[0], num_experts, ranks * e.degree), outputs)


def among_more_rounds(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: _Specs) -> Outputs:
    """All ranks know how many rows all have, and so how many rounds there are."""
    place, counts = inputs
    ranks, slots = _int(node, 2), _int(node, 3)
    spec = meta_of(counts).spec
    of_all = e.emit(all_gather, (counts, 0, 1, e.axis), TensorSpec((e.degree * spec.shape[0],), spec.dtype))
    return [e.emit(in_round, (place, of_all, ranks * e.degree, slots // e.degree**2), outputs[0])]


def among_more_orders(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: _Specs) -> Outputs:
    """Tell the other parts how many rows come for their experts, and put in order what comes."""
    (counts,) = inputs
    ranks, experts = meta_of(counts).spec.shape
    received = _spread(e, _reshaped(e, counts, (ranks, 1, experts)))
    table = _reshaped(e, received, (ranks * e.degree, experts // e.degree))
    return _outputs(e, received_order, (table, _int(node, 1) // e.degree**2), outputs)


def among_more_packed(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: _Specs) -> Outputs:
    """Pack rows for all ranks, and send them to the parts of these."""
    x, place = inputs
    out = outputs[0]
    assert out is not None
    ranks, (rows, *rest) = _ranks(node), out.shape
    packed = e.emit(pack, (x, place, node.args[2], rows), out)
    sent = _spread(e, _reshaped(e, packed, (ranks, 1, rows // ranks, *rest)))
    return [_reshaped(e, sent, out.shape)]


def among_more_unpacked(e: Emitter, node: fx.Node, inputs: list[fx.Node], outputs: _Specs) -> Outputs:
    """Bring rows back from the parts of all ranks, and add up the copies of each token."""
    rows, place = inputs
    spec, ranks = meta_of(rows).spec, _ranks(node)
    count, *rest = spec.shape
    slots = count // (ranks * e.degree)
    by_part = _reshaped(e, rows, (ranks, e.degree, slots, *rest))
    whole = TensorSpec((ranks, 1, e.degree * slots, *rest), spec.dtype)
    back = e.emit(all_to_all, (by_part, 2, 1, 1, 1, e.axis), whole)
    return [e.emit(unpack, (_reshaped(e, back, spec.shape), place, node.args[2]), outputs[0])]


def _spread(e: Emitter, x: fx.Node) -> fx.Node:
    """Send a run along dim 2 of [ranks, 1, ...] to each part: [ranks, parts, ...], by the part it came from."""
    spec = meta_of(x).spec
    ranks, _, size, *rest = spec.shape
    out = TensorSpec((ranks, e.degree, size // e.degree, *rest), spec.dtype)
    return e.emit(all_to_all, (x, 1, 1, 2, 1, e.axis), out)


def _reshaped(e: Emitter, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return e.emit(aten.reshape.default, (x, list(shape)), TensorSpec(tuple(shape), meta_of(x).spec.dtype))


def _ranks(node: fx.Node) -> int:
    """On the axes before, of the exchange that ``node`` packs or unpacks rows for."""
    place = node.args[1]
    assert isinstance(place, fx.Node) and place.target is in_round
    return _int(place, 2)


def _int(node: fx.Node, position: int) -> int:
    return int(node.args[position])  # type: ignore[arg-type]


def _outputs(e: Emitter, target: Any, args: tuple[Any, ...], specs: _Specs) -> Outputs:
    call = e.emit_multi(target, args, specs)
    return [e.emit(operator.getitem, (call, i), spec) for i, spec in enumerate(specs)]
