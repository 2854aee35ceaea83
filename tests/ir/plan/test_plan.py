from __future__ import annotations

import json
import math
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expecttest import assert_expected_inline
from hypothesis import given
from hypothesis import strategies as st

from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan import plan_json
from galvatron_fx.ir.plan.pipelining import Pipelining
from galvatron_fx.ir.plan.plan import BlockPlan, Plan, prime_factors
from galvatron_fx.ir.plan.plan_table import describe_keeps
from galvatron_fx.ir.plan.schedule import SCHEDULES, legal, make_schedule
from galvatron_fx.ir.plan.strategy import PIPELINE, ROLES, Strategy

ZERO = Strategy(("zero", "zero", "tensor"), recompute=True)
DATA = Strategy(("data", "zero", "tensor"), keep_gathered=True)
PRIMES = (2, 3, 5, 7, 1048573)
LINES = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=20)


def searched_plan() -> Plan:
    blocks = (
        BlockPlan("embed", DATA, "e0", 0.011, 500_000_000),
        *(BlockPlan(f"layers.{index}", ZERO, "b1", 0.02, 250_000_000) for index in range(4)),
        *(BlockPlan(f"layers.{index}", DATA, "b1", 0.018, 400_000_000) for index in (4, 5)),
        BlockPlan("loss", Strategy(("tensor_sequence", "data", "sequence")), "l2", 0.0055, 90_000_000),
    )
    return Plan((2, 2, 2), blocks, "g7", 0.1395, 2_390_000_000, 3_000_000_000, "adam", ("ranked 3 plans",))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    axis_sizes = tuple(draw(st.lists(st.sampled_from(PRIMES), max_size=4)))
    count = len(axis_sizes)
    roles = st.lists(st.sampled_from([role for role in ROLES if role != PIPELINE]), min_size=count, max_size=count).map(
        tuple
    )
    strategies = st.builds(Strategy, roles, st.booleans(), st.booleans())
    names, block_fingerprints = (
        LINES.filter(lambda name: name not in ("", "*")),
        st.from_regex(r"[0-9a-f]{0,8}", fullmatch=True),
    )
    seconds, sizes = st.floats(0, 1e18), st.integers(0, 10**18)
    blocks = st.lists(
        st.builds(BlockPlan, names, strategies, block_fingerprints, seconds, sizes), min_size=1, max_size=4
    ).map(tuple)
    budget, notes = st.none() | sizes, st.lists(LINES, max_size=2).map(tuple)
    return draw(
        st.builds(Plan, st.just(axis_sizes), blocks, block_fingerprints, seconds, sizes, budget, st.just("sgd"), notes)
    )


