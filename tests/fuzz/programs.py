"""Random programs as real models are built: inputs, a stem, a stack of layers, a head, and losses."""

from __future__ import annotations

from random import Random

from tests.fuzz.deciding import decided
from tests.fuzz.losses import finish
from tests.fuzz.mixing import IMAGES, TOKENS
from tests.fuzz.operators import ANYWHERE, norm
from tests.fuzz.source import Function, Program, Value, Writer
from tests.fuzz.stems import Inputs, stem


def draw_program(seed: int, *, small: bool | None = None) -> Program:
    """The program of a seed; equal seeds give equal programs.

    Small ones have no layers and are traced in a fraction of a second; None: three in four are small.
    """
    small = seed % 4 != 0 if small is None else small
    random = Random(f"program {seed}")
    model = Writer(random, "Model")
    inputs = Inputs(random)
    functions: list[Function] = []
    x = decided(model, inputs, stem(model, inputs), seed)
    x = _some(model, x, random.choice((0, 1, 1, 2) if small else (0, 0, 1)))
    for _ in range(0 if small else random.choice((0, 1, 1, 1, 1, 1, 1, 2))):
        layer = _layer(random, f"Layer{len(functions)}", x)
        functions.append(layer)
        count = random.choice((1, 1, 2, 2, 3))
        again = random.random() < 0.1
        made = f"{layer.name}()"
        name = f"self.layers{len(functions)}"
        model.members.append(f"{name} = nn.ModuleList([{', '.join([made] * (1 if again else count))}])")
        for index in range(count):
            x = model.emit(f"{name}[{0 if again else index}]({x})", x.shape)
        x = _some(model, x, random.choice((0, 0, 0, 1)))
    result = finish(model, inputs, x)
    if random.random() < 0.1:
        model.members.append("self.unused = nn.Linear(4, 4)")
    return Program(seed, (*functions, model.function(result)), tuple(inputs.made.items()))


def _layer(random: Random, name: str, like: Value) -> Function:
    """A layer that keeps its input's shape: parts with and without residuals and norms before them."""
    w = Writer(random, name)
    x = w.argument("x", like.shape)
    for _ in range(random.choice((1, 1, 2, 2))):
        before = x
        if random.random() < 0.6 and len(x.shape) < 4:
            x = norm(w, x)
        x = random.choice(_parts(x))(w, x)
        if random.random() < 0.75:
            x = w.emit(f"{before} + {x}", x.shape)
        x = _some(w, x, random.choice((0, 0, 0, 1)))
    return w.function(x.name)


def _parts(x: Value) -> tuple:  # type: ignore[type-arg]
    if len(x.shape) == 4:
        return (*IMAGES, *IMAGES, *ANYWHERE)
    return (*TOKENS, *TOKENS, *ANYWHERE) if len(x.shape) == 3 else ANYWHERE


def _some(w: Writer, x: Value, count: int) -> Value:
    for _ in range(count):
        x = w.random.choice(_parts(x))(w, x)
    return x
