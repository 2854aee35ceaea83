"""Every private torch entry point that Galvatron-FX uses, so that a torch upgrade touches one file."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import decomposition_table
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.utils import _pytree as pytree

__all__ = [
    "DTensor",
    "DTensorSpec",
    "FakeTensorMode",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "TensorMeta",
    "TupleStrategy",
    "annotate_module",
    "box_arguments",
    "compiling",
    "decomposition",
    "export_joint",
    "module_of",
    "multi_axis_rule",
    "new_fake_mode",
    "pytree",
    "single_axis_rule",
    "trace_decomposed",
]


def new_fake_mode() -> FakeTensorMode:
    """Make a fake tensor mode that lets a model use the real constants it holds."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, so that models skip checks that read tensor values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def export_joint(module: nn.Module, args: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace forward and backward of ``module`` on fake ``args`` into one functional ATen graph."""
    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(compiling())
        stack.enter_context(fx_traceback.preserve_node_meta())
        stack.enter_context(tracing(TracingContext(mode)))
        joint = aot_export_joint_with_descriptors(stack, module, tuple(args), {})
        graph_module = joint.graph_module
        if not isinstance(graph_module, fx.GraphModule):
            raise AssertionError(f"expected a GraphModule from AOTAutograd, got {type(graph_module)}")
        return graph_module


def decomposition(op: Any) -> Callable[..., Any] | None:
    """Return torch's own decomposition of an operator into simpler ones, or None."""
    return decomposition_table.get(op)


def trace_decomposed(
    function: Callable[..., Any],
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    table: Mapping[Any, Callable[..., Any]],
) -> fx.GraphModule:
    """Trace ``function`` on fake CPU tensors of the given shapes and dtypes, replacing the operators in ``table``."""
    with new_fake_mode(), torch.no_grad():
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        return make_fx(function, decomposition_table=dict(table))(*tensors)


def annotate_module(name: str) -> contextlib.AbstractContextManager[Any]:
    """Tag every node traced inside with the qualified module name (backward nodes inherit it)."""
    return fx_traceback.annotate({"galvatron_module": name})


def module_of(node: fx.Node) -> str:
    """Return the qualified name that ``annotate_module`` left on a node, or the empty string."""
    custom = node.meta.get("custom") or {}
    return str(custom.get("galvatron_module", ""))


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def single_axis_rule(op: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return DTensor's rule of one mesh axis for ``op``, or None."""
    entry = getattr(_propagator(), "op_single_dim_strategy_funcs", {}).get(op)
    return getattr(entry, "func", entry)


def multi_axis_rule(op: torch._ops.OpOverload) -> Callable[[OpSchema], Any] | None:
    """Return DTensor's older rule for ``op``, which takes an ``OpSchema`` of ``OpStrategy``, or None."""
    rule: Callable[[OpSchema], Any] | None = _propagator().op_strategy_funcs.get(op)
    return rule


def box_arguments(graph: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Generate code for ``graph`` that takes its arguments in one list and empties it, so that they can be freed
    early.
    """
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    forward: Callable[[list[Any]], Sequence[Any]] = graph.forward
    return forward
