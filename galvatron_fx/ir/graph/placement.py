"""How one tensor lies on one mesh axis.

The vocabulary is DTensor's, with one addition: ``Shard(dim, split_factor)`` splits a dim that is ``split_factor`` runs
of equal length, and each rank holds a slice of every run (DTensor's ``_StridedShard``). ``[batch, sequence, hidden]``
split along the sequence and viewed as ``[batch * sequence, hidden]`` is ``Shard(0, split_factor=batch)``: without it,
views would hide the sequence from every matrix multiplication. Runs of unlike lengths are told by these, in their
greatest common unit: 32 query heads, 8 of keys and 8 of values in one dim are ``Shard(0, (4, 1, 1))``.

A placement speaks of the tensor as it is after all earlier axes have been lowered, so that axes compose by
lowering one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, prod

from torch.distributed import tensor as dtensor

Runs = int | tuple[int, ...]
"""How many equal runs a dim is, or the lengths of unlike ones."""


def num_units(runs: Runs) -> int:
    """How many units runs are long together, of which each rank holds a part."""
    return runs if isinstance(runs, int) else sum(runs)


@dataclass(frozen=True, order=True)
class Replicate:
    """Every rank of the axis holds the whole tensor."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, order=True)
class Shard:
    """Every rank holds an equal slice of ``dim``, taken inside each of ``split_factor`` runs.

    ``routed``: these are copies of its own tokens, in the order of their experts: what ``dispatch`` makes of tokens
    that are sharded so, and ``combine`` turns back (:mod:`galvatron_fx.ir.kernels.experts`). As the whole tensor has
    another order, nothing else can: no collective takes them.

    ``mirrored``: of every run, cut into twice as many chunks as there are ranks, each rank holds one from the front and
    its mirror image from the back, chunks r and 2n - 1 - r: under a causal mask these take equal work.
    """

    dim: int
    split_factor: Runs = 1
    routed: bool = False
    mirrored: bool = False

    def __str__(self) -> str:
        lengths = (self.split_factor,) if isinstance(self.split_factor, int) else self.split_factor
        runs = f",{':'.join(map(str, lengths))}" if self.is_strided else ""
        return f"S({self.dim}{runs}{',routed' if self.routed else ''}{',mirrored' if self.mirrored else ''})"

    @property
    def is_strided(self) -> bool:
        """Whether each rank holds parts of several runs."""
        return self.split_factor != 1

    @property
    def num_runs(self) -> int:
        """How many runs there are, of one length each: what splits a batch or a sequence has no others."""
        assert isinstance(self.split_factor, int), f"{self} has runs of unlike lengths"
        return self.split_factor

    @property
    def is_plain(self) -> bool:
        """Whether each rank holds one run of neighbours, in order of the ranks: what DTensor's ``Shard`` says."""
        return not self.is_strided and not self.routed and not self.mirrored

    def pieces(self, degree: int) -> int:
        """Into how many equal pieces the dim is cut for ``degree`` ranks."""
        return num_units(self.split_factor) * degree * (2 if self.mirrored else 1)


@dataclass(frozen=True, order=True)
class Partial:
    """Every rank holds a term; the tensor is their ``op`` ("sum", "avg", "max" or "min").

    "routed": the ends of experts' rows, of which each rank has those of its own rows; no collective takes them.
    """

    op: str = "sum"

    def __str__(self) -> str:
        return f"P({self.op})"


@dataclass(frozen=True, order=True)
class Exchanged:
    """Rows along ``dim`` that came from all ranks to the one that holds their experts, in the order of these.

    Each rank has room for :func:`exchange_slots` of them from each other; the rows behind its experts' ends are of no
    token. Nothing but ``dispatch`` and ``combine`` (:mod:`galvatron_fx.ir.kernels.experts`) moves them.
    """

    dim: int

    def __str__(self) -> str:
        return f"X({self.dim})"


Placement = Replicate | Shard | Partial | Exchanged


