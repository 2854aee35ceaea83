"""What the subcommands print, write and exit with, on small models."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from galvatron_fx import Cluster, Pipelining, Plan, Strategy
from galvatron_fx.cli.main import main
from tests.cli.tiny import ARGUMENTS, CLUSTER
from tests.runtime.shared_captures import captured_once  # noqa: F401 (a fixture)

Run = Callable[..., tuple[int, str, str]]
OWN = ["--model", "tests.cli.tiny:build", *CLUSTER]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line: exit code, stdout, stderr."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main([str(argument) for argument in arguments])
        found = capsys.readouterr()
        return code, found.out, found.err

    return call


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A plan of the small LLaMA with stages allowed, in a file, and what ``plan --json`` said."""
    folder = tmp_path_factory.mktemp("plans")
    path = folder / "plan.json"
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr("builtins.print", lambda text, **_: told.append(text))
        roles = ("--roles", "data,zero,tensor,pipeline", "--num-microbatches", "2")
        assert main(["plan", *ARGUMENTS, *CLUSTER, *roles, "--json", "--out", str(path)]) == 0
    return path, json.loads(told[-1])


@pytest.mark.slow
def test_plan_as_json(planned: tuple[Path, dict[str, Any]]) -> None:
    path, found = planned
    assert json.loads(Plan.load(path).to_json()) == found["plan"]
    assert found["model"]["class"] == "LlamaForCausalLM"
    assert found["model"]["batch"] == {"input_ids": "8×32", "labels": "8×32"}
    assert found["report"]["simulated_s"] == found["plan"]["step_time_s"]
    assert found["plan"]["pipelining"]["num_microbatches"] == 2


def test_plan_in_words(run: Run, tmp_path: Path) -> None:
    out, cluster = tmp_path / "plan.json", tmp_path / "cluster.json"
    cluster.write_text(Cluster.preset("4xH100-80GB").to_json())
    options = ("--no-pipeline", "--roles", "data,zero", "--recompute", "never", "--out", out)
    code, text, errors = run("plan", *OWN[:2], "--cluster", cluster, *options)
    assert (code, errors) == (0, "")
    assert "tests.cli.tiny:build (Perceptron), 4192 parameters in float32" in text
    assert "Plan for 4 ranks on a mesh of 2×2" in text and "Why this plan" in text
    assert str(Plan.load(out)) in text


def test_estimate_finds_what_the_search_simulated(run: Run, planned: tuple[Path, dict[str, Any]]) -> None:
    path, found = planned
    code, text, _ = run("estimate", path, *ARGUMENTS, *CLUSTER, "--json")
    estimated = json.loads(text)
    assert code == 0 and estimated["fits"]
    assert estimated["step_time_s"] == pytest.approx(found["report"]["simulated_s"], rel=1e-12)
    assert estimated["peak_memory_bytes"] == found["plan"]["peak_memory_bytes"]
    assert sum(estimated["ranks"][0]["memory_bytes"].values()) <= estimated["peak_memory_bytes"]


def test_estimate_of_a_pipeline_by_hand(run: Run, tmp_path: Path) -> None:
    plan = Plan.uniform((2, 2), ["pipeline", "zero"], pipelining=Pipelining(2, 4, "zb_h1"))
    plan.save(tmp_path / "hand.json")
    code, text, _ = run("estimate", tmp_path / "hand.json", *ARGUMENTS, *CLUSTER, "--json")
    assert code == 0
    found = json.loads(text)
    assert [rank["stages"] for rank in found["ranks"]] == [[0], [1]]
    for rank in found["ranks"]:
        assert sum(cause["seconds"] for cause in rank["seconds"]) == pytest.approx(found["step_time_s"])


def test_estimate_says_what_does_not_fit(run: Run, tmp_path: Path) -> None:
    Plan.uniform((4,), ["zero"]).save(tmp_path / "hand.json")
    code, text, _ = run("estimate", tmp_path / "hand.json", *OWN, "--memory-budget", "10kB")
    assert code == 4
    assert "does not fit a budget of 10 kB per device" in text and "time of a step" in text


