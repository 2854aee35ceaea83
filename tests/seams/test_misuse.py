"""Arguments that no function can use: a typed error names the argument, what it was, and what to give instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import (
    Checkpointer,
    Cluster,
    Pipelining,
    Plan,
    Strategy,
    load_weights,
    measure_cluster,
    own_rows,
    save_weights,
)
from galvatron_fx.errors import BudgetError, GalvatronError, InputError, PlanError
from galvatron_fx.estimating import estimate
from galvatron_fx.report.page import write_page
from tests.models.test_odd_sizes import Regression

CLUSTER = Cluster.preset("2xA100-80GB")
BATCH = {"x": torch.randn(4, 6), "y": torch.randn(4, 3)}
NONSENSE: list[Any] = ["zero", 3, -1, 0, 1.5, [], [1], {}, ("zero", 3), float("nan"), object(), nn.Linear]
COUNTS = [value for value in NONSENSE if value != 3]
NOT_TEXT = [value for value in NONSENSE if not isinstance(value, str)]
SEARCH: dict[str, list[Any]] = {
    "memory_budget": [value for value in NONSENSE if value not in (3, 0)],
    "roles": [*NONSENSE, None],
    "recompute": [*NONSENSE, None],
    "constraints": [value for value in NONSENSE if value != {}],
    "num_stages": COUNTS,
    "num_microbatches": COUNTS,
    "schedule": NONSENSE[1:],
    "search_seconds": [value for value in NONSENSE if value not in (3, 1.5)],
    "optimizer": [*NONSENSE, None],
    "expert_imbalance": [*(value for value in NONSENSE if value not in (3, 1.5)), None],
    "offload": [*(value for value in NONSENSE if value != []), ["weights"]],
    "host_memory": NONSENSE,
    "mixed_precision": NONSENSE,
}
# Arguments that an error may call by another name.
OTHER_WORDS = {"axis_sizes": "axis", "roles": "role"}
PASSES = {"passes": [value for value in NONSENSE if value != {}]}
WATCHERS = {"progress": NONSENSE, "on_pass": NONSENSE, **PASSES}
MODEL = {"model": [*NONSENSE, None, Regression]}
INPUTS = {"example_inputs": [value for value in NONSENSE if value != 0]}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    """A mesh of one rank: this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def refused(function: Callable[..., Any], right: dict[str, Any], wrong: dict[str, list[Any]]) -> None:
    """Every wrong value raises an error of ours that names the argument and says what to give or use."""
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(GalvatronError) as caught:
                function(**{**right, name: value})
            message = str(caught.value)
            assert OTHER_WORDS.get(name, name) in message, f"{name}={value!r}: {message}"
            assert any(word in message for word in ("give", "use ", "pass ", "write ", "count")), message


def test_capture() -> None:
    refused(
        galvatron_fx.capture,
        {"model": Regression(), "example_inputs": BATCH},
        {**MODEL, **INPUTS, "mixed_precision": NONSENSE, "on_pass": NONSENSE, **PASSES},
    )


def test_plan() -> None:
    right = {"model": Regression(), "cluster": CLUSTER, "example_inputs": BATCH}
    refused(galvatron_fx.plan, right, {**MODEL, **INPUTS, **SEARCH, **WATCHERS, "cluster": [*NONSENSE, None]})


def test_plan_batch() -> None:
    def inputs_of(batch: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(batch, 6), "y": torch.randn(batch, 3)}

    right = {"model": Regression(), "cluster": CLUSTER, "inputs_of": inputs_of, "batches": [4]}
    batches = [value for value in NONSENSE if value != [1]]
    wrong = {**MODEL, "cluster": [*NONSENSE, None], "inputs_of": [*NONSENSE, None], "batches": batches}
    refused(galvatron_fx.plan_batch, right, {**wrong, **SEARCH, "progress": NONSENSE})
    with pytest.raises(TypeError, match="no option 'cores'"):
        galvatron_fx.plan_batch(Regression(), CLUSTER, inputs_of, cores=4)


def test_explain() -> None:
    right = {"model": Regression(), "cluster": CLUSTER, "example_inputs": BATCH}
    wrong = {**MODEL, **INPUTS, **SEARCH, "cluster": [*NONSENSE, None], "plan": NONSENSE[1:], "after": NONSENSE[1:]}
    refused(galvatron_fx.explain, right, {**wrong, "folder": NOT_TEXT, "progress": NONSENSE, **PASSES})


