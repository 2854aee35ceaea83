"""Let forward decide by values of buffers and inputs while it is traced, and remember which: these may not change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.graph.decisions import Computation, Decision, Given, Made, Step, plain
from galvatron_fx.ir.graph.metadata import output_ports
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.ir.torch_compat.tracing import (
    TRACED,
    DataDependentOutputException,
    DynamicOutputShapeException,
    no_modes,
)
from galvatron_fx.ir.traced_values import traced_value
from passes.frontend.capture.input_reads import InputReads, at_sizes, has_values
from passes.frontend.capture.trace_again import RowsOfAll
from passes.frontend.capture.trace_errors import calling_frame, described_frame
from passes.frontend.chosen_rows.functions import base_name, is_in_place
from passes.frontend.replaced_functions import replaced

__all__ = ["KnownReads", "refuse_changed_reads"]

_MOST_OF_BUFFER = 4096  # elements, whose values are remembered
_MOST_ELEMENTS = 2**16  # of a tensor that is as long as values of inputs say
_MOST_NUMBERS = 1024  # that are read of inputs: sizes of images and the like, and hardly a batch of token ids
_READS = ("bool", "complex", "contains", "equal", "float", "format", "index", "int", "item", "tolist")
_CHOOSE = ("combinations",)
_NOT_EACH = -1  # in the place of a number of rows
_MAKERS = (torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros)


@dataclass(frozen=True)
class _Known:
    """A traced tensor that is a buffer or an input, or is made of such alone; ``names``: of these.

    ``place``: the call that made it, and which part of that it is; None for buffers and inputs themselves.
    """

    tensor: Tensor
    traced: Tensor
    version: int
    names: tuple[str, ...]
    place: Made | None = None

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing that is not known was written into it since."""
        return self.tensor._version == self.version and traced_value(self.tensor) is self.traced


@dataclass(frozen=True)
class _Call:
    """A call on known tensors alone; ``names``: of the buffers and inputs that these are made of."""

    step: Step
    names: frozenset[str]


