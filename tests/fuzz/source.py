"""Programs as Python source: values, the lines that make them, and the classes that those form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random


@dataclass(frozen=True)
class Size:
    """A size and how the program spells it: a number, or an expression in sizes that follow the batch."""

    value: int
    text: str

    @classmethod
    def of(cls, value: int) -> Size:
        """A size that is the same for every batch."""
        return cls(value, str(value))

    @property
    def is_fixed(self) -> bool:
        """Whether it is the same for every batch."""
        return self.text.isdigit()

    def __mul__(self, other: Size) -> Size:
        value = self.value * other.value
        if self.is_fixed and other.is_fixed:
            return Size.of(value)
        return Size(value, f"{self.text} * {other.text}")


def sizes(*values: int | Size) -> tuple[Size, ...]:
    """Sizes of numbers and sizes."""
    return tuple(value if isinstance(value, Size) else Size.of(value) for value in values)


def merged(shape: Sequence[Size]) -> Size:
    """The size of several dims as one."""
    return math.prod(shape[1:], start=shape[0])


def spelled(shape: Sequence[Size]) -> str:
    """A shape as arguments."""
    return ", ".join(size.text for size in shape)


@dataclass(frozen=True)
class Value:
    """A tensor of the program: its name, its shape, and whether it holds "float", "int" or "bool"."""

    name: str
    shape: tuple[Size, ...]
    kind: str = "float"

    @property
    def width(self) -> int:
        """The size of the last dim."""
        return self.shape[-1].value

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Function:
    """A module class: ``members`` are the lines of its constructor, ``lines`` of its forward."""

    name: str
    arguments: tuple[str, ...]
    members: tuple[str, ...]
    lines: tuple[str, ...]
    result: str

    def __str__(self) -> str:
        used = _words(" ".join([*self.lines, self.result]))
        members = [
            line for line in self.members if (name := line.split(" = ")[0].removeprefix("self.")) and name in used
        ]
        return "\n".join(
            [
                f"class {self.name}(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                *(f"        {line}" for line in members),
                "",
                f"    def forward(self, {', '.join(self.arguments)}):",
                *(f"        {line}" for line in self.lines),
                f"        return {self.result}",
            ]
        )


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z_]\w*", text))


@dataclass(frozen=True)
class Program:
    """A model as source (the last function is the model) and how each of its inputs is made."""

    seed: int
    functions: tuple[Function, ...]
    inputs: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        model = self.functions[-1]
        used = _words(" ".join(" ".join([*f.lines, *f.members, f.result]) for f in self.functions))
        shown = [function for function in self.functions[:-1] if function.name in used]
        routed = any("galvatron_fx" in line for function in [*shown, model] for line in function.lines)
        lines = [
            "import torch",
            "from torch import nn",
            "from torch.nn import functional as F",
            *(("import galvatron_fx.ir.kernels.experts, transformers.integrations.moe",) if routed else ()),
            "",
            "torch.set_default_dtype(torch.float64)",
            f"torch.manual_seed({self.seed})",
            "",
            *(f"{function}\n\n" for function in [*shown, model]),
            f"model = {model.name}()",
            "inputs = {",
            *(f'    "{name}": {made},' for name, made in self.inputs),
            "}",
        ]
        return "\n".join(lines)


@dataclass
class Writer:
    """Writes the lines of one function; ``random`` decides wherever there is a choice."""

    random: Random
    name: str
    members: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    shared: dict[str, str] = field(default_factory=dict)

    def argument(self, name: str, shape: Sequence[Size], kind: str = "float") -> Value:
        """An argument; each of its sizes that follows the batch gets a name."""
        self.arguments.append(name)
        known = {value.text for value in self._known_sizes()}
        named = []
        for dim, size in enumerate(shape):
            if not size.is_fixed and size.text not in known:
                text = size.text if size.text.isidentifier() else f"n{len(self.lines)}"
                self.lines.append(f"{text} = {name}.shape[{dim}]")
                size = replace(size, text=text)
            named.append(size)
        value = Value(name, tuple(named), kind)
        self.values.append(value)
        return value

    def _known_sizes(self) -> list[Size]:
        return [size for value in self.values for size in value.shape]

    def emit(self, expression: str, shape: Sequence[Size], kind: str = "float") -> Value:
        """A line that makes one tensor."""
        value = Value(f"v{len(self.lines)}", tuple(shape), kind)
        self.lines.append(f"{value} = {expression}")
        self.values.append(value)
        return value

    def emit_several(self, expression: str, shapes: Sequence[Sequence[Size]]) -> list[Value]:
        """A line that makes several tensors."""
        made = [Value(f"v{len(self.lines)}_{i}", tuple(shape)) for i, shape in enumerate(shapes)]
        self.lines.append(f"{', '.join(map(str, made))} = {expression}")
        self.values += made
        return made

    def module(self, made: str) -> str:
        """A submodule; one in ten is one that there is already, if there is one alike."""
        if made in self.shared and self.random.random() < 0.1:
            return self.shared[made]
        name = f"self.m{len(self.members)}"
        self.members.append(f"{name} = {made}")
        self.shared[made] = name
        return name

    def parameter(self, *shape: int, scale: float = 0.5, shift: float = 0.0) -> str:
        """A parameter of random numbers."""
        name = f"self.p{len(self.members)}"
        drawn = f"{scale} * torch.randn({', '.join(map(str, shape))})" if shape else f"{scale} * torch.randn(())"
        self.members.append(f"{name} = nn.Parameter({drawn}{f' + {shift}' if shift else ''})")
        return name

    def buffer(self, made: str) -> str:
        """A constant tensor of the module."""
        name = f"self.c{len(self.members)}"
        self.members.append(f"{name} = nn.Buffer({made})")
        return name

    def chance(self, share: float) -> bool:
        """True for so many of all draws."""
        return self.random.random() < share

    def same_shape(self, value: Value) -> list[Value]:
        """Earlier floating values of the same shape."""
        wanted = [size.value for size in value.shape]
        return [
            other
            for other in self.values
            if other.kind == "float"
            and other.name != value.name
            and [size.value for size in other.shape] == wanted
            and [size.is_fixed for size in other.shape] == [size.is_fixed for size in value.shape]
        ]

    def function(self, result: str) -> Function:
        """The function as written."""
        return Function(self.name, tuple(self.arguments), tuple(self.members), tuple(self.lines), result)
