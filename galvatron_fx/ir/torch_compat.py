"""Every private torch entry point that Galvatron-FX uses, so that a torch upgrade touches one file."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch._C import _distributed_c10d as c10d
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import TracingContext, tracing
from torch._higher_order_ops.effects import with_effects
from torch._logging import _internal as torch_logging
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy, TupleStrategy
from torch.distributions import Distribution
from torch.fx import traceback as fx_traceback
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import _BoxedCodeGen
from torch.nn.modules import transformer as torch_transformer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "STAGES_DIM",
    "DTensor",
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "TensorMeta",
    "TorchDispatchMode",
    "TupleStrategy",
    "annotate_module",
    "box_arguments",
    "compile_functional",
    "compiling",
    "composites_in_python",
    "constant_value",
    "decomposition",
    "default_store",
    "dtensor_like",
    "dtensor_of",
    "export_joint",
    "failures_unlogged",
    "flight_record",
    "graph_module",
    "has_sharding_rules",
    "is_custom_backward",
    "is_tracing",
    "keeps_graph",
    "lie_alike",
    "local_tensor",
    "look_for_infinities_in_all_shards",
    "lower_actions",
    "missing_compiler",
    "module_of",
    "multi_axis_rule",
    "new_fake_mode",
    "no_modes",
    "pipeline_orders",
    "pipeline_runtime",
    "plain_function",
    "pytree",
    "scale_all",
    "single_axis_rule",
    "total_norm_functions",
    "trace_artifact",
    "trace_decomposed",
    "unit_of",
    "with_effects",
    "without_autograd",
]

# The dim of a mesh along which ranks hold other stages of a model.
STAGES_DIM = "galvatron_fx_stages"


def new_fake_mode() -> FakeTensorMode:
    """Make a fake tensor mode that lets a model use the real constants it holds."""
    return FakeTensorMode(allow_non_fake_inputs=True)


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


def composites_in_python() -> contextlib.AbstractContextManager[Any]:
    """Take operators apart as tracing does, also in eager: dropout draws by ``native_dropout`` then."""
    scope: contextlib.AbstractContextManager[Any] = enable_python_dispatcher()
    return scope


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
    with new_fake_mode(), torch.no_grad():
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        return make_fx(function, decomposition_table=dict(table))(*tensors)


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Leave all modes, as that of tracing: fake tensors still make fake tensors."""
    scope: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return scope


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


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def has_sharding_rules() -> bool:
    """Whether torch's rules can be relied on: in 2.11 some are wrong, as that of layer normalisation's backward, which
    splits its weight; 2.12 was not tried.
    """
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 13)


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


def all_gather_rows(x: torch.Tensor, num_ranks: int, group_name: str) -> torch.Tensor:
    """Start an all-gather along dim 0; the result, (num_ranks · rows, ...), is to be waited for.

    By ``out``, as ``all_gather_into_tensor`` damages the heap where collectives of one gloo group overlap: each of its
    two threads then notes, without a lock, a name too long to be held in place ("ALLGATHER_COALESCED",
    ``lastCompletedWorkName`` in torch 2.13's ``ProcessGroupGloo::runLoop``), and frees the one before.
    """
    out = x.new_empty((num_ranks * x.shape[0], *x.shape[1:]))
    gathered: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor_out(x, num_ranks, group_name, out=out)
    return gathered


def num_holders(tensor: torch.Tensor) -> int:
    """Return how many hold the tensor or its memory, but for what it is a view of; Python's object is one of them."""
    of_tensor = int(tensor._use_count())  # type: ignore[attr-defined]
    of_memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    known = 2 + tensor._is_view()  # the tensor holds its memory, and so do Python's object for that and what it views
    return of_tensor + of_memory - known


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


