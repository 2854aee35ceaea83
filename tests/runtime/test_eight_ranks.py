"""Stages beside other roles on eight real processes; this file is also what torchrun starts on the ranks."""

from __future__ import annotations

import copy
import datetime
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import Plan, Strategy
from galvatron_fx.ir.pipelining import Pipelining
from passes.find_blocks import num_blocks
from tests.models import zoo
from tests.runtime.launch import Check, assert_held, launched, run_checks
from tests.runtime.train_ranks import train

SIZES = (2, 2, 2)
RANKS = 8
TIMEOUT_S = 600


def four_stages_of_two(mesh: DeviceMesh) -> None:
    """T5, an unlike strategy in every stage: what the encoder made passes stages, tied embeddings are in two."""
    model, once = zoo.t5()
    inputs = {key: torch.cat([value, value.flip(0)] * 2) for key, value in once.items()}
    first = (0, 1, 3, 4, num_blocks(galvatron_fx.capture(model, inputs)))
    strategies = [
        Strategy(("pipeline", "pipeline", role), recompute=role == "tensor")
        for role, start, end in zip(("zero", "tensor", "data", "tensor_sequence"), first, first[1:], strict=False)
        for _ in range(start, end)
    ]
    plan = Plan.from_roles(SIZES, strategies, Pipelining(4, 4, "1f1b", first[:-1]))
    train(galvatron_fx.compile(copy.deepcopy(model), mesh, inputs, plan=plan), model, inputs, steps=2)


CHECKS: dict[str, Check] = {four_stages_of_two.__name__: four_stages_of_two}


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the one launch printed."""
    return launched(Path(__file__), RANKS, tmp_path_factory.mktemp("ranks") / "log.txt", timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_processes(output: str, check: str) -> None:
    assert_held(output, check)


def main() -> None:
    """Run the checks, or those named."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=200))
    run_checks(CHECKS, init_device_mesh("cpu", SIZES), sys.argv[1:])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
