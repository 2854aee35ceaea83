"""A traced graph at other batch and sequence sizes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import TensorSpec, meta_of, set_meta, set_signature, signature
from galvatron_fx.ir.graph.rewrite import copy_node
from galvatron_fx.ir.graph.symbols import Sizes, value_at
from galvatron_fx.ir.torch_compat.graphs import graph_module
from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.capture.size_expressions import (
    OtherSizes,
    SizedNumber,
    SizeExpressions,
    describe_sizes,
    refuse_unlike_constants,
    result_of,
    same_constant,
    where,
)

__all__ = ["Resize", "refuse_difference"]


@dataclass(frozen=True)
class Resize:
    """Write a traced graph down at other sizes: as it would have been traced there.

    Runs on what was traced, before anything that decides by sizes: what follows then sees the graph of those sizes.
    ``expressions``: of the graph; ``inputs``: of ``sizes``.

    Rewrite: ``y = view(x, [8, 16, 4])`` with ``[b, s, 4]`` -> ``y = view(x, [32, 16, 4])`` at a batch of 32.
    Raises OtherSizes where a dim becomes, or is no longer, 1 or 0: torch broadcasts and copies those otherwise.
    """

    expressions: SizeExpressions
    sizes: Sizes
    inputs: FlatInputs

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Return a new graph; ``graph`` is left as it is."""
        new_graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.graph.nodes:
            if node.op == "output":
                new_graph.output(fx.map_arg(node.args[0], copies.__getitem__)).meta.update(node.meta)
                continue
            copy = copies[node] = copy_node(new_graph, node, copies.__getitem__)
            if node in self.expressions.calls:
                copy.args, copy.kwargs = self._call(node, copies)
            self._set_facts(copy, node)
        result = graph_module(graph, new_graph)
        result.meta.update(graph.meta)
        result.meta["symbols"] = self.sizes
        specs = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in self.inputs.tensors)
        set_signature(result, signature(graph).having(input_spec=self.inputs, input_specs=specs))
        return result

    def _call(self, node: fx.Node, copies: dict[fx.Node, fx.Node]) -> tuple[Any, Any]:
        """Arguments at the new sizes, positional and by name."""
        with self._whole_at(node):
            args, kwargs = pytree.tree_map(lambda leaf: self._leaf(leaf, copies), self.expressions.calls[node])
            return args, kwargs

    @contextmanager
    def _whole_at(self, node: fx.Node) -> Iterator[None]:
        """Tell of ``node`` where an expression is no whole number at the new sizes."""
        try:
            yield
        except InputError as error:
            raise OtherSizes(f"{where(node)}: {error}") from None

    def _leaf(self, leaf: Any, copies: dict[fx.Node, fx.Node]) -> Any:
        if isinstance(leaf, fx.Node):
            return copies[leaf]
        return leaf.at(self.sizes) if isinstance(leaf, SizedNumber) else leaf

    def _set_facts(self, copy: fx.Node, node: fx.Node) -> None:
        """Facts at the new sizes; of the traced value only whether it lies densely counts any more."""
        record = meta_of(node)
        specs = tuple(spec and self._spec(node, spec) for spec in record.specs)
        set_meta(copy, record.having(specs=specs))
        dense = _is_dense(copy.meta.pop("val", None))
        copy.meta.pop("tensor_meta", None)
        if dense and not record.multi_output and specs[0] is not None:
            copy.meta["val"] = torch.empty(specs[0].shape, dtype=specs[0].dtype, device="meta")

    def _spec(self, node: fx.Node, spec: TensorSpec) -> TensorSpec:
        if not spec.dims:
            return spec
        with self._whole_at(node):
            shape = tuple(value_at(dim, self.sizes) for dim in spec.dims)
        for before, after in zip(spec.shape, shape, strict=True):
            if before != after and min(before, after) < 2:
                raise OtherSizes(
                    f"{where(node)} has the shape {list(shape)} at {describe_sizes(self.sizes)} and "
                    f"{list(spec.shape)} at {describe_sizes(self.expressions.base)}: sizes of 1 are broadcast"
                )
        return replace(spec, shape=shape)


def refuse_difference(graph: fx.GraphModule, traced: fx.GraphModule) -> None:
    """Raise OtherSizes naming the first node of a resized graph that is not as ``traced`` at the same sizes."""
    if len(graph.graph.nodes) != len(traced.graph.nodes):
        raise OtherSizes(f"the model runs {len(traced.graph.nodes)} operators, and {len(graph.graph.nodes)} elsewhere")
    twin: dict[fx.Node, fx.Node] = {}
    for mine, theirs in zip(graph.graph.nodes, traced.graph.nodes, strict=True):
        twin[theirs] = mine
        if not _same_call(mine, theirs, twin):
            raise OtherSizes(f"{where(mine)} is called with {_shown(mine)}, and when traced with {_shown(theirs)}")
        if mine.op == "get_attr":
            held = [getattr(holder, str(node.target)) for holder, node in ((graph, mine), (traced, theirs))]
            refuse_unlike_constants(mine, *held)
        if mine.op != "output":
            _refuse_unlike_values(mine, theirs)
    if result_of(graph) != result_of(traced):
        raise OtherSizes("what the model returns beside tensors changes with the sizes")


def _same_call(mine: fx.Node, theirs: fx.Node, twin: dict[fx.Node, fx.Node]) -> bool:
    if mine.op != theirs.op or (mine.op == "call_function" and mine.target is not theirs.target):
        return False
    pairs = [pytree.tree_flatten((node.args, dict(node.kwargs))) for node in (mine, theirs)]
    (leaves, tree), (others, other_tree) = pairs
    return tree == other_tree and all(
        twin.get(b) is a if isinstance(b, fx.Node) else same_constant(a, b) for a, b in zip(leaves, others, strict=True)
    )


def _shown(node: fx.Node) -> str:
    return f"{list(node.args)} {dict(node.kwargs) or ''}".rstrip()


def _refuse_unlike_values(mine: fx.Node, theirs: fx.Node) -> None:
    shapes = [[spec and (spec.shape, spec.dtype) for spec in meta_of(node).specs] for node in (mine, theirs)]
    if shapes[0] != shapes[1]:
        given, traced = ([spec and list(spec.shape) for spec in meta_of(node).specs] for node in (mine, theirs))
        raise OtherSizes(f"{where(mine)} has the shapes {given} by its expressions, and {traced} when traced")
    if _is_dense(mine.meta.get("val")) != _is_dense(theirs.meta.get("val")):
        raise OtherSizes(f"{where(mine)} lies otherwise in memory when traced")


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_contiguous()
