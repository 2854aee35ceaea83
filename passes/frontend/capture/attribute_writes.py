"""See what a forward writes in place into tensors that a trace takes for constants, and write ``.data`` as copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.torch_compat.tensors import pytree
from passes.frontend.capture.aliases import View
from passes.frontend.capture.trace_again import StateWritten

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SET_ITEM = torch.Tensor.__setitem__


class AttributeWrites(TorchFunctionMode):
    """Stops a trace at a write into one of ``constants`` (tensors by name), which would change it for good, and at a
    use of one of ``views`` of trained weights, which would stay as it is.

    ``x.data = y`` is not seen by a trace, so it is done as a copy into ``x``. ``viewed``: views of other weights that
    were used. With ``copies`` the forward gets copies of constants, and what it makes of them may be written into: a
    trace does not follow writes into other results of constants. Raises StateWritten, and CaptureError for views and
    where ``y`` has another shape or dtype than ``x``.
    """

    def __init__(self, constants: Mapping[str, Tensor], views: Sequence[View] = (), copies: bool = False) -> None:
        super().__init__()
        self._copies: dict[int, Tensor] | None = {} if copies else None
        self._names = {id(tensor): name for name, tensor in constants.items()}
        self._views = {id(view.tensor): view for view in views}
        self.viewed: list[View] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _SET_DATA or func == _SET_DATA:
            return _copy_data(*args)
        if self._views:
            for value in (*args, *kwargs.values()):
                for part in value if isinstance(value, (list, tuple)) else (value,):
                    self._read(part)
        if self._names and args:
            name = getattr(func, "__name__", "")
            if (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or func is _SET_ITEM:
                self._note(args[0])
            if kwargs.get("out") is not None:
                for tensor in kwargs["out"] if isinstance(kwargs["out"], tuple) else (kwargs["out"],):
                    self._note(tensor)
        if self._copies is not None and func.__name__ != "__get__":
            args, kwargs = pytree.tree_map_only(Tensor, self._copy, (args, kwargs))
        return func(*args, **kwargs)

    def _copy(self, tensor: Tensor) -> Tensor:
        """A constant as a tensor that was made in the trace; others as they are."""
        name = self._names.get(id(tensor))
        if name is None or self._copies is None or any(tensor is copy for copy in self._copies.values()):
            return tensor
        if id(tensor) not in self._copies:
            copy = torch.ops.aten.lift_fresh.default(tensor)
            self._copies[id(tensor)], self._names[id(copy)] = copy, name
        return self._copies[id(tensor)]

    def _read(self, value: Any) -> None:
        view = self._views.get(id(value))
        if view is None:
            return
        if view.is_trained:
            refuse_view(view)
        self.viewed.append(view)

    def _note(self, tensor: Any) -> None:
        if not isinstance(tensor, Tensor):
            return
        for part in (tensor, tensor._base):
            if part is not None and id(part) in self._names:
                raise StateWritten([self._names[id(part)]])


def refuse_view(view: View) -> NoReturn:
    """Raise CaptureError for a view of a weight that steps change."""
    raise CaptureError(
        f"forward uses '{view.path}', which shares memory with '{view.weight}' and would stay as it is while steps "
        f"change '{view.weight}': reach that as an attribute of its module, and make views of it in forward"
    )


def _copy_data(tensor: Tensor, value: Tensor) -> None:
    if value is tensor:  # as casts of modules to the dtype that they have
        return
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        raise CaptureError(
            f"forward sets .data of a tensor of shape {tuple(tensor.shape)} ({tensor.dtype}) to one of shape "
            f"{tuple(value.shape)} ({value.dtype}): make a new tensor instead, or, where it casts a module "
            f"(self.layer.to(dtype)), cast that before compile"
        )
    with torch.no_grad():
        tensor.detach().copy_(value)
