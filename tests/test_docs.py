"""What the documents speak of is there: the files they link to and name, and the options of the commands they show."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from galvatron_fx.cli.main import _parser
from tests.runtime.launch import launched

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("benchmarks", "cost_models", "docs", "examples", "galvatron_fx", "passes", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
# Of other programs, as far as the documents show them.
FOREIGN = {
    "--nodes",
    "--gpus-per-node",
    "--nproc-per-node",
    "--max-restarts",
    "--strict",
    "--check",
    "--nnodes",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--module",
    "--config",
}

LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"(?<![\w/.-])([\w-]+(?:/[\w.-]+)*\.(?:py|md))\b")
PROGRAM = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)  # a program that is shown whole, by its file
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
COMMAND = re.compile(r"galvatron-fx ([a-z]+(?:-[a-z]+)*)((?:[^\n`]|\\\n)*)")
SCRIPT = re.compile(r"(?<![\w/])((?:benchmarks|examples)(?:/\w+)+\.py)((?:[^\n`]|\\\n)*)")
MODULE = re.compile(r"-m (benchmarks(?:\.\w+)+)((?:[^\n`]|\\\n)*)")


def anchor(heading: str) -> str:
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@cache
def files() -> frozenset[str]:
    """All files, as paths from the root."""
    found = [path for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()]
    return frozenset(path.relative_to(ROOT).as_posix() for path in [*found, *ROOT.glob("*.*")])


@cache
def commands() -> dict[str, set[str]]:
    """The options of every subcommand."""
    (choices,) = (a.choices for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: {text for action in own._actions for text in action.option_strings} for name, own in choices.items()}


@cache
def script_options(path: str) -> set[str]:
    """The options that a script adds to its parser, and those of the command line that it takes over."""
    text = (ROOT / path).read_text()
    own = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', text))
    return own | (commands()["plan"] if "add_search" in text else set())


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    for link in LINK.findall(text):
        place, _, heading = link.partition("#")
        if place.startswith(("http:", "https:")):
            continue
        target = document.parent / place if place else document
        assert target.exists(), f"the link {link} leads nowhere"
        lines = target.read_text().splitlines() if heading else []
        headings = {anchor(line.lstrip("# ")) for line in lines if line.startswith("#")}
        assert not heading or heading in headings, f"{place} has no heading for {link}"
    shown = {name for name, _ in PROGRAM.findall(text)}
    for code in re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL):
        for name in set(FILE.findall(code)) - shown:
            assert any(f"/{path}".endswith(f"/{name}") for path in files()), f"there is no file {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_options_that_a_document_shows_exist(document: Path) -> None:
    text = document.read_text()
    known = set(FOREIGN).union(*commands().values())
    for path in (path for path in files() if path.startswith(("benchmarks/", "examples/"))):
        known |= script_options(path) if path.endswith(".py") else set()
    assert set(OPTION.findall(text)) <= known, "of no program here"
    for name, rest in COMMAND.findall(text):
        assert set(OPTION.findall(rest)) <= commands()[name], f"galvatron-fx {name}{rest}"
    for path, rest in SCRIPT.findall(text):
        assert set(OPTION.findall(rest)) <= script_options(path), f"{path}{rest}"
    for module, rest in MODULE.findall(text):
        path = module.replace(".", "/") + ".py"
        assert path in files(), f"there is no module {module}"
        assert set(OPTION.findall(rest)) <= script_options(path), f"{module}{rest}"


def test_the_checks_find_what_is_missing(tmp_path: Path) -> None:
    for text, check in [
        ("see [more](nowhere.md)", test_what_a_document_names_is_there),
        ("[here](#no-such-heading)\n# Other", test_what_a_document_names_is_there),
        ("as `passes/no_such_pass.py` does", test_what_a_document_names_is_there),
        ("`galvatron-fx plan --no-such-option`", test_options_that_a_document_shows_exist),
        ("`galvatron-fx diff --memory-budget 3`", test_options_that_a_document_shows_exist),
        ("`benchmarks/correctness/elastic.py --steps 3`", test_options_that_a_document_shows_exist),
        ("`python -m benchmarks.correctness.elastic --steps 3`", test_options_that_a_document_shows_exist),
        ("`python -m benchmarks.correctness.nothing`", test_options_that_a_document_shows_exist),
    ]:
        document = tmp_path / "document.md"
        document.write_text(text)
        with pytest.raises(AssertionError):
            check(document)


def test_the_first_program_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    script = tmp_path / "train.py"
    script.write_text(program)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)]
    done = subprocess.run(launch, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert "Plan for one device" in done.stdout and "loss 4." in done.stdout


def test_the_first_pass_is_written_run_and_tested_as_printed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "adding-a-pass.md").read_text()
    for name, program in PROGRAM.findall(text):
        (tmp_path / name).write_text(program)
    (printed,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert launched(tmp_path / "try_it.py") == printed
    run = tmp_path / "run.py"
    run.write_text(f"import pytest\npytest.main(['-q', '-p', 'no:cacheprovider', '{tmp_path}'])")
    assert "1 passed" in launched(run)
    for command in re.findall(r"```sh\npython -c \"(.*?)\"\n```", text, re.DOTALL):
        line = tmp_path / "line.py"
        line.write_text(command)
        assert "FunctionalRandom" in launched(line)
