"""What layer blocks are called, for people: the modules whose weights they compute with. Nothing is decided by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, ports
from passes.analysis.blocks import num_blocks

__all__ = ["block_names", "named_block"]

_LEAST_SHARE = 0.1  # of the weights of the largest part: a norm beside a head does not name the block
_MOST_PARTS = 2
_MOST_CHARACTERS = 200


def block_names(graph: fx.GraphModule) -> tuple[str, ...]:
    """Return a name for each block of an annotated graph: "model.layers.0", "lm_head".

    That is the outermost module that no other block computes with, of each weight; of several the largest, in forward
    order. Blocks whose modules others share too, as where a layer is run several times, have the path that their
    weights have in common; those without weights are called by their operators' modules, or by their number.
    """
    weights, operators = _modules(graph)
    homes: dict[str, set[int]] = {}
    for block, modules in enumerate(weights):
        for path in (prefix for module in modules for prefix in _prefixes(module)):
            homes.setdefault(path, set()).add(block)
    names = []
    for block, modules in enumerate(weights):
        parts: Counter[str] = Counter()
        for module, elements in modules.items():
            own = next((path for path in _prefixes(module) if len(homes[path]) == 1), None)
            parts[own or _common(modules)] += elements
        names.append(_printable(_joined(parts) or _common(operators[block])) or f"block {block}")
    return tuple(names)


def named_block(graph: fx.GraphModule, block: int) -> str:
    """Return number and name of a block, for errors: "block 3 ('model.layers.2')"."""
    name = block_names(graph)[block]
    return name if name == f"block {block}" else f"block {block} ('{name}')"


def _modules(graph: fx.GraphModule) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """For each block, the elements of weights by the module that reads them, and the operators by theirs."""
    weights: list[Counter[str]] = [Counter() for _ in range(num_blocks(graph))]
    operators: list[Counter[str]] = [Counter() for _ in weights]
    for node in graph.graph.nodes:
        if node.op == "call_function" and meta_of(node).phase == "forward":
            operators[max(meta_of(node).block, 0)][meta_of(node).module] += 1
    for port, parameter in ports(graph):
        for user in parameter.users if port.kind == "param" else ():
            if user.op == "call_function" and meta_of(user).phase == "forward":
                module = meta_of(user).module or port.name.rpartition(".")[0]
                weights[max(meta_of(user).block, 0)][module] += meta_of(parameter).spec.numel
    return weights, operators


def _prefixes(module: str) -> list[str]:
    """The module and those that it is in, the outermost first; none of the model itself."""
    parts = module.split(".") if module else []
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


def _common(modules: Iterable[str]) -> str:
    """The innermost module that all of these are in."""
    paths: Sequence[list[str]] = [module.split(".") for module in modules if module]
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)))


def _joined(parts: Counter[str]) -> str:
    most = max(parts.values(), default=0)
    large = [name for name, elements in parts.items() if name and elements >= _LEAST_SHARE * most]
    return ", ".join(large[:_MOST_PARTS]) + (", …" if len(large) > _MOST_PARTS else "")


def _printable(name: str) -> str:
    """Names of modules may hold anything; one line of a table does not."""
    return "".join(character if character.isprintable() else "?" for character in name)[:_MOST_CHARACTERS]
