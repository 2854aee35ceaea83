"""The layer block of every tensor that a check compares, for people to find it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from torch import fx

from galvatron_fx.checking.steps import Key
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports

__all__ = ["block_names"]


def block_names(graph: fx.GraphModule, outputs: Sequence[Key]) -> dict[Key, str]:
    """The block that first uses a parameter, or makes a buffer or an output, by kind and name: "3 (layers.1)".

    ``outputs``: kinds and names of what the model returns, in its order.
    """
    titles = _titles(graph)
    names: dict[Key, str] = {}
    for port, node in ports(graph):
        used = [user for user in node.users if user.op == "call_function"]
        if port.kind in ("param", "buffer") and used:
            title = titles.get(min(meta_of(user).block for user in used), "")
            kinds = ("parameter", "gradient") if port.kind == "param" else ("buffer",)
            names |= {(kind, port.name): title for kind in kinds}
    for output, maker in output_ports(graph):
        if output.kind == "buffer" and maker is not None:
            names["buffer", output.name] = titles.get(meta_of(maker).block, "")
        if output.kind == "output" and maker is not None and int(output.name) < len(outputs):
            names[outputs[int(output.name)]] = titles.get(meta_of(maker).block, "")
    return names


def _titles(graph: fx.GraphModule) -> dict[int, str]:
    """The number of every block and the module that most of its forward stands in."""
    modules: dict[int, Counter[str]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).phase == "forward":
            modules.setdefault(meta_of(node).block, Counter())[meta_of(node).module] += 1
    return {block: _title(block, counts) for block, counts in modules.items()}


def _title(block: int, modules: Counter[str]) -> str:
    named = [name.split(".") for name in modules if name]
    shared = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*named, strict=False)))
    main = shared or modules.most_common(1)[0][0]
    return f"{block} ({main})" if main else str(block)
