"""How many rows each expert had in the last step: counts that routing makes anyway, kept until they are asked for."""

from __future__ import annotations

import warnings
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.bound_ops import BoundAxis
from galvatron_fx.ir.graph.further_rounds import Room
from galvatron_fx.ir.graph.metadata import has_meta, meta_of
from galvatron_fx.ir.graph.placement import is_routed
from galvatron_fx.ir.graph.rewrite import write_call
from galvatron_fx.ir.kernels.experts import in_round, route
from galvatron_fx.ir.plan import text_table
from galvatron_fx.runtime.expert_order import ExpertOrder, ExpertOrders
from galvatron_fx.runtime.members import Members

__all__ = ["CountsKeeper", "ExpertLoads", "KeptCounts", "LayerLoads", "with_experts"]

_TOLD_AT = 8  # steps

Place = tuple[int, int]  # block, and number of the mixture in it
_Experts = tuple[int, ...]
_Part = tuple[
    str, Tensor | None, int, float, _Experts, _Experts
]  # name, rows that a rank counts, further rounds, room, order, shadows


@dataclass(frozen=True)
class LayerLoads:
    """``rows``: of each expert, in all micro-batches of all ranks; ``further_rounds``: of exchanges, of the ranks that
    had most of them; ``held``: the experts in the order in which ranks hold them, if it is not the model's;
    ``shadows``: those whose rows all ranks compute, each of its own tokens; ``room``: the least ``capacity`` of a
    strategy with which there would have been no further rounds, 0 where ranks exchange no rows.
    """

    name: str
    rows: tuple[int, ...]
    further_rounds: int = 0
    held: tuple[int, ...] = ()
    shadows: tuple[int, ...] = ()
    room: float = 0.0

    def imbalance(self, ranks: int) -> float:
        """Rows of the busiest of ``ranks`` that hold equal runs of the experts, as these are held, over their mean. Of
        experts with shadows, all ranks are taken to have as many.

        Raises InputError for a number of ranks that does not divide the experts.
        """
        if ranks < 1 or len(self.rows) % ranks:
            raise InputError(f"{len(self.rows)} experts of '{self.name}' are not the same for {ranks} ranks each")
        each = len(self.rows) // ranks
        travelling = [0 if expert in self.shadows else rows for expert, rows in enumerate(self.rows)]
        rows = with_experts(travelling, self.held)
        busiest = max(sum(rows[start : start + each]) for start in range(0, len(rows), each))
        total = sum(self.rows)
        return float(Fraction(busiest * ranks + total - sum(rows), max(total, 1)))


def with_experts(rows: Sequence[int], held: Sequence[int]) -> list[int]:
    """The rows of experts, in the order in which they are held."""
    return [rows[expert] for expert in held or range(len(rows))]


@dataclass(frozen=True)
class ExpertLoads:
    """What the experts of every layer that has some had to do in one step, in the order of layers."""

    layers: tuple[LayerLoads, ...]

    @property
    def further_rounds(self) -> int:
        """Rounds beyond the first of all layers."""
        return sum(layer.further_rounds for layer in self.layers)

    @property
    def room(self) -> float:
        """The least ``capacity`` of a strategy with which no layer would have run further rounds."""
        return max((layer.room for layer in self.layers), default=0.0)

    def imbalance(self, ranks: int) -> float:
        """The mean over layers of what the busiest of ``ranks`` has over the mean: ``expert_imbalance`` of a plan.

        Raises InputError where no layer has experts, and as :meth:`LayerLoads.imbalance`.
        """
        if not self.layers:
            raise InputError("no layer has experts that tokens choose: leave expert_imbalance out")
        return sum(layer.imbalance(ranks) for layer in self.layers) / len(self.layers)

    def __str__(self) -> str:
        rows = [
            (
                layer.name, f"{layer.imbalance(len(layer.rows)):.2f}", str(layer.further_rounds), f"{layer.room:.2f}",
                *map(str, layer.rows),
            )
            for layer in self.layers
        ]  # fmt: skip
        most = max((len(layer.rows) for layer in self.layers), default=0)
        headings = ("layer", "busiest expert / mean", "further rounds", "room", *map(str, range(most)))
        return "\n".join(text_table.render(headings, [(*row, *("",) * (most + 4 - len(row))) for row in rows], 1))


