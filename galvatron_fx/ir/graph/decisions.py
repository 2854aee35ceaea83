"""What forward decided by values of its inputs, and how that is computed of the inputs of another call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from galvatron_fx.ir.torch_compat.tensors import pytree

__all__ = ["NOTHING_READ", "Computation", "Decision", "Given", "Made", "MayRead", "Step", "plain"]


@dataclass(frozen=True)
class Given:
    """An input, in the place of a tensor among the arguments of a step."""

    name: str


@dataclass(frozen=True)
class Made:
    """What an earlier step made, or a ``part`` of that, in such a place."""

    step: int
    part: int | None = None


@dataclass(frozen=True)
class Step:
    """One call of a function of torch; its tensors are :class:`Given`, :class:`Made`, or constants.

    ``writes``: whether it changes the first of them.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    writes: bool = False


@dataclass(frozen=True)
class Computation:
    """Calls in order; the last gives the value. They are the user's own, on the host, and may write in place."""

    steps: tuple[Step, ...]

    @property
    def inputs(self) -> frozenset[str]:
        """Names of the inputs that it takes."""
        leaves = (leaf for step in self.steps for leaf in pytree.tree_leaves((step.args, step.kwargs), _is_place))
        return frozenset(leaf.name for leaf in leaves if isinstance(leaf, Given))

    @property
    def is_by_sample(self) -> bool:
        """Whether all calls but the last are known to do the same for each sample, whichever others there are: what the
        last one is given of some rows of the inputs is then those rows of what it is given of all.
        """
        is_reshaped = False
        for step in self.steps[:-1]:
            # Values of other shapes may meet so that a sample of one lies beside another place of the other.
            meets_another = is_reshaped and sum(map(_is_place, step.args)) > 1
            if meets_another or not _is_by_sample(step):
                return False
            is_reshaped = is_reshaped or _name(step) not in _BY_ELEMENT
        return len(self.inputs) == 1

    def of(self, inputs: Mapping[str, Tensor]) -> Any:
        """What it makes of ``inputs``, which stay as they are."""
        made: list[Any] = []
        given = {name: inputs[name].detach().cpu() for name in self.inputs}
        writes = any(step.writes for step in self.steps)
        copies: dict[int, Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            return copies.setdefault(id(tensor), tensor.clone()) if writes else tensor

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, Given):
                return own(given[leaf.name])
            if isinstance(leaf, Made):
                return made[leaf.step] if leaf.part is None else made[leaf.step][leaf.part]
            return own(leaf) if isinstance(leaf, Tensor) else leaf

        with torch.no_grad():
            for step in self.steps:
                args, kwargs = pytree.tree_map(filled, (step.args, step.kwargs), is_leaf=_is_place)
                made.append(step.function(*args, **kwargs))
        return made[-1]


@dataclass(frozen=True)
class MayRead:
    """What a trace may decide by: values of ``inputs``, by name, and of masks that choose rows at ``lines``, each as
    "file:line".
    """

    inputs: frozenset[str] = frozenset()
    lines: frozenset[str] = frozenset()


NOTHING_READ = MayRead()


@dataclass(frozen=True)
class Decision:
    """A value that forward computed of inputs, as lists of numbers, and by which it was traced: it is one of the
    program, as a Python number (``"number"``), or says how many rows a mask chooses (``"rows"``), or how many of each
    sample (``"each"``), which any rows of the batch tell. ``line``: where.
    """

    computation: Computation
    value: Any
    kind: Literal["number", "rows", "each"]
    line: str

    def is_as_of(self, inputs: Mapping[str, Tensor]) -> bool:
        """Whether it is decided so of the inputs of another call, of whichever sizes; not where these do not fit."""
        try:
            return bool(plain(self.computation.of(inputs)) == self.value)
        except RuntimeError:  # as torch says of sizes
            return False


def plain(value: Any) -> Any:
    """A value with lists of numbers in the place of its tensors."""
    whole = pytree.tree_map_only(Tensor, lambda tensor: tensor.tolist(), value)
    return list(whole) if isinstance(whole, tuple) else whole


_BY_ELEMENT = {
    "and", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "bool", "clone", "contiguous", "detach", "eq",
    "ge", "gt", "invert", "le", "logical_and", "logical_not", "logical_or", "logical_xor", "lt", "ne", "or", "to",
    "xor",
}  # fmt: skip


def _name(step: Step) -> str:
    return getattr(step.function, "__name__", "").strip("_")


def _is_by_sample(step: Step) -> bool:
    """Whether a call keeps samples where they are, in the first dim, and apart."""
    name, args = _name(step), step.args
    if step.writes or step.kwargs or any(isinstance(arg, Tensor) and arg.dim() for arg in args):
        return False
    if name in ("unsqueeze", "flatten"):
        return len(args) == 2 and args[1] in ((-1, 1, 2) if name == "unsqueeze" else (1,))
    if name == "select":
        return len(args) == 3 and args[1] == -1
    if name == "expand":
        return bool(args[1][0] == -1)
    return name in _BY_ELEMENT


def _is_place(leaf: Any) -> bool:
    return isinstance(leaf, (Given, Made))
