"""Every schedule on a pipeline of four real processes, and the refusals that must leave none of them waiting.

This file is also the script that forks the ranks. Rank 0 prints ``ok <check>`` once for each check that holds on all,
``FAILED <check>`` and the errors otherwise.
"""

from __future__ import annotations

import copy
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import galvatron_fx
from galvatron_fx import Plan
from galvatron_fx.compiling import compile_captured
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.pipelining import BY_HAND, Pipelining
from galvatron_fx.ir.plan.plan import prime_factors
from galvatron_fx.ir.plan.strategy import Strategy
from galvatron_fx.runtime.dtensor_views import local_part
from galvatron_fx.runtime.stage_runner import StageRunner
from passes.analysis.blocks import num_values
from passes.search.tables.search import search_table
from passes.search.tables.stages import Stages
from tests.ir.cluster.test_cluster import described
from tests.models import zoo
from tests.models.language import language
from tests.models.random_plans import Combination, draw, prepared, random_table
from tests.runtime.beside_plain import full, same, train
from tests.runtime.launch import Check, assert_held, collected, fork_checks, launched, parameters, runs
from tests.runtime.shared_lowerings import compile_before_the_fork, lower_before_the_fork

RANKS = 4
REFUSAL_S = 60.0  # far from the minutes in which collectives give up
PRIMES = prime_factors(RANKS)
ROLES = ("pipeline",) * len(PRIMES)

# Seeds of random combinations of four ranks: GPT-2 in a V of stages, T5 by a table, beside other roles.
DRAWN = (19, 44)

# schedule: stages and micro-batches
SCHEDULES = {
    "1f1b": (4, 4),
    "zb_h1": (4, 4),
    "interleaved_1f1b": (8, 4),
    "zbv": (8, 4),
    "dualpipev": (8, 8),
}
SLOW = ("interleaved_1f1b", "random_plans", "zb_h1")


@cache
def graph_of(layers: int) -> fx.GraphModule:
    """The model's graph, captured once before the ranks are forked."""
    return galvatron_fx.capture(*model_and_batch(layers))


def model_and_batch(layers: int) -> tuple[nn.Module, dict[str, Any]]:
    """GPT-2 with tied embeddings, of two blocks more than layers, and a batch of eight."""
    return zoo.gpt2(layers=layers)[0], zoo.tokens(8)


def compiled_by(mesh: DeviceMesh, pipelining: Pipelining, layers: int) -> Any:
    """Compile the model as a pipeline over all ranks."""
    model, inputs = model_and_batch(layers)
    plan = Plan.uniform(PRIMES, ROLES, pipelining=pipelining)
    return galvatron_fx.compile(model, mesh, inputs, plan=plan)


def graph_and_plan(pipelining: Pipelining) -> tuple[fx.GraphModule, Plan]:
    """A block a stage."""
    return graph_of(pipelining.num_stages - 2), Plan.uniform(PRIMES, ROLES, pipelining=pipelining)


def trains(pipelining: Pipelining, mesh: DeviceMesh) -> None:
    """Two steps of AdamW beside the plain model, and the measured schedule is the planned one."""
    model, inputs = model_and_batch(layers=pipelining.num_stages - 2)
    graph, plan = graph_and_plan(pipelining)
    compiled = compile_captured(copy.deepcopy(model), graph, mesh, plan, Cluster.from_mesh(mesh))
    train(compiled, model, inputs, steps=2)
    report = compiled.measured_schedule()
    assert report.schedule == pipelining.table(RANKS)
    own = sorted((span for span in report.spans if span.rank == dist.get_rank()), key=lambda span: span.start_s)
    assert tuple(span.action for span in own) == report.schedule.orders[dist.get_rank()]


def random_stages() -> Pipelining:
    """Stages lie on any rank, several in a row on one, backward is whole here and halved there."""
    return Pipelining.by_hand(random_table(Random(1), RANKS, 6, 4))


def table_by_hand(mesh: DeviceMesh) -> None:
    """A random table."""
    trains(random_stages(), mesh)


