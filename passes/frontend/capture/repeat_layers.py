"""Write out, in a joint graph that was traced with some of its equal layers left out, the layers that are missing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import (
    OutputKind,
    OutputSpec,
    meta_of,
    output_ports,
    ports,
    set_meta,
    set_signature,
    signature,
)
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.rewrite import copy_node
from passes.frontend.capture.compare_layers import (
    BEFORE,
    BEHIND,
    OUTSIDE,
    OWN,
    CopyPlan,
    RepeatedLayers,
    compare_layers,
    place_of,
    state_names,
    state_nodes,
)
from passes.frontend.capture.find_repeats import Repeat

# By how many copies an argument lies away.
_SHIFT = {OWN: 0, BEFORE: -1, BEHIND: 1}
_OF_STATE: tuple[OutputKind, ...] = ("grad", "buffer")


@dataclass(frozen=True)
class RepeatLayers:
    """Copy one traced unit of a repeat, forward and backward, for each unit that the trace left out.

    Traced are the units 0, n-2 and n-1 of n equal ones; the copies of the first go between the first and the second,
    in the forward chain as in the backward one. That is right where the first two are the same program under the shift
    by one unit: what takes a value of the unit before (behind) in one does so in the other. Values that backward sums
    up over the layers are links of that chain. (The last unit begins such a sum, so it is no link and never copied.)

    Rewrite: ``u0 -> u6 -> u7`` -> ``u0 -> u1 -> .. -> u6 -> u7``. Raises UnlikeUnits, leaving the graph as it was for
    this repeat, where the two units differ.
    """

    repeats: tuple[Repeat, ...]

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph``, which is cleaned, in place and return it."""
        plans = [
            compare_layers(graph, repeat, RepeatedLayers.of(graph, at, repeat))
            for at, repeat in enumerate(self.repeats)
        ]
        for plan in plans:
            _Writer(graph, plan).write()
        if plans:
            graph.recompile()
        return graph


class _Writer:
    """Writes the copies that a plan asks for. Unit 0 is copy 0, unit 1 the one behind the last copy."""

    def __init__(self, graph: fx.GraphModule, plan: CopyPlan) -> None:
        self._graph = graph
        self._plan = plan
        self._count = len(plan.repeat.left_out)
        placed = {port.name: node for port, node in ports(graph) if port.kind in ("param", "buffer")}
        first_state = plan.units.state[0]
        states = [state_nodes(placed, unit) for unit in plan.repeat.left_out]
        self._nodes: list[dict[fx.Node, fx.Node]] = [
            {node: node for node in plan.twin},
            *({node: state[name] for name, node in first_state.items()} for state in states),
            plan.twin,
        ]
        fresh = count(1 + max(node.meta.get("seq_nr") or 0 for node in graph.graph.nodes))
        self._numbers: list[dict[Any, Any]] = [
            {number: number for number in plan.number_twin},
            *({number: next(fresh) for number in plan.number_twin} for _ in states),
            plan.number_twin,
        ]

    def write(self) -> None:
        """Add the copies, link the traced units to them and bind their outputs."""
        units, copies = self._plan.units, range(1, self._count + 1)
        for nodes, before, order in (
            (units.forward[0], units.forward[1][0], copies),
            (units.backward[0], units.backward[0][0], reversed(copies)),
        ):
            with self._graph.graph.inserting_before(before):
                for copy in order:
                    for node in nodes:
                        self._copy(node, copy)
        for node in self._plan.sources:
            self._relink(node, 0, node)
            self._relink(node, self._count + 1, self._plan.twin[node])
        self._bind_outputs()

    def _copy(self, node: fx.Node, copy: int) -> None:
        arguments = iter([self._from(kind, source, copy) for kind, source in self._plan.sources[node]])
        new = copy_node(self._graph.graph, node, lambda _: next(arguments))
        record = meta_of(node)
        position, name = place_of(record.module, self._plan.repeat.kept[0])
        unit = self._plan.repeat.left_out[copy - 1]
        set_meta(new, record.having(module=unit[position].name + name if position >= 0 else record.module))
        new.meta["seq_nr"] = self._number(node, copy)
        self._nodes[copy][node] = new

    def _number(self, node: fx.Node, copy: int) -> Any:
        """The autograd number of the copy of ``node``."""
        kind, number = self._plan.numbers[node]
        return number if kind == OUTSIDE else self._numbers[copy + _SHIFT[kind]][number]

    def _from(self, kind: str, source: fx.Node, copy: int) -> fx.Node:
        return source if kind == OUTSIDE else self._nodes[copy + _SHIFT[kind]][source]

    def _relink(self, node: fx.Node, copy: int, place: fx.Node) -> None:
        """Let ``place`` of a traced unit take from the copy beside it what it took from the other traced unit, an
        autograd number too: operators on frozen parameters have that of the operator before.
        """
        across = BEHIND if copy == 0 else BEFORE
        if self._plan.numbers[node][0] == across:
            place.meta["seq_nr"] = self._number(node, copy)
        pairs = zip(self._plan.sources[node], input_nodes(place), strict=True)
        new = [self._from(kind, source, copy) if kind == across else was for (kind, source), was in pairs]
        if new != input_nodes(place):
            arguments = iter(new)
            place.args, place.kwargs = fx.map_arg((place.args, place.kwargs), lambda _: next(arguments))

    def _bind_outputs(self) -> None:
        """Give the gradients and updated buffers of the copies to the outputs of their parameters and buffers."""
        graph = self._graph
        copied: dict[OutputSpec, fx.Node] = {}
        for kind in _OF_STATE:
            values = {port.name: node for port, node in output_ports(graph) if port.kind == kind and node is not None}
            template = state_nodes(values, self._plan.repeat.kept[0])
            for copy, unit in enumerate(self._plan.repeat.left_out, 1):
                names = state_names(unit)
                for key, node in template.items():
                    copied[OutputSpec(kind, names[key])] = self._nodes[copy].get(node, node)
        outputs = [(port, copied.pop(port, node)) for port, node in output_ports(graph)]
        outputs += copied.items()
        position = {port.name: i for i, (port, _) in enumerate(ports(graph)) if port.kind in ("param", "buffer")}
        buffers = sorted(
            (pair for pair in outputs if pair[0].kind == "buffer"), key=lambda pair: position[pair[0].name]
        )
        outputs = buffers + [pair for pair in outputs if pair[0].kind != "buffer"]
        graph.graph.output_node().args = (tuple(node for _, node in outputs),)
        set_signature(graph, signature(graph).having(outputs=tuple(port for port, _ in outputs)))
