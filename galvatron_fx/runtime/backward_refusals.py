"""What ``backward()`` of a compiled model cannot do, refused as eager refuses it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.graph.metadata import InputSpec

__all__ = ["Versions", "refuse_higher_orders", "refuse_second_backward"]


def refuse_second_backward(is_spent: bool) -> None:
    """Raise InputError where backward has run, and what it needs was let go."""
    if is_spent:
        raise InputError("backward() ran twice on one forward: run forward again, or pass retain_graph=True before")


def refuse_higher_orders() -> None:
    """Raise InputError in a backward under ``create_graph=True``."""
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True asks for gradients of gradients, and a compiled backward has none: compute the "
            "gradient that the loss is made of inside the model, or do not compile it"
        )


class Versions:
    """How often the inputs that backward reads were written to, as forward found them.

    ``version_of``: how often an input was written to by now.
    """

    def __init__(self, read: Iterable[InputSpec], version_of: Callable[[InputSpec], int]) -> None:
        self._version_of = version_of
        self._expected = [(port, version_of(port)) for port in read]

    def require_kept(self, input_names: Sequence[str]) -> None:
        """Raise InputError for an input that was written to since, by its name among those of the model's inputs."""
        for port, expected in self._expected:
            version = self._version_of(port)
            if version != expected:
                kind = "parameter" if port.kind == "param" else port.kind
                name = input_names[int(port.name)].strip("[]'") if kind == "input" else port.name
                raise InputError(
                    f"{kind} '{name}' was changed in place between forward and backward, which reads it (it is at "
                    f"version {version}, expected {expected}): run backward() before changing it"
                )
