"""One operator call as sharding rules and prices see it: tensors replaced by their specs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import Node

from galvatron_fx.ir.graph.metadata import TensorSpec, has_meta, meta_of
from galvatron_fx.ir.graph.random_ops import comparable_args

_SELECTS = (
    torch.ops.aten.select.int,
    torch.ops.aten.select_scatter.default,
    torch.ops.aten.select_backward.default,
)
aten = torch.ops.aten

IN_PLACE: dict[Any, Any] = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
}
"""What writes rows into a copy of a tensor, and what writes them into the tensor itself."""
COPYING: dict[Any, Any] = {itself: copy for copy, itself in IN_PLACE.items()}


@dataclass(frozen=True)
class OpCall:
    """An operator with ``TensorSpec`` where tensors stand; hashable, so equal calls are looked at once.

    ``args`` and ``kwargs`` (as sorted pairs) hold tuples for lists; ``inputs`` are the tensors of args then kwargs,
    flattened in order; ``outputs`` has None for an absent output.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec | None, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Calls are looked up far more often than made."""
        return hash((self.target, self.args, self.kwargs, self.inputs, self.outputs))

    @property
    def output(self) -> TensorSpec:
        """The spec of the only (or first) output."""
        first = self.outputs[0]
        if first is None:
            raise AssertionError(f"{self.target} has no first output")
        return first


def call_key(call: OpCall) -> str:
    """Name a call, so that its time can be looked up: operator, arguments, and shapes and dtypes of tensors."""
    named = [_argument_key(value) for value in call.args]
    named += [f"{name}={_argument_key(value)}" for name, value in call.kwargs]
    return f"{getattr(call.target, '__name__', call.target)}({', '.join(named)})"


def _argument_key(value: Any) -> str:
    if isinstance(value, TensorSpec):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(_argument_key, value))}]"
    return str(value)


def without_index(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call with index 0 for the one that it selects.

    Steps of a loop over time differ in it. Costs and sharding rules do not depend on it.
    """
    return (*args[:-1], 0) if target in _SELECTS else args


def is_getitem(node: fx.Node) -> bool:
    """Tell whether ``node`` picks one output of a node with several."""
    return node.op == "call_function" and node.target is operator.getitem


def input_nodes(node: fx.Node) -> list[fx.Node]:
    """Tensor arguments of ``node`` in order, repeated where an argument is used twice."""
    nodes: list[fx.Node] = []
    _collect(node.args, nodes)
    if node.kwargs:
        _collect(node.kwargs.values(), nodes)
    return nodes


def _collect(values: Iterable[Any], nodes: list[fx.Node]) -> None:
    for value in values:
        if isinstance(value, Node):
            nodes.append(value)
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):  # sizes are numbers alone
            _collect(value, nodes)


def target_run(node: fx.Node) -> Any:
    """The operator that runs at ``node``: that which writes in place, where its record says so."""
    return IN_PLACE.get(node.target, node.target) if has_meta(node) and meta_of(node).in_place else node.target


def op_call(node: fx.Node, spec_of: Callable[[fx.Node], TensorSpec] | None = None) -> OpCall:
    """Describe the call at ``node`` with the specs that ``spec_of`` gives its inputs (by default their facts').

    The target of one that is run in place is that which writes in place.
    """
    lookup = spec_of or (lambda n: meta_of(n).spec)

    def freeze(value: Any) -> Any:
        if isinstance(value, Node):
            return lookup(value)
        if isinstance(value, (list, tuple)):
            are_sizes = value and isinstance(value[0], int)
            return tuple(value) if are_sizes else tuple(map(freeze, value))
        return value

    return OpCall(
        target=target_run(node),
        args=tuple(map(freeze, comparable_args(node))),
        kwargs=tuple(sorted((key, freeze(value)) for key, value in node.kwargs.items())) if node.kwargs else (),
        inputs=tuple(lookup(n) for n in input_nodes(node)),
        outputs=meta_of(node).specs,
    )
