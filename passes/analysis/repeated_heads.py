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
    """``source`` [batch, heads, ...], each head of which stands ``times`` in a row."""

    source: fx.Node
    times: int


def repeated_heads(value: Any) -> Repeated | None:
    """What ``value`` [batch, heads * times, ...] repeats: ``source.unsqueeze(2).expand(..).reshape(..)``."""
    chain: list[fx.Node] = []
    for targets in (_VIEWS, (aten.expand.default,), (aten.unsqueeze.default,)):
        if not isinstance(value, fx.Node) or value.target not in targets:
            return None
        chain.append(value)
        value = value.args[0]
    if not isinstance(value, fx.Node):
        return None
    repeated, expanded, single, source = (meta_of(node).spec.shape for node in (*chain, value))
    if len(source) != 4 or len(expanded) != 5 or single != (*source[:2], 1, *source[2:]):
        return None
    times = expanded[2]
    whole = expanded == (*source[:2], times, *source[2:]) and repeated == (source[0], source[1] * times, *source[2:])
    return Repeated(value, times) if whole else None
