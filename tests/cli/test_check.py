"""``galvatron-fx check``: what it prints, and how it ends where something differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_fx import Plan
from galvatron_fx.checking import steps as checked_steps
from galvatron_fx.cli.main import main
from tests.cli.tiny import ARGUMENTS, CLUSTER

OWN = ["check", "--model", "tests.cli.tiny:build", *CLUSTER]


def test_a_right_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform((2, 2), ("zero", "tensor")).save(path)
    assert (
        main(
            [
                "check",
                *ARGUMENTS,
                *CLUSTER,
                "--set",
                "num_hidden_layers=1",
                "--plan",
                str(path),
                "--steps",
                "2",
                "--json",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["notes"] == [] and found["model"]["class"] == "LlamaForCausalLM"
    assert {row["kind"] for row in found["rows"]} == {"buffer", "gradient", "loss", "output", "parameter"}
    assert all(row["is_equal"] and row["relative"] < 1e-10 for row in found["rows"])


def test_a_wrong_one_ends_with_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = checked_steps.Simulated.run

    def wrong(self: Any, seed: torch.Tensor) -> Any:
        outputs = right(self, seed)
        self.module.down.bias.grad *= 2
        return outputs

    monkeypatch.setattr(checked_steps.Simulated, "run", wrong)
    assert main([*OWN, "--own-precision"]) == 1
    text = capsys.readouterr().out
    assert "different: 2 of 9 tensors of 1 step on 4 simulated ranks" in text
    assert "the gradient 'down.bias'" in text and "down.weight" not in text


def test_a_plan_for_another_mesh_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    Plan.uniform((2,), ("zero",)).save(path)
    assert main([*OWN, "--plan", str(path)]) == 3
    assert str(path) in capsys.readouterr().err


@pytest.mark.slow
def test_inference(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, small = str(tmp_path / "plan.json"), [*ARGUMENTS, *CLUSTER, "--set", "num_hidden_layers=1"]
    assert main(["plan", *small, "--no-pipeline", "--forward-only", "--out", path]) == 0
    assert "Forward-only plan for 4 ranks" in capsys.readouterr().out
    assert main(["check", *small, "--plan", path, "--json"]) == 0  # the plan says what it is for
    found = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in found["rows"]} == {"buffer", "output"} and "labels" not in found["model"]["batch"]
    assert main(["estimate", path, *small, "--forward-only"]) == 0
    assert "optimizer" not in capsys.readouterr().out
