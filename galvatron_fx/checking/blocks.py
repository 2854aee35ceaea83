"""The layer block of every tensor that a check compares, for people to find it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from galvatron_fx.checking.steps import Key
from galvatron_fx.ir.graph.metadata import meta_of, output_ports, ports
from passes.analysis.block_names import block_names as module_names

__all__ = ["block_names"]


def block_names(graph: fx.GraphModule, outputs: Sequence[Key]) -> dict[Key, str]:
    """The block that first uses a parameter, or makes a buffer or an output, by kind and name: "3 (layers.1)".

    ``outputs``: kinds and names of what the model returns, in its order.
    """
    titles = [str(i) if name == f"block {i}" else f"{i} ({name})" for i, name in enumerate(module_names(graph))]
    names: dict[Key, str] = {}
    for port, node in ports(graph):
        used = [user for user in node.users if user.op == "call_function"]
        if port.kind in ("param", "buffer") and used:
            title = titles[min(meta_of(user).block for user in used)]
            kinds = ("parameter", "gradient") if port.kind == "param" else ("buffer",)
            names |= {(kind, port.name): title for kind in kinds}
    for output, maker in output_ports(graph):
        if output.kind == "buffer" and maker is not None:
            names["buffer", output.name] = titles[meta_of(maker).block]
        if output.kind == "output" and maker is not None and int(output.name) < len(outputs):
            names[outputs[int(output.name)]] = titles[meta_of(maker).block]
    return names
