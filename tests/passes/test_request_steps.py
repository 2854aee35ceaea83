"""Steps at sizes that were never lowered cost what lowering them there says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import fx

from cost_models.request_costs import Load, RequestSizes, SampledSizes
from galvatron_fx import Cluster
from galvatron_fx.errors import InputError
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.serving.captures import captured_graphs, sampled_sizes
from passes.simulation.half_batches import halves_s
from passes.simulation.request_steps import RequestSteps
from tests.serving import cached_model
from tests.serving.cached_model import HEADS, VOCABULARY, WIDTH

TWO = Cluster.preset("2xA100-80GB")
TENSOR = Strategy(("tensor",))
SIZES = sampled_sizes(300)
LAYERS, HIDDEN = 3, HEADS * WIDTH


@pytest.fixture(scope="module")
def graphs() -> dict[RequestSizes, fx.GraphModule]:
    return captured_graphs(cached_model.build(), cached_model.inputs, SIZES)


@pytest.fixture(scope="module")
def steps(graphs: dict[RequestSizes, fx.GraphModule]) -> RequestSteps:
    return RequestSteps.of(graphs, SIZES, TWO, TENSOR)


@pytest.mark.slow
def test_coefficients_serve_other_sizes_as_well(steps: RequestSteps) -> None:
    other = SampledSizes((4, 32), (8, 64), (128, 512), RequestSizes(12, 20, 192))
    again = RequestSteps.of(captured_graphs(cached_model.build(), cached_model.inputs, other), other, TWO, TENSOR)
    for load in (Load.of([(100, 1)] * 7), Load.of([(0, 333), (40, 1)])):
        np.testing.assert_allclose(again.block_seconds(load), steps.block_seconds(load), rtol=1e-12)
    assert again.held_bytes(0, steps.num_blocks, ("cache",)).tolist() == [0, 0, 0, LAYERS * 2 * HIDDEN // 2 * 4, 0]


@pytest.mark.slow
def test_flops_are_those_of_the_model(steps: RequestSteps) -> None:
    counts, load = steps.stage_matrix((0,))[0], Load.of([(99, 1)] * 10)
    flops = sum(
        count * (np.array(row.flops) @ np.array([1.0, *load]))
        for count, row in zip(counts, steps.prices.rows, strict=True)
        if row.kind == "matmul"
    )
    products = 2 * load.tokens * (LAYERS * (4 + 8) * HIDDEN**2 + HIDDEN * VOCABULARY)
    assert flops * TWO.num_devices == pytest.approx(products + 4 * LAYERS * HIDDEN * load.pairs, rel=1e-12)


def test_writing_into_a_cache_does_not_copy_it(steps: RequestSteps) -> None:
    """Only attention and the mask depend on how many keys there are."""
    dependent = [row.kind for row in steps.prices.rows if row.moved_bytes[3] > 0]
    short, long = (steps.block_seconds(Load.of([(held, 1)] * 4)) for held in (10, 250))
    assert "matmul" in dependent and "index_copy" not in dependent and (long >= short).all()


def test_stages_add_up_to_the_model(steps: RequestSteps) -> None:
    load = Load.of([(20, 1)] * 5)
    seconds = steps.prices.seconds(load)
    whole, parts = (steps.stage_matrix(cuts) @ seconds for cuts in ((0,), (0, 2, 4)))
    assert parts.sum() == pytest.approx(whole.sum(), rel=1e-12)
    assert whole[0] == pytest.approx(steps.block_seconds(load).sum(), rel=1e-12)
    assert steps.crossing_bytes(2, load) == load.tokens * HIDDEN * 4
    kinds = ("param", "buffer")
    held = [steps.held_bytes(*ends, kinds)[0] for ends in ((0, 2), (2, steps.num_blocks), (0, steps.num_blocks))]
    assert held[0] + held[1] == held[2]


def test_halves_hide_communication_and_never_more_than_that(steps: RequestSteps) -> None:
    half_s = steps.prices.seconds(Load.of([(50, 1)] * 8))
    blocks = [steps.work[block] for block in steps.stands_for]
    sent_s = sum(half_s[part.collective] for work in blocks for part in work if part.collective >= 0)
    apart_s = 2 * float((steps.stage_matrix((0,)) @ half_s)[0])
    together_s = halves_s(blocks, half_s, half_s, TWO.overlap)
    assert 0 < apart_s - together_s <= 2 * sent_s


def test_a_model_whose_costs_grow_unevenly_is_refused(graphs: dict[RequestSizes, fx.GraphModule]) -> None:
    """As if the cache of the ninth size had fewer keys than it says, as one with a sliding window has."""
    windowed = replace(SIZES, held_out=SIZES.held_out._replace(keys=256))
    wrong = {**graphs, windowed.held_out: graphs[SIZES.held_out]}
    with pytest.raises(InputError, match=r"the cost of '\w+' does not grow evenly with requests, tokens and keys"):
        RequestSteps.of(wrong, windowed, TWO, TENSOR)


@pytest.mark.slow
def test_programs_that_differ_between_sizes_are_refused(graphs: dict[RequestSizes, fx.GraphModule]) -> None:
    other = captured_graphs(cached_model.build(2), lambda *sizes: cached_model.inputs(*sizes, layers=2), SIZES)
    with pytest.raises(InputError, match="the program of a step differs between"):
        RequestSteps.of({**graphs, SIZES.held_out: other[SIZES.held_out]}, SIZES, TWO, TENSOR)
