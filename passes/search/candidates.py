"""The strategies that a search tries: role tables of the mesh axes, with and without recomputation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

from galvatron_fx.ir.cluster.cluster import Axis, Cluster
from galvatron_fx.ir.plan.strategy import BATCH_ROLES, PIPELINE, Strategy

FREE_AXES = 3  # up to so many mesh axes, every assignment of roles to axes is a candidate
_MODEL_RANKS = 16  # on more axes, tensor and sequence roles split a block among at most so many ranks


AxisPartition = tuple[tuple[int, ...], ...]
"""Mesh axes by kind: those of one kind have equal roles in every block, and so are served as one."""


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
) -> tuple[Strategy, ...]:
    """All strategies of a block whose outermost ``pipeline_axes`` axes hold stages.

    ``casts``: whether blocks cast their parameters, so that there are copies to be kept also where none are gathered;
    ``gather_late``: of all strategies, see :class:`galvatron_fx.ir.plan.strategy.Strategy`.

    Two axes of equal size and speed are interchangeable, so only tables whose roles ascend along them are kept. On
    meshes of many axes, tensor and sequence roles (one of them a block) take the inner, faster axes, as they talk in
    every layer, and ``zero`` takes axes inside those of ``data``.
    """
    inner = [role for role in roles if role != PIPELINE]
    axes = cluster.axes[pipeline_axes:]
    outer = (PIPELINE,) * pipeline_axes
    if not any(axis.size > 1 for axis in axes):
        tables = [("data",) * len(axes)]
    elif len(axes) <= FREE_AXES:
        tables = list(_all_tables(axes, inner))
    else:
        tables = list(dict.fromkeys(_nested_tables(axes, inner)))
    again = (False, True) if recompute == "auto" else (bool(recompute),)
    strategies = []
    for table in tables:
        for repeat in again:
            strategies.append(Strategy((*outer, *table), repeat, gather_late=gather_late))
            if ("zero" in table or casts) and not repeat:
                strategies.append(Strategy((*outer, *table), repeat, True, gather_late))
    return tuple(strategies)


def _all_tables(axes: Sequence[Axis], roles: Sequence[str]) -> Iterator[tuple[str, ...]]:
    twins = [(i, j) for j in range(len(axes)) for i in range(j) if _speed(axes[i]) == _speed(axes[j])]
    for picks in product(range(len(roles)), repeat=len(axes)):
        if all(picks[i] <= picks[j] for i, j in twins):
            yield tuple(roles[pick] for pick in picks)


def _nested_tables(axes: Sequence[Axis], roles: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """``data`` outside, ``zero`` inside it, one tensor or sequence role innermost."""
    count = len(axes)
    model = [role for role in roles if role not in BATCH_ROLES]
    batch = [role for role in ("data", "zero") if role in roles]
    for inside in range(count + 1):
        too_many = bool(batch) and prod(axis.size for axis in axes[count - inside :]) > _MODEL_RANKS
        if inside and (not model or too_many):
            continue
        if inside < count and not batch:
            continue
        for role in model if inside else [""]:
            for zeros in range(count - inside + 1):
                split = ("data",) * (count - inside - zeros) + ("zero",) * zeros
                if set(split) <= set(batch):
                    yield (*split, *(role,) * inside)


def _speed(axis: Axis) -> tuple[int, float, float]:
    return axis.size, axis.latency_s, axis.bandwidth_bytes_per_s
