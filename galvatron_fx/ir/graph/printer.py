"""Graphs as Python that a person can read."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import fx

from galvatron_fx.ir.graph.further_rounds import FurtherRounds
from galvatron_fx.ir.graph.metadata import has_meta, meta_of

_ASSIGNED = re.compile(r"^ +(\w+)(?:: .*?)? = ")


def readable(graph: fx.GraphModule, note: Callable[[fx.Node], str] | None = None) -> str:
    """Return the graph as Python, each value with its dtype and the shape that its facts give it.

    On a lowered graph these are the local shapes of one rank. Graphs that nodes run again stand behind it. ``note``:
    what to say of a node behind its line, if anything, such as :func:`cost_models.formula_text.cost_note`.
    """
    for node in graph.graph.nodes:
        if has_meta(node):
            values = [
                torch.empty(spec.shape, dtype=spec.dtype, device="meta") if spec is not None else None
                for spec in meta_of(node).specs
            ]
            node.meta["val"] = tuple(values) if meta_of(node).multi_output else values[0]
    text: str = graph.print_readable(print_output=False)
    rounds = [node for node in graph.graph.nodes if isinstance(node.target, FurtherRounds)]
    again = [f"\n\n# each of {node.name}\n{readable(node.target.body, note)}" for node in rounds]
    return "".join([text if note is None else _noted(text, graph, note), *again])


def memory_note(node: fx.Node) -> str:
    """Say of a value of forward that it is kept for backward, and of one of backward that it is computed again, with
    the number that plans know it by.
    """
    if node.op != "call_function" or not has_meta(node):
        return ""
    record = meta_of(node)
    number = f", value {record.value}" if record.value >= 0 else ""
    if record.again:
        return f"computed again{number}"
    is_kept = record.phase == "forward" and any(user.op == "output" for user in node.users)
    return f"kept for backward{number}" if number and is_kept else ""


def _noted(text: str, graph: fx.GraphModule, note: Callable[[fx.Node], str]) -> str:
    """The code with a comment behind the line of every node of which there is something to say."""
    notes = {node.name: note(node) for node in graph.graph.nodes if node.op == "call_function"}
    lines = []
    for line in text.split("\n"):
        assigned = _ASSIGNED.match(line)
        said = notes.get(assigned[1], "") if assigned else ""
        lines.append(f"{line}  # {said}" if said else line)
    return "\n".join(lines)
