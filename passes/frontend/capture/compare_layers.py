"""Tell whether two traced layers are the same program, forward and backward, and how they are chained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, ports
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.torch_compat.tracing import constant_value, unit_of
from passes.frontend.capture.call_signatures import relative, state_of
from passes.frontend.capture.find_repeats import Repeat
from passes.frontend.capture.record_calls import RecordedCall

_MOST_CONSTANTS = 64  # elements of a tensor written out in the model's code that are compared by value

# Where an argument of a unit comes from: not the units, the unit itself, the unit before it or the unit behind it.
OUTSIDE, OWN, BEFORE, BEHIND = "outside", "own", "before", "behind"


class UnlikeUnits(Exception):
    """The traced units of a repeat are not the same program: its layers have to be traced one by one."""

    def __init__(self, repeat: Repeat, reason: str) -> None:
        super().__init__(reason)
        self.repeat = repeat


@dataclass(frozen=True)
class RepeatedLayers:
    """The nodes of each traced unit, in graph order, and the placeholders of its parameters and buffers."""

    forward: list[list[fx.Node]]
    backward: list[list[fx.Node]]
    state: list[dict[str, fx.Node]]

    @classmethod
    def of(cls, graph: fx.GraphModule, index: int, repeat: Repeat) -> RepeatedLayers:
        """Collect the nodes that were tagged as those of the repeat number ``index``."""
        forward: list[list[fx.Node]] = [[] for _ in repeat.kept]
        backward: list[list[fx.Node]] = [[] for _ in repeat.kept]
        last: int | None = None  # sums over several users of a value bear no tag: they belong to the last user
        for node in graph.graph.nodes:
            if node.op not in ("call_function", "get_attr"):
                continue
            unit = unit_of(node)
            position = unit[1] if unit is not None and unit[0] == index else None
            if meta_of(node).phase == "forward":
                if position is not None:
                    forward[position].append(node)
                continue
            last = last if unit is None and not meta_of(node).module else position
            if last is not None:
                backward[last].append(node)
        del backward[0][len(backward[1]) :]
        placed = {port.name: node for port, node in ports(graph) if port.kind in ("param", "buffer")}
        return cls(forward, backward, [state_nodes(placed, unit) for unit in repeat.kept])


def state_nodes(placed: dict[str, Any], unit: Sequence[RecordedCall]) -> dict[str, Any]:
    """What ``placed`` holds of the parameters and buffers of a unit, by position of the call and name inside it."""
    entries = ((key, placed.get(name)) for key, name in state_names(unit).items())
    return {key: value for key, value in entries if value is not None}


def state_names(unit: Sequence[RecordedCall]) -> dict[str, str]:
    """The qualified names of the parameters and buffers of a unit, by position of the call and name inside it."""
    return {
        f"{position}.{name}": f"{call.name}.{name}"
        for position, call in enumerate(unit)
        for name, _ in state_of(call.module)
    }


@dataclass
class CopyPlan:
    """How to copy unit 0: ``sources[node]`` lists, for every tensor argument, (how it is told, node of unit 0 or the
    node outside); ``twin`` maps nodes of unit 0 to those of unit 1, and ``number_twin`` their autograd numbers.
    """

    repeat: Repeat
    units: RepeatedLayers
    twin: dict[fx.Node, fx.Node]
    sources: dict[fx.Node, list[tuple[str, fx.Node]]] = field(default_factory=dict)
    numbers: dict[fx.Node, tuple[str, Any]] = field(default_factory=dict)
    number_twin: dict[Any, Any] = field(default_factory=dict)


def compare_layers(graph: fx.GraphModule, repeat: Repeat, units: RepeatedLayers) -> CopyPlan:
    """Check that units 0 and 1 are the same program, and tell where each argument of them comes from."""

    def unlike(reason: str) -> UnlikeUnits:
        return UnlikeUnits(repeat, reason)

    first = units.forward[0] + units.backward[0]
    second = units.forward[1] + units.backward[1]
    lengths = [(len(units.forward[i]), len(units.backward[i])) for i in (0, 1)]
    if lengths[0] != lengths[1] or not all(lengths[0]) or units.state[0].keys() != units.state[1].keys():
        raise unlike(f"units of {lengths} nodes")
    order = {node: i for i, node in enumerate(graph.graph.nodes)}
    for chain in (units.forward[0] + units.forward[1], units.backward[1] + units.backward[0]):
        if order[chain[-1]] - order[chain[0]] != len(chain) - 1:
            raise unlike("other nodes stand among those of the units")
    twin = dict(zip(first, second, strict=True))
    twin |= {node: units.state[1][name] for name, node in units.state[0].items()}
    plan = CopyPlan(repeat, units, twin)
    back = {node: mine for mine, node in twin.items()}
    for mine, theirs in zip(first, second, strict=True):
        if not _same_call(graph, mine, theirs, repeat):
            raise unlike(f"'{mine.name}' and '{theirs.name}' are different operators")
        pairs = zip(input_nodes(mine), input_nodes(theirs), strict=True)
        plan.sources[mine] = [_source(a, b, twin, back, unlike) for a, b in pairs]
    _compare_numbers(plan, unlike)
    allowed = {*first, *second, *units.forward[2], *units.backward[2], graph.graph.output_node()}
    if any(user not in allowed for node in second for user in node.users):
        raise unlike("a value of the second unit is used outside")
    return plan


def _same_call(graph: fx.GraphModule, mine: fx.Node, theirs: fx.Node, repeat: Repeat) -> bool:
    """Whether two nodes are the same but for the tensors that they take and for their place."""
    if mine.op == "get_attr" or theirs.op == "get_attr":
        values = [_held(graph, node) for node in (mine, theirs)]
        return mine.op == theirs.op and values[0] is not None and values[0] == values[1]
    here, there = meta_of(mine), meta_of(theirs)
    places = [place_of(record.module, unit) for record, unit in zip((here, there), repeat.kept, strict=False)]
    constants = [repr(fx.map_arg((node.args, node.kwargs), lambda _: None)) for node in (mine, theirs)]
    same = mine.target is theirs.target and constants[0] == constants[1] and places[0] == places[1]
    return same and here.having(module="") == there.having(module="")


def _held(graph: fx.GraphModule, node: fx.Node) -> Any:
    value = getattr(graph, str(node.target))
    return (value.dtype, tuple(value.shape), text) if (text := constant_value(value, _MOST_CONSTANTS)) else None


def place_of(module: str, unit: Sequence[RecordedCall]) -> tuple[int, str]:
    """(position of the call that ``module`` is part of, its name inside), or (-1, ``module``)."""
    for position, call in enumerate(unit):
        inside, name = relative(module, call.name)
        if inside:
            return position, name
    return -1, module


def _source(
    mine: Any, theirs: Any, twin: dict[Any, Any], back: dict[Any, Any], unlike: Callable[[str], Exception]
) -> tuple[str, Any]:
    """Tell how two arguments correspond, and the one of unit 0, or outside, that the copies' arguments come from."""
    if mine in twin and twin[mine] == theirs:
        return OWN, mine
    if mine == theirs and mine not in twin and mine not in back:
        return OUTSIDE, mine
    if theirs in twin and mine not in twin and mine not in back:
        return BEFORE, theirs
    if mine in back and theirs not in twin and theirs not in back:
        return BEHIND, back[mine]
    raise unlike(f"{mine} and {theirs} do not correspond")


