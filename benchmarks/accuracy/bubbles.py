"""Claim: pipelines idle as their schedule says, and zero-bubble schedules less than 1F1B.

Trains a model of equal blocks on four processes by several schedules and notes when every process computes what. The
same schedule, simulated with the mean seconds of each stage's forward and backward, says how much each process should
idle, and how many micro-batches it should hold at most.

Processes on fewer cores than there are processes wait for each other's computation, which no schedule has in it. So
every task sleeps for a time in proportion to its matrix products, on top of a tiny model that is really computed, sent
and received; ``--no-sleep`` measures a larger model's computation itself, on a machine with a core a process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from benchmarks.accuracy.bubbles_rank import Task
from benchmarks.common import machine
from benchmarks.common.on_ranks import on_ranks
from cost_models.schedule_time import ScheduleReport, Span, in_flight_counts, simulate_schedule
from galvatron_fx.ir.plan.schedule import Action, Schedule, make_schedule
from galvatron_fx.ir.plan.units import format_seconds
from galvatron_fx.report.pictures import draw_timeline
from galvatron_fx.report.schedule_trace import write_trace

STAGES_A_RANK = {"gpipe": 1, "1f1b": 1, "zb_h1": 1, "interleaved_1f1b": 2, "zbv": 2, "dualpipev": 2}


@dataclass(frozen=True)
class Result:
    """A schedule as it ran: the step of median length, and what the simulation makes of the mean times of all."""

    measured: ScheduleReport
    simulated: ScheduleReport
    held: tuple[int, ...]

    @property
    def idle(self) -> tuple[float, float]:
        """The mean share of the step that a rank idles: measured, simulated."""
        measured, simulated = (fmean(shares(report)) for report in (self.measured, self.simulated))
        return measured, simulated


def shares(report: ScheduleReport) -> list[float]:
    """The share of the step that each rank idles."""
    return [idle_s / report.step_s for idle_s in report.idle_s]


def launch(task: Task) -> dict[str, list[list[Span]]]:
    """Run ``bubbles_rank.py`` under torchrun; returns by schedule the spans of every step."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "spans.json")
        ranks = task.ranks * task.inner
        on_ranks("benchmarks.accuracy.bubbles_rank", ranks, str(path), json.dumps(asdict(task)))
        found = json.loads(path.read_text())
    return {
        name: [[Span(Action.parse(text), rank, start, end) for text, rank, start, end in step] for step in steps]
        for name, steps in found.items()
    }


