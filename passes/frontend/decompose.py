"""Break operators that cannot be sharded into ones that can."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import NodeMeta, TensorSpec, meta_of, set_meta
from galvatron_fx.ir.graph.op_call import input_nodes, op_call
from galvatron_fx.ir.graph.rewrite import copy_node, inherited_meta, replace_outputs
from galvatron_fx.ir.graph.symbols import Sizes, other_sizes, value_at
from galvatron_fx.ir.graph.symbols import annotate as label_dims
from galvatron_fx.ir.kernels.experts import group_of, numbers_of_masks
from galvatron_fx.ir.torch_compat.tracing import decomposition, failures_unlogged, trace_decomposed
from passes.frontend.capture.cleanup import CleanGraph
from passes.sharding import batched_rules, gradient_rules, lookup_rules, own_rules, random_rules  # noqa: F401  (register rules)
from passes.sharding.rules import has_rule

aten = torch.ops.aten

# Operators that are broken up although torch has a rule for them, and why.
_STATISTICS = "torch's rule splits the channels only: a batch that is split would be gathered for the batch statistics"
_COUNTS = "torch's rule averages the means of ranks whose numbers of labels that count differ"
_STRIDES = "it wants pairs that lie together, and lowered graphs keep no strides"
ALWAYS: dict[Any, str] = {
    aten._native_batch_norm_legit_functional.default: _STATISTICS,
    aten._native_batch_norm_legit.no_stats: _STATISTICS,
    aten.native_batch_norm_backward.default: _STATISTICS,
    aten.nll_loss2d_forward.default: _COUNTS,
    aten.nll_loss2d_backward.default: _COUNTS,
    aten.view_as_complex.default: _STRIDES,
}

# Losses with rules for rows that count alike: broken up where a weight per class stands at this position.
_WEIGHT_AT: dict[Any, int] = {aten.nll_loss_forward.default: 2, aten.nll_loss_backward.default: 3}


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """What stands in ``target`` once ``source`` has been copied into it."""
    return source.to(target.dtype).expand(target.shape)


def _masked_write(target: Tensor, masks: Sequence[Tensor], value: Tensor, accumulate: bool = False) -> Tensor:
    """``target[mask] = value`` for one mask over the leading dims and a value that is the same at all its places."""
    (mask,) = masks
    rest = target.dim() - mask.dim()
    value = value.reshape(value.shape[max(value.dim() - rest, 0) :])
    return torch.where(mask.reshape(*mask.shape, *[1] * rest), value, target)


def _complex(pairs: Tensor) -> Tensor:
    """``view_as_complex``, wherever the two of a pair lie."""
    return torch.complex(pairs.select(-1, 0), pairs.select(-1, 1))


def _trilinear(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    without_a: Sequence[int],
    without_b: Sequence[int],
    without_c: Sequence[int],
    summed: Sequence[int],
    unroll_dim: int = 1,
) -> Tensor:
    """Products of three tensors, each of which lacks some of the dims, summed over others."""
    rank = a.dim() + len(without_a)
    dims = [[dim for dim in range(rank) if dim not in absent] for absent in (without_a, without_b, without_c, summed)]
    return torch.einsum(a, dims[0], b, dims[1], c, dims[2], dims[3])


# Decompositions that torch lacks.
_OWN: dict[Any, Callable[..., Any]] = {
    aten.copy.default: _copy,
    aten.index_put.default: _masked_write,
    aten._trilinear.default: _trilinear,
    aten.view_as_complex.default: _complex,
    group_of: numbers_of_masks,
}

_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)

_MOST_READINGS = 64  # of the sizes among one call's arguments, each of which is traced

_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class Decompose:
    """Replace operators without a sharding rule by torch's decomposition of them, where all of that has rules.

    Losses and activations become elementwise operators and reductions, and batch norm becomes means over the batch,
    which are terms (Partial) of the global means when the batch is split: the statistics are those of the whole batch.

    Rewrite: ``y = mse_loss(x, t, 1)`` -> ``d = sub(x, t); p = pow(d, 2); y = mean(p)``.

    Operators that have no decomposition, or only one that ends in operators without rules, stay; they are replicated.
    """

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        _plain_views(graph)
        expansions: dict[Any, fx.GraphModule | None] = {}
        changed = False
        for node in list(graph.graph.nodes):
            if not _wanted(node):
                continue
            key = (op_call(node), tuple(node.kwargs))
            if key not in expansions:
                expansions[key] = _expansion(node, graph.meta.get("symbols"))
            expansion = expansions[key]
            if expansion is not None:
                replace_outputs(graph, node, _splice(graph, node, expansion))
                changed = True
        return CleanGraph().run(graph) if changed else graph


def _wanted(node: fx.Node) -> bool:
    """Whether a node is an operator that should be, and can be, broken up."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in node.target.tags or _decomposition(node.target) is None:
        return False
    return _always(node) or not has_rule(node.target)


