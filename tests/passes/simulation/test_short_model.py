"""A choice simulated on a short model takes what it takes on the whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import fx, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.cluster.overlap import Overlap, Skew
from galvatron_fx.ir.plan.schedule import make_schedule
from galvatron_fx.ir.plan.strategy import PIPELINE, Strategy
from passes.analysis.blocks import fingerprints
from passes.search.solvers.stage_search import Configuration, StageSearch
from passes.simulation import choice as simulate_choice
from passes.simulation.choice import SimulateChoice, Staging
from passes.simulation.short_model import ShortModel
from passes.simulation.stages import StagesReport
from tests.helpers import captured
from tests.passes.search.small_chains import chain_of

pytestmark = pytest.mark.slow

CLUSTER = Cluster.preset("4xA100-80GB")
# Who receives waits for the sender, beside all that takes time without a wait.
LATE = replace(CLUSTER, overlap=replace(CLUSTER.overlap, skew=Skew(2e-3)))
SHARED = replace(CLUSTER, overlap=Overlap(2.0, 2.0))  # gradients of all blocks are reduced together
LAYERS = 8


class UnlikeLayers(nn.Module):
    """Layers of one kind on both sides of others: ``A A B B A C A A``."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(8, w), nn.Tanh(), nn.Linear(w, 8)) for w in (16, 16, 24, 24, 16, 32, 16, 16)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class WholeModel(ShortModel):
    """Nothing is left out."""

    @classmethod
    def of(cls, *args: object) -> ShortModel:
        stages = tuple(tuple(replace(s, kept=s.length) for s in stage) for stage in ShortModel.of(*args).whole)  # type: ignore[arg-type]
        return cls(stages, stages, tuple(range(len(stages))))


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    gpt2 = GPT2Config(n_layer=LAYERS, n_embd=64, n_head=4, vocab_size=128, n_positions=32, use_cache=False)
    llama = LlamaConfig(
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        vocab_size=128,
        use_cache=False,
    )
    mixtral = MixtralConfig(
        num_hidden_layers=LAYERS // 2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        vocab_size=128,
        use_cache=False,
    )
    ids = torch.zeros(16, 32, dtype=torch.long, device="meta")
    with torch.device("meta"):
        models = {
            "gpt2": GPT2LMHeadModel(gpt2),
            "llama": LlamaForCausalLM(llama),
            "mixtral": MixtralForCausalLM(mixtral),
        }
    graphs = {name: captured(model, {"input_ids": ids, "labels": ids}) for name, model in models.items()}
    return {**graphs, "unlike layers": captured(UnlikeLayers(), (torch.zeros(16, 8),))}


@pytest.fixture(scope="module")
def simulator(graphs: dict[str, fx.GraphModule]) -> Callable[[str, Cluster], SimulateChoice]:
    """Makes simulators of a model that share short graphs and what is solved of blocks, which know no links."""

    @cache
    def first(name: str) -> SimulateChoice:
        return SimulateChoice(graphs[name], CLUSTER, fingerprints(graphs[name]))

    return lambda name, cluster: replace(first(name), cluster=cluster, _measured={})


def roles(text: str) -> Strategy:
    """Roles, and whether to compute again: ``pipeline zero again``."""
    words = text.split()
    return Strategy(tuple(w for w in words if w != "again"), recompute="again" in words)


DATA, ZERO, TENSOR, AGAIN = (roles(f"{PIPELINE} {rest}") for rest in ("data", "zero", "tensor", "data again"))
ALONE, SPLIT = roles("data zero"), roles("tensor data again")
ONLY, ONLY_AGAIN = roles(f"{PIPELINE} {PIPELINE}"), roles(f"{PIPELINE} {PIPELINE} again")

FOLDED = [roles("tensor_sequence data"), roles("expert zero again")]
STAGED = [roles(f"{PIPELINE} tensor_sequence"), roles(f"{PIPELINE} expert")]

