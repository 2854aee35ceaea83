"""Claim: models that nobody tuned for are captured, planned and exact.

Sweeps tiny configurations of many architectures (transformers, diffusers, timm, PyTorch Geometric, torchvision, MONAI,
other packages, plain torch) and prints a row for each: seconds of capture, blocks found, whether a plan for four
devices was found, whether the searched, three written plans (four of mixtures of experts) and one in stages equal one
device on simulated ranks, what is left of the work on each of two ranks (1.00 of half: all is split), and the operators
without a sharding rule.
Models that compute parts of themselves in float32 are within its rounding. A model is *refused* where an error of ours
says why; any other error is *raw*, and a defect. Libraries that are not here are named and skipped. ``--rows FILE``
keeps rows, so that a sweep can go on where it ended, and ``--summary`` prints what kept rows say.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import signal
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import machine
from cost_models.node_cost import node_cost
from galvatron_fx import Cluster
from galvatron_fx.api import capture
from galvatron_fx.ir.cluster.cluster import Axis
from galvatron_fx.ir.errors import GalvatronError
from galvatron_fx.ir.graph.collectives import COLLECTIVES, RANK_LOCAL
from galvatron_fx.ir.graph.metadata import signature
from galvatron_fx.ir.graph.op_call import is_getitem
from galvatron_fx.ir.kernels.experts import route
from galvatron_fx.ir.plan.schedule import make_schedule
from passes.analysis.blocks import num_blocks
from passes.lowering.apply_plan import expand
from passes.search.plan_search import SearchOptions, search_plan
from passes.sharding.shard_graph import ShardGraph
from tests.helpers import DEVICE, assert_exact, one_device, simulate, simulate_stages, uniform

CLUSTER = Cluster.preset("4xA100-80GB")
WRITTEN = (("data", "tensor"), ("zero", "tensor_sequence"), ("sequence", "zero"))
OF_EXPERTS = ("expert", "data")
SHARED = ("data", "tensor", "sequence", "graph", "expert")
EXACT, ROUNDED = 1e-10, 2e-4  # relative: float64, and what float32 inside a model leaves of it
FREE_LINKS = (Axis("a0", 2, 1e-15, 1e21),)  # seconds and bytes a second
EVEN = 1.05  # of the work of an even split, which is split well
MOST_PARAMETERS = 6_000_000  # a configuration that did not get small is not measured

# Where the cases are, and the library that they need.
SOURCES = (("generality_torch", "torch"), ("generality_transformers", "transformers"))
SOURCES += (("generality_diffusers", "diffusers"), ("generality_timm", "timm"))
SOURCES += (("generality_graphs", "torch_geometric"), ("generality_kinds", "torch"), ("generality_objectives", "torch"))
SOURCES += (("generality_packages", "other packages"),)

Make = Callable[[], tuple[torch.nn.Module, Any]]


@dataclass
class Row:
    """What was found of one architecture; ``problem`` is the first thing that did not work, ``stages`` what became of
    a plan with stages: exact, rounded, or why there is none.
    """

    name: str
    capture_s: float | None = None
    blocks: int | None = None
    planned: bool = False
    exact: list[bool] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    without_rule: list[str] = field(default_factory=list)
    problem: str = ""
    kind: str = ""
    stages: str = ""


class NotMadeError(Exception):
    """Says why a model is not measured: it cannot be built small, or does not run by itself."""


class TooLong(BaseException):
    """Raised in a case that takes longer than it may; nothing inside may handle it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TooLong in what runs inside after ``seconds``."""

    def stop(*_: object) -> None:
        raise TooLong(f"longer than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def cases() -> tuple[dict[str, Make], list[str]]:
    """All architectures by name, and why those of some libraries are left out."""
    found: dict[str, Make] = {}
    missing = []
    for source, library in SOURCES:
        try:
            found |= importlib.import_module(f"benchmarks.correctness.{source}").cases()
        except (ImportError, RuntimeError) as error:  # not here, or built for another torch
            missing.append(f"{library} is left out, as it cannot be imported: {str(error).splitlines()[0]}")
    return found, missing


def examine(row: Row, make: Make) -> None:
    """Fill ``row``."""
    model, inputs, expected = made(make)
    start = time.perf_counter()
    graph = capture(model, inputs)
    row.capture_s, row.blocks = time.perf_counter() - start, num_blocks(graph)
    draws = any(port.kind == "seed" for port in signature(graph).inputs)
    if draws:
        expected = simulate(graph, model, inputs, (2,), uniform(graph, "data"), {})
    plan = search_plan(graph, CLUSTER, SearchOptions(CLUSTER.device.memory_bytes, ("data", "zero", "tensor")))
    row.planned = True
    written = [((2, 2), uniform(graph, *roles, recompute=at == 1)) for at, roles in enumerate(WRITTEN)]
    if any(node.target is route for node in graph.graph.nodes):
        written.append(((2, 2), uniform(graph, *OF_EXPERTS, capacity=1)))
    programs = [(CLUSTER.shape, expand(plan, row.blocks)), *written]
    for shape, strategies in programs:
        got = simulate(graph, model, inputs, shape, strategies, {})
        row.exact.append(is_close(got, expected, EXACT))
        if not row.exact[-1] and not is_close(got, expected, ROUNDED):
            raise ArithmeticError(f"{strategies[0].roles} differs from one device")
    row.stages = in_stages(graph, model, inputs, expected)
    row.shares = [share(graph, role) for role in SHARED]
    row.kind = "random" if draws else "exact" if all(row.exact) else "rounded"


def in_stages(graph: torch.fx.GraphModule, model: torch.nn.Module, inputs: Any, expected: dict[str, Any]) -> str:
    """What becomes of two stages and two micro-batches, each stage on two ranks of ``data`` that recompute."""
    blocks = num_blocks(graph)
    if blocks < 2:
        return "it has one block alone"
    strategies, schedule = uniform(graph, "pipeline", "data", recompute=True), make_schedule("1f1b", 2, 2, 2)
    try:
        got = simulate_stages(graph, model, inputs, (2, 2), strategies, (0, blocks // 2), schedule)
    except GalvatronError as error:
        return said(error)
    if not is_close(got, expected, ROUNDED):
        raise ArithmeticError("two stages differ from one device")
    return "exact" if is_close(got, expected, EXACT) else "rounded"


def made(make: Make) -> tuple[torch.nn.Module, Any, dict[str, torch.Tensor]]:
    """A model, its inputs, and what one device makes of them."""
    try:
        model, inputs = make()
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > MOST_PARAMETERS:
            raise ValueError(f"its configuration does not get small: it has {count} parameters")
        return model, inputs, _trained(model, inputs)
    except Exception as error:  # whatever it is: the model is not ours
        raise NotMadeError(f"{type(error).__name__}: {error}") from error


def _trained(model: torch.nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    """What one device makes of a copy: outputs, gradients, and the buffers that forward changes."""
    copied = copy.deepcopy(model)
    values = one_device(copied, inputs)
    if any(value.isnan().any() for value in values.values()):
        raise ValueError("what it computes is no number")
    before = dict(model.named_buffers())
    changed = {name: new for name, new in copied.named_buffers() if not torch.equal(new, before[name])}
    return values | {f"buffer {name}": new for name, new in changed.items()}


def is_close(got: dict[str, Any], expected: dict[str, Any], tolerance: float) -> bool:
    """Tell whether all values agree."""
    try:
        assert_exact(got, expected, tolerance=tolerance)
    except AssertionError:
        return False
    return True


def share(graph: torch.fx.GraphModule, role: str) -> float:
    """The work of each of two ranks, by the half that it should be.

    Links and starting operators take no time here: models as small as these would be split less than they can be.
    """
    local = ShardGraph(uniform(graph, role, capacity=1), FREE_LINKS, replace(DEVICE, launch_overhead_s=0.0), {}).run(
        graph
    )
    return 2 * work(local) / work(graph)


def work(graph: torch.fx.GraphModule) -> float:
    """Floating point operations of a graph; what moves values between ranks is no work."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function" and not is_getitem(node)]
    calls = [node for node in calls if node.target not in (*COLLECTIVES, *RANK_LOCAL)]
    return sum(float(node_cost(node, graph.meta["symbols"]).flops) for node in calls) or 1.0


