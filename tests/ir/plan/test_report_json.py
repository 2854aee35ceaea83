"""Reports are read as they were written, and nothing else is read as a report."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest

from galvatron_fx import Plan
from galvatron_fx.errors import PlanError
from galvatron_fx.ir.plan.prediction import COMPUTE, MEMORY_KINDS, Cause, RankUse
from galvatron_fx.ir.plan.report_json import read_report, report_path, write_report
from galvatron_fx.ir.plan.search_report import Contender, SearchReport
from galvatron_fx.ir.plan.throughput import Throughput
from galvatron_fx.ir.plan.tuning_report import TunedPlan, TuningReport

CHOSEN = Contender(1, 1, "1f1b", 1, "simulated", 2.0, 10**9, True, 1.9)
REPORT = SearchReport(
    chosen=CHOSEN,
    simulated_s=1.9,
    ranks=(
        RankUse(
            (0,),
            {Cause(COMPUTE): 1.8, Cause("all_gather", (0, 1)): 0.1},
            dict.fromkeys(MEMORY_KINDS, 1),
            {Cause("all_gather", (0, 1)): 0.2},
            7,
        ),
    ),
    runners_up=(Contender(2, 2, "zbv", 4, "bound", inf, fits=False, name="TP + PP"),),
    bound_s=1.5,
    budget_bytes=10**10,
    with_more_memory={inf: 1.9, 1.1: 2.0},
    counts={"configurations": 2},
    seconds={"search": 0.1},
    is_cut_short=False,
    tuning=TuningReport((TunedPlan("data×2", 1.9, 1.8, (1.7, 1.9)),), 0, 3.0, True),
    throughput=Throughput(4, 64, 0.5),
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    plan = Plan.uniform((2,), ("data",)).with_report(REPORT)
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read.report == REPORT and str(read.report) == str(REPORT)
    assert read_report(tmp_path / "plan.json", "another plan") is None
    assert read_report(tmp_path / "other.json", plan.digest()) is None


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("simulated_s", 0, r"\$.simulated_s"),
        ("version", 2, "report version 2"),
        ("ranks", [], "one or more with all of parameters"),
        ("bound_s", "1; import os", r"\$.bound_s"),
        ("more", 1, "more"),
    ],
)
def test_what_is_no_report_is_refused_and_the_plan_read_without(
    place: str, value: object, said: str, tmp_path: Path
) -> None:
    path, plan = tmp_path / "plan.json", Plan.uniform((2,), ("data",))
    plan.save(path)
    document = json.loads(write_report(REPORT, plan.digest())) | {place: value}
    report_path(path).write_text(json.dumps(document))
    with pytest.raises(PlanError, match=said):
        read_report(path, plan.digest())
    with pytest.warns(UserWarning, match="the plan is read without its reasons"):
        assert Plan.load(path) == plan
