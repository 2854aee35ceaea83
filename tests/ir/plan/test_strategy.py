from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from galvatron_fx.errors import GalvatronError, PlanError
from galvatron_fx.ir.plan.plan_table import describe_keeps
from galvatron_fx.ir.plan.strategy import LOWERING_ORDER, PIPELINE, ROLES, RoleGroup, Strategy

STRATEGIES = st.builds(Strategy, st.lists(st.sampled_from(ROLES), max_size=5).map(tuple), st.booleans(), st.booleans())


def test_groups_gathers_axes_by_role_in_lowering_order() -> None:
    strategy = Strategy(("data", "tensor", "zero", "tensor"))
    assert strategy.groups((2, 2, 3, 5)) == (
        RoleGroup("zero", (2,), 3),
        RoleGroup("data", (0,), 2),
        RoleGroup("tensor", (1, 3), 10),
    )


def test_groups_drops_axes_of_size_one() -> None:
    assert Strategy(("data", "tensor", "data")).groups((1, 1, 2)) == (RoleGroup("data", (2,), 2),)
    assert Strategy(()).groups(()) == ()


def test_lowering_order_has_every_role_once() -> None:
    assert sorted((*LOWERING_ORDER, PIPELINE)) == sorted(ROLES)


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Strategy(("data", "zero", "tensor"), recompute=True), "data zero tensor +recompute"),
        (Strategy(("zero",), recompute=True, keep_gathered=True), "zero +recompute +keep_gathered"),
        (Strategy(()), "one device"),
    ],
)
def test_str(strategy: Strategy, text: str) -> None:
    assert str(strategy) == text


@given(STRATEGIES)
def test_dict_round_trip(strategy: Strategy) -> None:
    assert Strategy.from_dict(strategy.to_dict()) == strategy


@given(STRATEGIES, STRATEGIES)
def test_order_is_total(left: Strategy, right: Strategy) -> None:
    assert (left < right) + (right < left) + (left == right) == 1


def test_flags_default_to_false() -> None:
    assert Strategy.from_dict({"roles": ["data"]}) == Strategy(("data",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"roles": ["data", "expret"]}, "unknown role 'expret' for mesh axis 1; use one of data, zero, tensor, "),
        ({"roles": [["data"]]}, r"unknown role \['data'\] for mesh axis 0"),
        ({"roles": "data"}, "roles of a strategy is 'data'; give a list"),
        ({}, "roles of a strategy is None; give a list"),
        ({"roles": [], "recompute": 1}, "recompute is 1, where a bool was expected"),
        ({"roles": [], "keep_gathered": "no"}, "keep_gathered is 'no', where a bool was expected"),
        ({"roles": [], "recomputed": True}, r"unknown keys \['recomputed'\]"),
    ],
)
def test_from_dict_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Strategy.from_dict(fields)


def test_refuses_a_bare_string() -> None:
    with pytest.raises(PlanError, match="roles is 'data', a str, where a tuple"):
        Strategy("data")  # type: ignore[arg-type]


def test_groups_refuses_another_number_of_axes() -> None:
    with pytest.raises(PlanError, match=r"'data tensor' has 2 roles for a mesh of 3 axes with sizes \(2, 2, 2\)"):
        Strategy(("data", "tensor")).groups((2, 2, 2))


def test_errors_are_value_errors() -> None:
    assert issubclass(PlanError, GalvatronError)
    assert issubclass(GalvatronError, ValueError)


KEEPS = Strategy(("data",), recompute=True, keeps=(0, 3), num_values=7)


def test_kept_values_survive_json_and_are_shown() -> None:
    assert Strategy.from_dict(KEEPS.to_dict()) == KEEPS
    assert str(KEEPS) == "data +recompute +keeps 0,3 of 7"
    assert "keeps" not in Strategy(("data",), recompute=True).to_dict()
    assert KEEPS.recompute and not KEEPS.recomputes_all
    assert describe_keeps(KEEPS) == "2 of 7"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"keeps": (3, 0)}, "ascending numbers below num_values"),
        ({"keeps": (0, 7)}, "ascending numbers below num_values"),
        ({"keeps": ("0",)}, "give a tuple of the numbers"),
        ({"keeps": (True,)}, "give a tuple of the numbers"),
        ({"recompute": False}, "one that does not keeps all"),
        ({"keeps": ()}, "give recompute=True with both"),
    ],
)
def test_values_that_cannot_be_kept(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(KEEPS, **changes)


OFFLOADS = replace(KEEPS, offloads=(3,), offload_entering=True)


def test_offloaded_values_survive_json_and_are_shown() -> None:
    assert Strategy.from_dict(OFFLOADS.to_dict()) == OFFLOADS
    assert str(OFFLOADS) == "data +recompute +keeps 0,3 of 7 +offloads 3 of 7 +offload_entering"
    assert describe_keeps(OFFLOADS) == "2 of 7, 1 and inputs on the host"
    assert OFFLOADS.is_offloaded and OFFLOADS.without_offload() == KEEPS
    entering = Strategy(("data",), recompute=True, offload_entering=True)
    assert Strategy.from_dict(entering.to_dict()) == entering and "offloads" not in entering.to_dict()
    states = replace(OFFLOADS, offload_states=True)
    assert Strategy.from_dict(states.to_dict()) == states and str(states) == f"{OFFLOADS} +offload_states"
    assert (
        describe_keeps(states) == "2 of 7, 1, inputs and states on the host"
        and states.without_offload().is_offloaded is False
    )
    assert describe_keeps(Strategy(("data",), offload_states=True)) == "all, states on the host"
    disk = Strategy(("data",), offload_entering=True, offload_states=True, states_on_disk=True)
    assert describe_keeps(disk) == "all, inputs on the host, states on disk"
    assert describe_keeps(replace(disk, offload_entering=False)) == "all, states on disk"
    assert describe_keeps(Strategy(("zero",), split_gathers=2)) == "all, gathered again in 2 slices"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"offloads": (3, 0)}, "offloads is .* ascending numbers below num_values"),
        ({"offloads": [3]}, "offloads is .* give a tuple of the numbers"),
        ({"offloads": (1,)}, "what is computed again cannot wait on the host; add the numbers to keeps"),
        ({"offload_entering": 1}, "offload_entering is 1, where a bool was expected"),
        ({"offload_states": "yes"}, "offload_states is 'yes', where a bool was expected"),
        ({"split_gathers": 0}, "split_gathers is 0, where a number of slices was expected"),
        ({"split_gathers": True}, "split_gathers is True, where a number of slices was expected"),
        ({"split_gathers": 2, "keep_gathered": True}, "keeps what it gathered and splits gathers in 2 slices"),
    ],
)
def test_values_that_cannot_be_offloaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(OFFLOADS, **changes)