def measured(name: str, make: Make, seconds: int) -> Row:
    """One row; whatever goes wrong is written into it."""
    row = Row(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with limited(seconds):
                examine(row, make)
        except (Exception, TooLong) as error:  # a sweep reports what fails, and goes on
            row.kind, row.problem = kind_of(error), said(error)
    texts = {str(warning.message) for warning in caught}
    row.without_rule = sorted({text.split()[1] for text in texts if "no sharding rule" in text})
    return row


KINDS = {
    "exact": "equal to one device to 1e-10 under all plans",
    "rounded": "equal to the rounding of what they compute in float32",
    "random": "draw random numbers, which no mesh changes: all plans are equal to each other",
    "refused": "refused by an error that says why",
    "wrong": "differ from one device",
    "raw": "end in an error that is not ours",
    "long": "take longer than they may",
    "not made": "cannot be built small, or do not run by themselves: not counted",
}


def kind_of(error: BaseException) -> str:
    """What becomes of a model whose row ends in ``error``."""
    kinds = ((NotMadeError, "not made"), (TooLong, "long"), (ArithmeticError, "wrong"), (GalvatronError, "refused"))
    return next((kind for family, kind in kinds if isinstance(error, family)), "raw")


def said(error: BaseException) -> str:
    """The first line of an error, and where it came from if it is not ours."""
    first = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    if kind_of(error) != "raw":
        return first
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{first} ({Path(frame.filename).name}:{frame.lineno})"


def summarize(rows: Sequence[Row], console: Console) -> None:
    """Print how many models are exact, refused and so on, why those refused are, and how evenly work is split."""
    counted = [row for row in rows if row.kind != "not made"]
    for kind, meaning in KINDS.items():
        number = sum(row.kind == kind for row in rows)
        part = f" ({number / max(len(counted), 1):.1%})" if kind != "not made" else ""
        console.print(f"{number:4d}{part} {meaning}")
    for at, role in enumerate(SHARED):
        shares = sorted(row.shares[at] for row in counted if len(row.shares) > at)
        even = sum(share <= EVEN for share in shares)
        if shares:
            console.print(f"{role}: {even} of {len(shares)} do at most {EVEN} of an even split of the work")
    staged = Counter(row.stages for row in counted if row.stages)
    for what, number in staged.most_common():
        console.print(f"in two stages {number}: {what}")
    for kind in ("refused", "wrong", "raw", "long"):
        for problem, number in Counter(row.problem for row in counted if row.kind == kind).most_common():
            names = [row.name for row in counted if row.kind == kind and row.problem == problem]
            console.print(f"{kind} {number}: {problem}: {', '.join(names[:6])}")


def cells(row: Row) -> list[str]:
    """A row as text."""
    shares = " ".join(f"{value:.2f}" for value in row.shares)
    capture_s = "" if row.capture_s is None else f"{row.capture_s:.1f}"
    exact = "".join("=" if equal else "~" for equal in row.exact)
    blocks = "" if row.blocks is None else str(row.blocks)
    return [row.name, capture_s, blocks, "yes" if row.planned else "", exact, shares, *notes(row)]


def notes(row: Row) -> list[str]:
    """Operators without a rule, and what did not work."""
    return [row.problem or ", ".join(name.removeprefix("aten.") for name in row.without_rule)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only architectures whose name contains one of these")
    parser.add_argument("--seconds", type=int, default=120, help="the longest that one may take (default: 120)")
    parser.add_argument("--rows", type=Path, help="a file of rows, one a line: those in it are not measured again")
    parser.add_argument("--summary", action="store_true", help="measure nothing, and say what the kept rows say")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"{machine.describe()}\n")
    rows = kept(options.rows)
    if options.summary:
        summarize(rows, console)
        return
    found, missing = cases()
    for reason in missing:
        console.print(reason)
    table = Table(title="= exact to 1e-10, ~ to the rounding of float32", title_justify="left")
    shares = " ".join(SHARED)
    for heading in ("architecture", "capture s", "blocks", "planned", "exact", shares, "replicated, or problem"):
        table.add_column(heading, overflow="fold")
    known = {row.name for row in rows}
    for name, make in found.items():
        if name not in known and (not options.names or any(part in name for part in options.names)):
            rows.append(measured(name, make, options.seconds))
            console.print(" | ".join(cells(rows[-1])))
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(rows[-1])) + "\n")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    summarize(rows, console)


def kept(path: Path | None) -> list[Row]:
    """Rows of an earlier sweep."""
    if path is None or not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
