"""Which dim of the inputs is the batch: as the user says, or as the graph tells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes
from galvatron_fx.ir.graph.symbols import BATCH, InputDims, SecondTrace, Shapes, annotate, fit_symbols
from passes.analysis.sample_work import is_mostly_of_samples
from passes.frontend.capture.flat_inputs import FlatInputs

__all__ = ["BatchDim", "fit_sizes"]

aten = torch.ops.aten

BatchDim: TypeAlias = "int | Mapping[str, int] | None"
"""The dim of the batch in all inputs, or by name in some that have it elsewhere than first; None: found."""

_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)


def fit_sizes(
    graph: fx.GraphModule,
    inputs: FlatInputs,
    retrace: Callable[[Shapes], fx.GraphModule],
    batch_dim: BatchDim,
    caches: frozenset[int] = frozenset(),
) -> tuple[InputDims, SecondTrace | None]:
    """Give every node's spec its symbolic ``dims``: where the inputs have batch and sequence, and the second trace.

    Unless the user says which dim is the batch, it is the first; or the second, where the program depends on the first
    size (a loop over steps) or attends along it, and neither on the second, and does most of its work for each index of
    that: models that take [sequence, batch, ...].
    ``caches``: positions of inputs that say nothing of it, as they have a batch where the others tell its size.
    Warns where samples attend to each other whichever dim is taken. Raises InputError for a dim that is none.
    """
    shapes, dtypes = inputs.shapes, inputs.dtypes
    first = InputDims.of(shapes, dtypes, () if batch_dim is None else _wanted(inputs, batch_dim), caches)
    second = fit_symbols(graph, shapes, first, retrace)
    if batch_dim is not None or (second is not None and not _attends_along_batch(graph)):
        return first, second
    sizes = graph.meta["symbols"]
    behind = InputDims.of(shapes, dtypes, (1,) * len(shapes), caches)
    if any(dim == 1 for dim in behind.batch):
        other = fit_symbols(graph, shapes, behind, retrace)
        if other is not None and not _attends_along_batch(graph) and is_mostly_of_samples(graph, _has_batch):
            return behind, other
    graph.meta["symbols"] = sizes
    if second is not None:
        annotate(graph, second.graph, sizes, second.sizes)
        warnings.warn(
            f"samples attend to each other along the first dim of the inputs, which is taken for the batch (of "
            f"{sizes.batch}): if it is the sequence, say which dim is the batch, batch_dim=1, else batch_dim=0",
            stacklevel=2,
        )
    else:
        _without_expressions(graph)
    return first, second


def _wanted(inputs: FlatInputs, batch_dim: int | Mapping[str, int]) -> tuple[int, ...]:
    """The dim for each input, counted from the front."""
    names = [name.strip("[]'") for name in inputs.tensor_names]
    if isinstance(batch_dim, Mapping):
        unknown = [name for name in batch_dim if name not in names]
        if unknown:
            raise InputError(f"batch_dim names {unknown[0]!r}, which is no input: there are {', '.join(names)}")
    wanted = []
    for name, shape in zip(names, inputs.shapes, strict=True):
        dim = batch_dim.get(name, 0) if isinstance(batch_dim, Mapping) else batch_dim
        if isinstance(batch_dim, Mapping) and name in batch_dim and not -len(shape) <= dim < len(shape):
            raise InputError(f"batch_dim of {name} is {dim}, and it has the shape {list(shape)}: give one of its dims")
        wanted.append(dim % len(shape) if dim < 0 and shape else dim)
    if all(dim >= len(shape) for dim, shape in zip(wanted, inputs.shapes, strict=True)):
        shapes = ", ".join(str(list(shape)) for shape in inputs.shapes)
        raise InputError(f"batch_dim is {batch_dim}, and the inputs have the shapes {shapes}: give one of their dims")
    return tuple(wanted)


def _has_batch(node: fx.Node) -> bool:
    return any(spec is not None and spec.dim_of(BATCH) is not None for spec in meta_of(node).specs)


def _attends_along_batch(graph: fx.GraphModule) -> bool:
    """Whether forward weighs values by a softmax over what is taken for the batch, as attention does over positions."""
    return any(
        meta_of(node).phase == "forward" and _weighs_samples(node)
        for node in graph.graph.nodes
        if node.op == "call_function"
    )


def _weighs_samples(node: fx.Node) -> bool:
    name = str(node.target)
    if node.target not in _SOFTMAXES and not name.startswith("aten._scaled_dot_product"):
        return False
    dims: tuple[Any, ...] = meta_of(input_nodes(node)[0]).spec.dims
    position = int(node.args[1]) if node.target in _SOFTMAXES else -2  # type: ignore[arg-type]
    return bool(dims) and BATCH in getattr(dims[position], "free_symbols", ())


def _without_expressions(graph: fx.GraphModule) -> None:
    for node in graph.graph.nodes:
        if node.op != "output":
            record = meta_of(node)
            set_meta(node, record.having(specs=tuple(spec and replace(spec, dims=()) for spec in record.specs)))
