"""Deal experts to ranks anew, or let all ranks compute others of them, so that each has about as many rows: what that
costs and gains, and the moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from cost_models.collectives import all_gather_s
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.units import format_bytes
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.runtime.expert_loads import KeptCounts, LayerLoads
from galvatron_fx.runtime.expert_order import ExpertOrder, ExpertOrders
from galvatron_fx.runtime.moved_experts import mark_moved, reorder, require_movable, split_dims, tensors_of

__all__ = ["ExpertMoves", "LayerMove", "balanced", "move", "propose", "require_alone", "restored"]


@dataclass(frozen=True)
class LayerMove:
    """Experts of one layer that are dealt to ranks anew; ``held``: experts in the order of ranks; ``shadows``: those
    that all ranks compute.

    ``imbalance_before`` and ``imbalance``: rows of the busiest rank over the mean, of the last step; ``by_moves`` and
    ``by_shadows``: if only experts moved, and if only others had shadows, which costs nothing; ``rows_saved``:
    that its busiest rank had more; ``rounds_saved``: further rounds of exchange that it would not have run.
    """

    name: str
    held: tuple[int, ...]
    num_moved: int
    imbalance_before: float
    imbalance: float
    by_moves: float
    by_shadows: float
    rows_saved: int
    rounds_saved: int
    shadows: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExpertMoves:
    """What dealing experts anew gains and costs, and whether it is ``done``.

    ``received_bytes``: by each rank, of weights, gradients and states of optimizers, one tensor at a time; ``seconds``:
    of these collectives, on the cluster that the model was compiled for. ``layers``: only those that gain.
    """

    layers: tuple[LayerMove, ...]
    received_bytes: int
    seconds: float
    done: bool = False

    def __str__(self) -> str:
        headings = ("layer", "moved", "shadows", "imbalance", "after", "moves alone", "shadows alone", "rows saved",
                    "rounds saved")  # fmt: skip
        rows = [
            (each.name, str(each.num_moved), " ".join(map(str, each.shadows)) or "none",
             *(f"{imbalance:.2f}" for imbalance in
               (each.imbalance_before, each.imbalance, each.by_moves, each.by_shadows)),
             str(each.rows_saved), str(each.rounds_saved))
            for each in self.layers
        ]  # fmt: skip
        state = "done" if self.done else "not done: give dry_run=False"
        cost = f"{format_bytes(self.received_bytes)} received by each rank, {self.seconds:.3g} s ({state})"
        return "\n".join([*text_table.render(headings, rows, 1), cost])


def balanced(rows: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Experts in the order of ``ranks``, as many for each, by longest processing time first: the expert with most rows
    goes to the rank that has fewest and has room left.

    R. L. Graham: Bounds on Multiprocessing Timing Anomalies. SIAM Journal on Applied Mathematics 17(2), 1969.
    """
    each = len(rows) // ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for expert in sorted(range(len(rows)), key=lambda expert: (-rows[expert], expert)):
        open_ranks = [experts for experts in dealt if len(experts) < each]
        min(open_ranks, key=lambda experts: sum(rows[e] for e in experts)).append(expert)
    return tuple(expert for experts in dealt for expert in sorted(experts))


def require_alone(orders: ExpertOrders, has_stages: bool) -> None:
    """Raise InputError where experts of a model cannot move: none is dealt to ranks, or others would have to know."""
    if not orders.layers:
        raise InputError("no experts are dealt to ranks: rebalance_experts is for plans with role 'expert'")
    if has_stages:
        raise InputError("experts do not move between ranks under a plan with pipeline stages: give a plan without")
    if orders.shared:
        raise InputError(
            "a copy was made of this model, which runs the same programs, and its experts would move, too: compile a "
            "model of its own for it instead"
        )


