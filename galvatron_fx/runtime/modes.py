"""How the modules of a model are switched, and what their own ``train`` does beside: seen on a copy without weights."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from galvatron_fx.ir.errors import InputError
from passes.frontend.capture.module_state import Change, ModuleState, quoted

__all__ = ["Modes", "Switches", "mark"]


class Modes(NamedTuple):
    """Whether each module trains, and plain attributes that ``train`` has set otherwise, as text."""

    trained: tuple[bool, ...]
    attributes: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if len(set(self.trained)) == 1:
            mode = "train mode" if self.trained[0] else "eval mode"
        else:
            mode = f"train mode in {sum(self.trained)} modules ({mark(self.trained)})"
        return ", ".join([mode, *(f"{path} {value}" for path, value in self.attributes)])


def mark(flags: Sequence[bool]) -> str:
    """What tells unlike flags of one number apart."""
    return f"{zlib.crc32(bytes(flags)):x}"


class Switches:
    """Switches modules of ``twin``, a copy of the original without weights, whose ``train`` may be the user's own."""

    def __init__(self, twin: nn.Module) -> None:
        self._twin = twin
        self._at_first: dict[str, str] = {}
        self._set: dict[str, str] = {}

    @property
    def modes(self) -> Modes:
        """How modules are switched now."""
        return Modes(tuple(module.training for module in self._twin.modules()), tuple(sorted(self._set.items())))

    def train(self, module: nn.Module, mode: bool) -> dict[str, bool]:
        """Switch a module of the twin; what ``requires_grad`` its own ``train`` gives parameters, by name.

        Raises InputError, and leaves all as it was, where that changes weights or buffers: the compiled model's own
        would stay as they are.
        """
        state, flags = ModuleState(self._twin), self._flags()
        names = {name: tensor for name, tensor in [*self._twin.named_parameters(), *self._twin.named_buffers()]}
        with _Writes(names) as writes:
            module.train(mode)
        changes = [change for change in state.changes() if change.place.name != "training"]
        written = [*writes.names(), *(change.path for change in changes if _is_tensor(change))]
        if written:
            state.restore()
            raise InputError(
                f"{'train' if mode else 'eval'}() of {type(module).__name__} changes {quoted(written)}, as where "
                f"adapters are merged, and the compiled model keeps its own weights: merge before compile, or in a "
                f"model of its own that loads this one's state dict"
            )
        for change in changes:
            self._at_first.setdefault(change.path, repr(change.before))
            self._set[change.path] = repr(change.after)
            if self._set[change.path] == self._at_first[change.path]:
                del self._set[change.path]
        return {name: flag for name, flag in self._flags().items() if flag != flags[name]}

    def _flags(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._twin.named_parameters()}


def _is_tensor(change: Change) -> bool:
    """Whether a parameter, buffer, module or tensor was put in the place of another."""
    return bool(change.place.table) or isinstance(change.before, Tensor) or isinstance(change.after, Tensor)


class _Writes(TorchDispatchMode):
    """Sees which of some tensors are written into, also by way of ``.data``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self._storages = {_storage(tensor): name for name, tensor in tensors.items()}
        self._written: dict[str, None] = {}

    def names(self) -> list[str]:
        """The tensors that were written into, or have other memory now."""
        known = set(self._storages)
        moved = [name for name, tensor in self._tensors.items() if _storage(tensor) not in known]
        return list(self._written | dict.fromkeys(moved))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            value = given.get(argument.name)
            if argument.is_write and isinstance(value, Tensor) and _storage(value) in self._storages:
                self._written[self._storages[_storage(value)]] = None
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number