def test_rows_of_ranks_where_the_batch_is_not_first(mesh: DeviceMesh) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    with pytest.raises(InputError, match=r"batch='local' .* the batch of 0 is dim 1: give the global batch"):
        galvatron_fx.compile(model, mesh, (torch.randn(6, 4, 8),), batch="local")
    compiled = galvatron_fx.compile(model, mesh, (torch.randn(6, 4, 8),), plan=Plan.uniform((1,), ("data",)))
    with pytest.raises(InputError, match=r"batches in the first dim, and the batch of 0 is dim 1: pass the whole"):
        _ = compiled.batch_rows
    with pytest.raises(InputError, match=r"batches in the first dim, and the batch of 0 is dim 1: pass the whole"):
        compiled(own_rows(torch.randn(6, 4, 8)))


def test_compile(mesh: DeviceMesh) -> None:
    right = {"model": Regression(), "mesh": mesh, "example_inputs": BATCH}
    wrong = {"mesh": [*NONSENSE, None], "plan": NONSENSE[1:], "cluster": NONSENSE, "backend": [*NONSENSE, None]}
    seeds = {"seed": [value for value in [*NONSENSE, None] if value not in (3, -1, 0)]}
    refused(galvatron_fx.compile, right, {**MODEL, **INPUTS, **SEARCH, **WATCHERS, **wrong, **seeds})


def test_a_text_is_no_list_of_roles() -> None:
    with pytest.raises(PlanError, match=r"roles is 'zero': give a sequence of roles, such as \('data', 'zero'\)"):
        galvatron_fx.plan(Regression(), CLUSTER, BATCH, roles="zero")
    with pytest.raises(PlanError, match="roles is 'data'"):
        Plan.uniform((2,), "data")