def propose(counts: KeptCounts, moves: bool) -> list[tuple[ExpertOrder, LayerMove]]:
    """The layers whose busiest rank would have fewer rows, by the last step; every rank calls it alike. Without
    ``moves`` only other experts get shadows.

    Raises InputError before the first step, and where the experts of a layer cannot be put in another order.
    """
    proposals = []
    loads = counts.loads().layers
    for place, layer in zip(sorted(counts.layers), loads, strict=True):
        order = counts.layers[place].order
        if order is None or order.weights.ranks == 1:
            continue
        if order.weights.refusal and moves:
            raise InputError(f"experts of '{layer.name}' cannot move: {order.weights.refusal}")
        gain = _proposal(order, layer, moves)
        if gain.imbalance < gain.imbalance_before:
            rounds = counts.members.all(counts.layers[place].further_rounds(gain.held, gain.shadows))
            proposals.append((order, replace(gain, rounds_saved=layer.further_rounds - max(rounds))))
    modules = [order.module for order, _ in proposals]
    if len(set(modules)) < len(modules):
        raise InputError("experts that a step runs several times cannot move: their loads differ")
    return proposals


def _proposal(order: ExpertOrder, layer: LayerLoads, moves: bool) -> LayerMove:
    """The experts with most rows get shadows, and the others are dealt to ranks."""
    ranks, before = order.weights.ranks, layer.imbalance(order.weights.ranks)
    by_rows = sorted(range(len(layer.rows)), key=lambda expert: (-layer.rows[expert], expert))
    shadows = tuple(sorted(by_rows[: order.weights.shadows]))

    def dealt(shadows: tuple[int, ...]) -> LayerLoads:
        rows = [0 if expert in shadows else rows for expert, rows in enumerate(layer.rows)]
        return replace(layer, held=balanced(rows, ranks), shadows=shadows)

    by_moves, by_shadows = dealt(order.shadows).imbalance(ranks), replace(layer, shadows=shadows).imbalance(ranks)
    best = dealt(shadows) if moves else replace(layer, held=order.held, shadows=shadows)
    saved = round((before - best.imbalance(ranks)) * sum(layer.rows) / ranks)
    num_moved = _num_moved(order, best.held)
    return LayerMove(
        layer.name, best.held, num_moved, before, best.imbalance(ranks), by_moves, by_shadows, saved, 0, shadows
    )


def _num_moved(order: ExpertOrder, held: tuple[int, ...]) -> int:
    each = len(held) // order.weights.ranks
    rank_before = {expert: place // each for place, expert in enumerate(order.held)}
    return sum(rank_before[expert] != place // each for place, expert in enumerate(held))


def restored(orders: ExpertOrders) -> list[tuple[ExpertOrder, tuple[int, ...]]]:
    """The layers whose experts have moved, and the model's own order of these."""
    moved = [order for order in (orders.layers or {}).values() if order.is_moved]
    return [(order, tuple(range(order.weights.experts))) for order in moved]


def move(
    orders: Sequence[tuple[ExpertOrder, tuple[int, ...]]],
    parameters: Mapping[str, Tensor],
    optimizers: Sequence[Optimizer],
    axes_of_dim: Sequence[Sequence[Axis]],
    dry_run: bool,
) -> tuple[int, float]:
    """Hold experts in other orders, unless it is a ``dry_run``; the bytes that each rank receives, and the seconds.

    ``axes_of_dim``: of the cluster, for each dim of the mesh of ``parameters``. Every rank calls it alike. Raises
    InputError before anything moves.
    """
    tensors = []
    orders = [(order, held) for order, held in orders if held != order.held]
    for order, held in orders:
        index = torch.tensor([order.held.index(expert) for expert in held])
        for name in order.weights.names:
            require_movable(parameters[name], order.weights.experts)
            tensors += [(tensor, index) for tensor in tensors_of(parameters[name], optimizers)]
    received_bytes, seconds = 0, 0.0
    for tensor, _ in tensors:
        local = local_part(tensor)
        size_bytes, axes = local.numel() * local.element_size(), _axes(tensor, axes_of_dim)
        whole_bytes = size_bytes
        for axis in axes:
            whole_bytes *= axis.size
        received_bytes += whole_bytes - size_bytes
        seconds += all_gather_s(float(whole_bytes), axes)
    if not dry_run:
        for tensor, index in tensors:
            reorder(tensor, index)
        for order, held in orders:
            order.hold(held)
            mark_moved([parameters[name] for name in order.weights.names], optimizers, order.is_moved)
    return received_bytes, seconds


def _axes(tensor: DTensor, axes_of_dim: Sequence[Sequence[Axis]]) -> list[Axis]:
    return [axis for dim in split_dims(tensor) for axis in axes_of_dim[dim]]
