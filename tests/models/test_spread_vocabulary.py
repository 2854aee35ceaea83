"""Embedding and head on all pipeline ranks: training steps on simulated ranks equal those of one device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import pytest
from torch import Tensor, nn

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.checking.check import cluster_of
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.placement import REPLICATE, Shard
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.lowering.apply_plan import lower
from passes.lowering.lower_stages import LoweredStages
from tests.models.language import Language, Layer, language


class Setting(NamedTuple):
    """A plan, and a model with a layer a stage."""

    sizes: tuple[int, ...]
    roles: tuple[str, ...]
    schedule: str
    stages: int
    microbatches: int
    vocabulary: int = 24
    is_tied: bool = False
    batch: int = 8
    recompute: bool = False

    @property
    def plan(self) -> Plan:
        pipelining = Pipelining(self.stages, self.microbatches, self.schedule, vocabulary="spread")
        return Plan.uniform(self.sizes, self.roles, recompute=self.recompute, pipelining=pipelining)


SETTINGS = {
    "untied": Setting((2,), ("pipeline",), "gpipe", 2, 4),
    "tied, recomputed": Setting((2,), ("pipeline",), "1f1b", 2, 4, is_tied=True, recompute=True),
    "not divided": Setting((2,), ("pipeline",), "1f1b", 2, 2, vocabulary=23),
    "padded batch": Setting((2,), ("pipeline",), "zb_h1", 2, 3, is_tied=True, batch=7),
    "four ranks": Setting((4,), ("pipeline",), "zbv", 8, 4),
    "beside data": Setting((2, 2), ("data", "pipeline"), "interleaved_1f1b", 4, 4, is_tied=True),
    "beside zero": Setting((2, 2), ("pipeline", "zero"), "dualpipev", 4, 4),
    "beside tensor": Setting((2, 2), ("pipeline", "tensor"), "1f1b", 2, 2),
}


@pytest.mark.sampled(9)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_step_equals_one_device(name: str) -> None:
    setting = SETTINGS[name]
    model, inputs = language(setting.stages, setting.vocabulary, setting.is_tied, setting.batch)
    uneven = pytest.warns(UserWarning, match="do not divide its 23 rows.* Pad it to 24 rows")
    with uneven if setting.vocabulary == 23 else nullcontext():
        galvatron_fx.check(model, setting.sizes, inputs, plan=setting.plan)


def test_equal_parts_of_the_vocabulary() -> None:
    model, inputs = language(2, is_tied=True)
    lowered = lower(galvatron_fx.capture(model, inputs), SETTINGS["untied"].plan, cluster_of(2))
    assert isinstance(lowered, LoweredStages)
    places = {
        port.name: placed[0]
        for port, placed in zip(signature(lowered.joint).inputs, lowered.layout.inputs, strict=True)
        if port.kind == "param"
    }
    assert {name: place for name, place in places.items() if place != REPLICATE} == {
        "embed.weight": Shard(0),
        "embed.weight@3": Shard(0),
    }


class Echo(Layer):
    """A layer that looks at the embedding, too."""

    def __init__(self, embed: nn.Embedding) -> None:
        super().__init__()
        self.embed = embed

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.embed.weight.mean(0)


def test_a_parameter_of_stages_of_one_rank_is_refused() -> None:
    model, inputs = language(2)
    assert isinstance(model, Language)
    model.layers = nn.ModuleList(Echo(model.embed) for _ in range(2)).double()
    with pytest.raises(PlanError, match=r"'embed.weight' is split over all pipeline ranks.*vocabulary='ends'"):
        galvatron_fx.check(model, 2, inputs, plan=SETTINGS["untied"].plan)
    with pytest.raises(PlanError, match=r"'embed.weight' is split over all pipeline ranks.*vocabulary='ends'"):
        galvatron_fx.plan(model, cluster_of(2), inputs, vocabulary="spread")