@dataclass(eq=False)
class CountsKeeper:
    """Called by a graph: keeps the counts of one mixture, of the last ``calls`` micro-batches.

    ``exchanged``: the room of an exchange; ``counted``: whether no other rank counts the same rows; ``order``:
    in which the experts are held, whose rows are counted.
    """

    name: str
    calls: int
    exchanged: Room | None
    counted: bool
    order: ExpertOrder | None = None
    kept: deque[tuple[Tensor, Tensor | None]] = field(init=False)

    __name__ = "keep_counts"  # as which it stands in code

    def __post_init__(self) -> None:
        self.kept = deque(maxlen=self.calls)

    def __call__(self, counts: Tensor, of_ranks: Tensor | None = None) -> None:
        self.kept.append((counts, of_ranks))

    @property
    def held(self) -> tuple[int, ...]:
        """The experts in the order in which they are held, if it is not the model's."""
        return self.order.held if self.order is not None and self.order.is_moved else ()

    @property
    def shadows(self) -> tuple[int, ...]:
        """The experts that all ranks compute."""
        if self.exchanged is None:
            return ()
        return tuple(range(self.exchanged.shadows)) if self.order is None else self.order.shadows

    def read(self) -> tuple[Tensor | None, int]:
        """Rows of this rank that it counts for all, and further rounds; waits for the device."""
        if not self.counted:
            return None, self.further_rounds()
        counts = [counts if self.exchanged else counts.diff(prepend=counts.new_zeros(1)) for counts, _ in self.kept]
        rows = self._by_place(torch.stack(counts).sum(0).cpu().long())
        return rows if self.order is None else self.order.of_experts(rows), self.further_rounds()

    def room(self) -> float:
        """The least capacity with which there is one round."""
        if self.exchanged is None:
            return 0.0
        return max((self.exchanged.enough(of_ranks) for _, of_ranks in self.kept if of_ranks is not None), default=0.0)

    def further_rounds(self, held: Sequence[int] = (), shadows: Sequence[int] = ()) -> int:
        """Rounds beyond the first that this rank runs, or would run if experts were ``held`` in another order and other
        ones had ``shadows``.
        """
        if self.exchanged is None:
            return 0
        tables = [of_ranks for _, of_ranks in self.kept if of_ranks is not None]
        if held:
            tables = [self._as_if(of_ranks.cpu().view(self.exchanged.ranks, -1), held, shadows) for of_ranks in tables]
        return sum(max(self.exchanged.num_rounds(of_ranks), 1) - 1 for of_ranks in tables)

    def _by_place(self, counts: Tensor) -> Tensor:
        """What each place has, ``[..., experts]``, of counts that have shadows behind all experts."""
        if not self.shadows:
            return counts
        by_place, of_shadows = counts.split([counts.shape[-1] - len(self.shadows), len(self.shadows)], -1)
        places = torch.tensor(self.shadows) if self.order is None else self.order.shadow_places()
        return torch.index_add(by_place, -1, places, of_shadows)

    def _as_if(self, of_ranks: Tensor, held: Sequence[int], shadows: Sequence[int]) -> Tensor:
        """What all ranks would count."""
        assert self.order is not None
        rows = self._by_place(of_ranks)[:, [self.order.held.index(expert) for expert in held]]
        places = torch.tensor([held.index(expert) for expert in shadows], dtype=torch.int64)
        return torch.cat([rows.index_fill(1, places, 0), rows[:, places]], 1).flatten()