# model, configuration, first blocks, strategies of the blocks
CASES = {
    "one stage": ("gpt2", Configuration(0, 1, "1f1b", 1), (0,), [ALONE] * 4 + [SPLIT] * 5 + [ALONE]),
    "1f1b mixed": ("llama", Configuration(1, 2, "1f1b", 4), (0, 6), [AGAIN] * 3 + [ZERO] * 4 + [TENSOR] * 3),
    "four ranks": ("gpt2", Configuration(2, 4, "1f1b", 4), (0, 3, 6, 8), [ONLY] * 10),
    "segments of unlike lengths": (
        "gpt2",
        Configuration(2, 4, "1f1b", 4),
        (0, 1, 4, 7),
        [ONLY] + [ONLY_AGAIN] * 2 + [ONLY] + [ONLY_AGAIN] + [ONLY] * 2 + [ONLY_AGAIN] + [ONLY] * 2,
    ),
    "attention and experts in turns": (
        "mixtral",
        Configuration(0, 1, "1f1b", 1),
        (0,),
        [SPLIT, *FOLDED * 4, SPLIT],
    ),
    "turns that stages cut": ("mixtral", Configuration(1, 2, "1f1b", 4), (0, 2), [DATA, *STAGED * 4, DATA]),
    "stages that lead from one to the next": (
        "mixtral",
        Configuration(2, 8, "interleaved_1f1b", 4),
        (0, 1, 2, 3, 4, 5, 6, 8),
        [ONLY] * 10,
    ),
    "a stage for each of unlike layers": (
        "unlike layers",
        Configuration(2, 8, "interleaved_1f1b", 4),
        tuple(range(8)),
        [ONLY] * 9,
    ),
    "zbv": ("llama", Configuration(1, 4, "zbv", 4), (0, 3, 5, 8), [AGAIN] * 3 + [DATA] * 2 + [ZERO] * 3 + [DATA] * 2),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cluster", [LATE, SHARED], ids=["late", "shared cores"])
@pytest.mark.parametrize("name", CASES)
def test_as_the_whole_model(
    name: str,
    cluster: Cluster,
    simulator: Callable[[str, Cluster], SimulateChoice],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, configuration, first_blocks, strategies = CASES[name]
    simulate = simulator(model, cluster)
    block_fingerprints = simulate.block_fingerprints
    assert len(block_fingerprints) == len(strategies)
    distinct = tuple(dict.fromkeys(strategies))
    prices = np.zeros((7, len(block_fingerprints), len(distinct)))
    change = np.zeros((len(block_fingerprints), len(distinct), len(distinct)))
    chain = replace(chain_of(prices, [0.0] * len(block_fingerprints), change), strategies=distinct)
    search = StageSearch(chain, configuration, cluster)

    short = ShortModel.of(block_fingerprints, strategies, first_blocks)
    assert len(short.keep) <= len(block_fingerprints)
    found = simulate.run(strategies, first_blocks, search.staging)
    monkeypatch.setattr(simulate_choice, "ShortModel", WholeModel)
    expected = simulate.run(strategies, first_blocks, search.staging)
    assert found.step_time_s == pytest.approx(expected.step_time_s, rel=1e-9)
    assert found.peak_memory_bytes == pytest.approx(expected.peak_memory_bytes, rel=1e-9)
    for mine, theirs in zip(found.ranks(), expected.ranks(), strict=True):
        assert sum(mine.memory.values()) == pytest.approx(sum(theirs.memory.values()), rel=1e-9)
        assert mine.busy_s == pytest.approx(theirs.busy_s, rel=1e-9)


def test_equal_short_models_are_lowered_once(
    simulator: Callable[[str, Cluster], SimulateChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_blocks, schedule = (0, 8), make_schedule("1f1b", 2, 2, 4)
    staging = Staging(schedule, schedule, CLUSTER.axes[:1])
    three, four = ([AGAIN] * (1 + n) + [ZERO] * (7 - n) + [TENSOR] * 2 for n in (3, 4))
    simulate = simulator("llama", CLUSTER)
    simulate.run(three, first_blocks, staging)
    expected = simulator("llama", CLUSTER).run(four, first_blocks, staging)
    monkeypatch.setattr(simulate_choice, "LowerStages", None)
    assert simulate.run(four, first_blocks, staging) == expected


def test_stages_are_lowered_once_whichever_they_stand_for(
    simulator: Callable[[str, Cluster], SimulateChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    first_blocks, schedule = (0, 1, 3, 5, 7, 8), make_schedule("interleaved_1f1b", 2, 6, 4)
    staging = Staging(schedule, schedule, CLUSTER.axes[:1])
    turns, row = (
        [DATA, *(each for stage in kinds for each in [stage] * 2), *[DATA] * 3]
        for kinds in ((AGAIN, DATA, AGAIN), (AGAIN, DATA, DATA))
    )
    alone, simulate = (replace(simulator("llama", CLUSTER), _held={}) for _ in range(2))
    expected = alone.run(row, first_blocks, staging)
    simulate.run(turns, first_blocks, staging)
    monkeypatch.setattr(simulate_choice, "LowerStages", None)
    assert simulate.run(row, first_blocks, staging) == expected


def test_even_cuts_of_periods_keep_few_stages() -> None:
    """Stages begin with attention and with experts in turns: those that are kept follow each other as neighbours do."""
    marks = ["embedding", *["dense"] * 3, *["attention", "experts"] * 58, "head"]
    cuts = [round(stage * len(marks) / 32) for stage in range(32)]
    short = ShortModel.of(marks, [ONLY] * len(marks), cuts)
    assert len(short.keep) == 25
    assert len(short.kept) == 7
    assert len(short.stage_of) == 32


def test_stages_untie_weights_for_themselves_alone(graphs: dict[str, fx.GraphModule]) -> None:
    """The short models of two stages and of one are the same graph, and one stage has one copy of a tied weight."""
    graph, block_fingerprints = graphs["gpt2"], fingerprints(graphs["gpt2"])
    two, one = make_schedule("1f1b", 2, 2, 4), make_schedule("1f1b", 1, 1, 4)
    simulate = SimulateChoice(graph, CLUSTER, block_fingerprints)
    simulate.run([DATA] * (LAYERS + 2), (0, 1), Staging(two, two, CLUSTER.axes[:1]))
    case = [ALONE] * (LAYERS + 2), (0,), Staging(one, one, ())
    alone = SimulateChoice(graph, CLUSTER, block_fingerprints, _cache=simulate._cache)
    assert simulate.run(*case) == alone.run(*case)


def test_stages_wait_for_those_that_have_computed(simulator: Callable[[str, Cluster], SimulateChoice]) -> None:
    """One micro-batch passes all stages and comes back: a wait each time, as long as the sender's computing says."""
    schedule = make_schedule("1f1b", 4, 4, 1)
    staging = Staging(schedule, schedule, CLUSTER.axes)

    def simulated(cluster: Cluster) -> StagesReport:
        report = simulator("gpt2", cluster).run([ONLY] * (LAYERS + 2), (0, 3, 6, 8), staging)
        assert isinstance(report, StagesReport)
        return report

    plain, late = simulated(CLUSTER), simulated(LATE)
    stages = [{task: sum(s for (t, _), s in times.items() if t == task) for task, _ in times} for times in plain.times]
    computed = [times["forward"] for times in stages[:-1]]
    computed += [times["input_grad"] + times["weight_grad"] for times in stages[1:]]
    waits_s = sum(LATE.overlap.skew.seconds(spent) for spent in computed)
    assert late.step_time_s - plain.step_time_s == pytest.approx(waits_s)
