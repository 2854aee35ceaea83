"""Where two histories of training differ, by kind and name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from galvatron_fx.checking.report import CheckRow
from galvatron_fx.checking.steps import Key, Step
from galvatron_fx.checking.whole_tensors import difference

__all__ = ["exact_rows", "merged", "missing_rows", "rounded_rows"]

INFINITE = float("inf")
# Of the largest gradient, or parameter: some are zero but for rounding (a bias before a batch norm, or of keys). All
# gradients may be so, of a loss that does not change with the scale of weights: hence also of the largest loss, which
# would be that of a gradient that doubles the loss where a weight moves by as much as the largest one is.
LEAST_SHARE = 1e-4
FEW_ELEMENTS = 16  # errors of so few numbers may be small by luck

# (largest absolute difference, relative difference, tolerance of the latter)
Measured = tuple[float, float, float]


def exact_rows(
    history: Sequence[Step], expected: Sequence[Step], tolerance: float, blocks: Mapping[Key, str]
) -> list[CheckRow]:
    """A row for every value that both have, of the step where it differs most."""

    def measure(step: int, key: Key, value: Tensor) -> Measured:
        known = expected[step].values
        absolute = max(difference(value, known[key]), history[step].spread.get(key, 0.0))
        if not (value.is_floating_point() or value.is_complex()):
            return absolute, absolute, 0.0
        return absolute, absolute / _scale(known, key, _largest), tolerance

    return _rows(history, expected, measure, blocks)


def rounded_rows(
    history: Sequence[Step],
    eager: Sequence[Step],
    expected: Sequence[Step],
    factor: float,
    blocks: Mapping[Key, str],
) -> list[CheckRow]:
    """As :func:`exact_rows` in lower precision: errors are root mean squares, and rounding of ``eager`` is the measure.

    A value may be off from ``expected``, which is float64, ``factor`` times as far as eager's own. Eager's error counts
    as at least the median of the kind (of all kinds for values of few numbers, whose error may be small by luck), and
    as one unit in the last place.
    """
    errors = [{key: _error(step.values[key], known.values, key) for key in step.values if key in known.values}
              for step, known in zip(eager, expected, strict=True)]  # fmt: skip
    middles = [_middles(step_errors) for step_errors in errors]

    def measure(step: int, key: Key, value: Tensor) -> Measured:
        known = expected[step].values
        absolute = max(difference(value, known[key]), history[step].spread.get(key, 0.0))
        if not (value.is_floating_point() or value.is_complex()):
            return absolute, absolute, 0.0
        kind = key[0] if known[key].numel() >= FEW_ELEMENTS else ""
        eager_error = errors[step].get(key, 0.0)
        least = max(eager_error, middles[step].get(kind, 0.0), torch.finfo(value.dtype).eps)
        relative = _error(value, known, key) + history[step].spread.get(key, 0.0) / _scale(known, key, _largest)
        return absolute, relative, factor * least

    return _rows(history, expected, measure, blocks)


def missing_rows(lost: set[Key], more: set[Key], blocks: Mapping[Key, str]) -> list[CheckRow]:
    """A row for each value that only eager has, and for each that only the plan has."""
    notes = dict.fromkeys(lost, "missing") | dict.fromkeys(more, "eager has none")
    return [CheckRow(*key, blocks.get(key, ""), 0, INFINITE, INFINITE, 0.0, note) for key, note in notes.items()]


def merged(rows: Sequence[CheckRow]) -> list[CheckRow]:
    """The worst row of each value, the worst value first."""
    worst: dict[Key, CheckRow] = {}
    for row in rows:
        key = (row.kind, row.name)
        if key not in worst or row.excess > worst[key].excess:
            worst[key] = row
    return sorted(worst.values(), key=lambda row: (-row.excess, -row.relative, row.kind, row.name))


def _rows(
    history: Sequence[Step],
    expected: Sequence[Step],
    measure: Callable[[int, Key, Tensor], Measured],
    blocks: Mapping[Key, str],
) -> list[CheckRow]:
    rows = []
    for step, got in enumerate(history):
        for key, value in got.values.items():
            if key in expected[step].values:
                rows.append(CheckRow(*key, blocks.get(key, ""), step, *measure(step, key, value)))
    return merged(rows)


def _scale(known: Mapping[Key, Tensor], key: Key, size: Callable[[Tensor], float]) -> float:
    least = 0.0
    if key[0] in ("gradient", "parameter"):
        least = LEAST_SHARE * _largest_of(known, key[0], size)
    if key[0] == "buffer":  # means of what a norm has centred are zero but for rounding; buffers of masks may be huge
        least = LEAST_SHARE * _largest_of(known, "parameter", size)
    if key[0] == "gradient":
        weight = max(_largest_of(known, "parameter", size), 1.0)
        least = max(least, LEAST_SHARE * _largest_of(known, "loss", size) / weight)
    return max(size(known[key]), least) or 1.0


def _largest_of(known: Mapping[Key, Tensor], kind: str, size: Callable[[Tensor], float]) -> float:
    return max((size(value) for (other, _), value in known.items() if other == kind), default=0.0)


def _error(value: Tensor, known: Mapping[Key, Tensor], key: Key) -> float:
    """The root mean square of the error, relative to that of the value."""
    if value.shape != known[key].shape:
        return INFINITE
    wide = torch.complex128 if value.is_complex() else torch.float64
    one, other = value.to(wide), known[key].to(wide)
    error = _root_mean_square(torch.where((one == other) | (one.isnan() & other.isnan()), 0.0, one - other))
    return error / _scale(known, key, _root_mean_square)


def _middles(errors: Mapping[Key, float]) -> dict[str, float]:
    """The median error of every kind, and of all under ""."""
    kinds = {kind for kind, _ in errors}
    by_kind = {kind: median(error for key, error in errors.items() if key[0] == kind) for kind in kinds}
    return by_kind | {"": median(errors.values())} if errors else {}


def _root_mean_square(value: Tensor) -> float:
    size = float(value.abs().double().square().mean().sqrt()) if value.numel() else 0.0
    return INFINITE if size != size else size


def _largest(value: Tensor) -> float:
    if not value.numel():
        return 0.0
    finite = value.detach().abs().double().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max())
