"""Models on fake tensors, traced into graphs."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import fx, nn
from torch._C import _len_torch_function_stack
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import transformer as torch_transformer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "CHECKPOINT_GENERATOR",
    "TRACED",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "annotate_module",
    "compiling",
    "composites_in_python",
    "constant_value",
    "decomposition",
    "export_joint",
    "failures_unlogged",
    "fake_mode",
    "is_custom_backward",
    "leave_modules",
    "module_of",
    "new_fake_mode",
    "no_modes",
    "not_compiling",
    "on_cpu",
    "trace_decomposed",
    "unit_of",
    "with_effects",
]

TRACED = (torch.Tensor, FakeTensor, FunctionalTensor)
"""The classes of tensors that a model sees while it is traced."""

# The name in torch.utils.checkpoint of what runs around the body of a checkpoint without reentrance.
CHECKPOINT_GENERATOR = next(
    name
    for name in ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    if hasattr(torch_checkpoint, name)
)


def new_fake_mode() -> FakeTensorMode:
    """Make a fake tensor mode that lets a model use the real constants it holds."""
    return FakeTensorMode(allow_non_fake_inputs=True)


_of_thread = threading.local()


def fake_mode() -> FakeTensorMode:
    """Give this thread's fake tensor mode, to run single operators in: making one takes longer than such a run."""
    if not hasattr(_of_thread, "fake_mode"):
        _of_thread.fake_mode = new_fake_mode()
    mode: FakeTensorMode = _of_thread.fake_mode
    return mode


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true, so that models skip checks that read tensor values.

    Two of torch's own do not ask. ``nn.TransformerEncoder`` and its kin compare the mask they are given with a causal
    one to pick a kernel: the mask says the same, and :mod:`passes.frontend.fold_causal_masks` picks the kernel.
    Distributions check their arguments, unless they are told not to.
    """
    before = torch.compiler._is_compiling_flag, torch_transformer._detect_is_causal_mask, Distribution._validate_args
    torch.compiler._is_compiling_flag = True
    torch_transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    Distribution._validate_args = False
    try:
        yield
    finally:
        (
            torch.compiler._is_compiling_flag,
            torch_transformer._detect_is_causal_mask,
            Distribution._validate_args,
        ) = before


@contextlib.contextmanager
def not_compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` false inside of :func:`compiling`."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, False
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def composites_in_python() -> contextlib.AbstractContextManager[Any]:
    """Take operators apart as tracing does, also in eager: dropout draws by ``native_dropout`` then."""
    scope: contextlib.AbstractContextManager[Any] = enable_python_dispatcher()
    return scope


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave all modes, as that of tracing: fake tensors still make fake tensors."""
    scope: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return scope


def on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Make tensors on the CPU, also where a caller has another default device, as inside ``torch.device("meta")``."""
    return torch.device("cpu") if _len_torch_function_stack() else contextlib.nullcontext()


def export_joint(module: nn.Module, args: Sequence[torch.Tensor], mode: FakeTensorMode) -> fx.GraphModule:
    """Trace forward and backward of ``module`` on fake ``args`` into one functional ATen graph.

    Its code is generated when it is first called or printed, and not after every pass that changes it.
    """
    with ExitStack() as stack:
        stack.enter_context(_use_lazy_graph_module(True))
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
    with on_cpu(), new_fake_mode(), torch.no_grad():
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        return make_fx(function, decomposition_table=dict(table))(*tensors)


@contextlib.contextmanager
def failures_unlogged() -> Iterator[None]:
    """Trace something that may well fail: torch logs every operator that refuses its shapes as an error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def annotate_module(name: str, unit: tuple[int, int] | None = None) -> contextlib.AbstractContextManager[Any]:
    """Tag every node traced inside with the qualified module name (backward nodes inherit it).

    ``unit``: a second tag, which modules called inside do not change unless they have one of their own.
    """
    tags: dict[str, Any] = {"galvatron_module": name}
    return fx_traceback.annotate(tags if unit is None else {**tags, "galvatron_unit": unit})


def leave_modules(scopes: list[contextlib.AbstractContextManager[Any]]) -> None:
    """Leave scopes of :func:`annotate_module` that an error has left open, innermost last in ``scopes``.

    Left to the garbage collector, they would write their tags into a later trace.
    """
    while scopes:
        with contextlib.suppress(KeyError):  # the tracer has put the tags back that were there before it
            scopes.pop().__exit__(None, None, None)


def module_of(node: fx.Node) -> str:
    """Return the qualified name that ``annotate_module`` left on a node, or the empty string."""
    custom = node.meta.get("custom") or {}
    return str(custom.get("galvatron_module", ""))


def unit_of(node: fx.Node) -> tuple[int, int] | None:
    """Return the unit that ``annotate_module`` left on a node, or None."""
    custom = node.meta.get("custom") or {}
    unit: tuple[int, int] | None = custom.get("galvatron_unit")
    return unit


def constant_value(tensor: torch.Tensor, most_elements: int) -> str | None:
    """Return the elements of a small real tensor as text, also inside a fake mode; None for fake and for large ones."""
    real = not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"
    if not real or tensor.numel() > most_elements:
        return None
    with _disable_current_modes():
        return repr(tensor.tolist())


def is_custom_backward(function: Any) -> bool:
    """Tell whether a ``grad_fn`` runs a user's ``autograd.Function``; those that torch writes for the operators of
    a library depend on the operator's arguments alone, and do not count.
    """
    if not isinstance(function, torch.autograd.function.BackwardCFunction):
        return False
    return getattr(type(function), "_forward_cls", type(function)).__module__ != "torch._library.autograd"
