"""Rows for the places of a mask that chooses as many of each sample: samples look up their own, and can be cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Cluster, Pipelining, Plan, Strategy
from galvatron_fx.errors import InputError, PlanError
from galvatron_fx.ir.graph.collectives import all_gather
from galvatron_fx.ir.graph.decisions import Computation, Given, Made, Step
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.runtime.decided_inputs import require_whole
from passes.frontend.capture.capture import Capture
from passes.frontend.capture.flat_inputs import FlatInputs
from passes.frontend.pipeline import Frontend
from passes.lowering.lower_step import Lower
from tests.helpers import assert_exact, cluster_for, one_device, simulate, uniform
from tests.models import zoo
from tests.passes.frontend.test_masked_scatter import IMAGE, SeesAndReads, batch, values


def even_batch(samples: int = 4) -> dict[str, Tensor]:
    """Images of three parts, three in each sample, in other places of each."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, 16, (samples, 8), generator=generator)
    places = torch.rand(samples, 8, generator=generator).argsort(1)[:, :3]
    return {"ids": ids.scatter(1, places, IMAGE), "image": values(samples, 3, 6)}


def decisions(inputs: dict[str, Tensor], model: type[nn.Module] = SeesAndReads) -> list[tuple[str, Any]]:
    graph = Capture().run(zoo.build(model), inputs)
    assert graph.meta["symbols"].batch == len(inputs["ids"])
    return [(decision.kind, decision.value) for decision in signature(graph).decisions]


class Counts(SeesAndReads):
    """Holds the number of its places against that of its parts, as newer models of transformers do, and reads them."""

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        words, parts = self.words(ids), self.sees(image)
        mask = (ids == IMAGE).unsqueeze(-1).expand_as(words)
        if words[mask].numel() != parts.numel():
            raise ValueError("as many places as parts, please")
        x = words.masked_scatter(mask, parts)
        for layer in self.layers:
            x = layer(x)
        seen = x[mask].reshape(len(ids), -1)
        whole = x[(ids[:, :1] >= 0).unsqueeze(-1).expand_as(x)]  # a mask that says the same of all of a sample
        return {"loss": x.square().mean() + seen.sin().mean() + whole.cos().mean(), "seen": seen}


class OfAll(SeesAndReads):
    """Two images of each sample, one behind the other along their own first dim."""

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        mask = (ids == IMAGE).unsqueeze(-1).expand_as(self.words(ids))
        return {"loss": self.words(ids).masked_scatter(mask, self.sees(image)).square().mean()}


def test_samples_are_told_apart_where_each_has_its_share() -> None:
    assert decisions(even_batch()) == [("each", [3, 3])]
    assert decisions(batch()) == []
    ids = even_batch()["ids"]
    meta = {"ids": ids.to("meta"), "image": values(4, 3, 6).to("meta")}  # as where ranks bring rows of their own
    assert decisions(meta) == []


def test_rows_that_are_taken_are_those_of_samples() -> None:
    kinds = [kind for kind, _ in decisions(even_batch(), Counts)]
    assert set(kinds) == {"each"}
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2))
    galvatron_fx.check(zoo.build(Counts), 2, even_batch(), plan).raise_if_different()


def test_rows_that_do_not_grow_with_the_batch_are_those_of_all() -> None:
    inputs = {"ids": even_batch()["ids"], "image": values(12, 6)}
    assert decisions(inputs, OfAll) == []


@pytest.mark.parametrize("samples, ranks, plan", [
    (4, 2, Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 2))),
    (8, 4, Plan.uniform((2, 2), ("zero", "tensor"), pipelining=Pipelining(1, 4))),
    (5, 2, Plan.uniform((2,), ("data",))),
], ids=["stages", "micro-batches", "odd"])  # fmt: skip
def test_micro_batches_take_their_own_parts(samples: int, ranks: int, plan: Plan) -> None:
    galvatron_fx.check(zoo.build(SeesAndReads), ranks, even_batch(samples), plan).raise_if_different()


def test_a_batch_of_other_counts_is_another_program(mesh: DeviceMesh) -> None:
    plain = zoo.build(SeesAndReads)
    compiled = galvatron_fx.compile(zoo.build(SeesAndReads), mesh, even_batch(), plan=Plan.uniform((1,), ("data",)))
    for inputs, programs in ((even_batch(), 1), (batch(), 2), (even_batch(), 2), (batch(), 2)):
        torch.testing.assert_close(compiled(**inputs)["x"], plain(**inputs)["x"], rtol=1e-10, atol=1e-12)
        assert len(compiled._programs) == programs


class AsTheLargest(SeesAndReads):
    """Its places are those of the largest token: which that is, one sample does not tell."""

    def forward(self, ids: Tensor, image: Tensor) -> dict[str, Tensor]:
        mask = (ids == ids.max()).unsqueeze(-1)
        return {"loss": self.words(ids).masked_scatter(mask, self.sees(image)).square().mean()}


