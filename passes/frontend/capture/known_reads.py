"""Let forward decide by values of buffers and inputs while it is traced, and remember which: these may not change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.metadata import output_ports
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import (
    TRACED,
    DataDependentOutputException,
    DynamicOutputShapeException,
    no_modes,
)
from galvatron_fx.ir.traced_values import traced_value
from passes.frontend.capture.trace_errors import calling_frame, described_frame
from passes.frontend.replaced_functions import replaced

__all__ = ["InputReads", "KnownReads", "refuse_changed_reads"]

_MOST_ELEMENTS = 4096  # of a buffer whose values are remembered
_MOST_OF_INPUT = 1024  # of an input: sizes of images and the like, and hardly a batch of token ids
_MAKERS = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class InputReads:
    """Integer inputs by whose values forward decides; ``allowed``: names of those of which it may.

    ``values``: of those that it read, as lists of numbers; ``lines``: where it did; ``refused``: names of inputs whose
    values it asked for and may not have.
    """

    def __init__(self) -> None:
        self.allowed: frozenset[str] = frozenset()
        self.values: dict[str, Any] = {}
        self.lines: dict[str, None] = {}
        self.refused: dict[str, None] = {}

    def allow_refused(self) -> bool:
        """Allow what was refused; False where that is nothing new."""
        new = self.refused.keys() - self.allowed
        self.allowed |= new
        self.values.clear()
        self.lines.clear()
        self.refused.clear()
        return bool(new)

    @staticmethod
    def may_read(given: Tensor) -> bool:
        """Whether an example input is one of which forward may be traced by its values."""
        has_values = given.device.type != "meta" and not isinstance(given, DTensor)
        return given.dtype in _INTEGERS and given.numel() <= _MOST_OF_INPUT and has_values


@dataclass(frozen=True)
class _Known:
    """A traced tensor that is a buffer or an input, or is made of such alone; ``names``: of these."""

    tensor: Tensor
    traced: Tensor
    version: int
    names: tuple[str, ...]
    made_by: tuple[Any, Any, Any] | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing was written into it since."""
        return self.tensor._version == self.version and traced_value(self.tensor) is self.traced


class KnownReads(TorchFunctionMode):
    """In its scope ``if buffer:``, ``buffer.item()`` and the like give the value that the buffer has, where forward has
    not changed it before; also of what is computed of such buffers alone. So do integer inputs of which ``inputs``
    allows it, and tensors as long as their values say (``x.repeat_interleave(sizes)``) are constants.

    ``traced``: the buffers as they are traced, by name, ``values``: as they are; ``reads``: takes what was read of
    buffers, as lists of numbers, and ``inputs`` what was read of inputs. Raises CaptureError for buffers on the meta
    device.
    """

    def __init__(
        self, traced: Mapping[str, Tensor], values: Mapping[str, Tensor], reads: dict[str, Any], inputs: InputReads
    ) -> None:
        super().__init__()
        self._values, self._reads, self._inputs = dict(values), reads, inputs
        self._known: dict[int, _Known] = {}
        self._input_names: dict[str, str] = {}
        for name, tensor in traced.items():
            if name in values and values[name].numel() <= _MOST_ELEMENTS:
                self._know(tensor, (name,))

    def add_input(self, name: str, traced: Tensor, given: Tensor) -> None:
        """Know an input by the values of the example, where it is traced at the shape of that."""
        if traced.shape == given.shape and InputReads.may_read(given) and id(traced) not in self._known:
            key = f"input {name}"  # no buffer is called so
            self._input_names[key] = name
            self._values[key] = given
            self._know(traced, (key,))

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
        if sources is None:
            return self._with_numbers(func, args, kwargs)
        if not sources and func not in _MAKERS:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException as error:
            return self._read(func, args, kwargs, sources, error)
        except DynamicOutputShapeException as error:
            inputs = self._of_inputs(sources)
            # Rows that a mask chooses are kept otherwise: nothing is asked for them.
            if not inputs or ("repeat_interleave" not in str(error) and not inputs <= self._inputs.allowed):
                raise
            result = self._constants(self._read(func, args, kwargs, sources, error))
        names = tuple(dict.fromkeys(name for source in sources for name in source.names))
        if isinstance(result, (tuple, list)):
            for at, part in enumerate(result):
                self._note(part, names, (_item(func, at), args, kwargs))
        self._note(result, names, (func, args, kwargs))
        return result

    def _with_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call with unknown tensors, too: where known ones are its sizes (``pad(x, (0, n))``), with their values."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException as error:
            failure = error
        read = []

        def number(tensor: Tensor) -> Any:
            sources = self._sources(tensor) if tensor.dim() == 0 else None
            if not sources:
                return tensor
            read.append(self._read(Tensor.item, (tensor,), {}, sources, failure))
            return read[-1]

        numbers, named = pytree.tree_map_only(Tensor, number, (args, kwargs))
        if not read:
            raise failure
        return func(*numbers, **named)

    def _note(self, result: Any, names: tuple[str, ...], made_by: tuple[Any, Any, Any]) -> None:
        if isinstance(result, Tensor) and id(result) not in self._known:
            self._know(result, names, made_by)

    def _know(self, tensor: Tensor, names: tuple[str, ...], made_by: tuple[Any, Any, Any] | None = None) -> None:
        self._known[id(tensor)] = _Known(tensor, traced_value(tensor), tensor._version, names, made_by)

    def _sources(self, given: Any) -> list[_Known] | None:
        """The tensors that a call is given, if all are known; else, and where it is told how to draw, None."""
        sources = []
        for leaf in pytree.tree_leaves(given):
            if isinstance(leaf, torch.Generator):
                return None
            if isinstance(leaf, Tensor):
                source = self._known.get(id(leaf))
                if source is None or not source.is_unchanged:
                    return None
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
        """What a call makes of the values that buffers and inputs have; what draws random numbers is no such value."""
        names = dict.fromkeys(name for source in sources for name in source.names)
        inputs = self._of_inputs(sources)
        refused = inputs - self._inputs.allowed
        if refused:
            self._inputs.refused |= dict.fromkeys(sorted(refused))
            raise error
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
            read = {name: self._values[name].tolist() for name in names}
        self._reads |= {name: value for name, value in read.items() if name not in self._input_names}
        if inputs:
            self._inputs.values |= {self._input_names[key]: read[key] for key in names if key in self._input_names}
            self._inputs.lines[described_frame(calling_frame())] = None
        return result

    def _of_inputs(self, sources: list[_Known]) -> set[str]:
        """The inputs among what a call is given, by name."""
        keys = {name for source in sources for name in source.names}
        return {self._input_names[key] for key in keys if key in self._input_names}

    @staticmethod
    def _constants(result: Any) -> Any:
        """Tensors of values that are known, as constants of the trace."""

        def constant(real: Tensor) -> Tensor:
            full = real.numel() > 0  # else a list says nothing of all dims
            return torch.tensor(real.tolist(), dtype=real.dtype) if full else torch.zeros(real.shape, dtype=real.dtype)

        return pytree.tree_map_only(Tensor, constant, result)

    def _real(self, given: Any) -> Any:
        return pytree.tree_map_only(Tensor, self._value, given)

    def _value(self, tensor: Tensor) -> Any:
        known = self._known[id(tensor)]
        if known.made_by is None:
            return self._values[known.names[0]].detach().cpu()
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
