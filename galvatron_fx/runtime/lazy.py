"""A module that is compiled at its first call, when the shapes of the batch are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Self

from torch import nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.batch_rows import unmarked
from galvatron_fx.runtime.module import DistributedGraphModule
from galvatron_fx.runtime.original_attributes import with_container_methods
from passes.frontend.capture.capture import FlatInputs

_OWN = vars(nn.Module()).keys() | {"_compile_now", "_switched_to"}


class LazyDistributedGraphModule(DistributedGraphModule):
    """Stands for a :class:`DistributedGraphModule` until the first call compiles it.

    Asking for parameters before then raises InputError: they are not placed yet.
    """

    def __init__(self, compiler: Callable[[FlatInputs], DistributedGraphModule], training: bool) -> None:
        nn.Module.__init__(self)
        self.training = training
        self.__dict__["_compile_now"] = compiler
        self.__dict__["_switched_to"] = None

    def train(self, mode: bool = True) -> Self:
        """As of any compiled module; before the first call, what holds from it on."""
        if "_compile_now" not in self.__dict__:
            return super().train(mode)
        self.training = mode
        self.__dict__["_switched_to"] = mode
        return self

    def _ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "_compile_now" not in self.__dict__:
            return
        flat, marked = unmarked(args, kwargs)
        if marked:
            raise InputError("own_rows: no rows are known before the model is compiled: pass example_inputs")
        compiled = self.__dict__["_compile_now"](flat)
        mode = self.__dict__["_switched_to"]
        hooks = {name: table for name, table in self.__dict__.items() if "_hooks" in name}
        given = {**self.__dict__, **self._parameters, **self._buffers, **self._modules}
        assigned = {name: value for name, value in given.items() if name not in hooks.keys() | _OWN}
        self.__dict__.clear()
        self.__dict__.update(compiled.__dict__ | hooks)
        with_container_methods(self, self._tree.twin)
        if mode is not None:
            self.train(mode)
        for name, value in assigned.items():
            setattr(self, name, value)

    def _refuse(self) -> None:
        if "_compile_now" in self.__dict__:
            raise InputError(
                "the parameters are not placed before the model is traced: pass example_inputs to "
                "galvatron_fx.compile, or run one batch first"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compile at the first call, then run; see :meth:`DistributedGraphModule.forward`."""
        self._ready(args, kwargs)
        return super().forward(*args, **kwargs)

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Compile at the first call, then run; see :meth:`DistributedGraphModule.forward_backward`."""
        self._ready(args, kwargs)
        return super().forward_backward(*args, **kwargs)

    @property
    def batch_rows(self) -> tuple[int, ...]:
        """As of any compiled module; InputError before."""
        self._refuse()
        return super().batch_rows

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As in any module, once compiled; InputError before."""
        self._refuse()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in any module, once compiled; InputError before."""
        self._refuse()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in any module, once compiled; InputError before."""
        self._refuse()
        return super().load_state_dict(*args, **kwargs)
