"""Laws of placements: shards are cut and joined without loss, and go through reshapes as index arithmetic says."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.distributed import tensor as dtensor

from galvatron_fx.ir.graph.bound_ops import put_stretches, take_stretches
from galvatron_fx.ir.graph.collectives import join_rows, join_runs, runs_to_exchange, split_runs, take_run
from galvatron_fx.ir.graph.placement import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Runs,
    Shard,
    fits,
    local_shape,
    num_units,
    through_view,
    to_dtensor,
)

PARTS = st.integers(1, 4)
OUTER = st.integers(1, 4)
UNLIKE = st.sampled_from(((2, 1), (1, 3), (4, 1, 1), (2, 3, 2)))


@st.composite
def sharded_shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], Shard, int]:
    """A shape, a shard that divides it, in equal runs or unlike ones, and the number of ranks."""
    parts, split_factor = draw(PARTS), draw(st.one_of(OUTER, UNLIKE))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= parts * num_units(split_factor)
    return tuple(shape), Shard(dim, split_factor), parts


def owners(shape: tuple[int, ...], shard: Shard, degree: int) -> np.ndarray:
    """The rank that holds each element, by the definition: runs, then ranks, then what a rank holds of a run."""
    index = np.indices(shape)[shard.dim]
    lengths = (1,) * shard.split_factor if isinstance(shard.split_factor, int) else shard.split_factor
    each = [np.repeat(np.arange(degree), length) for length in lengths]
    return np.repeat(np.concatenate(each), shape[shard.dim] // shard.pieces(degree))[index]


@given(sharded_shapes())
def test_join_undoes_split(case: tuple[tuple[int, ...], Shard, int]) -> None:
    shape, shard, degree = case
    x = torch.arange(prod(shape)).reshape(shape)
    parts = split_runs(x, shard.dim, shard.split_factor, degree)
    assert {tuple(part.shape) for part in parts} == {local_shape(shard, shape, degree)}
    assert torch.equal(join_runs(parts, shard.dim, shard.split_factor), x)


@given(sharded_shapes())
def test_rows_of_a_bundle_are_joined_densely(case: tuple[tuple[int, ...], Shard, int]) -> None:
    shape, shard, degree = case
    x = torch.arange(prod(shape)).reshape(shape)
    parts = split_runs(x, shard.dim, shard.split_factor, degree)
    bundle = torch.stack([torch.cat([part.flatten(), torch.zeros(5, dtype=x.dtype)]) for part in parts])
    joined = join_rows(bundle[:, : parts[0].numel()], parts[0].shape, shard.dim, shard.split_factor)
    assert torch.equal(joined, x) and joined.is_contiguous()


@given(sharded_shapes())
def test_split_undoes_join(case: tuple[tuple[int, ...], Shard, int]) -> None:
    shape, shard, degree = case
    local = local_shape(shard, shape, degree)
    parts = [torch.arange(prod(local)).reshape(local) + 1000 * rank for rank in range(degree)]
    again = split_runs(join_runs(parts, shard.dim, shard.split_factor), shard.dim, shard.split_factor, degree)
    assert all(torch.equal(a, b) for a, b in zip(again, parts, strict=True))


@given(sharded_shapes(), st.booleans())
def test_a_rank_takes_what_split_gives_it(case: tuple[tuple[int, ...], Shard, int], transposed: bool) -> None:
    shape, shard, degree = case
    x = torch.arange(prod(shape)).reshape(shape)
    if transposed:
        x = x.reshape(shape[::-1]).permute(*reversed(range(len(shape))))
    for rank, part in enumerate(split_runs(x, shard.dim, shard.split_factor, degree)):
        taken = take_run(x, shard.dim, shard.split_factor, degree, rank)
        assert torch.equal(taken, part) and taken.is_contiguous() and part.is_contiguous()
        assert taken.data_ptr() != x.data_ptr(), "a copy, that later writes to x do not reach"
        expected = x.numpy()[owners(shape, shard, degree) == rank]
        assert np.array_equal(taken.numpy().ravel(), expected)


@given(st.one_of(OUTER, UNLIKE), st.one_of(OUTER, UNLIKE), PARTS, st.integers(0, 2))
def test_ranks_exchange_what_other_runs_hold(have: Runs, want: Runs, degree: int, dim: int) -> None:
    """Each sends what is not its own any more, once, and has what the new runs say."""
    shape = [2, 3, 1]
    shape[dim] *= num_units(have) * num_units(want) * degree
    x = torch.arange(prod(shape)).reshape(shape)
    moves = [runs_to_exchange(shape[dim], have, want, degree, rank) for rank in range(degree)]
    sent = [
        take_stretches(part, dim, move.taken).split(move.sent)
        for part, move in zip(split_runs(x, dim, have, degree), moves, strict=True)
    ]
    for rank, (move, expected) in enumerate(zip(moves, split_runs(x, dim, want, degree), strict=True)):
        assert move.received == [len(rows[rank]) for rows in sent]
        put = put_stretches(torch.cat([rows[rank] for rows in sent]), dim, move.put)
        assert torch.equal(put, expected) and put.is_contiguous()


@st.composite
def views(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of equal size: the same factors, in the same order or another, grouped in two ways."""
    first = draw(st.lists(st.sampled_from((1, 2, 2, 3, 4)), min_size=1, max_size=6))

    def grouped(factors: list[int]) -> tuple[int, ...]:
        cuts = draw(st.sets(st.integers(1, max(len(factors) - 1, 1))))
        edges = [0, *sorted(cut for cut in cuts if cut < len(factors)), len(factors)]
        return tuple(prod(factors[a:b]) for a, b in itertools.pairwise(edges))

    return grouped(first), grouped(draw(st.one_of(st.just(first), st.permutations(first))))