@given(plans())
def test_json_round_trip_is_byte_identical(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text
    assert Plan.from_json(text).digest() == plan.digest()
    assert str(plan)


@given(st.sampled_from(SCHEDULES), st.integers(1, 3), st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_stages_round_trip(name: str, ranks: int, per_rank: int, parts: int, by_hand: bool) -> None:
    stages = ranks * per_rank
    if legal(name, ranks, stages, parts) is not None:
        return
    pipelining = Pipelining(stages, parts, name, tuple(2 * stage for stage in range(stages)))
    if by_hand:
        pipelining = Pipelining.by_hand(make_schedule(name, ranks, stages, parts), pipelining.first_blocks)
    strategies = [Strategy((PIPELINE, "zero") if ranks > 1 else ("data", "zero"))] * (2 * stages)
    plan = Plan.from_roles((ranks, 2) if ranks > 1 else (2, 2), strategies, pipelining)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.num_pipeline_ranks == ranks
    assert str(plan)


@pytest.mark.parametrize(
    ("roles", "pipelining", "message"),
    [
        ([("pipeline", "data")] * 4, Pipelining(3), r"'1f1b' wants one stage a rank.*2 pipeline ranks and 3 stages"),
        ([("pipeline", "data"), ("data", "pipeline")], Pipelining(2), "the same axes in every block"),
        ([("pipeline", "pipeline")] * 2, Pipelining(4), "4 stages that begin with blocks .* model of 2 blocks"),
        ([("pipeline", "data")] * 4, Pipelining(2, 1, "1f1b", (0, 4)), "4 blocks"),
        ([("pipeline", "data")] * 4, Pipelining(2, 2, "2f2b"), "2f2b"),
    ],
)
def test_stages_that_do_not_fit_are_refused(roles: list[tuple[str, ...]], pipelining: Pipelining, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_roles((2, 2), [Strategy(own) for own in roles], pipelining)


def test_json_text() -> None:
    assert_expected_inline(
        Plan.uniform((2,), ("zero",), recompute=True).to_json(),
        """\
{
  "axis_sizes": [
    2
  ],
  "blocks": [
    {
      "fingerprint": "",
      "memory_bytes": 0,
      "name": "*",
      "strategy": {
        "gather_late": false,
        "keep_gathered": false,
        "recompute": true,
        "roles": [
          "zero"
        ]
      },
      "time_s": 0.0
    }
  ],
  "graph_fingerprint": "",
  "memory_budget_bytes": null,
  "notes": [],
  "optimizer": "adam",
  "peak_memory_bytes": 0,
  "pipelining": {
    "first_blocks": [],
    "num_microbatches": 1,
    "num_stages": 1,
    "orders": [],
    "rank_of_stage": [],
    "schedule": "1f1b"
  },
  "step_time_s": 0.0,
  "version": 2
}
""",
    )


def ascii_table(plan: Plan) -> str:
    """Return the table in ASCII, which is all that expecttest can write back on EXPECTTEST_ACCEPT=1."""
    return str(plan).translate(str.maketrans("×·─", "x|-"))


def test_table() -> None:
    assert_expected_inline(
        ascii_table(searched_plan()),
        """\
Plan for 8 ranks on a mesh of 2x2x2

blocks           roles, outermost axis first        keeps for backward            time   memory/rank
----------------------------------------------------------------------------------------------------
0 embed          datax2 | zerox2 | tensorx2         all, gathered kept           11 ms        500 MB
1-4 layers.0-3   zerox4 | tensorx2                  recompute, gathered again    80 ms          1 GB
5-6 layers.4-5   datax2 | zerox2 | tensorx2         all, gathered kept           36 ms        800 MB
7 loss           tensor_sequencex2 | datax2 |       all                         5.5 ms         90 MB
                 sequencex2

predicted step time  140 ms
predicted peak       2.39 GB per rank
memory budget        3 GB per rank
optimizer            adam
note                 ranked 3 plans""",
    )


def test_table_of_a_plan_written_by_hand() -> None:
    plan = Plan.uniform((4, 2), ("data", "tensor"))
    assert "data×4 · tensor×2" in str(plan)
    assert_expected_inline(
        ascii_table(plan),
        """\
Plan for 8 ranks on a mesh of 2x2x2

blocks   roles, outermost axis first   keeps for backward   time   memory/rank
------------------------------------------------------------------------------
all      datax4 | tensorx2             all                     -             -

predicted step time  -
predicted peak       -
memory budget        none
optimizer            adam""",
    )


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (Strategy(("zero",)), "all, gathered again"),
        (Strategy(("zero",), keep_gathered=True), "all, gathered kept"),
        (Strategy(("zero",), recompute=True), "recompute, gathered again"),
        (Strategy(("zero",), recompute=True, keep_gathered=True), "recompute, gathered again"),
        (Strategy(("data",), recompute=True, keep_gathered=True), "recompute"),
        (Strategy(("data",), keep_gathered=True), "all"),
    ],
)
def test_what_a_block_keeps(strategy: Strategy, text: str) -> None:
    assert describe_keeps(strategy) == text


def test_table_of_one_device() -> None:
    plan = Plan.uniform((1,), ("data",), recompute=True, num_blocks=3)
    assert_expected_inline(
        ascii_table(plan),
        """\
Plan for one device

blocks     roles, outermost axis first   keeps for backward   time   memory/rank
--------------------------------------------------------------------------------
0-2 (3x)   one device                    recompute               -             -

predicted step time  -
predicted peak       -
memory budget        none
optimizer            adam""",
    )


def test_table_heeds_no_terminal_and_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(searched_plan(), notes=("[bold]:smile:",))
    before = str(plan)
    for name, value in {"COLUMNS": "20", "FORCE_COLOR": "1", "TERM": "dumb", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert str(plan) == before
    assert "[bold]:smile:" in before
    named = replace(plan.blocks[0], name="[red]" + "x" * 300)
    assert max(map(len, str(replace(plan, blocks=(named,))).splitlines())) <= 100


@pytest.mark.parametrize(("size", "factors"), [(1, ()), (2, (2,)), (12, (2, 2, 3)), (97, (97,)), (2**20, (2,) * 20)])
def test_prime_factors(size: int, factors: tuple[int, ...]) -> None:
    assert prime_factors(size) == factors


@given(st.integers(1, 2**20))
def test_prime_factors_multiply_back(size: int) -> None:
    factors = prime_factors(size)
    assert math.prod(factors) == size
    assert list(factors) == sorted(factors)
    assert all(prime_factors(factor) == (factor,) for factor in factors)


@pytest.mark.parametrize("size", [0, -2, True, 2.0, 2**20 + 1])
def test_prime_factors_refuses(size: int) -> None:
    with pytest.raises(PlanError, match=r"a mesh axis has size .* give the number of ranks along it"):
        prime_factors(size)


def test_uniform_splits_axes_into_primes() -> None:
    plan = Plan.uniform((2, 1, 6), ("data", "sequence", "tensor"), recompute=True, keep_gathered=True)
    assert plan.axis_sizes == (2, 2, 3)
    assert plan.is_wildcard
    assert plan.strategy_of(70, 71) == Strategy(("data", "tensor", "tensor"), recompute=True, keep_gathered=True)


def test_uniform_with_a_count_fits_only_that_count() -> None:
    plan = Plan.uniform((2,), ("data",), num_blocks=3)
    assert [block.name for block in plan.blocks] == ["block_0", "block_1", "block_2"]
    assert plan.strategy_of(2, 3) == Strategy(("data",))
    with pytest.raises(PlanError, match="the plan has 3 blocks and the model 4; search"):
        plan.strategy_of(2, 4)


def test_uniform_with_one_block_is_no_wildcard() -> None:
    assert not Plan.uniform((2,), ("data",), num_blocks=1).is_wildcard


def test_from_roles_keeps_the_order_of_blocks() -> None:
    first, second = Strategy(("data",)), Strategy(("tensor",), recompute=True)
    plan = Plan.from_roles((4,), [first, second])
    assert plan.strategy_of(0, 2) == Strategy(("data", "data"))
    assert plan.strategy_of(1, 2) == Strategy(("tensor", "tensor"), recompute=True)


@pytest.mark.parametrize("index", [-1, 8])
def test_strategy_of_refuses_a_block_that_is_not_there(index: int) -> None:
    with pytest.raises(PlanError, match=f"block {index} of a model with 8 blocks; give 0 to 7"):
        searched_plan().strategy_of(index, 8)


def test_hand_written_plans_refuse_another_number_of_roles() -> None:
    with pytest.raises(PlanError, match=r"has 2 roles for a mesh with axes \(8,\).* prime axes \(2, 2, 2\)"):
        Plan.uniform((8,), ("data", "tensor"))
    with pytest.raises(PlanError, match=r"malformed plan at \$.blocks"):
        Plan.from_roles((8,), [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis_sizes": (8,)}, r"mesh axis 0 of the plan has size 8, where a prime .* Plan.from_roles"),
        ({"axis_sizes": [2, 2, 2]}, "axis_sizes of a plan is a list; give a tuple"),
        ({"axis_sizes": (2, 2)}, r"block 0 \('embed'\) has strategy .* with 3 roles for a mesh with axes \(2, 2\)"),
        ({"step_time_s": math.nan}, r"at \$.step_time_s: nan is not a finite number"),
        ({"step_time_s": math.inf}, r"at \$.step_time_s: inf is greater than the maximum"),
        ({"peak_memory_bytes": -1}, r"at \$.peak_memory_bytes: -1 is less than the minimum"),
        ({"memory_budget_bytes": 1.5}, r"at \$.memory_budget_bytes: 1.5 is neither null nor a whole number"),
        ({"optimizer": ""}, r"at \$.optimizer: '' should be non-empty"),
        ({"optimizer": "adma"}, "optimizer is 'adma': use one of adam, adamw, sgd, sgd_momentum, adafactor, muon"),
        ({"notes": ("two\nlines",)}, r"at \$.notes\[0\]: 'two\\nlines' holds characters that are not allowed"),
        ({"graph_fingerprint": "g 7"}, r"at \$.graph_fingerprint: 'g 7' holds characters"),
    ],
)
def test_plan_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        replace(searched_plan(), **changes)


@pytest.mark.parametrize("place", ["beside another block", "block fingerprint", "graph fingerprint"])
def test_plan_refuses_a_wildcard_tied_to_a_model(place: str) -> None:
    plan = Plan.uniform((2,), ("data",))
    (block,) = plan.blocks
    with pytest.raises(PlanError, match=r"block 0 is named '\*', which stands for all blocks of any model"):
        if place == "beside another block":
            replace(plan, blocks=(block, replace(block, name="other")))
        elif place == "block fingerprint":
            replace(plan, blocks=(replace(block, fingerprint="b"),))
        else:
            replace(plan, graph_fingerprint="g")


FINGERPRINTS = ("e0", *["b1"] * 6, "l2")


def test_check_accepts_its_model_on_any_factoring_of_the_mesh() -> None:
    searched_plan().check("g7", FINGERPRINTS, (2, 2, 2))
    searched_plan().check("g7", FINGERPRINTS, (1, 4, 2))
    Plan.uniform((8,), ("data",)).check("any", ("x", "y"), (8,))
    Plan.uniform((8,), ("data",), num_blocks=2).check("any", ("x", "y"), (8,))


@pytest.mark.parametrize(
    ("graph", "blocks", "axis_sizes", "message"),
    [
        ("g7", FINGERPRINTS, (2, 2), r"mesh with axes \(2, 2, 2\) and this mesh has \(2, 2\); run on"),
        ("g7", FINGERPRINTS[1:], (8,), "the plan has 8 blocks and the model 7; search"),
        ("g7", ("e1", *FINGERPRINTS[1:]), (8,), r"block 0 \('embed'\) of the plan has fingerprint e0 .* model e1"),
        ("g8", FINGERPRINTS, (8,), "made for graph g7 and this is graph g8, though the blocks agree"),
    ],
)
def test_check_refuses(graph: str, blocks: tuple[str, ...], axis_sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        searched_plan().check(graph, blocks, axis_sizes)


def test_digest_differs_for_different_plans() -> None:
    plan = searched_plan()
    assert len(plan.digest()) == 64
    assert plan.digest() != replace(plan, optimizer="sgd").digest()


def test_times_given_as_int_make_no_difference() -> None:
    assert replace(searched_plan(), step_time_s=1).to_json() == replace(searched_plan(), step_time_s=1.0).to_json()


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    searched_plan().save(path)
    assert Plan.load(path) == searched_plan()
    assert path.read_bytes() == searched_plan().to_json().encode()
    assert list(tmp_path.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


def test_save_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        searched_plan().save(tmp_path / "taken")
    assert list(tmp_path.iterdir()) == [tmp_path / "taken"]


def test_load_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=r"cannot read a plan from .*plan.json: No such file"):
        Plan.load(path)
    path.write_bytes(b"\xff")
    with pytest.raises(PlanError, match=r"plan.json is not UTF-8 at byte 0"):
        Plan.load(path)
    path.write_text("[")
    with pytest.raises(PlanError, match=r"plan.json: the plan is not JSON"):
        Plan.load(path)


def test_load_refuses_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched_plan().save(tmp_path / "plan.json")
    monkeypatch.setattr(plan_json, "MAX_PLAN_BYTES", 100)
    with pytest.raises(PlanError, match=r"plan.json has over 100 bytes"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=r"a plan of \d+ characters; at most 100 are read"):
        Plan.from_json(searched_plan().to_json())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the plan is not JSON: Expecting value"),
        ("{} {}", "the plan is not JSON: Extra data"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 900 + "]" * 900, r"malformed plan at \$|nested too deeply"),
        ("9" * 10_000, "the plan is not JSON"),
        ("{}", r"malformed plan at \$: 'version' is a required property"),
        ('{"version": 3}', "plan version 3, where 2 was expected"),
        ('{"version": 1, "version": 1}', "key 'version' stands twice"),
        ('{"step_time_s": NaN}', "NaN in the plan, where a finite number"),
        ('{"step_time_s": -Infinity}', "-Infinity in the plan"),
    ],
)
def test_from_json_refuses(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"step_time_s": 0.1395', '"step_time_s": 1e999', "inf is greater than the maximum"),
        ('"step_time_s": 0.1395', '"step_time_s": "soon"', "'soon' is not of type 'number'"),
        ('"name": "embed"', r'"name": "\ud800"', r"blocks\[0\].name: '\\ud800' holds characters"),
        ('"name": "embed"', '"title": "embed"', "'title' was unexpected"),
        ('"memory_bytes": 500000000', '"memory_bytes": 5e8', "500000000.0 is not of type 'integer'"),
        ('"recompute": false', '"recompute": 0', "0 is not of type 'boolean'"),
        ('"tensor_sequence"', '"sequance"', "unknown role 'sequance' for mesh axis 0; use one of"),
    ],
)
def test_from_json_refuses_one_change(old: str, new: str, message: str) -> None:
    text = searched_plan().to_json()
    assert old in text
    with pytest.raises(PlanError, match=message):
        Plan.from_json(text.replace(old, new, 1))