class KnownReads(TorchFunctionMode):
    """In its scope ``if buffer:``, ``buffer.item()`` and the like give the value that the buffer has, where forward has
    not changed it before; also of what is computed of such buffers alone. So do inputs of which ``inputs`` allows it,
    and tensors as long as their values say (``x.repeat_interleave(sizes)``) are constants. Of inputs of
    floating-point numbers, which are others in every batch, code may know counts alone.

    ``traced``: the buffers as they are traced, by name, ``values``: as they are; ``reads``: takes what was read of
    buffers, as lists of numbers, and ``inputs`` what was decided by inputs. Raises CaptureError for buffers on the
    meta device.
    """

    def __init__(
        self, traced: Mapping[str, Tensor], values: Mapping[str, Tensor], reads: dict[str, Any], inputs: InputReads
    ) -> None:
        super().__init__()
        self._values, self._reads, self._inputs = dict(values), reads, inputs
        self._known: dict[int, _Known] = {}
        self._calls: list[_Call] = []
        self._input_names: dict[str, str] = {}
        self._is_example = True
        for name, tensor in traced.items():
            if name in values and values[name].numel() <= _MOST_OF_BUFFER:
                self._know(tensor, (name,))

    def add_input(self, name: str, traced: Tensor, given: Tensor) -> None:
        """Know an input by the values of the example, which it repeats where it is traced at other sizes."""
        is_cast = traced.dtype != given.dtype  # to a narrower one, in which it has other values
        if not has_values(given) or is_cast or traced.dim() != given.dim() or id(traced) in self._known:
            return
        key = f"input {name}"  # no buffer is called so
        self._is_example = self._is_example and traced.shape == given.shape
        self._input_names[key] = name
        with torch._C.DisableTorchFunction(), no_modes():
            self._values[key] = at_sizes(given, traced.shape)
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
        if base_name(func) == "expand_as":
            func, args = Tensor.expand, (args[0], args[1].shape)
        sources = self._sources((args, kwargs))
        if sources is None:
            return self._mixed(func, args, kwargs)
        if not sources and func not in _MAKERS:
            return func(*args, **kwargs)
        if func is torch.tensor and sources and not isinstance(args[0] if args else kwargs["data"], Tensor):
            # Made of the numbers that tensors in a list hold, which torch takes from memory.
            return self._constants(self._read(func, args, kwargs, sources, _reads_values()))
        writes = is_in_place(func)
        known = [each for each in self._known.values() if each.is_unchanged] if writes else []
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException as error:
            if base_name(func) in _READS:
                return self._read(func, args, kwargs, sources, error)
            args, kwargs = self._with_numbers(args, kwargs, error)
            result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            # Rows that a mask chooses are kept otherwise, but where a function chooses its own: nothing is asked for.
            if base_name(func) not in _CHOOSE and ("nonzero" in str(error) or "masked_select" in str(error)):
                raise
            result = self._constants(self._read(func, args, kwargs, sources, error))
        names = tuple(dict.fromkeys(name for source in sources for name in source.names))
        noted = self._at_any_batch(args) if base_name(func) == "expand" else args
        given = pytree.tree_map(lambda leaf: leaf, (tuple(noted), dict(kwargs)))  # lists may grow later
        self._calls.append(_Call(Step(func, given[0], given[1], writes), frozenset(names)))
        for each in known:
            if not each.is_unchanged and self._input_names.keys() >= set(each.names):  # buffers may not change
                self._know(each.tensor, tuple(dict.fromkeys((*each.names, *names))), each.place)
        parts = enumerate(result) if isinstance(result, (tuple, list)) else [(None, result)]
        for part, tensor in parts:
            if isinstance(tensor, Tensor) and id(tensor) not in self._known:
                self._know(tensor, names, Made(len(self._calls) - 1, part))
        return result

    def _mixed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call on what is known and what is not: tensors that it takes for numbers (sizes) are among the known."""
        try:
            return func(*args, **kwargs)
        except DataDependentOutputException as error:
            args, kwargs = self._with_numbers(args, kwargs, error)
            return func(*args, **kwargs)

    def _with_numbers(self, args: Any, kwargs: Any, error: Exception) -> tuple[Any, Any]:
        """Arguments with numbers in the place of known tensors that are taken for such, bounds of slices too."""
        read = []

        def number(leaf: Any) -> Any:
            if isinstance(leaf, slice):
                return slice(number(leaf.start), number(leaf.stop), number(leaf.step))
            if not self._is_number(leaf):
                return leaf
            read.append(self._read(Tensor.item, (leaf,), {}, [self._known[id(leaf)]], error))
            return read[-1]

        args, kwargs = pytree.tree_map(number, (tuple(args), kwargs))
        if not read:
            raise error
        return args, kwargs

    def _is_number(self, leaf: Any) -> bool:
        is_scalar = isinstance(leaf, Tensor) and leaf.dim() == 0 and not leaf.is_floating_point()
        return is_scalar and self._sources(leaf) is not None

    def _know(self, tensor: Tensor, names: tuple[str, ...], place: Made | None = None) -> None:
        self._known[id(tensor)] = _Known(tensor, traced_value(tensor), tensor._version, names, place)

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
        @wraps(tolist)  # modes go by its name
        def listed(tensor: Tensor) -> Any:
            sources = self._sources(tensor)  # torch would ask for one number after another
            return self._read(Tensor.tolist, (tensor,), {}, sources, _reads_values()) if sources else tolist(tensor)

        return listed

    def _read(self, func: Any, args: Any, kwargs: Any, sources: list[_Known], error: Exception) -> Any:
        """What a call makes of the values that buffers and inputs have; what draws random numbers is no such value."""
        names = dict.fromkeys(name for source in sources for name in source.names)
        inputs = self._of_inputs(sources)
        refused = inputs - self._inputs.may_read.inputs
        if refused:
            self._inputs.refused |= dict.fromkeys(sorted(refused))
            raise error
        line = described_frame(calling_frame())
        if inputs and not self._is_example:
            return self._inputs.again(line)
        for name in names:
            if self._values[name].device.type == "meta":
                raise CaptureError(
                    f"forward decides by the value of buffer '{name}', which has none on the meta device: make the "
                    f"model with its weights, or decide by a Python value"
                )
        computation = self._computation(func, args, kwargs)
        result = self._computed(computation)
        if result is None or (inputs and not self._may_decide(result, (args, kwargs), names)):
            raise error
        self._reads |= {name: self._values[name].tolist() for name in names if name not in self._input_names}
        if inputs:
            self._inputs.note(line, result)
            self._inputs.decisions.append(Decision(computation, plain(result), "number", line))
        return result

    def _may_decide(self, result: Any, read: Any, names: Collection[str]) -> bool:
        """Whether what was made of tensors may be a value of the program: of floating-point inputs, counts alone."""
        dtypes = {leaf.dtype for leaf in pytree.tree_leaves(read) if isinstance(leaf, Tensor)}
        if self._of_floats(names) and any(dtype == torch.bool or dtype.is_floating_point for dtype in dtypes):
            return False
        most = _MOST_ELEMENTS if isinstance(result, Tensor) else _MOST_NUMBERS
        return len(pytree.tree_leaves(plain(result))) <= most

    def _of_floats(self, names: Collection[str]) -> bool:
        return any(self._values[name].is_floating_point() for name in names)

    def refutes(self, check: Tensor) -> bool:
        """Whether a check of what is known is false of the example inputs."""
        return self._is_example and self.knows_mask(check) and self.value(torch.all, check) is False

    # ---- masks of inputs ----

    def knows_mask(self, mask: Tensor) -> bool:
        """Whether a mask is made of inputs and constants alone."""
        sources = self._sources(mask)
        return sources is not None and all(self._input_names.keys() >= set(source.names) for source in sources)

    def value(self, function: Any, mask: Tensor) -> Any:
        """What ``function`` makes of the values of a mask that is known, or None of one that is drawn."""
        return plain(self._computed(self._computation(function, (mask,), {})))

    def decide_rows(self, function: Any, mask: Tensor, rows: Any) -> None:
        """Trace rows that a mask chooses by what ``function`` says of it; ``rows``: how it chooses, at any sizes, or
        None where that is not known.

        A mask of floating-point inputs may come out otherwise on the device, by rounding: it is checked there, too.
        """
        line = described_frame(calling_frame())
        if not self._is_example and self._inputs.again(line) != rows:
            raise CaptureError(f"a mask chooses rows otherwise at other sizes: {line}")
        if self._is_example:
            self._inputs.note(line, rows)
            computation = self._computation(function, (mask,), {})
            if computation.inputs:
                self._inputs.decisions.append(Decision(computation, plain(self._computed(computation)), "rows", line))
        if self.is_of_floats(mask):
            value = torch.tensor(self.value(function, mask))
            torch._check_tensor_all(torch.stack(pytree.tree_leaves(function(mask))) == value)

    def is_of_floats(self, mask: Tensor) -> bool:
        """Whether a mask is made of inputs of floating-point numbers, by whose values nothing but counts is decided."""
        return self._of_floats({name for source in self._sources(mask) or () for name in source.names})

    def chooses_of_each(self, mask: Tensor, count: float) -> bool:
        """Whether a mask of inputs ``[samples, places]`` chooses ``count`` places of each sample, which is held against
        those of every call; False where inputs decide other things as well: then samples are not told apart.
        """
        noted = self._count_of_each(mask, lambda found: found == count)
        if noted not in (None, count):
            raise RowsOfAll(f"a mask chooses {count:g} places of a sample in place of {noted:g}")
        return noted is not None

    def count_of_each(self, mask: Tensor) -> int | None:
        """How many places a mask of inputs ``[samples, places]`` chooses of each sample, likewise; None where it
        chooses more of one than of another, and where samples are not told apart.
        """
        return self._count_of_each(mask, lambda found: True)

    def _count_of_each(self, mask: Tensor, suits: Callable[[int], bool]) -> int | None:
        if not self._inputs.may_tell_samples_apart or self._inputs.may_read.inputs:
            return None
        if not self.knows_mask(mask) or self.is_of_floats(mask):
            return None
        line = described_frame(calling_frame())
        if not self._is_example:
            noted: int = self._inputs.again(line)
            return noted if noted >= 0 else None
        computation = self._computation(least_and_most, (mask,), {})
        counts = plain(self._computed(computation))
        is_known = bool(computation.inputs) and counts is not None and counts[0] == counts[1] and suits(counts[0])
        self._inputs.note(line, counts[0] if is_known else _NOT_EACH)
        if is_known:
            kind: Literal["each", "rows"] = "each" if computation.is_by_sample else "rows"
            self._inputs.decisions.append(Decision(computation, counts, kind, line))
        return counts[0] if is_known else None

    # ---- values ----

    def _of_inputs(self, sources: list[_Known]) -> set[str]:
        """The inputs among what a call is given, by name."""
        keys = {name for source in sources for name in source.names}
        return {self._input_names[key] for key in keys if key in self._input_names}

    @staticmethod
    def _at_any_batch(args: Any) -> Any:
        """Arguments of ``expand`` that keep the dims that stay as they are, whichever size they have."""
        tensor, *rest = args
        sizes = rest[0] if rest and isinstance(rest[0], (tuple, list)) else rest
        if not sizes or any(isinstance(size, Tensor) for size in sizes):
            return args
        new = len(sizes) - tensor.dim()
        pairs = zip(sizes[new:], tensor.shape, strict=True)
        return tensor, (*sizes[:new], *(-1 if size == now else size for size, now in pairs))

    @staticmethod
    def _constants(result: Any) -> Any:
        """Tensors of values that are known, as constants of the trace."""

        def constant(real: Tensor) -> Tensor:
            full = real.numel() > 0  # else a list says nothing of all dims
            return torch.tensor(real.tolist(), dtype=real.dtype) if full else torch.zeros(real.shape, dtype=real.dtype)

        return pytree.tree_map_only(Tensor, constant, result)

    def _computation(self, func: Any, args: Any, kwargs: Any) -> Computation:
        """The calls that make what ``func`` is given, those that write into what has the same names, and it itself."""
        names = {name for source in self._sources((args, kwargs)) or () for name in source.names}
        writes = [at for at, call in enumerate(self._calls) if call.step.writes]
        pending = [at for at in writes if not self._calls[at].names or self._calls[at].names & names]
        pending += self._made((args, kwargs))
        wanted: set[int] = set()
        while pending:
            at = pending.pop()
            if at not in wanted:
                wanted.add(at)
                step = self._calls[at].step
                pending += self._made((step.args, step.kwargs))
        number = {at: position for position, at in enumerate(sorted(wanted))}
        constants: dict[str, Tensor] = {}

        def place(tensor: Tensor) -> Any:
            known = self._known[id(tensor)]
            if known.place is not None:
                return Made(number[known.place.step], known.place.part)
            name = known.names[0]
            if name in self._input_names:
                return Given(self._input_names[name])
            with torch._C.DisableTorchFunction(), no_modes():
                return constants.setdefault(name, self._values[name].detach().cpu())

        steps = (*(self._calls[at].step for at in number), Step(func, tuple(args), dict(kwargs)))
        placed = (pytree.tree_map_only(Tensor, place, (step.args, dict(step.kwargs))) for step in steps)
        return Computation(tuple(replace(step, args=a, kwargs=k) for step, (a, k) in zip(steps, placed, strict=True)))

    def _made(self, given: Any) -> list[int]:
        """The calls that made the tensors among what a call is given."""
        places = (self._known[id(leaf)].place for leaf in pytree.tree_leaves(given) if isinstance(leaf, Tensor))
        return [place.step for place in places if place is not None]

    def _computed(self, computation: Computation) -> Any:
        """Its value of the example; None where it draws random numbers."""
        inputs = {name: self._values[key] for key, name in self._input_names.items()}
        with torch._C.DisableTorchFunction(), no_modes():
            before = torch.get_rng_state()
            result = computation.of(inputs)
            if torch.equal(before, torch.get_rng_state()):
                return result
            torch.set_rng_state(before)
            return None


def least_and_most(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the most places that a mask chooses of a row."""
    counts = mask.sum(-1)
    return counts.min(), counts.max()


def _reads_values() -> DataDependentOutputException:
    return DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)


def refuse_changed_reads(reads: Mapping[str, Any], graph: fx.GraphModule) -> None:
    """Raise CaptureError for a buffer that forward decides by, and changes."""
    for port, _ in output_ports(graph):
        if port.kind == "buffer" and port.name in reads:
            raise CaptureError(
                f"forward decides by the value of buffer '{port.name}' ({reads[port.name]}), and changes it: there is "
                f"no one graph of it. Where only the first step does (an initialisation by data), run the model once "
                f"before compile; else choose by torch.where, or decide outside of forward"
            )