@cache
def searched_stages() -> Pipelining:
    """A table that was searched for stages of unlike times on ranks with little room, several micro-batches each."""
    forward, ones, none = (1.0, 4.0, 1.0, 2.0), (1.0,) * 4, (0.0,) * 3
    table = search_table(Stages((0, 1, 2, 3), forward, ones, forward, none, none, ones, ones, (3.0,) * 4), 4).schedule
    assert table.name == BY_HAND and table.splits_backward, "no named schedule is as fast"
    return Pipelining.by_hand(table)


def searched_table(mesh: DeviceMesh) -> None:
    trains(searched_stages(), mesh)


SPREAD, ENDS = (
    Plan.uniform(PRIMES, ROLES, pipelining=Pipelining(RANKS, 2, "zb_h1", vocabulary=vocabulary))
    for vocabulary in ("spread", "ends")
)


def spread_vocabulary(mesh: DeviceMesh) -> None:
    """Embedding and head, tied, on all ranks: steps, evaluation, and a state that a plan of whole ends takes over."""
    model, inputs = language(RANKS, is_tied=True)
    cluster, graph = Cluster.from_mesh(mesh), galvatron_fx.capture(model, inputs)
    compiled, other = (compile_captured(copy.deepcopy(model), graph, mesh, plan, cluster) for plan in (SPREAD, ENDS))
    assert local_part(compiled.embed.weight).shape[0] == model.embed.weight.shape[0] // RANKS
    train(compiled, model, inputs, steps=2)
    with torch.no_grad():
        same(compiled(**inputs)["loss"], model(**inputs)["loss"], "loss of evaluation")
    report = compiled.measured_schedule()
    assert report.schedule == SPREAD.pipelining.table(RANKS)
    with TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        dcp.save(compiled.state_dict(), checkpoint_id=folder[0])
        loaded = other.state_dict()
        dcp.load(loaded, checkpoint_id=folder[0])
        other.load_state_dict(loaded)
        dist.barrier()
    same(other.forward_backward(**inputs)["loss"], model(**inputs)["loss"], "loss after loading")


def of_block(strategy: Strategy, count: int) -> Strategy:
    """Of the values that were drawn without a look at the block, those that it has."""
    keeps = tuple(value for value in strategy.keeps if value < count)
    return replace(strategy, keeps=keeps, num_values=count if keeps else 0)


def drawn_plan(combination: Combination, graph: fx.GraphModule) -> Plan:
    """The plan of a random combination for a graph."""
    table = combination.schedule
    if table.name == BY_HAND:
        pipelining = Pipelining.by_hand(table, combination.first_blocks)
    else:
        pipelining = Pipelining(table.num_stages, table.num_microbatches, table.name, combination.first_blocks)
    strategies = [of_block(*each) for each in zip(combination.strategies, num_values(graph), strict=True)]
    return Plan.from_roles(combination.sizes, strategies, pipelining)


def differs(combination: Combination) -> str:
    """Run a random combination on the ranks: what of this rank's results is not what one device makes."""
    given = prepared(combination.name, combination.deep, combination.batch)
    mesh = init_device_mesh("cpu", combination.sizes)
    cluster = Cluster.from_mesh(mesh)
    plan = drawn_plan(combination, given.graph)
    compiled = compile_captured(copy.deepcopy(given.model), given.graph, mesh, plan, cluster)
    compiled.forward_backward(**given.inputs)
    own = {f"grad {name}": p.grad for name, p in compiled.named_parameters()}
    assert own, "this rank holds no parameter"
    largest = max(float(v.abs().max()) for n, v in given.expected.items() if n.startswith("grad"))
    for name, gradient in own.items():
        want = given.expected[name]
        held = torch.zeros_like(want) if gradient is None else full(gradient)
        if float((held - want).abs().max()) > 1e-10 * max(float(want.abs().max()), 1e-6 * largest):
            return name
    return ""


def random_plans(mesh: DeviceMesh) -> None:
    """Some of what ``tests/models/test_stages.py`` simulates."""
    for seed in DRAWN:
        combination = draw(seed)
        assert not (name := differs(combination)), f"{name} differs: {combination}"


def gradients_of_zero_are_seen(mesh: DeviceMesh) -> None:
    """The trials have teeth: a runtime whose stages give zeros is found out on every rank."""
    finish = StageRunner.finish
    zeros = {"finish": lambda self: {n: None if v is None else 0 * v for n, v in finish(self).items()}}
    with patch.multiple(StageRunner, **zeros):
        assert differs(draw(DRAWN[0])), "no gradient differs though all are zero"


