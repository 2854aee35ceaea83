"""How a program begins: what it is fed, and how that becomes a tensor of features."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tests.fuzz.operators import linear
from tests.fuzz.source import Size, Value, Writer, sizes


@dataclass
class Inputs:
    """The sizes of a batch and how each input is made; small, and often equal by chance."""

    random: Random
    made: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choose = self.random.choice
        self.batch = Size(choose((2, 4, 4, 4, 6, 8)), "b")
        self.sequence = Size(choose((4, 6, 8, 8)), "s")
        self.width = choose((4, 6, 8, 8, 12, 16))
        self.classes = choose((4, 6, 7, 8, 10))
        self.words = choose((8, 11, 16))


def stem(w: Writer, inputs: Inputs) -> Value:
    """The first features of the program."""
    kind = w.random.choice((_words, _words, _vectors, _rows, _image, _patches, _patches, _unfolded))
    return kind(w, inputs)


def _words(w: Writer, inputs: Inputs) -> Value:
    b, s, d = inputs.batch, inputs.sequence, inputs.width
    inputs.made["ids"] = f"torch.randint({inputs.words}, ({b.value}, {s.value}))"
    ids = w.argument("ids", (b, s), "int")
    padding = ", padding_idx=0" if w.chance(0.2) else ""
    x = w.emit(f"{w.module(f'nn.Embedding({inputs.words}, {d}{padding})')}({ids})", sizes(b, s, d))
    if w.chance(0.5):
        places = w.module(f"nn.Embedding({s.value}, {d})")
        return w.emit(f"{x} + {places}(torch.arange({s.text}))", x.shape)
    return w.emit(f"{x} + {w.parameter(1, s.value, d)}[:, :{s.text}]", x.shape) if w.chance(0.3) else x


def _vectors(w: Writer, inputs: Inputs) -> Value:
    b, s = inputs.batch, inputs.sequence
    width = w.random.choice((inputs.width, 5, 6))
    inputs.made["x"] = f"torch.randn({b.value}, {s.value}, {width})"
    return linear(w, w.argument("x", sizes(b, s, width)), inputs.width)


def _rows(w: Writer, inputs: Inputs) -> Value:
    width = w.random.choice((inputs.width, 6))
    inputs.made["x"] = f"torch.randn({inputs.batch.value}, {width})"
    x = w.argument("x", sizes(inputs.batch, width))
    if w.chance(0.3):
        inputs.made["y"] = inputs.made["x"]
        y = w.argument("y", x.shape)
        both = w.emit(f"torch.cat([{x}, {y}])", (Size(2 * inputs.batch.value, "2 * b"), x.shape[1]))
        return linear(w, both, inputs.width)
    return linear(w, x, inputs.width)


def _pixels(w: Writer, inputs: Inputs, side: int) -> Value:
    channels = w.random.choice((1, 2, 3, 4))
    inputs.made["x"] = f"torch.randn({inputs.batch.value}, {channels}, {side}, {side})"
    return w.argument("x", sizes(inputs.batch, channels, side, side))


def _image(w: Writer, inputs: Inputs) -> Value:
    x = _pixels(w, inputs, side := w.random.choice((4, 6)))
    channels = inputs.width
    conv = w.module(f"nn.Conv2d({x.shape[1].value}, {channels}, 3, padding=1)")
    return w.emit(f"{conv}({x})", sizes(inputs.batch, channels, side, side))


def _patches(w: Writer, inputs: Inputs) -> Value:
    """[batch, places, width] of an image cut into squares, by view, permute and reshape, or by a convolution."""
    b, side, patch = inputs.batch, *w.random.choice(((4, 2), (8, 2), (8, 4), (6, 2), (6, 3)))
    x = _pixels(w, inputs, side)
    c, n = x.shape[1].value, side // patch
    if w.chance(0.25):
        conv = w.module(f"nn.Conv2d({c}, {inputs.width}, {patch}, {patch})")
        return w.emit(f"{conv}({x}).flatten(2).transpose(1, 2)", sizes(b, n * n, inputs.width))
    order, last = w.random.choice((("0, 2, 4, 1, 3, 5", (c, patch, patch)), ("0, 2, 4, 3, 5, 1", (patch, patch, c))))
    cut = w.emit(f"{x}.view(b, {c}, {n}, {patch}, {n}, {patch})", sizes(b, c, n, patch, n, patch))
    moved = w.emit(f"{cut}.permute({order})", sizes(b, n, n, *last))
    width = c * patch * patch
    rows_apart = w.chance(0.5)
    places = (n, n) if rows_apart else (n * n,)
    parts = w.emit(f"{moved}.reshape(b, {', '.join(map(str, places))}, {width})", sizes(b, *places, width))
    if w.chance(0.4):
        parts = w.emit(f"{w.module(f'nn.LayerNorm({width})')}({parts})", parts.shape)
    parts = linear(w, parts, inputs.width)
    if w.chance(0.4):
        parts = w.emit(f"{w.module(f'nn.LayerNorm({inputs.width})')}({parts})", parts.shape)
    return w.emit(f"{parts}.flatten(1, 2)", sizes(b, n * n, inputs.width)) if rows_apart else parts


def _unfolded(w: Writer, inputs: Inputs) -> Value:
    """[batch, places, width] of squares taken out by unfold."""
    x = _pixels(w, inputs, 4)
    width = x.shape[1].value * 4
    parts = w.emit(f"F.unfold({x}, 2, stride=2).transpose(1, 2)", sizes(inputs.batch, 4, width))
    return linear(w, parts, inputs.width)
