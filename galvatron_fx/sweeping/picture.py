"""A sweep as a picture: tokens a second and model flops utilisation over the number of devices."""

from __future__ import annotations

import os
from collections.abc import Sequence

from galvatron_fx.figures import new_figure
from galvatron_fx.sweeping.points import SweepPoint

# Okabe and Ito (2008): colours that people tell apart however they see colours.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D1F")
_DASHES = ("-", "--", ":", "-.")
_MARKERS = ("o", "s", "^", "D", "v")


def draw(points: Sequence[SweepPoint], path: str | os.PathLike[str]) -> None:
    """Draw a column of two charts for each model: a line for each device, dashes for budgets and batches beside.

    Points without a plan stand as crosses at the bottom, at the count of devices that is too small. Raises InputError
    where matplotlib is missing.
    """
    models = list(dict.fromkeys(point.model for point in points))
    devices = list(dict.fromkeys(point.device for point in points))
    figure = new_figure(1.2 + 5.2 * len(models), 7.4)
    figure.set_layout_engine("constrained")
    axes = figure.subplots(2, len(models), squeeze=False, sharex="col", sharey="row")
    for column, model in enumerate(models):
        rate, use = axes[0][column], axes[1][column]
        for place, device in enumerate(devices):
            _lines(rate, use, [p for p in points if (p.model, p.device) == (model, device)], place)
        rate.set_title(f"{model}, {max(p.parameters for p in points if p.model == model) / 1e9:.3g} B parameters")
        rate.set_yscale("log")
        counts = sorted({point.devices for point in points if point.model == model})
        for chart in (rate, use):
            chart.set_xscale("log", base=2)
            chart.set_xticks(counts, [str(count) for count in counts])
            chart.minorticks_off()
            chart.grid(alpha=0.3)
        use.set_xlabel("devices; × where no plan fits")
    axes[0][0].set_ylabel("tokens a second")
    axes[1][0].set_ylabel("model flops utilisation, %")
    axes[1][0].set_ylim(0, None)  # shared by all charts of the row, so behind the last of them
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(2 * len(models), max(1, len(labels))), frameon=False
    )
    figure.savefig(path, dpi=110)


def _lines(rate: object, use: object, points: Sequence[SweepPoint], place: int) -> None:
    """The lines of one device: one for each budget, batch and sequence."""
    series = list(dict.fromkeys((p.budget_bytes, p.batch, p.sequence) for p in points))
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    for number, key in enumerate(series):
        line = [p for p in points if (p.budget_bytes, p.batch, p.sequence) == key]
        fitting = [p for p in line if p.fits]
        label = line[0].device if len(series) == 1 else f"{line[0].device}, {_named(key, series)}"
        style = {"color": colour, "marker": marker, "linestyle": _DASHES[number % len(_DASHES)], "markersize": 5}
        counts = [p.devices for p in fitting]
        rate.plot(counts, [p.tokens_per_s for p in fitting], label=label, **style)  # type: ignore[attr-defined]
        use.plot(counts, [100 * (p.mfu or 0) for p in fitting], **style)  # type: ignore[attr-defined]
        unfit = [p.devices for p in line if not p.fits]
        if unfit:
            height = 0.03 + 0.03 * place  # of the chart
            at_bottom = use.get_xaxis_transform()  # type: ignore[attr-defined]
            use.plot(unfit, [height] * len(unfit), "x", color=colour, transform=at_bottom)  # type: ignore[attr-defined]


def _named(key: tuple[int, int, int], series: Sequence[tuple[int, int, int]]) -> str:
    """What tells a line from the others."""
    texts = (f"{key[0] / 1e9:.3g} GB", f"batch {key[1]}", f"sequence {key[2]}")
    return ", ".join(text for i, text in enumerate(texts) if len({other[i] for other in series}) > 1)