def refused(act: Callable[[], object], match: str) -> None:
    """``act`` raises PlanError on this rank, soon."""
    start = time.monotonic()
    try:
        act()
    except PlanError as error:
        assert re.search(match, str(error)), f"refused with another reason: {error}"
    else:
        raise AssertionError(f"was not refused; expected {match!r}")
    seconds = time.monotonic() - start
    assert seconds < REFUSAL_S, f"was refused only after {seconds:.1f} s"


def refuses_another_mesh(mesh: DeviceMesh) -> None:
    model, inputs = model_and_batch(layers=2)
    plan = Plan.uniform((2,), ("pipeline",), pipelining=Pipelining(2, 4))
    refused(lambda: galvatron_fx.compile(model, mesh, inputs, plan=plan), r"for a mesh with axes \(2,\)")


def refuses_more_stages_than_blocks(mesh: DeviceMesh) -> None:
    refused(lambda: compiled_by(mesh, Pipelining(4, 4), layers=1), "4 stages .* do not fit a model of 1 blocks")


def refuses_a_duplicate_action(mesh: DeviceMesh) -> None:
    table = Pipelining(4, 4, "1f1b").table(RANKS)
    orders = ((table.orders[0][0], *table.orders[0]), *table.orders[1:])
    doubled = Pipelining.by_hand(type(table)("by hand", table.rank_of_stage, 4, orders))
    refused(lambda: compiled_by(mesh, doubled, layers=2), "rank 0 has 0F0 twice")


def refuses_a_table_of_other_ranks(mesh: DeviceMesh) -> None:
    refused(lambda: compiled_by(mesh, Pipelining.by_hand(Pipelining(2, 4).table(2)), layers=2), "the table has 2 ranks")


def refuses_unlike_plans(mesh: DeviceMesh) -> None:
    """One rank has another schedule, which fits the model or does not."""
    for other in (Pipelining(4, 4, "gpipe"), Pipelining(12, 4, "interleaved_1f1b")):
        chosen = other if dist.get_rank() == 2 else Pipelining(4, 4)
        refused(partial(compiled_by, mesh, chosen, layers=2), r"ranks \[2\] hold another plan than rank 0")


def _checks() -> dict[str, Check]:
    named: dict[str, Check] = {name: partial(trains, Pipelining(*of, name)) for name, of in SCHEDULES.items()}
    others: tuple[Check, ...] = (
        table_by_hand, searched_table, spread_vocabulary, random_plans, gradients_of_zero_are_seen,
        refuses_another_mesh, refuses_more_stages_than_blocks, refuses_a_duplicate_action,
        refuses_a_table_of_other_ranks, refuses_unlike_plans,
    )  # fmt: skip
    return named | {check.__name__: check for check in others}


CHECKS = _checks()


@pytest.fixture(scope="module")
def output(request: pytest.FixtureRequest) -> str:
    """What the one launch printed."""
    return launched(Path(__file__), *collected(request))


@pytest.mark.parametrize("check", parameters(CHECKS, SLOW))
def test_on_a_pipeline_of_four(output: str, check: str) -> None:
    assert_held(output, check)


def before_the_fork() -> None:
    """Capture, and lower what trains."""
    cluster = described((RANKS,))
    named = (Pipelining(*of, name) for name, of in SCHEDULES.items() if runs(name))
    for pipelining in (*named, random_stages(), searched_stages()):
        lower_before_the_fork(*graph_and_plan(pipelining), cluster)
    compile_before_the_fork((RANKS,), [(*language(RANKS, is_tied=True), [SPREAD, ENDS]), (*model_and_batch(1), [])])
    for seed in DRAWN if runs("random_plans") else ():
        combination = draw(seed)
        graph = prepared(combination.name, combination.deep, combination.batch).graph
        lower_before_the_fork(graph, drawn_plan(combination, graph), described(combination.sizes))


def main() -> None:
    """Run all checks, or those named."""
    fork_checks((RANKS,), CHECKS, sys.argv[1:], before_the_fork)


if __name__ == "__main__":
    main()