def judge(schedule: Schedule, steps: Sequence[Sequence[Span]]) -> Result:
    """Compare the median step with the simulation of the mean."""
    reports = sorted((ScheduleReport.from_spans(schedule, spans) for spans in steps), key=lambda r: r.step_s)
    measured = reports[len(reports) // 2]
    return Result(measured, simulate(schedule, [span for spans in steps for span in spans]), held(measured))


def simulate(schedule: Schedule, spans: Sequence[Span]) -> ScheduleReport:
    """Simulate with the mean seconds of each stage's actions, and no time for transfers."""
    means = [{kind: _mean(spans, stage, kind) for kind in "FBIW"} for stage in range(schedule.num_stages)]
    # A whole backward counts as both gradients; where a schedule has both kinds, what was measured apart is taken.
    inputs = [mean["I"] if mean["W"] else mean["B"] for mean in means]
    idle = [0.0] * (schedule.num_stages - 1)
    return simulate_schedule(schedule, [mean["F"] for mean in means], inputs, [m["W"] for m in means], idle, idle)


def _mean(spans: Sequence[Span], stage: int, kind: str) -> float:
    times = [s.end_s - s.start_s for s in spans if s.action.stage == stage and s.action.kind == kind]
    return fmean(times) if times else 0.0


def held(report: ScheduleReport) -> tuple[int, ...]:
    """The most micro-batches that each stage held at once, in the order that was measured."""
    counts, most = [0] * report.schedule.num_stages, [0] * report.schedule.num_stages
    for span in sorted(report.spans, key=lambda span: span.start_s):
        stage = span.action.stage
        counts[stage] += {"F": 1, "B": -1, "I": 0, "W": -1}[span.action.kind]
        most[stage] = max(most[stage], counts[stage])
    return tuple(most)


def table_of(results: Mapping[str, Result]) -> Table:
    """Measured over simulated, two rows a schedule."""
    table = Table(title="Idle shares of the step, and micro-batches held at most", title_justify="left")
    for heading in ("schedule", "", "step", "idle", "by rank", "held, by stage"):
        table.add_column(heading, justify="right" if heading in ("step", "idle") else "left", no_wrap=True)
    for name, result in results.items():
        rows = (("measured", result.measured, result.held), ("simulated", result.simulated, result.simulated.in_flight))
        for how, report, most in rows:
            by_rank = " ".join(f"{share:.0%}" for share in shares(report))
            cells = format_seconds(report.step_s), f"{fmean(shares(report)):.1%}", by_rank, " ".join(map(str, most))
            table.add_row(name if how == "measured" else "", how, *cells, end_section=how == "simulated")
    return table


def draw(results: Mapping[str, Result], folder: Path) -> None:
    """Write a picture a schedule, one of all measured schedules, and a trace of everything."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = {}
    for name, result in results.items():
        pair = {f"{name}, predicted": result.simulated, f"{name}, measured": result.measured}
        draw_timeline(pair, folder / f"{name}.png")
        rows |= pair
    draw_timeline({name: result.measured for name, result in results.items()}, folder / "all_measured.png")
    write_trace(rows, folder / "trace.json")


def print_claims(results: Mapping[str, Result], console: Console) -> bool:
    """Say which claims hold; returns whether all do."""
    claims = {
        f"{name} holds at most what in_flight says": result.held == in_flight_counts(result.measured.schedule)
        for name, result in results.items()
    }
    if "1f1b" in results:
        base = results["1f1b"].idle[0]
        for name in set(results) & {"zb_h1", "zbv"}:
            claims[f"{name} idles {results[name].idle[0]:.1%} of the step, 1f1b {base:.1%}"] = (
                results[name].idle[0] < base
            )
    for claim, holds in sorted(claims.items()):
        console.print(f"{'holds' if holds else 'FAILS'}: {claim}")
    return all(claims.values())


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the pictures and the trace are written")
    parser.add_argument("--schedules", nargs="+", default=["gpipe", "1f1b", "zb_h1", "zbv"], choices=STAGES_A_RANK)
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a pipeline (default: 4)")
    parser.add_argument("--inner", type=int, default=1, help="pipelines side by side, as data parallelism (default: 1)")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps that are measured (default: 3)")
    parser.add_argument("--sleep", action=argparse.BooleanOptionalAction, default=True, help="sleep for each task")
    parser.add_argument("--forward-ms", type=float, default=40.0, help="sleep of a rank's forward (default: 40)")
    return parser.parse_args()


def task_of(options: argparse.Namespace) -> Task:
    """What the ranks shall do: a tiny model that sleeps, or one that computes for long."""
    hidden, samples = (16, 4) if options.sleep else (512, 256)
    return Task(
        schedules={name: STAGES_A_RANK[name] * options.ranks for name in options.schedules},
        ranks=options.ranks,
        inner=options.inner,
        microbatches=options.microbatches,
        steps=options.steps,
        blocks=2 * options.ranks,
        hidden=hidden,
        samples=samples * options.inner,
        forward_s=options.forward_ms / 1e3 if options.sleep else 0.0,
    )


def main() -> None:
    """Measure; exits with 1 where a claim fails."""
    options, console = arguments(), Console(soft_wrap=True, highlight=False)
    task = task_of(options)
    how = "tasks sleep in proportion to their matrix products" if options.sleep else "tasks compute"
    console.print(f"{machine.describe()}\n")
    console.print(
        f"{task.blocks} equal blocks, {task.microbatches} micro-batches, {task.ranks} x {task.inner} gloo processes, "
        f"{how}\n"
    )
    spans = launch(task)
    results = {
        name: judge(make_schedule(name, task.ranks, stages, task.microbatches), spans[name])
        for name, stages in task.schedules.items()
    }
    console.print(table_of(results))
    draw(results, options.folder)
    console.print(f"pictures and trace.json (for https://ui.perfetto.dev) in {options.folder}\n")
    sys.exit(not print_claims(results, console))


if __name__ == "__main__":
    main()
