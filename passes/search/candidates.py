"""The strategies that a search tries: role tables of the mesh axes, with and without recomputation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, product
from math import prod
from operator import mul

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.plan.strategy import CONTEXT, EXPERT, EXPERT_SEQUENCE, GRAPH, PIPELINE, Strategy

FREE_AXES = 3  # up to so many mesh axes, every assignment of roles to axes is a candidate
_TENSOR_ROLES = ("tensor", "tensor_sequence")
_MODEL_RANKS = 16  # on more axes, tensor and sequence roles split a block among so many ranks, if samples allow it
_COARSE_STEP = 4  # degrees and numbers of micro-batches of a coarse search are so many times those before


AxisPartition = tuple[tuple[int, ...], ...]
"""Mesh axes by kind: those of one kind have equal roles in every block, and so are served as one."""


def far_apart(numbers: Iterable[int]) -> list[int]:
    """Of ascending numbers the first, and each that is at least four times the one before it."""
    kept: list[int] = []
    for number in numbers:
        if not kept or number >= _COARSE_STEP * kept[-1]:
            kept.append(number)
    return kept


def axis_partitions(axis_sizes: Sequence[int], pipeline_axes: int) -> list[AxisPartition]:
    """All ways to tell apart the axes that hold no stages, on meshes of few axes: the fewest kinds first.

    On meshes of many axes there are too many: [()], which says nothing of any axis.
    """
    real = [axis for axis in range(pipeline_axes, len(axis_sizes)) if axis_sizes[axis] > 1]
    if sum(size > 1 for size in axis_sizes) > FREE_AXES:
        return [()]
    partitions: list[AxisPartition] = [()]
    for axis in real:
        joined = [(*kinds[:i], (*kind, axis), *kinds[i + 1 :]) for kinds in partitions for i, kind in enumerate(kinds)]
        partitions = [*joined, *((*kinds, (axis,)) for kinds in partitions)]
    return sorted(partitions, key=lambda kinds: (len(kinds), kinds))


def fits_partition(strategy: Strategy, kinds: AxisPartition) -> bool:
    """Whether axes of one kind have equal roles."""
    return all(len({strategy.roles[axis] for axis in kind}) == 1 for kind in kinds)


def candidates(
    cluster: Cluster,
    roles: Sequence[str],
    recompute: str | bool,
    pipeline_axes: int = 0,
    casts: bool = False,
    gather_late: bool = False,
    samples: int | None = None,
    selective: bool = False,
    coarse: bool = False,
    keeps: bool = True,
) -> tuple[Strategy, ...]:
    """All strategies of a block whose outermost ``pipeline_axes`` axes hold stages.

    ``recompute``: as of :func:`galvatron_fx.plan`, or "blocks" for all or nothing, chosen per block.

    ``casts``: whether blocks cast their parameters, so that there are copies to be kept also where none are gathered;
    ``gather_late``: of all strategies, see :class:`galvatron_fx.ir.plan.strategy.Strategy`; ``samples``: of a
    micro-batch, None where there are enough for all ranks; ``selective``: whether blocks that recompute may keep some
    of their values, beside which they may keep what they gathered; ``coarse``: on meshes of many axes, roles have fewer
    degrees; ``keeps``: whether there is a backward to keep anything for.

    Two axes of equal size and speed are interchangeable, so only tables whose roles ascend along them are kept. On
    meshes of many axes, tensor, sequence and expert roles take the inner, faster axes, as they talk in every layer,
    others outside of a tensor role where a block has both, and ``zero`` takes axes inside those of ``data``.
    """
    inner = [role for role in roles if role != PIPELINE]
    axes = cluster.axes[pipeline_axes:]
    outer = (PIPELINE,) * pipeline_axes
    if not any(axis.size > 1 for axis in axes):
        tables = [("data",) * len(axes)]
    elif len(axes) <= FREE_AXES:
        tables = list(_all_tables(axes, inner))
    else:
        tables = list(dict.fromkeys(_nested_tables(axes, inner, samples, coarse)))
    choices = {"auto": (False, True), "blocks": (False, True), "selective": (True,)}
    again = choices.get(str(recompute), (bool(recompute),))
    strategies = []
    for table in tables:
        for repeat in again:
            strategies.append(Strategy((*outer, *table), repeat, gather_late=gather_late))
            if keeps and ("zero" in table or casts) and (selective or not repeat):
                strategies.append(Strategy((*outer, *table), repeat, True, gather_late))
    return tuple(strategies)


def _all_tables(axes: Sequence[Axis], roles: Sequence[str]) -> Iterator[tuple[str, ...]]:
    twins = [(i, j) for j in range(len(axes)) for i in range(j) if _speed(axes[i]) == _speed(axes[j])]
    for picks in product(range(len(roles)), repeat=len(axes)):
        if all(picks[i] <= picks[j] for i, j in twins):
            yield tuple(roles[pick] for pick in picks)


def _nested_tables(
    axes: Sequence[Axis], roles: Sequence[str], samples: int | None, coarse: bool
) -> Iterator[tuple[str, ...]]:
    """``data`` outside, ``zero`` inside it, tensor and sequence roles innermost."""
    count = len(axes)
    ranks = [1, *accumulate((axis.size for axis in reversed(axes)), mul)]
    model_ranks, zero_ranks = set(far_apart(ranks[1:])), set(far_apart(ranks))
    model = [role for role in roles if role not in ("data", "zero")]
    batch = [role for role in ("data", "zero") if role in roles]
    for inside in range(count + 1):
        if (inside and not model) or (inside < count and not batch):
            continue
        if batch and inside and _are_too_many(axes, inside, samples):
            continue
        fewest = samples is not None and ranks[-1] // ranks[inside] <= samples < ranks[-1] // ranks[max(inside - 1, 0)]
        if coarse and inside and ranks[inside] not in model_ranks and not fewest:
            continue
        for zeros in range(count - inside + 1):
            if coarse and zeros < count - inside and ranks[zeros] not in zero_ranks:
                continue
            split = ("data",) * (count - inside - zeros) + ("zero",) * zeros
            if set(split) <= set(batch):
                yield from ((*split, *(role,) * inside) for role in (model if inside else [""]))
                if zeros in (0, count - inside):
                    yield from ((*split, *both) for both in _two_model_roles(model, inside))


def _are_too_many(axes: Sequence[Axis], inside: int, samples: int | None) -> bool:
    """Whether fewer of the inner axes would do: the others have a sample a rank even then."""
    outer = prod(axis.size for axis in axes[: len(axes) - inside + 1])
    few_samples = samples is not None and outer > samples
    return prod(axis.size for axis in axes[len(axes) - inside :]) > _MODEL_RANKS and not few_samples


def _two_model_roles(model: Sequence[str], inside: int) -> Iterator[tuple[str, ...]]:
    """A tensor role, or heads, on the innermost of the ``inside`` inner axes, another role on the rest."""
    inner_of = {
        "sequence": _TENSOR_ROLES,
        CONTEXT: ("sequence", *_TENSOR_ROLES),
        GRAPH: _TENSOR_ROLES,
        EXPERT: _TENSOR_ROLES,
        EXPERT_SEQUENCE: _TENSOR_ROLES,
    }
    for outer, inner in ((outer, inner) for outer, roles in inner_of.items() for inner in roles):
        if {outer, inner} <= set(model):
            yield from ((outer,) * (inside - k) + (inner,) * k for k in range(1, inside))


def _speed(axis: Axis) -> tuple[int, float, float]:
    return axis.size, axis.latency_s, axis.bandwidth_bytes_per_s
