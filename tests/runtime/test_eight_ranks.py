"""Stages beside other roles on eight real processes; this file is also the script that forks them."""

from __future__ import annotations

import copy
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

import galvatron_fx
from galvatron_fx import Plan, Strategy
from galvatron_fx.compiling import compile_captured
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import Pipelining
from passes.analysis.blocks import num_blocks
from tests.ir.cluster.test_cluster import described
from tests.models import zoo
from tests.runtime.beside_plain import train
from tests.runtime.launch import Check, assert_held, fork_checks, launched
from tests.runtime.shared_lowerings import lower_before_the_fork

SIZES = (2, 2, 2)


@cache
def captured() -> tuple[nn.Module, dict[str, Any], fx.GraphModule]:
    """T5, a batch, and the graph, captured once before the ranks are forked."""
    model, once = zoo.t5()
    inputs = {key: torch.cat([value, value.flip(0)] * 2) for key, value in once.items()}
    return model, inputs, galvatron_fx.capture(model, inputs)


def plan_of(graph: fx.GraphModule) -> Plan:
    """An unlike strategy in every stage."""
    first = (0, 1, 3, 4, num_blocks(graph))
    strategies = [
        Strategy(("pipeline", "pipeline", role), recompute=role == "tensor")
        for role, start, end in zip(("zero", "tensor", "data", "tensor_sequence"), first, first[1:], strict=False)
        for _ in range(start, end)
    ]
    return Plan.from_roles(SIZES, strategies, Pipelining(4, 4, "1f1b", first[:-1]))


def four_stages_of_two(mesh: DeviceMesh) -> None:
    """T5: what the encoder made passes stages, tied embeddings are in two."""
    model, inputs, graph = captured()
    compiled = compile_captured(copy.deepcopy(model), graph, mesh, plan_of(graph), Cluster.from_mesh(mesh))
    train(compiled, model, inputs, steps=2)


CHECKS: dict[str, Check] = {four_stages_of_two.__name__: four_stages_of_two}


@pytest.fixture(scope="module")
def output() -> str:
    """What the one launch printed."""
    return launched(Path(__file__))


@pytest.mark.parametrize("check", CHECKS)
def test_on_eight_processes(output: str, check: str) -> None:
    assert_held(output, check)


def before_the_fork() -> None:
    graph = captured()[2]
    lower_before_the_fork(graph, plan_of(graph), described(SIZES))


def main() -> None:
    """Run the checks, or those named."""
    fork_checks(SIZES, CHECKS, sys.argv[1:], before_the_fork)


if __name__ == "__main__":
    main()