def _always(node: fx.Node) -> bool:
    position = _WEIGHT_AT.get(node.target)
    return node.target in ALWAYS or _writes_by_mask(node) or (position is not None and node.args[position] is not None)


def _writes_by_mask(node: fx.Node) -> bool:
    if node.target is not aten.index_put.default or (len(node.args) > 3 and node.args[3]):
        return False
    target, places, value = node.args[:3]
    specs = [meta_of(place).spec for place in places if isinstance(place, fx.Node)]  # type: ignore[union-attr]
    if not (len(specs) == len(places) == 1 and specs[0].dtype is torch.bool):  # type: ignore[arg-type]
        return False
    rest = len(meta_of(target).spec.shape) - len(specs[0].shape)  # type: ignore[arg-type]
    shape = meta_of(value).spec.shape  # type: ignore[arg-type]
    return all(size == 1 for size in shape[: max(len(shape) - rest, 0)])


def _plain_views(graph: fx.GraphModule) -> None:
    """Write windows onto memory that show all of a dense tensor in its order as the views that they are, and squeezes,
    which would also drop dims that become 1 on a rank, as views to their shape.

    Rewrite: ``as_strided(x, size, contiguous)`` -> ``view(x, size)``; ``squeeze(x)`` -> ``view(x, shape)``;
    ``as_strided_scatter(x, y, size, contiguous)``, which covers all of x -> ``view(y, x's shape)``.
    """
    for node in graph.graph.nodes:
        if node.target in _SQUEEZES:
            node.target, node.args = aten.view.default, (node.args[0], list(meta_of(node).spec.shape))
        if node.target is aten.as_strided.default and _covers(node, node.args[1:]):
            node.target, node.args = aten.view.default, node.args[:2]
        elif node.target is aten.as_strided_scatter.default and _covers(node, node.args[2:]):
            node.target, node.args = aten.view.default, (node.args[1], list(meta_of(node).spec.shape))


def _covers(node: fx.Node, window: Sequence[Any]) -> bool:
    size, stride, offset = window[0], window[1], window[2] if len(window) > 2 else None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    value = source.meta.get("val")
    if not isinstance(value, Tensor) or not value.is_contiguous():
        return False
    dense = torch.empty(tuple(size), device="meta").stride()
    in_order = all(n == 1 or have == want for n, have, want in zip(size, stride, dense, strict=True))
    return in_order and not offset and math.prod(size) == value.numel()


def _decomposition(target: Any) -> Callable[..., Any] | None:
    """Our decomposition of an operator, or torch's."""
    return _OWN.get(target) or decomposition(target)


# ---- the decomposition of one call ---------------------------------------------------------------------------------


