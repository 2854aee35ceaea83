"""In which order the experts of a layer are held, and which have shadows: data that its graphs read, so that experts
move and none is compiled again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import has_meta, meta_of
from galvatron_fx.ir.graph.rewrite import write_call
from galvatron_fx.ir.kernels.experts import gather_experts, part_experts, shadows
from passes.analysis.expert_weights import ROUTES, ExpertWeights, expert_weights

__all__ = ["ExpertOrder", "ExpertOrders"]


@dataclass(eq=False)
class ExpertOrder:
    """Called by graphs: the place of each chosen expert among those held; ``held``: experts by place; ``shadows``:
    those that every rank computes for its own tokens.
    """

    module: str
    weights: ExpertWeights
    held: tuple[int, ...] = field(init=False)
    shadows: tuple[int, ...] = field(init=False)
    _places: Tensor | None = field(init=False, default=None, repr=False)

    __name__ = "expert_places"  # as which it stands in code

    def __post_init__(self) -> None:
        self.held = tuple(range(self.weights.experts))
        self.shadows = self.held[: self.weights.shadows]

    def __call__(self, experts: Tensor) -> Tensor:
        if self._places is None:
            return experts
        if self._places.device != experts.device:
            self._places = self._places.to(experts.device)
        return self._places.index_select(0, experts.clamp(max=self.weights.experts))  # those of no expert stay so

    @property
    def is_moved(self) -> bool:
        """Whether they are held in another order than the model's own."""
        return self._places is not None

    @property
    def is_shown(self) -> bool:
        """Whether parameters have experts in another order than the model's own."""
        return self.is_moved and bool(self.weights.names)

    def hold(self, held: tuple[int, ...]) -> None:
        """Say in which order the experts are held from now on."""
        self.held = held
        own = tuple(range(self.weights.experts))
        self._places = None if held == own else torch.tensor([*held, len(own)]).argsort()

    def shadow_places(self) -> Tensor:
        """Where the experts that have shadows are held."""
        return torch.tensor([self.held.index(expert) for expert in self.shadows], dtype=torch.int64)

    def stay(self, reason: str) -> None:
        """Refuse moves from now on. Raises InputError where the experts have moved."""
        if self.is_moved:
            raise InputError(f"experts of '{self.module}' have moved, and {reason}: call restore_experts(...) before")
        self.weights = replace(self.weights, refusal=reason)

    def of_experts(self, by_place: Tensor) -> Tensor:
        """What each place has, in the model's own order."""
        return by_place if self._places is None else by_place[self._places[:-1].to(by_place.device)]


@dataclass(frozen=True, eq=False)
class ShadowPlaces:
    """Called by graphs: where the experts that have shadows are held."""

    order: ExpertOrder

    __name__ = "shadow_places"  # as which it stands in code

    def __call__(self) -> Tensor:
        return self.order.shadow_places()


@dataclass(frozen=True, eq=False)
class ListedExperts:
    """Called by graphs: the weights of experts that are parameters of their own, put together as these are held."""

    order: ExpertOrder

    __name__ = "gather_held_experts"  # as which it stands in code

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        gathered: Tensor = gather_experts([parts[expert] for expert in self.order.held])
        return gathered


@dataclass(frozen=True, eq=False)
class PartedExperts:
    """Called by graphs: the transpose of :class:`ListedExperts`."""

    order: ExpertOrder

    __name__ = "part_held_experts"  # as which it stands in code

    def __call__(self, values: Tensor) -> list[Tensor]:
        by_place = part_experts(values)
        return [by_place[self.order.held.index(expert)] for expert in range(len(by_place))]


_LOOK_UPS = {shadows: ShadowPlaces, gather_experts: ListedExperts, part_experts: PartedExperts}


@dataclass(eq=False)
class ExpertOrders:
    """Those of all layers of a model whose experts are dealt to ranks, by module; every program of it reads them.

    ``shared``: whether a copy of the model runs the same programs.
    """

    layers: dict[str, ExpertOrder] | None = None
    shared: bool = False

    @property
    def shown(self) -> bool:
        """Whether parameters of a layer have experts in another order than the model's own."""
        return any(order.is_shown for order in (self.layers or {}).values())

    def learn(self, lowered: fx.GraphModule) -> None:
        """Look at a graph before it is bound. Raises InputError where experts that have moved are read otherwise."""
        seen = expert_weights(lowered)
        if self.layers is None:
            dealt = any(weights.ranks > 1 for weights in seen.values())
            self.layers = {name: ExpertOrder(name, weights) for name, weights in seen.items()} if dealt else {}
            return
        for name, order in self.layers.items():
            new, old = seen.get(name), order.weights
            if new is not None and replace(new, ranks=old.ranks, shadows=old.shadows) == old:
                continue
            order.stay("another program of the model reads them in other ways")

    def write(self, graph: fx.GraphModule) -> None:
        """Let a bound graph look up where the experts are that its tokens choose."""
        for node in list(graph.graph.nodes) if self.layers else ():
            if node.target not in (*ROUTES, *_LOOK_UPS) or not has_meta(node):
                continue
            order = (self.layers or {}).get(meta_of(node).module)
            if node.target in _LOOK_UPS:
                if order is not None:
                    node.args = () if node.target is shadows else node.args  # they are looked up
                    node.target = _LOOK_UPS[node.target](order)
                continue
            if order is None:
                for each in (self.layers or {}).values():
                    each.stay(f"'{node.name}' of a program may choose among them, too")
                continue
            with graph.graph.inserting_before(node):
                placed = write_call(graph.graph, order, (node.args[0],))
            node.update_arg(0, placed)
        graph.recompile()