def of_the_largest() -> dict[str, Tensor]:
    """The same batch, with places of the token that is an image's and the largest."""
    ids = even_batch()["ids"]
    return {**even_batch(), "ids": torch.where(ids == IMAGE, IMAGE, ids % IMAGE)}


def test_own_rows_are_refused_where_they_do_not_tell_of_their_samples() -> None:
    inputs = of_the_largest()
    known = signature(Capture().run(zoo.build(AsTheLargest), inputs)).decisions
    assert [(decision.kind, decision.value) for decision in known] == [("rows", [3, 3])]
    with pytest.raises(InputError, match="forward decides by values of input 'ids', which takes those of all rows"):
        require_whole(known, FlatInputs.of({name: tensor[:2] for name, tensor in inputs.items()}), own_rows=[0, 1])


def test_own_rows_have_to_be_as_the_program_has_them() -> None:
    known = signature(Capture().run(zoo.build(SeesAndReads), even_batch())).decisions

    def own(inputs: dict[str, Tensor]) -> FlatInputs:
        return FlatInputs.of({name: tensor[:2] for name, tensor in inputs.items()})

    require_whole(known, own(even_batch()), own_rows=[0, 1])
    with pytest.raises(InputError, match=r"of each of which a mask of 'ids' chooses 3 places, and .*scatter"):
        require_whole(known, own(batch()), own_rows=[0, 1])


@pytest.mark.parametrize("kind", [SeesAndReads, AsTheLargest])
def test_a_plan_that_was_searched_without_values_holds(mesh: DeviceMesh, kind: type[nn.Module]) -> None:
    meta = {name: tensor.to("meta") for name, tensor in of_the_largest().items()}
    model = zoo.build(kind)
    plan = galvatron_fx.plan(model, Cluster.from_mesh(mesh), meta)
    compiled = galvatron_fx.compile(zoo.build(kind), mesh, of_the_largest(), plan=plan)
    other = {**of_the_largest(), "ids": of_the_largest()["ids"].roll(1)}  # as many of all, and not of each
    for inputs in (of_the_largest(), other):
        torch.testing.assert_close(compiled(**inputs)["loss"], model(**inputs)["loss"], rtol=1e-10, atol=1e-12)
    assert len(compiled._programs) == 1


def test_batches_of_other_counts_are_refused_in_micro_batches() -> None:
    plan = Plan.uniform((2,), ("data",), pipelining=Pipelining(1, 2))
    with pytest.raises(PlanError, match=r"masked_scatter looks rows up sample by sample .* batch='gather'"):
        galvatron_fx.check(zoo.build(SeesAndReads), 2, batch(), plan)


def test_no_rank_takes_rows_of_others() -> None:
    graph = Frontend().run(zoo.build(SeesAndReads), even_batch())
    strategies = uniform(graph, "data")
    lowered = Lower(strategies, cluster_for((2,), strategies), {}).run(graph)
    assert not lowered.joint.graph.find_nodes(op="call_function", target=all_gather)


def test_calls_that_may_mix_samples_are_told() -> None:
    ids, last = Given("ids"), Step(torch.any, (Made(0),), {})
    equal, wider = Step(torch.eq, (ids, IMAGE), {}), Step(torch.unsqueeze, (Made(0), 1), {})
    assert Computation((equal, Step(torch.logical_or, (Made(0), ids), {}), last)).is_by_sample
    assert Computation((equal, wider, last)).is_by_sample
    for mixes in (
        Step(torch.logical_or, (Made(0), Made(1)), {}),  # [b, s] and [b, 1, s]
        Step(torch.eq, (Made(0), torch.ones(4)), {}),
        Step(torch.flip, (Made(0), (0,)), {}),
        Step(torch.expand_copy, (Made(0), (4, -1)), {}),
    ):
        assert not Computation((equal, wider, mixes, last)).is_by_sample
    assert not Computation((Step(torch.eq, (ids, Given("other")), {}), last)).is_by_sample


@pytest.mark.parametrize("samples", [5, 8])
def test_unlike_neighbours_frozen_and_unused_weights_are_exact_on_eight_ranks(samples: int) -> None:
    model, inputs = zoo.build(Counts), even_batch(samples)
    model.words.weight.requires_grad_(False)
    model.unused = nn.Parameter(torch.ones(3).double())
    graph = Frontend().run(model, inputs)
    tables = ("zero", "tensor", "data"), ("tensor", "data", "zero"), ("data", "sequence", "zero")
    strategies = [Strategy(tables[at % 3], at % 2 == 0) for at in range(len(uniform(graph, "data", "data", "data")))]
    assert_exact(simulate(graph, model, inputs, (2, 2, 2), strategies, {}), one_device(model, inputs), f"{samples}")