@dataclass
class KeptCounts:
    """The counts of this rank's part of a program; ``calls``: how often a step runs its graphs; ``orders``: in which
    experts are held; ``members``: the ranks that count.
    """

    calls: int = 1
    orders: ExpertOrders = field(default_factory=ExpertOrders)
    members: Members = field(default_factory=Members.every)
    layers: dict[Place, CountsKeeper] = field(default_factory=dict)
    _steps: int = 0
    _seen: Counter[int] = field(default_factory=Counter)

    def keep(self, graph: fx.GraphModule, axes: Sequence[BoundAxis]) -> None:
        """Write nodes that keep what the forward routing of ``graph``, which is bound to ``axes``, counts."""
        for node in list(graph.graph.nodes):
            if node.target not in (route, in_round) or not has_meta(node):
                continue
            record = meta_of(node)
            if record.phase != "forward":
                continue
            block = max(record.block, 0)
            place = block, self._seen[block]
            self._seen[block] += 1
            alone = all(is_routed(p) or a.coordinate == 0 for p, a in zip(record.placements[0], axes, strict=True))
            name, order = record.module or f"block {block}", (self.orders.layers or {}).get(record.module)
            values = _counts(node)
            if not values:  # rows that a mask chooses are put back where they were, and nobody counts them
                continue
            exchanged = None if node.target is route else _room(node, values[0])
            layer = self.layers[place] = CountsKeeper(name, self.calls, exchanged, alone, order)
            with graph.graph.inserting_after(max(values)):
                write_call(graph.graph, layer, tuple(values))
        graph.recompile()

    def end_step(self) -> None:
        """Hear that a step was trained; of one of the first, warn where most layers had no room for all rows."""
        self._steps += 1
        if self._steps != _TOLD_AT:
            return
        exchanging = [layer for layer in self.layers.values() if layer.exchanged is not None and layer.kept]
        crowded = [layer for layer in exchanging if layer.further_rounds()]
        if 2 * len(crowded) > len(exchanging):
            room = max(layer.room() for layer in crowded)
            warnings.warn(
                f"experts have no room for all rows that ranks send each other, so {len(crowded)} of "
                f"{len(exchanging)} layers exchange and compute in further rounds ('{crowded[0].name}'), each of which "
                f"takes about as long as the first: compile or plan with expert_imbalance={ceil(20 * room) / 20:.2f}, "
                f"which is room for step {self._steps} and takes memory; or deal experts by their rows, "
                f"model.rebalance_experts(optimizer). model.expert_loads() tells of each layer",
                stacklevel=2,
            )

    def forget(self) -> None:
        """Drop what was counted while experts were held in another order."""
        for layer in self.layers.values():
            layer.kept.clear()

    def loads(self) -> ExpertLoads:
        """What all ranks have counted; each of them calls it. Raises InputError where no step was trained."""
        own = {
            place: (layer.name, *layer.read(), layer.room(), layer.held, layer.shadows)
            for place, layer in self.layers.items()
            if layer.kept
        }
        if len(own) < len(self.layers):
            raise InputError("no rows of experts are counted yet: call forward_backward(...) before")
        of_ranks: list[dict[Place, _Part]] = self.members.all(own)
        places = sorted({place for rank in of_ranks for place in rank})
        return ExpertLoads(tuple(_together([rank[place] for rank in of_ranks if place in rank]) for place in places))


def _room(node: fx.Node, counts: fx.Node) -> Room:
    ranks, slots = node.args[2:4]
    assert isinstance(ranks, int) and isinstance(slots, int)
    num_shadows = meta_of(counts).spec.shape[0] - int(node.args[0].args[0].args[1])  # type: ignore[union-attr,arg-type]
    return Room(ranks, slots, num_shadows, int(node.kwargs.get("shadow_slots", 0)))  # type: ignore[arg-type]


def _counts(node: fx.Node) -> list[fx.Node]:
    """The rows of each expert, or the ends of them in the order of experts; and of an exchange those of all ranks. None
    where the graph does not read them.
    """
    source = node if node.target is route else node.args[0].args[0]  # type: ignore[union-attr]
    position = 2 if node.target is route else 1
    counts = next((user for user in source.users if user.args[1] == position), None)  # type: ignore[union-attr]
    if counts is None:
        return []
    return [counts] if node.target is route else [counts, node.args[1]]  # type: ignore[list-item]


def _together(parts: Sequence[_Part]) -> LayerLoads:
    rows = torch.stack([counts for _, counts, *_ in parts if counts is not None]).sum(0)
    name, *_, held, shadows = parts[0]
    rounds, room = max(part[2] for part in parts), max(part[3] for part in parts)
    return LayerLoads(name, tuple(rows.tolist()), rounds, held, shadows, room)
