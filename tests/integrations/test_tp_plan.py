"""The plan of tensor parallelism that a transformers model declares, as constraints of a search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

import galvatron_fx
from galvatron_fx import Cluster
from galvatron_fx.errors import InputError
from galvatron_fx.integrations.tp_plan import tp_constraints
from tests.models import zoo

_PRESET = Cluster.preset("4xA100-80GB")
CLUSTER = replace(
    _PRESET, axes=tuple(replace(axis, name=name) for axis, name in zip(_PRESET.axes, ("dp", "tp"), strict=True))
)


@pytest.mark.slow
def test_blocks_whose_weights_are_split_get_the_role() -> None:
    model, inputs = zoo.llama(layers=2)
    constraints = tp_constraints(model)
    assert constraints["model.layers.*.mlp.down_proj"] == constraints["lm_head"] == {"tp": "tensor"}
    roles = ("data", "zero", "tensor")
    plan = galvatron_fx.plan(model, CLUSTER, inputs, roles=roles, constraints=constraints, simulate_runners_up=False)
    assert {block.strategy.roles[1] for block in plan.blocks} == {"tensor"}
    free = galvatron_fx.plan(model, CLUSTER, inputs, roles=roles, simulate_runners_up=False)
    assert {block.strategy.roles[1] for block in free.blocks} != {"tensor"}


def test_names_of_parameters_stand_for_their_modules() -> None:
    model, _ = zoo.llama(layers=1)
    plan = {"model.layers.*.mlp.up_proj.weight": "packed_colwise", "model.norm": "replicate", "model.absent": "rowwise"}
    with pytest.warns(UserWarning, match=r"names what .* does not have: model\.absent"):
        assert tp_constraints(model, "1", plan) == {"model.layers.*.mlp.up_proj": {"1": "tensor"}}


@pytest.mark.parametrize("plan, said", [
    (None, "Linear declares no tp_plan: give plan="),
    ({"a": "grouped_gemm"}, r"'a' the style 'grouped_gemm', which is another role.*\{'a': \{'tp': 'expert'\}\}"),
    ({"a": "sequence_parallel"}, "'tensor_sequence'"),
    ({"a": "diagonal"}, "'a' the style 'diagonal', which is not known: use one of colwise,"),
])  # fmt: skip
def test_what_has_no_equal_is_refused_by_name(plan: dict[str, str] | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        tp_constraints(nn.Linear(2, 2), plan=plan)
