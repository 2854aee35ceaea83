from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import galvatron_fx

ROOT = Path(__file__).resolve().parents[1]


def test_importing_the_package_and_a_plan_does_not_import_torch() -> None:
    code = "import sys, galvatron_fx; galvatron_fx.Plan; galvatron_fx.errors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["passes", "cost_models"])
def test_another_package_of_the_name_of_ours_is_told_of(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    command = [sys.executable, "-c", "import galvatron_fx"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert f"ImportError: galvatron_fx needs its own package '{name}'" in ended.stderr
    assert f"and Python finds {tmp_path / name}.py by that name: rename that one" in ended.stderr


def test_the_command_line_is_a_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["galvatron_fx", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("galvatron_fx", run_name="__main__")
    assert galvatron_fx.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("name", galvatron_fx.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(galvatron_fx, name) is not None
    assert name in dir(galvatron_fx)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'compiel'; the public names are"):
        galvatron_fx.compiel  # noqa: B018
