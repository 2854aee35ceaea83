"""Graphs as code that runs: written late, boxed, or compiled by inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext, tracing
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen

from galvatron_fx.ir.torch_compat.tracing import new_fake_mode

__all__ = [
    "box_arguments",
    "compile_functional",
    "enter_range",
    "exit_range",
    "graph_module",
    "is_profiled",
    "missing_compiler",
    "without_autograd",
    "written",
]

enter_range = torch.ops.profiler._record_function_enter_new.default
exit_range = torch.ops.profiler._record_function_exit._RecordFunction


def is_profiled() -> bool:
    """Tell whether torch.profiler runs, in whatever thread."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def graph_module(root: nn.Module, graph: fx.Graph, class_name: str = "GraphModule") -> fx.GraphModule:
    """A GraphModule that writes its Python code when it is first run or read, and not at every change."""
    return _LazyGraphModule(root, graph, class_name)


def box_arguments(graph: fx.GraphModule) -> Callable[[list[Any]], Sequence[Any]]:
    """Generate code for ``graph`` that takes its arguments in one list and empties it, so that they can be freed
    early.
    """
    graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    return written(graph)


def written(graph: fx.GraphModule) -> Callable[..., Sequence[Any]]:
    """The code of ``graph``, written now: before that, ``forward`` calls the module, and so hooks of all modules."""
    _LazyGraphModule.force_recompile(graph)
    forward: Callable[..., Sequence[Any]] = graph.forward
    return forward


def without_autograd(function: Callable[[list[Any]], Sequence[Any]]) -> Callable[[list[Any]], Sequence[Any]]:
    """``function``, whose operators pass by the keys of autograd: a microsecond less for each."""

    def run(arguments: list[Any]) -> Sequence[Any]:
        with torch._C._AutoDispatchBelowAutograd():
            return function(arguments)

    return run


def compile_functional(
    function: Callable[..., Sequence[Any]], arguments: Sequence[torch.Tensor]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile ``function``, without autograd, with inductor for tensors like ``arguments``.

    What comes back takes its arguments in one list, which it empties. Python functions on tensors are traced through,
    writes inside become values, and operators that inductor has no kernel for are decomposed as it wants them.
    """
    from torch._inductor.compile_fx import compile_fx_inner  # slow to import, and only compiled backends need it
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.virtualized import V

    mode = new_fake_mode()
    fakes = [mode.from_tensor(argument) for argument in arguments]
    with mode, torch.no_grad():
        functional = torch.func.functionalize(function, remove="mutations")
        traced = make_fx(functional, decomposition_table=select_decomp_table())(*fakes)
    with tracing(TracingContext(mode)), V.set_fake_mode(mode), torch.no_grad():
        return compile_fx_inner(traced, fakes, is_inference=True)


def missing_compiler(device_type: str) -> str | None:
    """Return what inductor needs for kernels of ``device_type`` and does not find, or None."""
    if device_type != "cpu":
        from torch.utils._triton import has_triton

        return None if has_triton() else "triton"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler"
    return None