@dataclass(frozen=True, order=True)
class Inside:
    """A value between the operators of a local program: what each rank has is no part of any whole tensor.

    ``program``: the operator that the program stands for, or the pass that wrote it; ``step``: the number of the
    operator that made the value; ``output``: which of its outputs.
    """

    program: str
    step: int
    output: int = 0

    def __str__(self) -> str:
        return f"[{self.program} {self.step}]"


ValuePlacement = Placement | Inside

REPLICATE = Replicate()
PARTIAL = Partial()
ROUTED_ENDS = Partial("routed")


def is_routed(placement: ValuePlacement) -> bool:
    """Whether a value so placed belongs to rows that each rank has sorted for itself, so that it cannot be moved."""
    if isinstance(placement, Shard):
        return placement.routed
    return placement == ROUTED_ENDS or isinstance(placement, Exchanged)


def is_mirror_image(have: ValuePlacement, want: ValuePlacement) -> bool:
    """Whether two shards are of the same runs, and one of them mirrored: half of what each rank holds moves."""
    if not isinstance(have, Shard) or not isinstance(want, Shard):
        return False
    return have.mirrored != want.mirrored and replace(have, mirrored=want.mirrored) == want


def between(have: Placement, want: Placement) -> Placement | None:
    """By way of what a change of placement is made of two collectives; None where one does it.

    What is mirrored is a shard in order of the ranks first, or becomes mirrored last.
    """
    if is_mirror_image(have, want) or isinstance(have, Replicate) or isinstance(want, Replicate):
        return None
    if isinstance(want, Shard) and want.mirrored:
        return replace(want, mirrored=False)
    if isinstance(have, Shard) and have.mirrored:
        return replace(have, mirrored=False)
    return None


