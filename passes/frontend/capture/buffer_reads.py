"""Let forward decide by values of buffers while it is traced, and remember which: no step may change these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import output_ports
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import TRACED, DataDependentOutputException, no_modes
from galvatron_fx.ir.traced_values import traced_value
from passes.frontend.replaced_functions import replaced

__all__ = ["BufferReads", "refuse_changed_reads"]

_MOST_ELEMENTS = 4096  # of a buffer whose values are remembered


@dataclass(frozen=True)
class _Known:
    """A traced tensor that is one of buffers, or by what it is made of them alone; ``names``: of the buffers."""

    tensor: Tensor
    traced: Tensor
    version: int
    names: tuple[str, ...]
    made_by: tuple[Any, Any, Any] | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written into it since."""
        return self.tensor._version == self.version and traced_value(self.tensor) is self.traced


class BufferReads(TorchFunctionMode):
    """In its scope ``if buffer:``, ``buffer.item()`` and the like give the value that the buffer has, where forward has
    not changed it before; also of what is computed of such buffers alone.

    ``traced``: the buffers as they are traced, by name, ``values``: as they are; ``reads``: takes what was read, as
    lists of numbers. Raises CaptureError for buffers on the meta device.
    """

    def __init__(self, traced: Mapping[str, Tensor], values: Mapping[str, Tensor], reads: dict[str, Any]) -> None:
        super().__init__()
        self._values, self._reads = values, reads
        self._known: dict[int, _Known] = {}
        for name, tensor in traced.items():
            if name in values and values[name].numel() <= _MOST_ELEMENTS:
                self._know(tensor, (name,))

    def __enter__(self) -> Any:
        self._lists = replaced([(kind, "tolist", self._lister(kind.tolist)) for kind in TRACED])  # no mode sees it
        self._lists.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._lists.__exit__(None, None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        sources = self._sources((args, kwargs))
        if not sources:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException as error:
            return self._read(func, args, kwargs, sources, error)
        names = tuple(dict.fromkeys(name for source in sources for name in source.names))
        if isinstance(result, (tuple, list)):
            for at, part in enumerate(result):
                self._note(part, names, (_item(func, at), args, kwargs))
        self._note(result, names, (func, args, kwargs))
        return result

    def _note(self, result: Any, names: tuple[str, ...], made_by: tuple[Any, Any, Any]) -> None:
        if isinstance(result, Tensor) and id(result) not in self._known:
            self._know(result, names, made_by)

    def _know(self, tensor: Tensor, names: tuple[str, ...], made_by: tuple[Any, Any, Any] | None = None) -> None:
        self._known[id(tensor)] = _Known(tensor, traced_value(tensor), tensor._version, names, made_by)

    def _sources(self, given: Any) -> list[_Known]:
        """What a call is given, if it is all known."""
        sources = []
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, Tensor):
                source = self._known.get(id(leaf))
                if source is None or not source.is_unchanged:
                    return []
                sources.append(source)
        return sources

    def _lister(self, tolist: Any) -> Any:
        def listed(tensor: Tensor) -> Any:
            try:
                return tolist(tensor)
            except DataDependentOutputException as error:
                sources = self._sources(tensor)
                if not sources:
                    raise
                return self._read(Tensor.tolist, (tensor,), {}, sources, error)

        return listed

    def _read(self, func: Any, args: Any, kwargs: Any, sources: list[_Known], error: Exception) -> Any:
        """What a call makes of the values that the buffers have; what draws random numbers is no such value."""
        names = dict.fromkeys(name for source in sources for name in source.names)
        for name in names:
            if self._values[name].device.type == "meta":
                raise CaptureError(
                    f"forward decides by the value of buffer '{name}', which has none on the meta device: make the "
                    f"model with its weights, or decide by a Python value"
                )
        with torch._C.DisableTorchFunction(), no_modes():
            before = torch.get_rng_state()
            result = func(*self._real(args), **self._real(kwargs))
            if not torch.equal(before, torch.get_rng_state()):
                torch.set_rng_state(before)
                raise error
            self._reads |= {name: self._values[name].tolist() for name in names}
        return result

    def _real(self, given: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._value, given)

    def _value(self, tensor: Tensor) -> Any:
        known = self._known[id(tensor)]
        if known.made_by is None:
            return self._values[known.names[0]]
        func, args, kwargs = known.made_by
        return func(*self._real(args), **self._real(kwargs))


def _item(func: Any, at: int) -> Any:
    return lambda *args, **kwargs: func(*args, **kwargs)[at]


def refuse_changed_reads(reads: Mapping[str, Any], graph: fx.GraphModule) -> None:
    """Raise CaptureError for a buffer that forward decides by, and changes."""
    for port, _ in output_ports(graph):
        if port.kind == "buffer" and port.name in reads:
            raise CaptureError(
                f"forward decides by the value of buffer '{port.name}' ({reads[port.name]}), and changes it: there is "
                f"no one graph of it. Where only the first step does (an initialisation by data), run the model once "
                f"before compile; else choose by torch.where, or decide outside of forward"
            )
