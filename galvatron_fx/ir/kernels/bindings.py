"""How operators are called from Python: by torch's own functions, where these read their arguments faster.

The call of an overload (``aten.mm.default``) matches arguments with a schema at run time, which takes 2 microseconds;
``torch.mm`` parses them in generated code. Both reach the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from galvatron_fx.ir.graph.rewrite import copied

__all__ = ["BINDINGS", "with_fast_calls"]

aten = torch.ops.aten

_DEFAULT = (
    "abs", "addmm", "amax", "amin", "baddbmm", "bmm", "clone", "cos", "embedding", "erf", "exp", "expand", "gather",
    "log", "logical_and", "logical_not", "logical_or", "maximum", "mean", "minimum", "mm", "native_layer_norm", "neg",
    "permute", "reciprocal", "relu", "reshape", "rsqrt", "sigmoid", "sin", "split_with_sizes", "sqrt", "sum", "t",
    "tanh", "unsqueeze", "view",
)  # fmt: skip
_WITH_SCALARS = ("add", "div", "eq", "ge", "gt", "le", "lt", "mul", "ne", "sub")
_OTHERS = (
    ("cat", "default"), ("mean", "dim"), ("pow", "Tensor_Scalar"), ("pow", "Tensor_Tensor"), ("select", "int"),
    ("squeeze", "dim"), ("squeeze", "dims"), ("sum", "dim_IntList"), ("transpose", "int"), ("where", "self"),
)  # fmt: skip
_KEYWORDS = {"alpha", "beta", "dtype", "memory_format"}


def _bindings() -> dict[Any, Callable[..., Any]]:
    """Functions of torch by overload; what is none, such as ``view``, is a method of tensors."""
    names = [(name, "default") for name in _DEFAULT]
    names += [(name, overload) for name in _WITH_SCALARS for overload in ("Tensor", "Scalar")]
    return {
        getattr(getattr(aten, name), overload): getattr(torch, name, None) or getattr(torch.Tensor, name)
        for name, overload in (*names, *_OTHERS)
    }


BINDINGS = _bindings()


def with_fast_calls(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy of a bound graph that calls torch's functions where it calls overloads: to be run, and no more."""
    fast = copied(graph)
    for node in fast.graph.nodes:
        is_plain = bool(node.args) and _KEYWORDS.issuperset(node.kwargs)
        if node.op == "call_function" and is_plain and not isinstance(node.args[0], (bool, int, float)):
            node.target = BINDINGS.get(node.target, node.target)
    return fast