def _compare_numbers(plan: CopyPlan, unlike: Callable[[str], Exception]) -> None:
    """The same for the autograd numbers, which tie backward nodes to forward nodes.

    Backward nodes of a library's operators may have numbers of their own, which no forward node has.
    """
    numbers = [{node.meta.get("seq_nr") for node in nodes} for nodes in plan.units.forward]
    later = [{node.meta.get("seq_nr") for node in nodes} for nodes in plan.units.backward]
    alone = [later[i].difference(*numbers, *(later[j] for j in range(3) if j != i)) for i in range(3)]
    differences = [numbers[0] - numbers[1] | alone[0], numbers[1] - numbers[2] | alone[1]]
    twin, back = plan.number_twin, dict[Any, Any]()
    pairs = [
        (mine, mine.meta.get("seq_nr"), plan.twin[mine].meta.get("seq_nr"))
        for mine in (*plan.units.forward[0], *plan.units.backward[0])
    ]
    for _, mine, theirs in pairs:
        if mine in differences[0] and theirs in differences[1]:
            tied = twin.setdefault(mine, theirs), back.setdefault(theirs, mine)
            if tied != (theirs, mine):
                raise unlike(f"autograd numbers {mine} and {theirs} do not correspond")
    for node, mine, theirs in pairs:
        plan.numbers[node] = _source(mine, theirs, twin, back, unlike)
