"""All that a sweep found, as tables, files and a picture."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from galvatron_fx.ir.plan import text_table
from galvatron_fx.ir.plan.units import format_bytes, format_seconds
from galvatron_fx.sweeping.by_devices import DevicesRate, by_devices
from galvatron_fx.sweeping.picture import draw
from galvatron_fx.sweeping.points import SweepPoint
from galvatron_fx.table_files import csv_text, json_text, save_table

__all__ = ["Sweep"]

_HEADINGS = ("devices", "batch", "step", "tokens/s", "MFU", "memory", "plan, or why there is none")
_WIDTH = 150
_PRICED = ("$/Mtoken", "days", "k$")


@dataclass(frozen=True)
class Sweep:
    """All points of a sweep, in the order of models, devices, counts, budgets, batches, sequences; ``print`` it."""

    points: tuple[SweepPoint, ...]

    def __str__(self) -> str:
        """Return a table for each model, kind of device and budget, and what is largest, as plain text."""
        lines: list[str] = []
        priced = any(point.usd_per_mtoken is not None or point.days is not None for point in self.points)
        for (model, device, budget), points in _grouped(self.points):
            lines += ["", f"{model} on {device}, {format_bytes(budget)} a device", ""]
            headings = (*_HEADINGS[:-1], *(_PRICED if priced else ()), _HEADINGS[-1])
            rows = [_row(point, priced) for point in points]
            lines += text_table.render(headings, rows, 0, words=(len(headings) - 1,), width=_WIDTH)
        lines += ["", "The largest of those swept that fit", ""]
        lines += text_table.render(
            ("device", "devices", "memory", "model", "batch", "sequence"), list(self._largest_rows()), 1
        )
        estimated = any(point.known == "searched" for point in self.points)
        lines += [
            "",
            "MFU: flops of matrix products, attention and convolutions of forward and backward, without recomputation,",
            "over what all devices do at their datasheet's peak.",
            *(["Steps and memory are the search's estimates; simulate=True (--simulate) lowers each."] * estimated),
        ]
        return "\n".join(lines[1:])

    def largest(self) -> Iterator[tuple[SweepPoint, SweepPoint, SweepPoint]]:
        """Of each kind of device, count and budget where anything fits: the points of the largest model, batch and
        sequence (each the fastest of equals).
        """
        groups: dict[tuple[str, int, int], list[SweepPoint]] = {}
        for point in self.points:
            if point.fits:
                groups.setdefault((point.device, point.devices, point.budget_bytes), []).append(point)
        for group in groups.values():
            rates = {id(point): point.tokens_per_s or 0.0 for point in group}
            yield (
                max(group, key=lambda point: (point.parameters, rates[id(point)])),
                max(group, key=lambda point: (point.batch, rates[id(point)])),
                max(group, key=lambda point: (point.sequence, rates[id(point)])),
            )

    def to_csv(self) -> str:
        """Return a line for each point under a line of names; what is unknown is empty."""
        return csv_text(SweepPoint, self.points)

    def to_json(self) -> str:
        """Return the points as a JSON list of objects; what is unknown is null."""
        return json_text(self.points)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the points as JSON where ``path`` ends in .json, else as CSV; raises OSError."""
        save_table(path, SweepPoint, self.points)

    def by_devices(self) -> tuple[DevicesRate, ...]:
        """Return the throughput on 1, 2, ... devices, as of :func:`galvatron_fx.sweeping.by_devices.by_devices`."""
        return by_devices(self.points)

    def save_by_devices(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`by_devices` as JSON where ``path`` ends in .json, else as CSV; raises OSError."""
        save_table(path, DevicesRate, self.by_devices())

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw tokens/s and MFU by the number of devices into ``path``, PNG or SVG by its ending; raises OSError."""
        draw(self.points, path)

    def _largest_rows(self) -> Iterator[Sequence[str]]:
        for model, batch, sequence in self.largest():
            yield (
                model.device,
                f"{model.devices:,}",
                format_bytes(model.budget_bytes),
                f"{model.model} ({model.parameters / 1e9:.3g} B)",
                f"{batch.batch:,} ({batch.model})",
                f"{sequence.sequence:,} ({sequence.model})",
            )


def _grouped(points: Iterable[SweepPoint]) -> Iterator[tuple[tuple[str, str, int], list[SweepPoint]]]:
    groups: dict[tuple[str, str, int], list[SweepPoint]] = {}
    for point in points:
        groups.setdefault((point.model, point.device, point.budget_bytes), []).append(point)
    yield from groups.items()


def _row(point: SweepPoint, priced: bool) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    money = [
        shown(point.usd_per_mtoken, ".3g"),
        shown(point.days, ",.3g" if (point.days or 0) < 1000 else ",.0f"),
        shown(None if point.usd is None else point.usd / 1000, ",.0f" if (point.usd or 0) >= 1e5 else ",.3g"),
    ]
    return [
        f"{point.devices:,}",
        f"{point.batch:,}" + (f"×{point.sequence:,}" if point.sequence else ""),
        "-" if point.step_s is None else format_seconds(point.step_s),
        shown(point.tokens_per_s, ",.0f"),
        shown(point.mfu, ".1%"),
        "-" if point.peak_bytes is None else format_bytes(point.peak_bytes),
        *(money if priced else []),
        point.plan or point.reason,
    ]
