"""The experts of a layer as a block of their own: from the residual in front of the router to its next sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from torch import fx

from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.kernels.experts import route

__all__ = ["expert_spans", "with_expert_cuts"]

Span = tuple[int, int]
"""Positions of the first operator, and behind the last one."""


def expert_spans(forward: Sequence[fx.Node], crossing: np.ndarray) -> list[Span]:
    """The operators that bring tokens to experts and back, with the norm and the router in front of them.

    A span begins where the fewest bytes cross between the span before it and the router, and ends behind the last use
    of what crosses there and leads to the router: the sum of the residual and the experts' result. ``crossing[i]``:
    bytes of activations that cross in front of operator ``i``, infinite where tokens are on their way.
    """
    position = {node: i for i, node in enumerate(forward)}
    spans: list[Span] = []
    for node, i in position.items():
        if node.target is not route:
            continue
        start = spans[-1][1] if spans else 0
        window = np.where(crossing[start : i + 1] > 0, crossing[start : i + 1], np.inf)
        if not np.isfinite(window).any():
            continue
        first = start + int(np.flatnonzero(window == window.min())[-1])
        end = max(_last_use(forward[:first], position, first, i), _last_row(node, position) + 1)
        spans.append((first, end))
    return spans


def _last_use(before: Sequence[fx.Node], position: Mapping[fx.Node, int], first: int, router: int) -> int:
    """The position behind the last use of what is made ``before`` and leads to the router."""
    uses = [[position[user] for user in node.users if user in position] for node in before]
    return 1 + max((max(each) for each in uses if any(first <= use <= router for use in each)), default=router)


def _last_row(node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """Where the rows that ``route`` sorts are put together again."""
    outputs = [user for user in node.users if is_getitem(user)]
    return max((position[user] for out in outputs for user in out.users if user in position), default=position[node])


def with_expert_cuts(
    cuts: Sequence[int], spans: Sequence[Span], length: int, holds_weight: Callable[[int, int], bool]
) -> list[int]:
    """``cuts``, and one at each end of a span, where there are weights on both sides of it.

    ``length``: of the forward pass; ``holds_weight(first, end)``: whether operators there take a matrix of weights.
    """
    edges = sorted({edge for span in spans for edge in span if 0 < edge < length})
    cuts = [cut for cut in cuts if all(holds_weight(*sorted((cut, edge))) for edge in edges)]
    bounds = [0, *sorted({*cuts, *edges}), length]
    return [
        cut
        for before, cut, behind in zip(bounds, bounds[1:], bounds[2:], strict=False)
        if cut in cuts or (holds_weight(before, cut) and holds_weight(cut, behind))
    ]
