"""How every value of a lowered graph lies on its mesh: held against what makes it."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from galvatron_fx.ir.graph.folded_gradients import fold_gradient
from galvatron_fx.ir.graph.host_copies import HOST_COPIES
from galvatron_fx.ir.graph.layout import layout, placement_of
from galvatron_fx.ir.graph.local_program import literals, placements_of
from galvatron_fx.ir.graph.metadata import Step, has_meta, meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem
from galvatron_fx.ir.graph.placement import Replicate
from galvatron_fx.ir.graph.verifier.calls import CallRules, call_problem, placed_call
from galvatron_fx.ir.graph.verifier.folded_gradients import folded_gradient_problem
from galvatron_fx.ir.graph.verifier.host_copies import host_copy_problem
from galvatron_fx.ir.graph.verifier.moves import MOVES, Move, read_move, shape_problem


def text(placements: Any) -> str:
    """Placements for people: ``S(0) R``."""
    if isinstance(placements, tuple):
        return " ".join(map(text, placements)) or "nothing"
    return str(placements)


# Under which a node keeps what it was held to be right by: the very objects.
_HELD = "galvatron_fx verified"


@dataclass(frozen=True)
class Placements:
    """The checks of a graph on a mesh of ``degrees``; ``inputs``: how each placeholder has to lie; ``rules``: of single
    operators.
    """

    degrees: tuple[int, ...]
    inputs: dict[fx.Node, tuple[Any, ...]]
    rules: CallRules

    @classmethod
    def of(cls, graph: fx.GraphModule, rules: CallRules | None) -> Placements:
        """The checks of ``graph``, which has a layout."""
        if rules is None:
            raise AssertionError("a graph that lies on a mesh is verified with the rules of operators")
        graph_layout = layout(graph)
        given = dict(zip(graph.graph.find_nodes(op="placeholder"), graph_layout.inputs, strict=True))
        return cls(_one_of(graph_layout.shape), given, rules)

    def problem(self, node: fx.Node) -> str | None:
        """What is wrong with a node's placements or with the call that makes them, None if nothing is.

        A call that was held to be right is not looked at again until it, its facts or those of what it takes change:
        most passes leave most nodes alone.
        """
        if node.op != "call_function":
            return self._problem(node)
        records = (meta_of(n) if has_meta(n) else None for n in (node, *node.all_input_nodes))
        facts = self.degrees, self.rules, node.target, node.args, node.kwargs, *records
        known = node.meta.get(_HELD, ())
        if len(facts) == len(known) and all(map(operator.is_, facts, known)):
            return None
        problem = self._problem(node)
        if problem is None:
            node.meta[_HELD] = facts
        return problem

    def _problem(self, node: fx.Node) -> str | None:
        columns = len(self.degrees)
        record = meta_of(node)
        placements = record.placements or (((),) * len(record.specs) if not columns else ())
        if len(placements) != len(record.specs) or any(len(placed) != columns for placed in placements):
            return f"has placements {record.placements}, where each of its outputs needs one on {columns} mesh columns"
        if node.op == "placeholder":
            wanted = self.inputs[node]
            given = placement_of(node)
            alike = given == wanted or not columns
            return None if alike else f"lies as {text(given)}, where the graph is given {text(wanted)}"
        if node.op == "get_attr":
            whole = all(isinstance(placed, Replicate) for placed in placements[0])
            return None if whole else f"is a constant, which every rank has whole, and lies as {text(placements[0])}"
        unplaced = [n.name for n in node.all_input_nodes if not has_meta(n)]
        if unplaced:
            return f"takes {unplaced}, which have no facts"
        return self._call_problem(node, record.step)

    def _call_problem(self, node: fx.Node, step: Step | None) -> str | None:
        first = 0
        if step is not None:
            problem = _step_problem(node, step)
            if problem is not None:
                return problem
            first = step.columns
        if node.target in HOST_COPIES:
            return host_copy_problem(node)
        if node.target is fold_gradient:
            return folded_gradient_problem(node)
        if node.target in MOVES:
            return self._move_problem(node, first)
        if is_getitem(node):
            return _getitem_problem(node, first)
        return self._rule_problem(node, first)

    def _rule_problem(self, node: fx.Node, first: int) -> str | None:
        """An operator between tensors has to have a rule, on every mesh column that no program speaks of."""
        if first == len(self.degrees):
            return None
        several = [n.name for n in input_nodes(node) if meta_of(n).multi_output]
        if several:
            return f"takes all outputs of {several} at once"
        return call_problem(placed_call(node, self.degrees, first), self.rules)

    def _move_problem(self, node: fx.Node, first: int) -> str | None:
        move = read_move(node, len(self.degrees))
        if isinstance(move, str):
            return move
        wrong_shape = shape_problem(node, move, self.degrees[move.column])
        if wrong_shape is not None:
            return wrong_shape
        have, want = placements_of(node.args[0])[0], placements_of(node)[0]  # type: ignore[arg-type]
        if move.column >= first:
            problem = _change_problem(node, move, have, want)
            if problem is not None:
                return problem
        for column in range(first, move.column):
            if have[column] != want[column]:
                return f"lies as {text(want)} and takes {text(have)}: it may change column {move.column} alone"
        return self._rule_problem(node, max(first, move.column + 1))


@cache
def _one_of(degrees: tuple[int, ...]) -> tuple[int, ...]:
    """The same object for equal ones."""
    return degrees


def _change_problem(node: fx.Node, move: Move, have: tuple[Any, ...], want: tuple[Any, ...]) -> str | None:
    if move.have is None or move.want is None:
        return "makes values that differ from rank to rank, and no local program is recorded that they are part of"
    placements = have[move.column], want[move.column]
    if placements != (move.have, move.want):
        return (
            f"turns {move.have} into {move.want} on mesh column {move.column}, where {node.args[0]} lies as "
            f"{placements[0]} and its result as {placements[1]}"
        )
    return None


def _step_problem(node: fx.Node, step: Step) -> str | None:
    """A node of a local program has to be what was recorded, and to take what it took."""
    if node.target is not step.target or literals(node) != step.literals:
        asked = f"{getattr(step.target, '__name__', step.target)} with {text(step.literals)}"
        return f"is called with {text(literals(node))}, where '{step.program}' has {asked}"
    inputs = tuple(placements_of(source, step.columns) for source in input_nodes(node))
    if inputs != step.inputs:
        return f"takes {_each(inputs)}, where '{step.program}' has {_each(step.inputs)}"
    return None


def _each(inputs: tuple[Any, ...]) -> str:
    return ", ".join(map(text, inputs))


def _getitem_problem(node: fx.Node, first: int) -> str | None:
    source, index = node.args
    given = meta_of(source)  # type: ignore[arg-type]
    if not isinstance(index, int) or not 0 <= index < len(given.specs):
        return f"takes output {index} of {source}, which has {len(given.specs)}"
    placements, wanted = placements_of(node)[0][first:], given.placements[index][first:]
    if placements != wanted:
        return f"lies as {text(placements)}, where output {index} of {source} lies as {text(wanted)}"
    if meta_of(node).specs[0] != given.specs[index]:
        return f"is recorded as {meta_of(node).specs[0]}, where output {index} of {source} is {given.specs[index]}"
    return None