@given(views(), st.integers(0, 5), st.integers(1, 6), st.integers(2, 4))
def test_through_view_keeps_every_element_on_its_rank(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dim: int, split_factor: int, degree: int
) -> None:
    source, target = shapes
    shard = Shard(dim % len(source), split_factor)
    assume(fits(shard, source, degree))
    after = through_view(shard, source, target, degree)
    held = owners(source, shard, degree).reshape(target)
    found = [
        Shard(d, runs)
        for d in range(len(target))
        for runs in range(1, target[d] + 1)
        if fits(Shard(d, runs), target, degree) and np.array_equal(owners(target, Shard(d, runs), degree), held)
    ]
    if after is None:
        assert not found, "a shard of the target does hold the same elements"
    else:
        assert after in found


@given(views(), st.integers(0, 5), UNLIKE, st.integers(2, 4))
def test_through_view_with_unlike_runs(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dim: int, lengths: tuple[int, ...], degree: int
) -> None:
    """They stay where they are, or are not followed."""
    source, target = (tuple(size * sum(lengths) * degree for size in shape) for shape in shapes)
    assume(prod(source) == prod(target) and prod(source) < 1 << 16)
    shard = Shard(dim % len(source), lengths)
    after = through_view(shard, source, target, degree)
    if after is not None:
        held = owners(source, shard, degree).reshape(target)
        assert np.array_equal(owners(target, after, degree), held)


@given(views(), st.integers(0, 5), st.one_of(st.integers(1, 6), UNLIKE), st.integers(2, 4))
def test_through_view_and_back(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dim: int, split_factor: Runs, degree: int
) -> None:
    source, target = shapes
    shard = Shard(dim % len(source), split_factor)
    assume(fits(shard, source, degree))
    after = through_view(shard, source, target, degree)
    if after is not None:
        back = through_view(after, target, source, degree)
        assert back is not None
        assert np.array_equal(owners(source, back, degree), owners(source, shard, degree))
    assert through_view(shard, source, source, degree) == shard


@pytest.mark.parametrize(
    ("shard", "source", "target", "expected"),
    [
        (Shard(1), (4, 6, 5), (24, 5), Shard(0, 4)),  # the sequence behind the batch
        (Shard(0, 4), (24, 5), (4, 6, 5), Shard(1)),
        (Shard(0), (4, 6, 5), (24, 5), Shard(0)),
        (Shard(2), (4, 6, 8), (4, 6, 2, 4), Shard(2)),  # features become heads
        (Shard(2, 2), (4, 6, 8), (4, 6, 2, 4), Shard(3)),
        (Shard(1, (2, 1, 1)), (24, 16), (4, 6, 16), Shard(2, (2, 1, 1))),  # queries, keys and values
        (Shard(2, (2, 1, 1)), (4, 6, 16), (4, 6, 8, 2), Shard(2, (2, 1, 1))),
        (Shard(2, (2, 1, 1)), (4, 6, 16), (4, 6, 4, 4), None),  # half of a head
        (Shard(1, (2, 1, 1)), (6, 16), (96,), None),
        (Shard(0), (6, 8), (3, 2, 8), None),  # half of 6 lies across 3
        (Shard(2), (4, 6, 8), (192,), Shard(0, 24)),
    ],
)
def test_through_view_examples(
    shard: Shard, source: tuple[int, ...], target: tuple[int, ...], expected: Shard | None
) -> None:
    assert through_view(shard, source, target, 2) == expected


@pytest.mark.parametrize(
    ("placement", "shape", "expected"),
    [
        (REPLICATE, (3,), True),
        (PARTIAL, (), True),
        (Shard(0), (4,), True),
        (Shard(0), (3,), False),
        (Shard(0, 2), (4,), True),
        (Shard(0, 4), (4,), False),
        (Shard(0), (0,), False),  # an empty dim has no shards
        (Shard(0), (), False),
        (Shard(1), (4,), False),
    ],
)
def test_fits(placement: Placement, shape: tuple[int, ...], expected: bool) -> None:
    assert fits(placement, shape, 2) is expected


def test_local_shape() -> None:
    assert local_shape(Shard(1, 2), (4, 8), 2) == (4, 4)
    assert local_shape(REPLICATE, (4, 8), 2) == local_shape(PARTIAL, (4, 8), 2) == (4, 8)


def test_names() -> None:
    assert list(map(str, (REPLICATE, PARTIAL, Partial("max"), Shard(1), Shard(0, 4)))) == [
        "R",
        "P(sum)",
        "P(max)",
        "S(1)",
        "S(0,4)",
    ]


def test_dtensor_words() -> None:
    assert to_dtensor(REPLICATE) == dtensor.Replicate()
    assert to_dtensor(Shard(1)) == dtensor.Shard(1)
    for placement in (PARTIAL, Shard(0, 2)):
        with pytest.raises(AssertionError, match="has no place in a DTensor that users see"):
            to_dtensor(placement)