def test_a_plan_of_another_model_is_refused(run: Run, planned: tuple[Path, dict[str, Any]]) -> None:
    code, text, errors = run("estimate", planned[0], *OWN)
    assert (code, text) == (3, "")
    assert errors.startswith(f"galvatron-fx: {planned[0]}: the plan has ")
    assert errors.count("\n") == 1


def test_nothing_fits(run: Run) -> None:
    code, text, _ = run("plan", *OWN, "--no-pipeline", "--memory-budget", "20kB", "--json")
    error = json.loads(text)["error"]
    assert code == error["exit_code"] == 4
    assert error["kind"] == "BudgetError" and error["least_bytes"] > 20_000
    assert error["plan"]["peak_memory_bytes"] == error["least_bytes"]


def test_too_little_time(run: Run) -> None:
    code, _, errors = run("plan", *OWN, "--search-seconds", "1e-9")
    assert code == 6 and "give more search_seconds" in errors


def test_pins_that_cannot_be(run: Run) -> None:
    code, _, errors = run("plan", *OWN, "--num-stages", "3")
    assert code == 3 and "num_stages" in errors


def test_the_optimizer_is_said(run: Run) -> None:
    code, text, _ = run("plan", *OWN, "--no-pipeline", "--optimizer", "adafactor", "--json")
    assert code == 0 and json.loads(text)["plan"]["optimizer"] == "adafactor"
    code, _, errors = run("plan", *OWN, "--optimizer", "adma")
    assert code == 2 and "choose from" in errors and "adafactor" in errors


def test_the_batch_is_searched(run: Run) -> None:
    search = (*OWN, "--no-pipeline", "--search-batch")
    code, text, errors = run("plan", *search, "8,32", "--json")
    found = json.loads(text)
    assert code == 0 and [line.partition(":")[0] for line in errors.splitlines()] == ["batch 8", "batch 32"]
    assert found["model"]["batch"] == {"x": "32×32"}, "starting takes longer than computing"
    assert found["samples_per_s"] == pytest.approx(32 / found["plan"]["step_time_s"])
    code, text, _ = run("plan", *search, "8")
    assert code == 0 and "batch    x 8×32" in text and "searched the batch: " in text


@pytest.mark.slow
def test_the_batch_of_a_configuration_is_searched(run: Run) -> None:
    arguments = [*ARGUMENTS[:-4], *ARGUMENTS[-2:], *CLUSTER, "--no-pipeline", "--roles", "data", "--search-batch", "4"]
    code, text, _ = run("plan", *arguments, "--json")
    assert code == 0 and json.loads(text)["model"]["batch"] == {"input_ids": "4×32", "labels": "4×32"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model, options, code, message",
    [
        ("build", ["--roles", "data,zero", "--memory-budget", "20kB", "--search-batch", "16,8"], 4, "20 kB"),
        ("build_alone", ["--search-batch", "4"], 5, "return a pair"),
        ("build_of_none", ["--search-batch", "4"], 5, "called with a batch of 4 failed with TypeError"),
    ],
)
def test_batches_that_cannot_be_searched(run: Run, model: str, options: list[str], code: int, message: str) -> None:
    found, text, errors = run("plan", "--model", f"tests.cli.tiny:{model}", *CLUSTER, "--no-pipeline", *options)
    assert (found, text) == (code, "") and message in errors and "Traceback" not in errors


def test_constraints_pin_blocks(run: Run, tmp_path: Path) -> None:
    (tmp_path / "pins.json").write_text('{"up": {"roles": ["zero", "zero"], "recompute": true}}')
    for options in (["--constraints", tmp_path / "pins.json"], ["--constrain", "up=tensor,zero"]):
        code, text, errors = run("plan", *OWN, "--no-pipeline", *options, "--json")
        assert (code, errors) == (0, "")
        strategies = [block["strategy"] for block in json.loads(text)["plan"]["blocks"]]
        if options[0] == "--constrain":
            assert any(sorted(strategy["roles"]) == ["tensor", "zero"] for strategy in strategies)
        else:
            assert any(s["roles"] == ["zero", "zero"] and s["recompute"] for s in strategies)


