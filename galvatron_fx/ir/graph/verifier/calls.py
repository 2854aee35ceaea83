"""Calls of operators on placed tensors, as the verifier looks at them: each distinct one once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.placement import ValuePlacement
from galvatron_fx.ir.graph.random_ops import comparable_args

Lie = tuple[ValuePlacement, ...]


class Local(NamedTuple):
    """What a rank has of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PlacedCall(NamedTuple):
    """A call with :class:`Local` for tensors; ``inputs`` and ``outputs``: their placements, one a mesh column;
    ``degrees``: of the columns, of which those before ``first`` are not asked about.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    locals: tuple[Local | None, ...]
    inputs: tuple[Lie, ...]
    outputs: tuple[Lie, ...]
    degrees: tuple[int, ...]
    first: int


# What is wrong with a call, None if nothing is.
CallRules = Callable[[PlacedCall], str | None]


def placed_call(node: fx.Node, degrees: Sequence[int], first: int) -> PlacedCall:
    """Describe the call at ``node``, whose inputs and outputs have placements."""
    record = meta_of(node)
    return PlacedCall(
        node.target,
        _frozen(comparable_args(node)),
        tuple((name, _frozen(node.kwargs[name])) for name in node.kwargs),
        tuple(None if spec is None else Local(spec.shape, spec.dtype) for spec in record.specs),
        tuple(meta_of(source).placements[0] for source in input_nodes(node)),
        record.placements,
        tuple(degrees),
        first,
    )


def _frozen(value: Any) -> Any:
    if isinstance(value, fx.Node):
        spec = meta_of(value).specs[0]
        assert spec is not None
        return Local(spec.shape, spec.dtype)
    if isinstance(value, (tuple, list)):
        return tuple(map(_frozen, value))
    return value


@lru_cache(maxsize=1 << 16)
def call_problem(call: PlacedCall, rules: CallRules) -> str | None:
    """What ``rules`` find wrong with ``call``: equal layers and passes ask again and again."""
    return rules(call)
