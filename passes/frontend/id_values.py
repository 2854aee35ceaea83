"""What follows from the ids of experts alone, known by its values for a few draws of ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of
from galvatron_fx.ir.graph.op_call import input_nodes, is_getitem

__all__ = [
    "INTEGERS",
    "Values",
    "are_places",
    "choices",
    "followers",
    "root_of",
    "values_of_constants",
    "values_of_ids",
]

aten = torch.ops.aten

INTEGERS = (torch.int64, torch.int32)

# Operators that return places along a dim of their input, and the position of that dim among the arguments.
_PLACES = {aten.topk.default: 2, aten.sort.default: 1, aten.sort.stable: 2, aten.max.dim: 1, aten.argmax.default: 1}
_LISTS = (aten.topk.default, aten.sort.default, aten.sort.stable)  # give no place twice

_FEW_ROWS = 256

Values = dict[fx.Node, list[Any]]
"""Of each node its value for every draw: a tensor, or a tuple of them."""


def root_of(ids: fx.Node) -> fx.Node:
    """The ids before they were flattened or cast."""
    while ids.op == "call_function" and not is_getitem(ids) and len(input_nodes(ids)) == 1:
        (source,) = input_nodes(ids)
        if meta_of(source).multi_output or meta_of(source).spec.dtype not in INTEGERS:
            break
        ids = source
    return ids


def are_places(root: fx.Node, experts: int) -> bool:
    """Whether ids are places along a dim of at most ``experts``, so that each is of an expert."""
    size = choices(root)
    return size is not None and size <= experts


def choices(root: fx.Node) -> int | None:
    """The size of the dim along which ids are places; None where they are not."""
    found = _places(root)
    return found[1] if found is not None else None


def _places(root: fx.Node) -> tuple[int, int, bool] | None:
    """The dim along which ids are places, its size, and whether they lie along it, each once."""
    maker = root.args[0] if is_getitem(root) else root
    if not isinstance(maker, fx.Node) or maker.target not in _PLACES:
        return None
    at = _PLACES[maker.target]
    dim = maker.args[at] if len(maker.args) > at else maker.kwargs.get("dim", -1)
    shape = meta_of(maker.args[0]).spec.shape  # type: ignore[arg-type]
    return (dim, shape[dim], maker.target in _LISTS) if isinstance(dim, int) and shape else None


def values_of_ids(root: fx.Node, experts: int, stray: int | None = None) -> Values:
    """The values of all that is computed from ``root`` and constants alone, for ids at random and ids that are as much
    the same as they can be; ``stray``: the id in some places.
    """
    values: Values = {root: _draws(root, experts, stray)}
    pending = list(root.users)
    while pending:
        node = pending.pop()
        if node in values or not _is_known(node, values):
            continue
        values[node] = [_run(node, values, draw) for draw in range(len(values[root]))]
        pending += list(node.users)
    return values


def values_of_constants(node: fx.Node) -> Values:
    """The values of a node that follows from constants alone, and of its inputs, as if of one draw."""
    if not _is_known(node, {}):
        return {}
    return {each: [_run(each, {}, 0)] for each in (*input_nodes(node), node)}


def followers(values: Values, first: set[fx.Node]) -> list[fx.Node]:
    """Of what follows from ids, what follows from one of ``first``, and these."""
    behind = dict.fromkeys(first)
    pending = [user for node in first for user in node.users]
    while pending:
        node = pending.pop()
        if node in values and node not in behind:
            behind[node] = None
            pending += list(node.users)
    return list(behind)


def _draws(root: fx.Node, experts: int, stray: int | None) -> list[Tensor]:
    spec, places = meta_of(root).spec, _places(root)
    count = 2 + _FEW_ROWS // max(spec.numel, 1)  # orders of few rows may be alike by chance
    seeds = [torch.Generator().manual_seed(seed) for seed in range(count)]
    if places is not None and places[1:] == (experts, True):
        draws = [_apart(spec, places[0], experts, seed) for seed in (*seeds, None)]
    else:
        draws = [torch.randint(experts, spec.shape, generator=seed, dtype=spec.dtype) for seed in seeds]
        draws.append(torch.full_like(draws[0], experts - 1))
    if stray is not None:
        draws = [torch.where(draw % 2 == 0, draw, stray) for draw in draws]
    return draws


def _apart(spec: TensorSpec, dim: int, experts: int, seed: torch.Generator | None) -> Tensor:
    """Ids, none of them twice along ``dim``: runs up or down from any; or the same everywhere, without a seed."""
    along = [-1 if at == dim % len(spec.shape) else 1 for at in range(len(spec.shape))]
    one = [1 if size < 0 else spec.shape[at] for at, size in enumerate(along)]
    steps = torch.arange(spec.shape[dim]).reshape(along).expand(spec.shape)
    if seed is not None:
        steps = torch.randint(experts, one, generator=seed) + steps * (2 * torch.randint(2, one, generator=seed) - 1)
    return (steps % experts).to(spec.dtype)


def _is_known(node: fx.Node, values: Values) -> bool:
    """Whether a node can be computed from what is known, and constants."""
    if node.op != "call_function" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return False
    return all(source in values or _is_known(source, {}) for source in input_nodes(node))


def _run(node: fx.Node, values: Values, draw: int) -> Any:
    def of(source: fx.Node) -> Any:
        return values[source][draw] if source in values else _run(source, {}, draw)

    options = {name: value for name, value in node.kwargs.items() if name != "device"}
    args, kwargs = fx.map_arg((node.args, options), of)
    target = aten.reshape.default if node.target is aten.view.default else node.target  # strides may be others
    return target(*args, **kwargs)  # type: ignore[operator]
