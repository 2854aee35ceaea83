"""Nodes that a padded batch needs: rows of padding behind inputs, and fills in them where they would count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from cost_models.node_cost import call_formula
from galvatron_fx.ir.graph.metadata import Dim, NodeMeta, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import op_call
from galvatron_fx.ir.graph.placement import Shard
from galvatron_fx.ir.graph.rewrite import write_call
from galvatron_fx.ir.graph.symbols import BATCH, Sizes, value_at
from galvatron_fx.ir.torch_compat.tracing import fake_mode

__all__ = ["PaddingWriter", "makes_what_it_says"]

aten = torch.ops.aten


@dataclass(frozen=True)
class PaddingWriter:
    """Writes into ``graph``, of ``rows`` samples where there are ``sizes.batch``.

    What a node needs is written into its block and phase, once, so that equal blocks stay equal.
    """

    graph: fx.Graph
    sizes: Sizes
    rows: int
    _written: dict[Any, fx.Node] = field(default_factory=dict)

    def once(self, key: Any, write: Callable[[], fx.Node]) -> fx.Node:
        """The node of a key, written where there is none yet."""
        if key not in self._written:
            self._written[key] = write()
        return self._written[key]

    def emit(self, target: Any, args: tuple[Any, ...], spec: TensorSpec, beside: NodeMeta, **kwargs: Any) -> fx.Node:
        """Append a call, of the block and phase of ``beside``."""
        new = write_call(self.graph, target, args, kwargs)
        set_meta(new, NodeMeta((spec,), beside.phase, beside.block, beside.module))
        set_meta(new, meta_of(new).having(cost=call_formula(op_call(new))))
        return new

    def grown(self, spec: TensorSpec) -> TensorSpec | None:
        """The spec with rows of padding; None where one dim alone is not in proportion to the batch."""
        larger = replace(self.sizes, batch=self.rows)
        shape = tuple(value_at(dim, larger) for dim in spec.symbolic)
        batched = [at for at, dim in enumerate(spec.symbolic) if BATCH in getattr(dim, "free_symbols", ())]
        if len(batched) != 1 or shape[batched[0]] * self.sizes.batch != spec.shape[batched[0]] * self.rows:
            return None
        return replace(spec, shape=shape)

    def with_padding(self, value: fx.Node, dim: int, spec: TensorSpec, beside: NodeMeta) -> fx.Node:
        """``value`` and copies of its last sample."""
        numbers = self._numbers(beside)
        args = numbers, None, self.sizes.batch - 1
        source = self.emit(aten.clamp.default, args, meta_of(numbers).spec, beside)
        return self.emit(aten.index_select.default, (value, dim, source), spec, beside)

    def filled(self, value: fx.Node, shard: Shard, fill: int, beside: NodeMeta) -> fx.Node:
        """``value``, whose rows lie as ``shard`` splits them, with ``fill`` in those of padding."""
        spec = meta_of(value).spec
        return self.emit(aten.masked_fill.Scalar, (value, self._mask(spec, shard, beside), fill), spec, beside)

    def _mask(self, spec: TensorSpec, shard: Shard, beside: NodeMeta) -> fx.Node:
        """Which rows are padding, shaped to broadcast against ``spec``."""
        size, runs = spec.shape[shard.dim], shard.num_runs
        after = size // (runs * self.rows)
        mask = self._rows_of_padding(beside)
        if runs * after > 1:
            rest = sympy.sympify(spec.symbolic[shard.dim]) / BATCH
            dims: tuple[Dim, ...] = (rest, BATCH, 1) if after == 1 else (runs, BATCH, rest / runs)
            column = TensorSpec((1, self.rows, 1), torch.bool, (1, BATCH, 1))
            mask = self.emit(aten.view.default, (mask, [1, self.rows, 1]), column, beside)
            lengths = runs, self.rows, after
            mask = self.emit(aten.expand.default, (mask, list(lengths)), TensorSpec(lengths, torch.bool, dims), beside)
        elif len(spec.shape) == 1:
            return mask
        shape, at_dim = [1] * len(spec.shape), [at == shard.dim for at in range(len(spec.shape))]
        shape[shard.dim] = size
        along: tuple[Dim, ...] = tuple(dim if here else 1 for dim, here in zip(spec.symbolic, at_dim, strict=True))
        factors = tuple(runs if here else 1 for here in at_dim) if runs > 1 else ()
        whole = TensorSpec(tuple(shape), torch.bool, along, factors)
        return self.emit(aten.reshape.default, (mask, shape), whole, beside)

    def _rows_of_padding(self, beside: NodeMeta) -> fx.Node:
        spec = TensorSpec((self.rows,), torch.bool, (BATCH,))
        args = self._numbers(beside), self.sizes.batch
        return self.once(("padding", beside.block, beside.phase), lambda: self.emit(aten.ge.Scalar, args, spec, beside))

    def _numbers(self, beside: NodeMeta) -> fx.Node:
        spec = TensorSpec((self.rows,), torch.int64, (BATCH,))
        options = {"dtype": torch.int64, "device": torch.device("cpu"), "pin_memory": False}
        return self.once(
            ("numbers", beside.block, beside.phase),
            lambda: self.emit(aten.arange.default, (self.rows,), spec, beside, **options),
        )


def makes_what_it_says(node: fx.Node) -> bool:
    """Whether a call makes tensors of the shapes in its record: arguments may hold sizes that nobody knows of."""
    if not isinstance(node.target, OpOverload):
        return True
    call = op_call(node)
    return _shapes(call.target, call.args, call.kwargs) == tuple(spec and spec.shape for spec in call.outputs)


@lru_cache(maxsize=1 << 14)
def _shapes(target: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...] | None, ...] | None:
    """The shapes of a call's results; None where it fails."""

    def thaw(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return torch.empty(value.shape, dtype=value.dtype)
        return [thaw(item) for item in value] if isinstance(value, tuple) else value

    with fake_mode():
        try:
            result = target(*map(thaw, args), **{key: thaw(value) for key, value in kwargs})
        except (RuntimeError, ValueError, IndexError, TypeError):
            return None
    results = result if isinstance(result, (list, tuple)) else (result,)
    return tuple(tuple(x.shape) if isinstance(x, Tensor) else None for x in results)
