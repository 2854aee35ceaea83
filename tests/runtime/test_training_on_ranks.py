"""Training on four real processes, started once for all checks of train_ranks.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import galvatron_fx
from galvatron_fx import Plan
from tests.models import zoo
from tests.runtime.beside_plain import full
from tests.runtime.launch import assert_held, collected, launched, parameters
from tests.runtime.train_ranks import CHECKS, on_meta

SLOW = (
    "checkpoint_to_another_plan", "checkpoints_of_another_order", "chunks_beside_products", "experts",
    "experts_have_shadows", "further_rounds", "gathers_ahead", "listed_experts_move", "losses_of_shards",
    "other_batch_shapes", "outputs_are_inputs", "rank_0_searches_for_all", "ranks_in_another_order", "stages",
    "uniform_plans", "writes_into_shards",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder_and_output(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Of the one launch."""
    folder = tmp_path_factory.mktemp("ranks")
    checks = {*collected(request), "meta_device"}
    return folder, launched(Path(__file__).with_name("train_ranks.py"), str(folder), *checks)


@pytest.mark.parametrize("check", parameters(CHECKS, SLOW))
def test_on_four_processes(folder_and_output: tuple[Path, str], check: str) -> None:
    assert_held(folder_and_output[1], check)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_meta_device_gives_the_weights_of_one_rank(folder_and_output: tuple[Path, str], one_rank: None) -> None:
    folder, _ = folder_and_output
    found = torch.load(folder / "meta_weights.pt", weights_only=True)
    model, inputs = on_meta()
    mesh = init_device_mesh("cpu", (1,))
    compiled = galvatron_fx.compile(model, mesh, inputs, plan=Plan.uniform((1,), ("data",)), seed=5)
    for name, value in compiled.named_parameters():
        torch.testing.assert_close(found[name], full(value).detach(), rtol=0, atol=0, msg=name)
    torch.testing.assert_close(compiled.forward_backward(**inputs).loss, found["loss"], rtol=1e-10, atol=0)


def test_one_rank_is_the_plain_model(one_rank: None) -> None:
    """The search on one device finds a plan, and the result is the model itself."""
    model, inputs = zoo.gpt2(layers=1)
    expected = model(**inputs).loss
    expected.backward()
    compiled = galvatron_fx.compile(model, init_device_mesh("cpu", (1,)), inputs, memory_budget="1GiB")
    torch.testing.assert_close(compiled.forward_backward(**inputs).loss, expected.detach(), rtol=1e-10, atol=0)
    for name, parameter in model.named_parameters():
        gradient = full(compiled.get_parameter(name).grad)
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
