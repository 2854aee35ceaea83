"""Programs that decide by values of an input: as Python numbers, or by how many rows a mask of it chooses."""

from __future__ import annotations

from random import Random

from tests.fuzz.source import Value, Writer, sizes
from tests.fuzz.stems import Inputs

_SHARE = 0.1


def decided(w: Writer, inputs: Inputs, x: Value, seed: int) -> Value:
    """What one in ten programs makes of ``x`` by values of one more input. It draws by itself, so that all others are
    as they would be without.
    """
    random = Random(f"decided {seed}")
    if random.random() >= _SHARE:
        return x
    kinds = (
        [_number, _branch] if len(x.shape) != 3 else [_number, _branch, _slice, _rows, _rows, _scattered, _scattered]
    )
    if x.shape[0] == inputs.batch:
        kinds.append(_steps)
    return random.choice(kinds)(w, inputs, x, random)


def _counts(w: Writer, inputs: Inputs, random: Random) -> list[int]:
    counts = [random.randint(1, 3) for _ in range(inputs.batch.value)]
    inputs.made["counts"] = f"torch.tensor({counts})"
    w.argument("counts", (inputs.batch,), "int")
    return counts


def _number(w: Writer, inputs: Inputs, x: Value, random: Random) -> Value:
    _counts(w, inputs, random)
    return w.emit(f"{x} * int(counts.{random.choice(('max', 'min'))}()) / 2", x.shape)


def _branch(w: Writer, inputs: Inputs, x: Value, random: Random) -> Value:
    _counts(w, inputs, random)
    return w.emit(f"torch.tanh({x}) if (counts > {random.choice((1, 2))}).all() else 2 * {x}", x.shape)


def _steps(w: Writer, inputs: Inputs, x: Value, random: Random) -> Value:
    """As many steps as samples, so that the program is of one batch alone."""
    _counts(w, inputs, random)
    ones = ", 1" * (len(x.shape) - 1)
    steps = f"torch.stack([row * {random.choice((1, 2))} / 3 for row in counts])"
    return w.emit(f"{x} + {steps}.to({x}.dtype).reshape(-1{ones})", x.shape)


def _slice(w: Writer, inputs: Inputs, x: Value, random: Random) -> Value:
    longest = min(x.shape[1].value, max(_counts(w, inputs, random)))
    return w.emit(f"{x}[:, :int(counts.max())]", sizes(x.shape[0], longest, x.shape[2]))


def _rows(w: Writer, inputs: Inputs, x: Value, random: Random) -> Value:
    """As many rows of each sample, others of each."""
    batch, length, width = x.shape
    kept = random.randint(1, length.value)
    made = f"torch.stack([torch.randperm({length.value}) for _ in range({batch.value})])"
    inputs.made["order"] = made
    w.argument("order", (batch, length), "int")
    return w.emit(f"{x}[order < {kept}].reshape({batch.text}, -1, {width.text})", sizes(batch, kept, width))


def _scattered(w: Writer, inputs: Inputs, x: Value, random: Random) -> Value:
    """Rows of each sample at places of a mask, which chooses as many of each, or as many of all."""
    batch, length, _ = x.shape
    kept = random.randint(1, length.value)
    of_all = f"torch.randperm({batch.value * length.value}).reshape({batch.value}, {length.value}) // {batch.value}"
    of_each = f"torch.stack([torch.randperm({length.value}) for _ in range({batch.value})])"
    inputs.made["order"] = random.choice((of_all, of_each, of_each))
    w.argument("order", (batch, length), "int")
    mask = random.choice(("(order < {}).unsqueeze(-1)", "(order < {}).unsqueeze(-1).expand_as({})")).format(kept, x)
    return w.emit(f"{x}.masked_scatter({mask}, torch.tanh({x}[:, {length.value - kept}:]))", x.shape)
