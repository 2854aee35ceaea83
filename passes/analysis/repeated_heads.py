"""Key heads that a model repeats for every query head of a group (grouped queries; Ainslie et al. 2023)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from galvatron_fx.ir.graph.metadata import meta_of

__all__ = ["Repeated", "repeated_heads"]

aten = torch.ops.aten

_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)


class Repeated(NamedTuple):
    """``source`` [batch, heads, 1, ...], each head of which stands ``times`` in a row."""

    source: fx.Node
    times: int


def repeated_heads(value: Any) -> Repeated | None:
    """What ``value`` [batch, heads * times, ...] repeats: ``source.expand(..).reshape(..)``.

    Models write ``unsqueeze`` in front of ``expand``; behind it there may be a collective.
    """
    chain: list[fx.Node] = []
    for targets in (_VIEWS, (aten.expand.default,)):
        if not isinstance(value, fx.Node) or value.target not in targets:
            return None
        chain.append(value)
        value = value.args[0]
    if not isinstance(value, fx.Node):
        return None
    repeated, expanded, source = (meta_of(node).spec.shape for node in (*chain, value))
    if len(source) != 5 or len(expanded) != 5 or source[2] != 1:
        return None
    (batch, heads, _, *rest), times = source, expanded[2]
    whole = expanded == (batch, heads, times, *rest) and repeated == (batch, heads * times, *rest)
    return Repeated(value, times) if whole else None
