"""The lowered code of each kind of block, once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from galvatron_fx.ir.graph import collectives as c
from galvatron_fx.ir.graph.chunked_collectives import CHUNKED
from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.printer import readable
from galvatron_fx.ir.graph.rewrite import copy_node
from galvatron_fx.report.collective_rows import task_graphs
from galvatron_fx.report.reasons import Reasons
from passes.simulation.short_model import Label
from passes.simulation.short_program import ShortProgram

__all__ = ["BlockCode", "block_codes"]

_FREED = re.compile(r";(\s+\w+ =)+ None(  # |$)")
_CALL = re.compile(r"galvatron_fx_ir_graph_(?:collectives|bound_ops|precision|random_ops)_(\w+)\(")
_ASSIGNED = re.compile(r"^\s*(\w+)\s*[:=]")


@dataclass(frozen=True)
class BlockCode:
    """What runs of a kind of block: by task, lines of Python with, for collectives, their reasons.

    ``index``: the block whose code it is, the same as that of all blocks of the label.
    """

    label: Label
    index: int
    tasks: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]


def block_codes(program: ShortProgram, kinds: frozenset[str]) -> list[BlockCode]:
    """Return the code of every label, of the kept block that stands for most."""
    blocks = program.blocks
    reasons = Reasons(program.lowered.joint)
    codes = []
    for label in dict.fromkeys(block.label for block in blocks):
        numbers = [i for i, block in enumerate(blocks) if block.label == label]
        number = max(numbers, key=lambda i: blocks[i].stands_for)
        tasks = []
        for position, task, graph in task_graphs(program, kinds):
            if number not in program.blocks_of(position):
                continue
            chosen = [node for node in graph.graph.nodes if _block(node) == number]
            block_excerpt = excerpt(task, chosen)
            if block_excerpt is not None:
                tasks.append((task, tuple(_lines(block_excerpt, reasons))))
        codes.append(BlockCode(label, program.short.keep[number], tuple(tasks)))
    return codes


def excerpt(name: str, chosen: Sequence[fx.Node]) -> fx.GraphModule | None:
    """Operators of a graph, in its order, as a graph of their own; None where there is none.

    Takes what they take from others, and returns what others take.
    """
    if not chosen:
        return None
    inside = set(chosen)
    taken = dict.fromkeys(source for node in chosen for source in node.all_input_nodes if source not in inside)
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for source in taken:
        copies[source] = new.placeholder(source.name)
        copies[source].meta = dict(source.meta)
    for node in chosen:
        copies[node] = copy_node(new, node, lambda n: copies[n])
    new.output(tuple(copies[node] for node in chosen if any(user not in inside for user in node.users)))
    return fx.GraphModule({}, new, class_name=name)


def _block(node: fx.Node) -> int:
    return max(meta_of(node).block, 0) if node.op == "call_function" else -1


def _lines(graph: fx.GraphModule, reasons: Reasons) -> Iterator[tuple[str, str]]:
    nodes = {node.name: node for node in graph.graph.nodes}
    for line in readable(graph).splitlines():
        if not line.strip() or line.strip().startswith("#") or line.startswith("class "):
            continue
        text = _FREED.sub("", line.removeprefix("    ")).rstrip()
        text = text.replace("def forward(self, ", f"def {graph.__class__.__name__}(", 1)
        called = _CALL.search(text)
        name = _ASSIGNED.match(text)
        node = nodes.get(name[1]) if called and name else None
        is_known = node is not None and (node.target in c.COLLECTIVES or node.target in CHUNKED)
        yield _CALL.sub(r"\1(", text), reasons.of(node) if is_known and node is not None else ""