def pipeline_orders(
    name: str, num_ranks: int, num_stages: int, num_microbatches: int
) -> list[list[tuple[int, str, int]]]:
    """Return what torch's schedule lets each pipeline rank compute: stage, kind (F, B, I or W) and micro-batch.

    No processes, process groups or stages are made: torch's methods get an object with the few numbers that they
    read. ``name`` is one of ``galvatron_fx.ir.plan.schedule.SCHEDULES``, whose limits the caller has checked.
    ``Schedule1F1B._get_pipeline_order`` of torch 2.13 counts the forwards of the last rank from 1, so 1F1B comes from
    the function that the interleaved schedules share.
    """
    from torch.distributed.pipelining import schedules  # slow to import, and only pipelines need it

    rounds = max(1, num_microbatches // num_ranks)
    known: Any = SimpleNamespace(
        _n_microbatches=num_microbatches,
        _num_stages=num_stages,
        num_stages=num_stages,
        pp_group_size=num_ranks,
        n_local_stages=num_stages // num_ranks,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
    )
    if name == "gpipe":
        table: Any = schedules.ScheduleGPipe._get_pipeline_order(known)
        return [_compute_actions(table[rank]) for rank in range(num_ranks)]
    if name == "1f1b":
        return [_compute_actions(_one_forward_one_backward(known, rank)) for rank in range(num_ranks)]
    owner: Any = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "zb_h1": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    return [_compute_actions(owner._calculate_single_rank_operations(known, rank)) for rank in range(num_ranks)]


def _one_forward_one_backward(known: Any, rank: int) -> list[Any]:
    """Return torch's 1F1B order of ``rank`` with one stage a rank, bubbles included."""
    from torch.distributed.pipelining import schedules

    count, ranks = known._n_microbatches, known.pp_group_size
    warmup = schedules._get_warmup_ops(rank, 1, known.microbatches_per_round, ranks, count, multiply_factor=1)
    return list(
        schedules._get_1f1b_rank_ops(1, ranks, warmup, count - warmup, warmup, rank, lambda _: rank, lambda _: rank)
    )


def _compute_actions(order: Iterable[Any]) -> list[tuple[int, str, int]]:
    """Drop bubbles and gradient reductions from an order of torch, and take overlapped pairs apart."""
    flat = (part for action in order if action is not None for part in (action.sub_actions or (action,)))
    return [(a.stage_index, a.computation_type.value, a.microbatch_index) for a in flat if a.is_compute_op]


def graph_module(root: nn.Module, graph: fx.Graph, class_name: str = "GraphModule") -> fx.GraphModule:
    """A GraphModule that writes its Python code when it is first run or read, and not at every change."""
    return _LazyGraphModule(root, graph, class_name)


def pipeline_runtime() -> type:
    """The class of torch's runtime for pipeline schedules."""
    from torch.distributed.pipelining import schedules

    return schedules._PipelineScheduleRuntime


def lower_actions(
    orders: Sequence[Sequence[tuple[int, str, int]]], rank_of_stage: Sequence[int]
) -> dict[int, list[Any]]:
    """Torch's actions, with sends and receives between them, for rows of (stage, kind, micro-batch); by rank."""
    from torch.distributed.pipelining import schedules

    kinds = {"F": schedules.FORWARD, "B": schedules.FULL_BACKWARD}
    kinds |= {"I": schedules.BACKWARD_INPUT, "W": schedules.BACKWARD_WEIGHT}
    actions = {
        rank: [schedules._Action(stage, kinds[kind], microbatch) for stage, kind, microbatch in order]
        for rank, order in enumerate(orders)
    }
    mapping = tuple(rank_of_stage)
    return schedules._add_send_recv(actions, lambda stage: mapping[stage], len(mapping))


def orders_with_transfers(
    orders: Sequence[Sequence[tuple[int, str, int]]], rank_of_stage: Sequence[int]
) -> list[list[tuple[int, str, int]]]:
    """The rows of :func:`lower_actions` as (stage, kind, micro-batch), SEND_F, RECV_F, SEND_B and RECV_B among them."""
    lowered = lower_actions(orders, rank_of_stage)
    return [
        [(a.stage_index, str(a.computation_type.value), int(a.microbatch_index)) for a in lowered[rank]]
        for rank in sorted(lowered)
    ]


def is_tracing() -> bool:
    """Whether ``TORCH_TRACE`` names a folder for structured artifacts.

    Torch's handler is there in any case, and without a folder removes itself at the first artifact. Others do not
    count: pytest adds some to every logger that does not propagate.
    """
    handlers = torch_logging.trace_log.handlers
    return any(isinstance(h, torch_logging.LazyTraceHandler) and h.root_dir is not None for h in handlers)


@functools.cache
def look_for_infinities_in_all_shards() -> None:
    """Have ``GradScaler`` skip a step on all ranks where one has an infinite gradient, however gradients lie.

    Torch 2.13 asks other ranks along those axes alone that split the first gradient of an optimizer, so that of
    gradients that lie otherwise one rank would take a step that another skips. Ranks of other stages, along the dim
    ``STAGES_DIM`` of the mesh that theirs is cut from, are asked as well.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers
    operator = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    torch_handler = handlers[operator]

    def handler(op_call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        torch_handler(op_call, args, kwargs)
        gradients, any_infinite = args[0], args[1]
        split = ((g.device_mesh, dim) for g in gradients for dim, p in enumerate(g.placements) if not p.is_replicate())
        for mesh, dim in dict.fromkeys(split):
            dist.all_reduce(any_infinite, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
        for root in dict.fromkeys(gradient.device_mesh._get_root_mesh() for gradient in gradients):
            if STAGES_DIM in (root.mesh_dim_names or ()):
                dist.all_reduce(any_infinite, op=dist.ReduceOp.MAX, group=root.get_group(STAGES_DIM))

    handlers[operator] = handler


def dtensor_like(kind: type[DTensor], tensor: torch.Tensor) -> Any:
    """The memory of a DTensor as a tensor of ``kind``, which is DTensor or a subclass of it."""
    assert isinstance(tensor, DTensor)
    return kind(tensor._local_tensor, tensor._spec, requires_grad=False)


def dtensor_of(local: torch.Tensor, like: DTensor) -> DTensor:
    """A DTensor of this rank's part of it, of the dtype of ``like``, that lies as ``like`` does: ``DTensor.from_local``
    compares and copies what is known here, which takes 60 microseconds.
    """
    made: DTensor = DTensor.__new__(DTensor, local, like._spec, requires_grad=False)
    return made


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """This rank's part, outside of autograd: ``to_local`` makes a view of that of a parameter."""
    return tensor._local_tensor


def lie_alike(one: DTensor, other: DTensor) -> bool:
    """Whether two tensors of one shape lie alike on one mesh."""
    specs = one._spec, other._spec
    return specs[0] is specs[1] or (specs[0].placements == specs[1].placements and specs[0].mesh == specs[1].mesh)


def total_norm_functions() -> tuple[Any, ...]:
    """What ``torch.nn.utils.get_total_norm`` calls on gradients."""
    return torch._foreach_norm, torch.linalg.vector_norm


def plain_function(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch on tensors of a subclass as if they were of its base."""
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors by a number, in place and in one call."""
    torch._foreach_mul_(list(tensors), factor)


def keeps_graph() -> bool:
    """Whether the ``backward()`` that runs was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def trace_artifact(name: str, text: str) -> None:
    """Write ``text`` to the structured trace as an artifact that tlparse shows as a file, if one is kept."""
    torch_logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: text,
        expect_trace_id=False,
    )


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


def default_store() -> c10d.Store:
    """The store through which the ranks of the default process group found each other."""
    return _get_default_store()


def collective_timeout_s() -> float:
    """Seconds that a collective of the default process group waits for other ranks."""
    group = _get_default_group()
    backend = group._get_backend(group._device_types[0])
    return float(backend.options._timeout.total_seconds())


def store_is_served() -> bool:
    """Whether the store of the default process group is in the memory of a process, and not a file."""
    store = _get_default_store()
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    return isinstance(store, c10d.TCPStore)


def flight_record() -> str | None:
    """The last collectives of this rank as JSON; None where ``TORCH_FR_BUFFER_SIZE`` does not turn the recorder on."""
    if os.environ.get("TORCH_FR_BUFFER_SIZE", "0") == "0":
        return None
    record = c10d._dump_fr_trace_json()  # type: ignore[attr-defined]
    return record.decode() if isinstance(record, bytes) else str(record)