def read_or_refuse(text: str) -> None:
    """Read a plan; what is read must write itself again, and what is refused must be a PlanError."""
    try:
        plan = Plan.from_json(text)
    except PlanError as error:
        assert len(str(error)) < 1_000
    else:
        assert Plan.from_json(plan.to_json()) == plan
        assert str(plan)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=5), values, max_size=3),
    max_leaves=5,
)


@given(st.text(st.characters()))
def test_from_json_survives_any_text(text: str) -> None:
    read_or_refuse(text)


@given(st.data())
def test_from_json_survives_cut_and_changed_text(data: st.DataObject) -> None:
    text = Plan.uniform((2, 3), ("data", "zero"), num_blocks=2).to_json()
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(start + 5, len(text))))
    read_or_refuse(text[:start] + data.draw(st.text('0123456789-+.eE"{}[],:ntf\\u*', max_size=5)) + text[end:])


@given(st.data())
def test_from_json_survives_any_value_in_any_place(data: st.DataObject) -> None:
    document = json.loads(Plan.uniform((2, 3), ("data", "zero"), num_blocks=2).to_json())
    place: Any = document
    while True:
        key = data.draw(st.sampled_from(sorted(place)) if isinstance(place, dict) else st.integers(0, len(place) - 1))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(JSON_VALUES)
    read_or_refuse(json.dumps(document))


def test_axes_by_name() -> None:
    """As the dims of the user's mesh are called; in the table and in JSON, for people alone."""
    plain = Plan.uniform((2, 2, 2), ("data", "data", "tensor"))
    named = replace(plain, axis_names=("dp.0", "dp.1", "tp"))
    assert "dp data×4 · tp tensor×2" in str(named) and "data×4 · tensor×2" in str(plain)
    assert Plan.from_json(named.to_json()) == named and "axis_names" not in plain.to_json()
    with pytest.raises(PlanError, match=r"names 1 of them: \('dp',\); give a name for each, or none"):
        replace(plain, axis_names=("dp",))