def _expansion(node: fx.Node, sizes: Sizes | None) -> fx.GraphModule | None:
    """The call at ``node`` as a graph of operators with rules, with facts; None where there is none."""
    specs = [meta_of(source).spec for source in input_nodes(node)]
    table = {node.target: _decomposition(node.target)}
    if node.target in ALWAYS:
        table[aten.var_mean.correction] = _two_pass_var_mean
    shapes = [spec.shape for spec in specs]
    traced = _traced(node, (node.args, node.kwargs), shapes, table)
    while traced is not None and (missing := _without_rules(traced)):
        more = {op: _decomposition(op) for op in missing if op not in table}
        if len(more) < len(missing) or None in more.values():
            return None
        table |= more
        traced = _traced(node, (node.args, node.kwargs), shapes, table)
    if traced is None or not _same_outputs(traced, meta_of(node).specs):
        return None
    if sizes is not None:
        _label(traced, node, specs, table, sizes)
    return traced


def _traced(node: fx.Node, call: Any, shapes: Sequence[tuple[int, ...]], table: Any) -> fx.GraphModule | None:
    """Trace the operator with arguments ``call`` at the given shapes of its tensors; None where that fails."""

    def function(*tensors: Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = fx.map_arg(call, lambda _: next(rest))
        return node.target(*args, **kwargs)  # type: ignore[operator]

    dtypes = [meta_of(source).spec.dtype for source in input_nodes(node)]
    try:
        with failures_unlogged():
            traced = trace_decomposed(function, list(zip(shapes, dtypes, strict=True)), table)
    except _FAILURES:
        return None
    for inner_node in traced.graph.nodes:
        # Some of torch's decompositions fill an empty tensor, which a graph of values cannot say.
        writes = isinstance(inner_node.target, torch._ops.OpOverload) and inner_node.target._schema.is_mutable
        if inner_node.op == "get_attr" or writes:
            return None
        if inner_node.op != "output":
            set_meta(inner_node, _concrete_facts(inner_node.meta["val"]))
    return traced


def _concrete_facts(value: Any) -> NodeMeta:
    multi = isinstance(value, (tuple, list))
    values = value if multi else (value,)
    specs = tuple(TensorSpec(tuple(v.shape), v.dtype) if isinstance(v, Tensor) else None for v in values)
    return NodeMeta(specs, multi_output=multi)


def _without_rules(graph: fx.GraphModule) -> list[Any]:
    """Distinct operators of ``graph`` that have no rule."""
    called = dict.fromkeys(node.target for node in graph.graph.nodes if node.op == "call_function")
    return [target for target in called if target in ALWAYS or not has_rule(target)]


def _outputs(graph: fx.GraphModule) -> list[fx.Node | None]:
    result = graph.graph.output_node().args[0]
    return list(result) if isinstance(result, (list, tuple)) else [result]  # type: ignore[list-item, arg-type]


def _same_outputs(graph: fx.GraphModule, specs: Sequence[TensorSpec | None]) -> bool:
    """Whether the outputs of ``graph`` have these shapes and dtypes (None: an absent output, which may be anything)."""
    outputs = _outputs(graph)
    return len(outputs) == len(specs) and all(
        spec is None
        or (out is not None and (meta_of(out).spec.shape, meta_of(out).spec.dtype) == (spec.shape, spec.dtype))
        for out, spec in zip(outputs, specs, strict=True)
    )


def _two_pass_var_mean(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Variance as a mean of squares: means can be computed from the means of shards, which variances cannot."""
    dims = list(dim) if dim is not None else list(range(x.dim()))
    mean = aten.mean.dim(x, dims, True)
    centred = x - mean
    variance = aten.mean.dim(centred * centred, dims, keepdim)
    count = x.numel() // mean.numel()
    freedom = count - (1 if correction is None else correction)
    variance = variance if freedom == count else variance * (count / freedom)
    return variance, mean if keepdim else aten.squeeze.dims(mean, dims)


# ---- symbolic sizes ------------------------------------------------------------------------------------------------


def _label(graph: fx.GraphModule, node: fx.Node, specs: Sequence[TensorSpec], table: Any, base: Sizes) -> None:
    """Give the specs of ``graph`` symbolic dims, by tracing once more at other sizes, as capture does.

    Arguments that spell out sizes must change with them; which ones do is told by the shapes of the outputs.
    """
    for other in other_sizes(base.batch, base.sequence):
        if bool(other.sequence) != bool(base.sequence):
            continue
        try:
            shapes = [_shape_at(spec, other) for spec in specs]
            wanted = [spec and replace(spec, shape=_shape_at(spec, other)) for spec in meta_of(node).specs]
        except InputError:  # no whole number: of halves, where the other sequence is odd
            continue
        changes: dict[int, list[int]] = {}
        for size, changed in chain.from_iterable(map(_pairs, specs, shapes)):
            if size != changed and changed not in changes.setdefault(size, []):
                changes[size].append(changed)
        for call in _resized_calls(node, changes):
            second = _traced(node, call, shapes, table)
            if second is not None and _same_outputs(second, wanted) and label_dims(graph, second, base, other):
                return


def _pairs(spec: TensorSpec, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    return zip(spec.shape, shape, strict=True)


def _shape_at(spec: TensorSpec, sizes: Sizes) -> tuple[int, ...]:
    return tuple(value_at(dim, sizes) for dim in spec.symbolic)


def _resized_calls(node: fx.Node, changes: dict[int, list[int]]) -> Iterator[Any]:
    """The arguments with some of the sizes among them changed: sizes may be equal by chance.

    The first, all and none; of lists of sizes, first the first of those that may have changed, then all. Then any
    others, as far as they are few: a number of groups may be that of samples, and one of samples a length.
    """
    last = {size: new[-1] for size, new in changes.items()}
    sized = [at for at, value in enumerate(node.args) if _resized(value, last) != value]
    likely = (
        [resized(arg, last) if at in chosen else arg for at, arg in enumerate(node.args)]
        for resized in (_first_resized, _resized)
        for chosen in (sized[:1], sized, [])
    )
    readings = [_readings(arg, changes, last) for arg in node.args]
    others = map(list, product(*readings)) if math.prod(map(len, readings)) <= _MOST_READINGS else iter(())
    seen = []
    for args in chain(likely, others):
        if args not in seen:
            seen.append(args)
            yield tuple(args), node.kwargs


def _readings(value: Any, changes: dict[int, list[int]], last: dict[int, int]) -> list[Any]:
    """What an argument may be at the other sizes."""
    if type(value) is int:
        return [value, *changes.get(value, [])]
    resized = _resized(value, last)
    return [value] if resized == value else [value, _first_resized(value, last), resized]


def _first_resized(value: Any, changes: dict[int, int]) -> Any:
    """Of a list, only the first size that changes."""
    if not isinstance(value, (list, tuple)):
        return _resized(value, changes)
    first = next((at for at, item in enumerate(value) if _resized(item, changes) != item), len(value))
    return [*value[:first], *(_resized(item, changes) for item in value[first : first + 1]), *value[first + 1 :]]


def _resized(value: Any, changes: dict[int, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_resized(item, changes) for item in value]
    return changes.get(value, value) if type(value) is int else value


# ---- splicing ------------------------------------------------------------------------------------------------------


def _splice(graph: fx.GraphModule, node: fx.Node, expansion: fx.GraphModule) -> list[fx.Node | None]:
    """Copy ``expansion`` in front of ``node``, with the phase, module and other marks of it; returns the outputs."""
    given = [placeholder for placeholder in expansion.graph.nodes if placeholder.op == "placeholder"]
    copies = dict(zip(given, input_nodes(node), strict=True))
    with graph.graph.inserting_before(node):
        for inner_node in expansion.graph.nodes:
            if inner_node.op == "call_function":
                copy = copies[inner_node] = copy_node(graph.graph, inner_node, copies.__getitem__)
                copy.meta = inherited_meta(node)
                record = meta_of(inner_node)
                set_meta(copy, meta_of(node).having(specs=record.specs, multi_output=record.multi_output))
    return [copies[out] if out is not None else None for out in _outputs(expansion)]
