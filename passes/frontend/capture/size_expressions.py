"""The arguments of a traced graph that change with batch and sequence, as expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of, signature
from galvatron_fx.ir.graph.symbols import SecondTrace, Sizes, fit, value_at
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import FakeTensor, no_modes

__all__ = ["Call", "OtherSizes", "SizeExpressions", "SizedNumber"]

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a node."""


class OtherSizes(Exception):
    """Says which part of a traced graph is no expression of batch and sequence, so that other sizes need a trace."""


@dataclass(frozen=True)
class SizedNumber:
    """A number in a node's arguments that changes with the sizes: ``expression``, or one over it where ``inverse``.

    ``kind``: int or float. Means divide by a count, or multiply by its inverse.
    """

    expression: sympy.Expr
    kind: type
    inverse: bool = False

    def at(self, sizes: Sizes) -> int | float:
        """The number at ``sizes``."""
        value = value_at(self.expression, sizes)
        number: int | float = self.kind(1 / value if self.inverse else value)
        return number


@dataclass(frozen=True)
class SizeExpressions:
    """What changes in a graph between sizes beside the shapes of its tensors, whose ``dims`` are expressions already.

    ``base``: the sizes of the graph; ``calls``: the arguments of the nodes that have sizes in them, with
    :class:`SizedNumber` in their place.
    """

    base: Sizes
    calls: Mapping[fx.Node, Call]

    @classmethod
    def of(cls, graph: fx.GraphModule, second: SecondTrace) -> SizeExpressions:
        """Match ``graph``, whose dims are annotated, with its second trace.

        Raises OtherSizes naming the first node with a size that is no expression.
        """
        base: Sizes = graph.meta["symbols"]
        matching = _Matching(base, second.sizes)
        calls: dict[fx.Node, Call] = {}
        for first, other in zip(graph.graph.nodes, second.graph.graph.nodes, strict=True):
            matching.twin[other] = first
            call = matching.call(first, other)
            if call is not None:
                calls[first] = call
            if first.op == "get_attr":
                refuse_unlike_constants(first, getattr(graph, str(first.target)), _held(second.graph, other))
            if first.op != "output":
                matching.check_dims(first, other)
        if result_of(graph) != result_of(second.graph):
            raise OtherSizes("what the model returns beside tensors changes with the sizes")
        return cls(base, calls)


@dataclass
class _Matching:
    """Two traces, walked through node by node; ``twin``: the node of the first for each of the second."""

    base: Sizes
    other: Sizes

    def __post_init__(self) -> None:
        self.twin: dict[fx.Node, fx.Node] = {}

    def call(self, first: fx.Node, second: fx.Node) -> Call | None:
        """The arguments with expressions; None where no size is among them."""
        sized = False

        def leaf(mine: Any, theirs: Any) -> Any:
            nonlocal sized
            if isinstance(mine, fx.Node) or isinstance(theirs, fx.Node):
                if self.twin.get(theirs) is not mine:
                    raise OtherSizes(f"{where(first)} takes other values at other sizes")
                return mine
            if same_constant(mine, theirs):
                return mine
            sized = True
            return self._number(first, mine, theirs)

        try:
            args, kwargs = pytree.tree_map(leaf, _call(first), _call(second))
        except ValueError:  # the arguments are nested otherwise
            raise OtherSizes(f"{where(first)} has other arguments at other sizes") from None
        return (args, kwargs) if sized else None

    def _number(self, node: fx.Node, mine: Any, theirs: Any) -> SizedNumber:
        """The expression of a number that differs."""
        kind = type(mine)
        for inverse in (False, True):
            counts = [_count(value, kind, inverse) for value in (mine, theirs)]
            if type(theirs) is kind and None not in counts:
                dim = fit(counts[0], counts[1], self.base, self.other)
                if isinstance(dim, sympy.Expr):
                    return SizedNumber(dim, kind, inverse)
        raise OtherSizes(
            f"{where(node)} has {mine!r} at {describe_sizes(self.base)} and {theirs!r} at {describe_sizes(self.other)}"
        )

    def check_dims(self, first: fx.Node, second: fx.Node) -> None:
        """See that the dims of a node are its shape at the other sizes as well."""
        for mine, theirs in zip(meta_of(first).specs, meta_of(second).specs, strict=True):
            if mine is None or theirs is None:
                continue
            shape = tuple(value_at(dim, self.other) for dim in mine.symbolic)
            if shape != theirs.shape:
                raise OtherSizes(
                    f"{where(first)} has the shape {list(mine.shape)} at {describe_sizes(self.base)} and "
                    f"{list(theirs.shape)} at {describe_sizes(self.other)}"
                )


def where(node: fx.Node) -> str:
    """Name a node for people: its name, what it calls and its module."""
    module = f" in module '{meta_of(node).module}'" if node.op != "output" and meta_of(node).module else ""
    return f"node '{node.name}' ({node.target}){module}"


def describe_sizes(sizes: Sizes) -> str:
    """Name sizes for people."""
    sequence = f", sequence {sizes.sequence}" if sizes.sequence else ""
    return f"batch {sizes.batch}{sequence}"


def same_constant(mine: Any, theirs: Any) -> bool:
    """Whether two arguments that are no nodes are the same, of one type; a not-a-number is the same as another."""
    return type(mine) is type(theirs) and (mine == theirs or (mine != mine and theirs != theirs))


def refuse_unlike_constants(node: fx.Node, mine: Any, theirs: Any) -> None:
    """Raise OtherSizes where two traces hold other constants under one name."""
    if mine is theirs:
        return
    plain = all(isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor) for value in (mine, theirs))
    if not plain or mine.device.type == "meta" or theirs.device.type == "meta":
        raise OtherSizes(f"{where(node)} holds a constant whose values are not known at other sizes")
    with no_modes():
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not torch.equal(mine, theirs):
            shapes = " and ".join(str(list(value.shape)) for value in (mine, theirs))
            raise OtherSizes(f"{where(node)} holds a constant that depends on the sizes (of shapes {shapes})")


def result_of(graph: fx.GraphModule) -> tuple[Any, ...]:
    """What a signature says that sizes must not change: inputs and outputs, and what is returned beside tensors."""
    facts = signature(graph)
    return (
        facts.inputs,
        facts.outputs,
        facts.loss,
        facts.scalars,
        facts.detached,
        facts.output_names,
        facts.output_spec[1],
    )


def _held(graph: fx.GraphModule, node: fx.Node) -> Any:
    return getattr(graph, str(node.target))


def _call(node: fx.Node) -> Call:
    return node.args, dict(node.kwargs)


def _count(value: Any, kind: type, inverse: bool) -> int | None:
    """The whole number that a number is, or is one over; None where it is neither."""
    if kind is int:
        return None if inverse else int(value)
    if kind is not float or (inverse and not value):
        return None
    count = round(1 / value) if inverse else round(value)
    return count if count and (1 / count if inverse else float(count)) == value else None
