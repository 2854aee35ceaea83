"""What a simulation tells of the choices that follow it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

from galvatron_fx.ir.cluster.cluster import Cluster
from galvatron_fx.ir.plan.strategy import ROLES
from passes.search.configurations import Pins
from passes.search.cost_table.cost_table import Pricer
from passes.search.open_configurations import OpenConfigurations
from passes.search.solvers.stage_search import StageSearch
from passes.search.trials import MemorySlack, Trial
from tests.helpers import captured
from tests.passes.search.test_report import Stack

LIMIT = 24e6


@pytest.fixture(scope="module")
def search() -> StageSearch:
    pricer = Pricer(captured(Stack(), (torch.ones(256, 256),)), Cluster.preset("4xA100-80GB"), {})
    opened = OpenConfigurations(pricer, ROLES, "auto", Pins(1, 1))
    opened.open_first()
    return max(opened.searches, key=lambda search: len(search.costs.strategies))


@pytest.fixture(scope="module")
def trial(search: StageSearch) -> Trial:
    first = Trial.first(search, LIMIT, LIMIT)
    assert first is not None
    return first


def test_a_choice_that_follows_promises_no_more_than_was_simulated(trial: Trial) -> None:
    over = trial.next(0.8 * LIMIT, int(LIMIT), 2 * trial.time_s)
    assert over is not None and over.choice != trial.choice
    assert over.time_s == pytest.approx(0.95 * 2 * over.choice.time_s)
    faster = trial.next(0.8 * LIMIT, int(LIMIT), 0.5 * trial.time_s)
    assert faster is not None and faster.time_s == faster.choice.time_s


def test_between_what_fits_and_what_does_not_all_is_looked_at(trial: Trial) -> None:
    """Room that a choice leaves may promise a budget that was found to be too much: then one between is tried."""
    least = trial.search.least_bytes
    fits, over = 1.1 * least, 3 * least
    choice = trial.search.run(fits)
    assert choice is not None
    leaving = replace(trial, choice=choice, budget=fits, fits=fits, over=over)
    following = leaving.next(10 * least, round(6 * least), choice.time_s)
    assert following is not None and following.budget == pytest.approx((fits + over) / 2)
    assert following.choice.time_s < choice.time_s


def test_budgets_between_may_be_looked_at_more_closely(trial: Trial) -> None:
    """Two budgets less than 1 % apart have unlike choices; the second is looked at where that is asked for."""
    least = trial.search.least_bytes
    tight, loose = 1.1 * least, 3 * least
    while loose > 1.005 * tight:
        middle = (tight + loose) / 2
        slower = trial.search.run(middle) == trial.search.run(tight)
        tight, loose = (middle, loose) if slower else (tight, middle)
    choice = trial.search.run(tight)
    assert choice is not None
    known = replace(trial, choice=choice, budget=tight, fits=tight, over=2 * loose - tight)
    simulated = 10 * least, round(6 * least), choice.time_s
    assert known.next(*simulated) is None
    following = known.next(*simulated, apart=0.0005)
    assert following is not None and following.budget == pytest.approx(loose)
    assert following.choice.time_s < choice.time_s


def test_a_little_more_memory_may_pay_where_the_best_is_close(trial: Trial) -> None:
    seconds = trial.choice.time_s
    assert not trial.may_be_closer(seconds, 2 * seconds), "nothing was found to be too much"
    bounded = replace(trial, over=2 * LIMIT)
    assert bounded.may_be_closer(seconds, 0.99 * seconds)
    assert not bounded.may_be_closer(seconds, 0.97 * seconds)


def test_nothing_follows_that_is_too_slow(trial: Trial) -> None:
    assert trial.next(0.8 * LIMIT, int(LIMIT), 2 * trial.time_s, below_s=1.5 * trial.time_s) is None


def test_slack_is_that_of_the_roles_that_are_chosen(search: StageSearch, trial: Trial) -> None:
    """A choice of other roles that takes far less than was estimated has the next ones tried under more, but not of
    roles whose estimates are known to be close.
    """
    slack, limit = MemorySlack(), search.bytes(trial.choice)
    slack.learn(trial, round(limit), limit)
    assert slack.budgets(search, limit)[0] == pytest.approx(limit)
    others = search.among(lambda strategy: strategy.roles != search.main_roles(trial.choice))
    other = Trial.first(others, LIMIT, 10 * LIMIT) if others is not None else None
    assert other is not None
    peak = search.bytes(other.choice) / 1.3
    assert slack.learn(other, round(peak), peak)
    budget, _ = slack.budgets(search, limit)
    assert budget == pytest.approx(1.3 * limit)
    assert slack.suited(replace(trial, budget=budget), limit).budget == pytest.approx(limit)
    assert slack.suited(replace(other, budget=budget), limit).budget == budget


def test_gathers_hide_beside_what_is_before() -> None:
    """Attention and experts take turns: experts' gathers cost more than in a row of experts."""
    shape = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=2, use_cache=False, **shape))
    ids = torch.zeros(64, 512, dtype=torch.long, device="meta")
    pricer = Pricer(captured(model, {"input_ids": ids, "labels": ids}), Cluster.preset("64xH100-80GB"), {})
    ratios = [before for before, _ in pricer._neighbours]
    assert ratios[1] * ratios[2] == pytest.approx(1) and ratios[2] < 1 == ratios[0] == ratios[-1]

    def seconds(pricer: Pricer) -> float:
        opened = OpenConfigurations(pricer, ("zero",), False, Pins(1, 1))
        opened.open_first()
        return float(opened.searches[0].costs.time[2, 0])

    alone = pricer.on(pricer.cluster)
    alone.__dict__["_neighbours"] = [(1.0, 1.0)] * len(ratios)
    assert seconds(pricer) > seconds(alone)
