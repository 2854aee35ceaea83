"""Caches of keys and values among the arguments: what is captured of them, what is planned, what ranks keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import galvatron_fx
from galvatron_fx import Cluster, Pipelining, Plan
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph.metadata import meta_of, ports, signature
from galvatron_fx.ir.graph.symbols import BATCH
from tests.runtime.cache_ranks import CHECKS, kept
from tests.runtime.cached_models import VOCABULARY, Decoder, Kept, decoder, prompts
from tests.runtime.launch import assert_held, collected, launched, parameters

CLUSTER = Cluster.preset("4xA100-80GB")


def given(batch: int = 4) -> tuple[Tensor, Any, Tensor]:
    return prompts(batch, 4), kept(batch), torch.tensor(0)


def test_what_forward_writes_is_a_cache_and_what_it_reads_an_input() -> None:
    graph = galvatron_fx.capture(decoder(), given(), forward_only=True)
    caches = [port.name for port in signature(graph).inputs if port.kind == "cache"]
    assert caches == [f"1[{layer}]['{part}']" for layer in range(3) for part in ("keys", "values")]
    assert [port.name for port in signature(graph).outputs if port.kind == "cache"] == caches
    assert [port.name for port in signature(graph).inputs if port.kind == "input"] == ["0", str(1 + len(caches))]


def test_the_batch_of_a_cache_is_that_of_the_inputs() -> None:
    class Stacked(nn.Module):
        """Keeps all of its three layers, [layer, batch, width], in one tensor."""

        def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
            for layer in range(3):
                kept[0][layer] += x
            return kept[0].sum(0)

    graph = galvatron_fx.capture(Stacked(), (torch.ones(2, 3), [torch.zeros(3, 2, 3)]), forward_only=True)
    (cache,) = [meta_of(node).spec for port, node in ports(graph) if port.kind == "cache"]
    assert cache.dims == (3, BATCH, 3)


def test_an_object_is_left_as_it_was() -> None:
    cache = Kept(3, 4, 4, 9, 4)
    before = [tensor for layer in cache.layers for tensor in layer.values()]
    graph = galvatron_fx.capture(decoder(), (prompts(4, 5), cache), forward_only=True)
    after = [tensor for layer in cache.layers for tensor in layer.values()]
    assert cache.length == 0 and all(x is y and not x.any() for x, y in zip(before, after, strict=True))
    assert signature(graph).arguments.value[0][1].length == 5
    named = dict(zip(signature(graph).input_names, signature(graph).input_spec.tensors, strict=True))
    assert {name for name, tensor in named.items() if tensor.is_meta} == {name for name in named if "layers" in name}


@pytest.mark.slow
def test_a_plan_counts_caches_and_has_one_microbatch() -> None:
    short, long = (
        galvatron_fx.plan(
            decoder(), CLUSTER, (prompts(4, 4), kept(4, longest), torch.tensor(0)), roles=("tensor",), forward_only=True
        )
        for longest in (9, 4000)
    )
    assert long.peak_memory_bytes > short.peak_memory_bytes + 3 * 2 * 4 * 4 * 3000 * 4 * 8 / 4
    assert short.pipelining.num_microbatches == 1
    with pytest.raises(PlanError, match=r"the cache '1\[0\]\['keys'\]', which 2 micro-batches do not write one after"):
        galvatron_fx.plan(decoder(), CLUSTER, given(), forward_only=True, num_stages=2, num_microbatches=2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "plan",
    [Plan.uniform((2, 2), ("data", "tensor")), Plan.uniform((8,), ("tensor",))],
    ids=["data tensor", "more ranks than heads"],
)
def test_outputs_are_those_of_one_device(plan: Plan) -> None:
    ids, cache, _ = given()
    torch.manual_seed(1)
    for layer in cache:
        for tensor in layer.values():
            tensor.normal_()
    batch = ids, cache, torch.tensor(3)
    report = galvatron_fx.check(decoder(), plan.axis_sizes, batch, plan, forward_only=True)
    assert report.ok and {row.name for row in report.rows} >= {"logits", "cache'][2]['values"}


def test_a_spread_vocabulary_has_no_cache() -> None:
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 1, "gpipe", vocabulary="spread"))
    with pytest.raises(PlanError, match=r"the cache '1\[0\]\['keys'\]', of which ranks that all compute"):
        galvatron_fx.check(decoder(), (2,), given(), plan, forward_only=True)


def test_writes_into_a_cache_that_is_cast_are_refused() -> None:
    cache = [{part: torch.zeros(2, 4, 8, 4) for part in ("keys", "values")} for _ in range(3)]
    inputs = {"ids": torch.randint(VOCABULARY, (2, 3)), "cache": cache, "start": torch.tensor(0)}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"writes into cache\[0\].*casts to torch.bfloat16.*give one of"):
        galvatron_fx.capture(Decoder().float().eval(), inputs, forward_only=True, mixed_precision=policy)


def test_training_leaves_a_cache_as_it_was() -> None:
    with pytest.warns(UserWarning, match=r"writes into '1\[0\]\['keys'\]', .* stays as it was.*forward_only=True"):
        graph = galvatron_fx.capture(decoder(), given(), forward_only=False)
    assert not [port for port in (*signature(graph).inputs, *signature(graph).outputs) if port.kind == "cache"]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> str:
    return launched(Path(__file__).with_name("cache_ranks.py"), *collected(request))


@pytest.mark.parametrize("check", parameters(CHECKS, ["lazy", "lists", "own_cache", "padded", "refusals"]))
def test_on_real_ranks(ranks: str, check: str) -> None:
    assert_held(ranks, check)
