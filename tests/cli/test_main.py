"""Help, exit codes and messages of the command line as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from galvatron_fx import errors
from galvatron_fx.cli import schema
from galvatron_fx.cli.exits import EXIT_CODES, ModelError, UsageError, exit_code
from galvatron_fx.cli.main import main
from tests.cli.tiny import CLUSTER

COMMANDS = ("plan", "estimate", "explain", "diff", "validate", "profile", "schema")


def test_help_lists_commands_and_exit_codes_without_torch() -> None:
    code = """
import sys
from galvatron_fx.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(f"\n    {name} " in done.stdout for name in COMMANDS)
    assert all(meaning in done.stdout for meaning in EXIT_CODES.values())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert f"galvatron-fx {command}" in text.partition("examples:")[2] or command == "profile"
    assert "--json" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["plam"], "invalid choice: 'plam'"),
        (["plan"], "the following arguments are required: --model, --cluster"),
        (["plan", "--model", "llama", *CLUSTER, "--memory-budget", "12 Gib"], "unknown unit 'Gib'; use one of"),
        (["plan", "--model", "llama", *CLUSTER, "--memory-budget", "0"], "a size of 0 bytes"),
        (["plan", "--model", "llama", *CLUSTER, "--roles", "data,zera"], "unknown role 'zera': use some of data, zero"),
        (["plan", "--model", "llama", *CLUSTER, "--set", "layers"], "'layers' is no key=value"),
        (["plan", "--model", "llama", *CLUSTER, "--batch-size", "-1"], "'-1' is no number of samples"),
        (["plan", "--model", "llama", *CLUSTER, "--search-seconds", "inf"], "'inf' is no number of seconds"),
        (["plan", "--model", "llama", *CLUSTER, "--mixed-precision", "int8"], "'int8' is not one or two of bfloat16"),
        (["plan", "--model", "llama", *CLUSTER, "--search-batch", "8,0"], "'8,0' is no list of batches"),
        (["plan", "--model", "llama", *CLUSTER, "--search-batch", "--batch-size", "8"], "either given or searched"),
        (
            ["plan", "--model", "llama", *CLUSTER, "--budget", "1GB"],
            "arguments: --budget 1GB; did you mean --memory-bu",
        ),
        (["diff", "a.json", "b.json", "c.json"], "unrecognized arguments: c.json (see galvatron-fx diff --help)"),
        (["sweep", "--model", "llama", *CLUSTER, "--memory-budget", "1GB,0"], "a size of 0 bytes"),
        (["plan", "--model", "tests.cli.tiny:build", *CLUSTER, "--dtype", "float32"], "makes the model and its batch"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    found = capsys.readouterr()
    assert found.out == "" and message in found.err and found.err.startswith("galvatron-fx: ")
    assert main([*arguments, "--json"]) == 2
    found = capsys.readouterr()
    assert found.err == "" and message in json.loads(found.out)["error"]["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("x"), 1),
        (AssertionError("x"), 1),
        (errors.VerifierError("x"), 1),
        (UsageError("x"), 2),
        (errors.PlanError("x"), 3),
        (errors.ClusterError("x"), 3),
        (errors.InputError("x"), 3),
        (FileNotFoundError(2, "no such file", "plan.json"), 3),
        (errors.BudgetError("x", least_bytes=1), 4),
        (errors.CaptureError("x"), 5),
        (ModelError("x"), 5),
        (errors.TimeLimitError("x"), 6),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise error

    assert exit_code(error) == code and code in EXIT_CODES
    monkeypatch.setattr(schema, "run", fail)
    assert main(["schema", "plan"]) == code
    message = capsys.readouterr().err
    assert message.startswith("galvatron-fx: ") and "Traceback" not in message and message.count("\n") == 1
    assert ("this is a bug" in message) == (code == 1)
    assert main(["schema", "plan", "--debug"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_a_message_cannot_command_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "\\u001b]0;evil\\u0007\\ud800"}')
    assert main(["plan", "--model", str(path), *CLUSTER]) == 3
    message = capsys.readouterr().err
    assert "\x1b" not in message and "\x07" not in message and "\\x1b]0;evil\\x07\\ud800" in message


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m galvatron_fx.cli.main schema plan | head -c 1"
    done = subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True)
    assert done.returncode in (0, 141) and done.stderr == ""


def test_ascii_terminals_can_show_tables(tmp_path: Path) -> None:
    from galvatron_fx import Plan

    path = tmp_path / "plan.json"
    Plan.uniform((2, 2), ["data", "zero"]).save(path)
    command = [sys.executable, "-m", "galvatron_fx.cli.main", "validate", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "is a sound plan" in done.stdout
