"""The table of what must hold at each stage, and its check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx
from torch._ops import OpOverload

from galvatron_fx.ir.errors import VerifierError
from galvatron_fx.ir.graph.layout import has_layout
from galvatron_fx.ir.graph.metadata import output_ports, ports
from galvatron_fx.ir.graph.verifier.calls import CallRules
from galvatron_fx.ir.graph.verifier.nodes import (
    is_annotated,
    is_blocked,
    is_captured,
    is_flat,
    is_forward_first,
    is_lowered,
)
from galvatron_fx.ir.graph.verifier.placements import Placements
from galvatron_fx.ir.graph.verifier.results import result_problems

Check = Callable[[fx.Node], str | None]


@dataclass(frozen=True)
class Stage:
    """What must hold of a graph: ``nodes`` of each node; ``placed``: whether values lie on a mesh; ``whole``: whether
    its signature holds (not of its parts, nor of what a micro-batch adds to sums).
    """

    nodes: tuple[Check, ...]
    placed: bool = False
    whole: bool = True


STAGES: dict[str, Stage] = {
    "captured": Stage((is_flat, is_captured, is_forward_first)),
    "blocked": Stage((is_flat, is_captured, is_forward_first, is_blocked)),
    "annotated": Stage((is_flat, is_captured, is_forward_first, is_blocked, is_annotated)),
    "sharding": Stage((is_flat, is_lowered, is_forward_first)),
    "lowered": Stage((is_flat, is_lowered, is_forward_first), placed=True),
    "scheduled": Stage((is_flat, is_lowered, is_forward_first), placed=True, whole=False),
    "bound": Stage((is_flat, is_lowered, is_forward_first), placed=True, whole=False),
}


def verify(graph: fx.GraphModule, stage: str, after: str, rules: CallRules | None = None) -> None:
    """Check that ``graph`` is well formed and of ``stage`` (a key of STAGES); ``after`` names the pass that made it.

    ``rules`` says of an operator whose tensors are placed what is wrong, if anything: graphs on a mesh need it.

    Raises VerifierError naming the pass, the node and what is wrong with it.
    """
    try:
        graph.graph.lint()
        if STAGES[stage].whole:
            ports(graph), output_ports(graph)
    except (RuntimeError, ValueError) as error:
        raise VerifierError(f"after {after}: the graph is malformed: {error}") from error
    for subject, problem in _problems(graph, STAGES[stage], rules):
        raise VerifierError(f"after {after}: {subject} {problem}")


def _problems(graph: fx.GraphModule, stage: Stage, rules: CallRules | None) -> Iterator[tuple[str, str]]:
    """What is wrong, with its place, in the order of the graph."""
    placements = Placements.of(graph, rules) if stage.placed and has_layout(graph) else None
    for node in graph.graph.nodes:
        if node.op == "output":
            continue
        for check in stage.nodes:
            problem = check(node)
            if problem is not None:
                yield _subject(node), problem
        problem = placements.problem(node) if placements is not None else None
        if problem is not None:
            yield _subject(node), problem
    if placements is not None:
        yield from result_problems(graph, stage.whole)


def _subject(node: fx.Node) -> str:
    named = not isinstance(node.target, (str, OpOverload)) and hasattr(node.target, "__name__")
    return f"node '{node.name}' ({node.target.__name__ if named else node.target})"  # type: ignore[union-attr]
