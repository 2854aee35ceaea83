"""Tensors that are not dense are refused: no rule says what becomes of them on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from galvatron_fx.ir.errors import CaptureError, InputError
from galvatron_fx.ir.torch_compat.tracing import module_of

__all__ = ["refuse_sparse_values", "refuse_sparse_weights"]

_REMEDY = (
    "keep a dense one, or its entries: x.new_zeros(...).index_add(0, rows, entries[:, None] * x[columns]) is its "
    "product with x"
)


def refuse_sparse_weights(model: nn.Module) -> None:
    """Raise InputError for a parameter or buffer that is not dense."""
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if tensor.layout != torch.strided:
                raise InputError(f"{kind} '{name}' is sparse: {_REMEDY}")


def refuse_sparse_values(graph: fx.GraphModule) -> None:
    """Raise CaptureError for what a traced graph makes, or holds, that is not dense."""
    for node in graph.graph.nodes:
        value = getattr(graph, str(node.target)) if node.op == "get_attr" else node.meta.get("val")
        if isinstance(value, Tensor) and value.layout != torch.strided:
            made = "holds" if node.op == "get_attr" else f"makes by {node.target}"
            where = f"module '{module_of(node)}'" if module_of(node) else "the model"
            raise CaptureError(f"{where} {made} a sparse tensor of {list(value.shape)}: {_REMEDY}")