def exchange_slots(rows: int, degree: int, capacity: float, parts: int = 1, whole: bool = False) -> int:
    """Return for how many rows each pair of ranks has room, of the ``rows`` that all ``degree`` ranks send.

    ``capacity`` times what a pair sends in the mean, at least one, and at most all that a rank sends; a multiple of
    ``parts ** 2`` where axes of so many ranks split what each of the two sends and has experts for. ``whole``: room
    for all that a rank sends, also where such axes split it.
    """
    of_rank = rows // degree
    slots = of_rank * parts if whole else min(of_rank, max(1, ceil(capacity * of_rank / degree)))
    return -(-slots // parts**2) * parts**2


@dataclass(frozen=True)
class Exchange:
    """The room that ranks have for rows which they exchange: ``capacity`` and ``parts`` as of :func:`exchange_slots`.

    ``shadows``: of ``experts``, those that each rank computes for its own tokens, whose rows do not travel. ``whole``:
    there is room for all rows, whatever the capacity.
    """

    capacity: float = 1.0
    parts: int = 1
    shadows: int = 0
    experts: int = 1
    whole: bool = False

    def slots(self, rows: int, degree: int) -> int:
        """For each pair of ranks, of the ``rows`` that all ``degree`` ranks have."""
        return exchange_slots(rows, degree, self.capacity, self.parts, self.whole)

    def shadow_slots(self, rows: int, degree: int) -> int:
        """For rows of shadow experts on each rank: as many for each of them as for an expert that it holds; a multiple
        of ``degree``, as all other room is.
        """
        of_rank = rows // degree
        wanted = of_rank * self.shadows * (self.experts if self.whole else self.capacity * degree / self.experts)
        return degree * ceil(min(of_rank, wanted) / degree)

    def room(self, rows: int, degree: int) -> int:
        """For rows on each rank."""
        return degree * self.slots(rows, degree) + self.shadow_slots(rows, degree)


NO_EXCHANGE = Exchange()
"""Where nothing is said of it."""


def fits(placement: Placement, shape: Sequence[int], degree: int) -> bool:
    """Tell whether a tensor of ``shape`` can be placed so over ``degree`` ranks: shards must divide evenly."""
    if not isinstance(placement, Shard):
        return True
    if placement.dim >= len(shape):
        return False
    size = shape[placement.dim]
    return size > 0 and size % placement.pieces(degree) == 0


def local_shape(placement: Placement, shape: Sequence[int], degree: int) -> tuple[int, ...]:
    """Shape of what one rank holds."""
    sizes = list(shape)
    if isinstance(placement, Shard):
        sizes[placement.dim] //= degree
    return tuple(sizes)


def shown_as(placement: Placement) -> Placement:
    """How an output leaves the graph: as it is made, or nearly so, as long as a DTensor can say how it lies."""
    if not isinstance(placement, Shard):
        return REPLICATE
    shown = replace(placement, mirrored=False)
    return shown if shown.is_plain else REPLICATE


def to_dtensor(placement: Placement) -> dtensor.Placement:
    """The same placement in DTensor's words; only unstrided shards and replicas occur on parameters."""
    if isinstance(placement, Replicate):
        return dtensor.Replicate()
    if isinstance(placement, Shard) and placement.is_plain:
        return dtensor.Shard(placement.dim)
    raise AssertionError(f"{placement} has no place in a DTensor that users see")


def kept_by_view(placement: Exchanged, source: tuple[int, ...], target: tuple[int, ...]) -> Exchanged | None:
    """Follow exchanged rows through a reshape; None where their dim does not stay by itself."""
    for source_dims, target_dims in _groups(source, target):
        if placement.dim in source_dims:
            kept = [dim for dim in target_dims if target[dim] == source[placement.dim]]
            alone = prod(source[dim] for dim in source_dims) == source[placement.dim]
            if len(target_dims) == 1 and placement.dim == source_dims[-1]:
                return Exchanged(target_dims[0])  # rows by the rank that they came from
            if alone and kept:
                return Exchanged(kept[0])
            return Exchanged(target_dims[-1]) if alone else None  # rows by the rank that they go to
    return None


@lru_cache(maxsize=65536)
def through_view(placement: Shard, source: tuple[int, ...], target: tuple[int, ...], degree: int) -> Shard | None:
    """Follow a shard through a reshape of ``source`` into ``target``; None where no single dim holds it afterwards.

    Both shapes are cut into the shortest groups of dims with equal products; inside a group, the shard is the digit
    ``(runs before, degree, length after)`` of the flattened index, and the target dim that holds the whole digit
    carries it on. Unlike runs stay in the dim that begins where theirs does.
    """
    for source_dims, target_dims in _groups(source, target):
        if placement.dim not in source_dims:
            continue
        runs = placement.split_factor
        before = prod(source[d] for d in source_dims if d < placement.dim) * (runs if isinstance(runs, int) else 1)
        passed = 1
        for dim in target_dims:
            size = target[dim]
            if before < passed * size and before % passed == 0:
                if isinstance(runs, tuple) and passed < before:
                    return None
                after = replace(placement, dim=dim, split_factor=before // passed if isinstance(runs, int) else runs)
                return after if size % after.pieces(degree) == 0 else None
            passed *= size
    return None


@lru_cache(maxsize=65536)
def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[tuple[list[int], list[int]], ...]:
    """Split two shapes of equal numel into the shortest runs of dims whose products agree."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        left: list[int] = []
        right: list[int] = []
        left_size = right_size = 1
        while not left or left_size != right_size:
            if i < len(source) and (left_size <= right_size or j >= len(target)):
                left_size *= source[i]
                left.append(i)
                i += 1
            elif j < len(target):
                right_size *= target[j]
                right.append(j)
                j += 1
            else:
                break
        while left_size == right_size and i < len(source) and source[i] == 1:
            left.append(i)
            i += 1
        while left_size == right_size and j < len(target) and target[j] == 1:
            right.append(j)
            j += 1
        groups.append((left, right))
    return tuple(groups)