def test_the_path_of_a_plan_is_a_plan(mesh: DeviceMesh, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform((1,), ("data",)).save(path)
    assert galvatron_fx.compile(Regression(), mesh, BATCH, plan=str(path)).plan == Plan.load(path)
    with pytest.raises(PlanError, match="absent"):
        galvatron_fx.compile(Regression(), mesh, BATCH, plan=tmp_path / "absent.json")
    Plan.uniform((2,), ("tensor",)).save(path)
    assert "after ShardGraph" in galvatron_fx.explain(Regression(), CLUSTER, BATCH, plan=path)


BESIDE_A_PLAN = {
    "roles": ("data",),
    "recompute": False,
    "constraints": {"layers.0": ("data",)},
    "num_stages": 1,
    "num_microbatches": 2,
    "schedule": "1f1b",
    "search_seconds": 5,
    "optimizer": "sgd",
    "expert_imbalance": 2,
    "offload": ("activations",),
}


@pytest.mark.parametrize("option", BESIDE_A_PLAN)
def test_what_a_given_plan_has_decided_is_refused(mesh: DeviceMesh, tmp_path: Path, option: str) -> None:
    model, given = Regression(), {"plan": Plan.uniform((1,), ("data",)), option: BESIDE_A_PLAN[option]}
    alone = Cluster.from_mesh(mesh)
    for use in (
        lambda: galvatron_fx.compile(model, mesh, **given),
        lambda: galvatron_fx.explain(model, alone, BATCH, **given),
        lambda: write_page(tmp_path / "page.html", model, alone, BATCH, **given),
    ):
        with pytest.raises(PlanError, match=f"{option}=.* is given beside plan=.*leave out plan= to search"):
            use()


def test_a_given_plan_has_to_be_within_the_budget(mesh: DeviceMesh, tmp_path: Path) -> None:
    model, plan = Regression(), Plan.uniform((1,), ("data",))
    peak = estimate(model, Cluster.from_mesh(mesh), BATCH, plan).peak_bytes
    galvatron_fx.compile(model, mesh, BATCH, plan=plan, memory_budget=peak, constraints={})
    lazy = galvatron_fx.compile(model, mesh, plan=plan, memory_budget=peak - 1)
    for use in (
        lambda: galvatron_fx.compile(model, mesh, BATCH, plan=plan, memory_budget=peak - 1),
        lambda: lazy(**BATCH),
        lambda: galvatron_fx.explain(model, Cluster.from_mesh(mesh), BATCH, plan=plan, memory_budget=peak - 1),
        lambda: write_page(
            tmp_path / "page.html", model, Cluster.from_mesh(mesh), BATCH, plan=plan, memory_budget=peak - 1
        ),
    ):
        with pytest.raises(BudgetError, match=rf"\({peak} bytes\) and memory_budget is .*leave out plan=") as caught:
            use()
        assert (caught.value.least_bytes, caught.value.plan) == (peak, plan)


def test_clusters() -> None:
    for value in NOT_TEXT:
        with pytest.raises(GalvatronError, match="preset"):
            Cluster.preset(value)
        with pytest.raises(GalvatronError, match="mesh is"):
            Cluster.from_mesh(value)
        with pytest.raises(GalvatronError, match="mesh is"):
            measure_cluster(value)
        for function in (CLUSTER.save, Cluster.load):
            with pytest.raises(InputError, match="path is"):
                function(value)
        with pytest.raises(GalvatronError, match="JSON text"):
            Cluster.from_json(value)


def test_seconds_of_a_measurement(mesh: DeviceMesh) -> None:
    for value in ("long", 0, -1, float("nan"), None, True):
        with pytest.raises(InputError, match="seconds is"):
            measure_cluster(mesh, seconds=value)


def test_plans_by_hand() -> None:
    refused(
        Plan.uniform,
        {"axis_sizes": (2,), "roles": ("data",)},
        {
            "axis_sizes": [*NOT_TEXT[:4], *NOT_TEXT[6:], None],
            "roles": [*NONSENSE, None],
            "recompute": NONSENSE,
            "num_blocks": COUNTS,
            "pipelining": [*NONSENSE, None],
        },
    )
    refused(
        Plan.from_roles,
        {"axis_sizes": (2,), "strategies": [Strategy(("data",))]},
        {"strategies": [value for value in [*NONSENSE, None] if value != []], "axis_sizes": [3, None, object()]},
    )
    refused(Strategy, {}, {"roles": [*NONSENSE, None]})
    refused(Pipelining, {}, {"num_stages": COUNTS, "num_microbatches": COUNTS})
    plan = Plan.uniform((2,), ("data",))
    for function in (plan.save, Plan.load):
        for value in NOT_TEXT:
            with pytest.raises(InputError, match="path is"):
                function(value)


def test_checkpoints(tmp_path: Path) -> None:
    model = Regression()
    refused(Checkpointer, {"folder": tmp_path}, {"folder": [*NOT_TEXT, None, ""], "keep": COUNTS, "every": COUNTS})
    refused(Checkpointer, {"folder": tmp_path}, {"asynchronous": [*NONSENSE, None]})
    states = {name: NONSENSE for name in ("optimizer", "scheduler", "loader")}
    steps = [value for value in [*NONSENSE, None] if value not in (3, 0)]
    saver = Checkpointer(tmp_path)
    right = {"step": 1, "model": model}
    refused(saver.save, right, {"step": steps, **MODEL, **states, "extra": [v for v in NONSENSE if v != {}]})
    refused(saver.load, right, {"step": steps[:-1], **MODEL, **states})
    assert list(tmp_path.iterdir()) == [], "nothing is written for what is refused"


def test_weights(tmp_path: Path) -> None:
    right = {"model": Regression(), "folder": tmp_path / "weights"}
    folders = {"folder": [*NOT_TEXT, None, ""]}
    refused(save_weights, right, {**MODEL, **folders, "like": NOT_TEXT})
    refused(load_weights, right, {**MODEL, **folders, "cast": [*NONSENSE, None]})


def test_batches(mesh: DeviceMesh) -> None:
    compiled = galvatron_fx.compile(Regression(), mesh, BATCH, plan=Plan.uniform((1,), ("data",)))
    for value in [*NONSENSE, None]:
        with pytest.raises(InputError, match="without any tensor"):
            own_rows(value)
        with pytest.raises(GalvatronError):
            compiled.forward_backward(value)
        with pytest.raises(GalvatronError):
            compiled.forward_backward(**BATCH, z=value)
    for value in ("much", [1], None, object()):
        with pytest.raises(InputError, match="max_norm is"):
            compiled.clip_grad_norm_(value)