@pytest.mark.parametrize(
    "content, flags, code, message",
    [
        ('{"nowhere": ["data", "data"]}', [], 3, "'nowhere': the model has no such module"),
        ('{"up": ["data", "date"]}', [], 3, "pins.json: constraint on module 'up': unknown role 'date'"),
        (
            '{"up": ["data"]}',
            [],
            3,
            "has 1 roles, and the mesh of 2×2 has 2 axes of several ranks: give a role for each",
        ),
        ('{"up": "data"}', [], 3, "give a list of roles"),
        ('{"up": {"roles": ["data", "data"], "again": true}}', [], 3, "unknown keys ['again']"),
        ('[["up"]]', [], 3, "pins.json: a JSON object was expected"),
        ('{"up": ["data", "data"]}', ["--constrain", "up=zero,zero"], 2, "'up' is constrained twice"),
        ("{}", ["--constrain", "up=date,data"], 2, "unknown role 'date'"),
        ("{}", ["--constrain", "up"], 2, "no module=roles"),
    ],
)
def test_constraints_that_cannot_be(
    run: Run, tmp_path: Path, content: str, flags: list[str], code: int, message: str
) -> None:
    (tmp_path / "pins.json").write_text(content)
    found, text, errors = run("plan", *OWN, "--no-pipeline", "--constraints", tmp_path / "pins.json", *flags)
    assert (found, text) == (code, "") and message in errors
    assert "Traceback" not in errors and errors.count("\n") == 1


