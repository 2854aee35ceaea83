"""Outputs that this rank does not have: whoever reads one is told why, and what to do."""

from __future__ import annotations

from typing import Any, NoReturn

from galvatron_fx.ir.errors import InputError

__all__ = ["AbsentOutput"]

_READS = (
    *("__bool__", "__float__", "__int__", "__index__", "__len__", "__iter__", "__getitem__", "__array__", "__call__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__matmul__", "__rmatmul__", "__pow__", "__neg__", "__lt__", "__le__", "__gt__", "__ge__"),
)


class AbsentOutput:
    """Stands for an output of the model that was made on other ranks, or only micro-batch by micro-batch.

    It prints; whatever else is asked of it raises InputError, which names the output.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """Return what it stands for."""
        return f"<output '{self._name}', which is not on this rank>"

    def __getattr__(self, attribute: str) -> Any:
        """Refuse all but what Python itself looks for, to copy or to show the object."""
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        _refuse(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Refuse functions of torch."""
        given = [*args, *(kwargs or {}).values()]
        flat = [value for each in given for value in (each if isinstance(each, (list, tuple)) else (each,))]
        _refuse(next(value for value in flat if isinstance(value, cls)))


def _refuse(output: AbsentOutput, *_: object) -> NoReturn:
    raise InputError(
        f"output '{vars(output)['_name']}' is not on this rank: under stages only the ranks of one stage have it, and "
        f"in training with several micro-batches none has it whole. Every rank has the loss and other outputs without "
        f"dims: compute what you need of the output inside the model, ask for it in eval(), or compile with "
        f"num_stages=1, num_microbatches=1"
    )


for _read in _READS:
    setattr(AbsentOutput, _read, _refuse)