def test_explain_writes_a_file_a_pass(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    Plan.uniform((2, 2), ["zero", "tensor"]).save(plan)
    folder = tmp_path / "graphs"
    code, text, _ = run("explain", *OWN, "--plan", plan, "--folder", folder)
    assert code == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "00_Capture.py" and names[-1].endswith("_DeferOutputWaits.forward.py")
    assert all(name in text for name in names)
    assert "all_reduce" in (folder / names[-1]).read_text()


def test_explain_prints_one_pass(run: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    Plan.uniform((2, 2), ["data", "data"]).save(plan)
    code, text, _ = run("explain", *OWN, "--plan", plan, "--after", "Capture")
    assert code == 0 and text.startswith("# ---- after Capture ----") and "aten.relu" in text
    code, _, errors = run("explain", *OWN, "--plan", plan, "--after", "Captur")
    assert code == 3 and "no pass is called 'Captur': the passes are Capture, " in errors


@pytest.mark.parametrize("flags, said", [
    (("--num-stages", "1"), "num_stages=1 is given beside plan="),
    (("--no-pipeline",), "--plan is found already"),
    (("--memory-budget", "1kB"), "memory_budget is 1 kB"),
])  # fmt: skip
def test_explain_refuses_what_a_plan_has_decided(run: Run, tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    plan = tmp_path / "plan.json"
    Plan.uniform((2, 2), ["data", "data"]).save(plan)
    code, _, errors = run("explain", *OWN, "--plan", plan, "--after", "Capture", *flags)
    assert code and re.search(said, errors), errors


def test_explain_takes_one_output(run: Run) -> None:
    code, _, errors = run("explain", *OWN, "--html", "page.html", "--after", "Capture")
    assert code == 2 and "ask for one of them" in errors


def test_validate(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "hand.json"
    Plan.uniform((4,), ["zero"]).save(path)
    assert run("validate", path)[0] == 0
    assert "is a sound plan for tests.cli.tiny:build on 4xA100-80GB" in run("validate", path, *OWN)[1]
    code, _, errors = run("validate", path, "--cluster", "8xA100-80GB")
    assert code == 3 and "the plan is for a mesh with axes (2, 2) and this mesh has (2, 2, 2)" in errors
    assert run("validate", path, "--model", "tests.cli.tiny:build")[0] == 2
    cluster = tmp_path / "cluster.json"
    cluster.write_text(Cluster.preset("8xH100-80GB").to_json())
    code, text, _ = run("validate", cluster)
    assert code == 0 and "is a sound cluster" in text
    assert run("validate", cluster, *CLUSTER)[0] == 2
    code, _, errors = run("estimate", cluster, *OWN)
    assert code == 3 and "cluster.json: this is a cluster, and a plan is wanted there" in errors
    code, _, errors = run("plan", *OWN[:2], "--cluster", path)
    assert code == 3 and "hand.json: this is a plan, and a cluster is wanted there" in errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["blocks"][0]["strategy"]["roles"].append("tensor"), r"has strategy .* with 3 roles for a mesh"),
        (lambda d: d["blocks"][0].pop("time_s"), r"malformed plan at \$\.blocks\[0\]: 'time_s' is a required property"),
        (lambda d: d.update(version=1), "plan version 1, where 2 was expected"),
        (lambda d: d.update(extra=1), r"malformed plan at \$: Additional properties are not allowed"),
        (lambda d: d["blocks"][0]["strategy"].update(roles=["dat", "zero"]), "unknown role 'dat' for mesh axis 0"),
    ],
)
def test_validate_names_the_place(run: Run, tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    document = json.loads(Plan.uniform((2, 2), ["data", "zero"]).to_json())
    change(document)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    code, text, errors = run("validate", path)
    assert (code, text) == (3, "")
    assert errors.startswith(f"galvatron-fx: {path}: ")
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(errors)


def test_diff(run: Run, tmp_path: Path) -> None:
    data, zero = Strategy(("data", "data")), Strategy(("zero", "data"), recompute=True)
    a, b, c = (tmp_path / f"{name}.json" for name in "abc")
    Plan.from_roles((2, 2), [data] * 5).save(a)
    Plan.from_roles((2, 2), [data, zero, zero, data, data]).save(b)
    Plan.from_roles((2, 2), [data] * 7).save(c)
    assert run("diff", a, a, "--exit-code")[:2] == (0, "the plans are equal\n")
    assert run("diff", a, b)[0] == 0
    code, text, _ = run("diff", a, b, "--exit-code", "--json")
    found = json.loads(text)
    assert code == 7 and not found["equal"] and found["totals"] == []
    (block,) = found["blocks"]
    assert block["first"]["blocks"] == block["second"]["blocks"] == [1, 2]
    assert block["second"]["strategy"] == zero.to_dict()
    more = json.loads(run("diff", a, c, "--json")[1])["blocks"]
    assert more[0]["first"] is None and more[0]["second"]["blocks"] == [5, 6]
    assert "1-2 (2x)   B   zero×2 · data×2   recompute, gathered again" in run("diff", a, b)[1]


@pytest.mark.parametrize("kind", ["plan", "cluster"])
def test_schema(run: Run, kind: str) -> None:
    from jsonschema import Draft202012Validator

    code, text, _ = run("schema", kind)
    assert code == 0
    Draft202012Validator.check_schema(json.loads(text))
    valid = {"plan": Plan.uniform((2,), ["zero"]), "cluster": Cluster.preset("8xA100-80GB")}[kind]
    assert not list(Draft202012Validator(json.loads(text)).iter_errors(json.loads(valid.to_json())))


def test_explain_as_a_page(run: Run, tmp_path: Path) -> None:
    page, plan = tmp_path / "page.html", tmp_path / "plan.json"
    Plan.uniform((2, 2), ["zero", "tensor"]).save(plan)
    assert run("explain", *OWN, "--plan", plan, "--html", page)[:2] == (0, f"written to {page}\n")
    assert "<html" in page.read_text() and "Perceptron" in page.read_text()


def test_states_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A preset knows no disk, whose speed is given, for plans and for sweeps."""
    out = tmp_path / "plan.json"
    model = ["--model", "tests.cli.tiny:build", "--offload", "states", "--storage", "/disk"]
    assert main(["plan", *model, *CLUSTER, "--out", str(out)]) == 3
    assert "--disk-bandwidth 3GB/s" in capsys.readouterr().err
    assert main(["plan", *model, *CLUSTER, "--out", str(out), "--disk-bandwidth", "3GB/s"]) == 0
    sweep = ["sweep", *model, "--devices", "2", "--kinds", "A100-80GB"]
    assert main(sweep) == 3 and "nothing is known of the disk" in capsys.readouterr().err
    assert main([*sweep, "--disk-bandwidth", "3GB/s"]) == 0
    assert main([*sweep, "--disk-bandwidth", "3GB"]) == 2 and "is no bandwidth" in capsys.readouterr().err


def test_profile(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.device_mesh import DeviceMesh

    from galvatron_fx import profiling

    def measure(
        mesh: DeviceMesh, *, seconds: float, dtypes: list[torch.dtype], storage: str, progress: Callable[..., None]
    ) -> Cluster:
        progress(profiling.ProfileProgress("collectives", 0.5))
        assert (mesh.size(), seconds, dtypes, storage) == (1, 7.0, [torch.float64], "/disk")
        return Cluster.from_mesh(mesh)

    monkeypatch.setattr(profiling, "measure_cluster", measure)
    nowhere = tmp_path / "none" / "profile.json"
    assert run("profile", "--out", nowhere, "--device", "cpu")[::2] == (
        3, f"galvatron-fx: {nowhere}: No such file or directory\n"
    )  # fmt: skip
    out = tmp_path / "profile.json"
    flags = ("--device", "cpu", "--seconds", "7", "--dtype", "float64", "--storage", "/disk", "--json")
    code, text, _ = run("profile", "--out", out, *flags)
    assert code == 0 and json.loads(text)["cluster"] == json.loads(out.read_text())
    assert run("validate", out)[0] == 0
    assert not torch.distributed.is_initialized()


def test_reasons_lie_beside_the_plan_and_explain_tells_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, model = tmp_path / "plan.json", ["--model", "tests.cli.tiny:build", *CLUSTER]
    assert main(["plan", *model, "--roles", "data,zero", "--out", str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"the reasons to {tmp_path / 'plan.report.json'}" in printed and "samples/s, MFU" in printed
    plan = Plan.load(path)
    assert plan.report is not None and str(plan.report) in printed
    assert main(["explain", *model, "--plan", str(path), "--folder", str(tmp_path / "graphs")]) == 0
    assert str(plan.report) in capsys.readouterr().out
    replace(plan, notes=("another plan",)).save(path)
    assert Plan.load(path).report is None, "a report of another plan was taken"


def test_a_file_that_cannot_be_written_is_told_before_the_search(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "no_such_module:build", *CLUSTER]
    for command in (["plan", "--out"], ["explain", "--html"], ["sweep", "--picture"]):
        assert main([command[0], *model, command[1], "/no/such/folder/file"]) == 3
        assert "/no/such/folder/file: No such file or directory" in capsys.readouterr().err


def test_a_missing_matplotlib_is_told_before_the_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    model = ["--model", "no_such_module:build", "--devices", "1", "--kinds", "A100-80GB"]
    assert main(["sweep", *model, "--picture", str(tmp_path / "sweep.png")]) == 3
    assert "pip install matplotlib" in capsys.readouterr().err


def test_sweep_prints_and_writes_every_point(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "points.json", tmp_path / "sweep.svg"
    flags = ["--devices", "1,2", "--kinds", "A100-80GB", "--memory-budget", "80GB,1kB", "--inter-node", "100Gb"]
    model = ["--model", "tests.cli.tiny:build", "--roles", "data,zero", "--out", str(out), "--picture", str(picture)]
    assert main(["sweep", *model, *flags]) == 0
    printed = capsys.readouterr().out
    assert "tests.cli.tiny:build on A100-80GB, 80 GB a device" in printed
    assert [point["step_s"] is None for point in json.loads(out.read_text())] == [False, True] * 2
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--devices", "2"], "--devices and --kinds go together"),
        ([], "no cluster: give --devices and --kinds, or --cluster"),
        (["--cluster", "2xA100-80GB", "--price", "2.5"], "is no price: write DEVICE=USD"),
        (["--cluster", "2xA100-80GB", "--inter-node", "fast"], "is no bandwidth"),
    ],
)
def test_sweeps_that_cannot_be_meant_are_refused(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "--model", "llama", *flags]) == 2
    assert said in capsys.readouterr().err
