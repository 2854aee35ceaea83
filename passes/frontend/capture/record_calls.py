"""Record a forward run on fake tensors: every operator, what it is wired to, and the module call that made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.modules.module as module_hooks
from torch import Tensor, nn

from galvatron_fx.ir.torch_compat.tracing import FakeTensor, TorchDispatchMode, constant_value, is_custom_backward
from passes.frontend.capture.flat_inputs import flatten

_MOST_CONSTANTS = 64  # elements of a tensor written out in the model's code that are compared by value
_HOLE = "tensor"


@dataclass(frozen=True)
class RecordedOp:
    """One operator call; tensors are numbers, and ``key`` is all the rest: target, constants, sizes, grad mode.

    ``writes``: the numbers of the tensors that it changes in place.
    """

    key: int
    module: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    writes: tuple[int, ...] = ()


@dataclass
class RecordedCall:
    """One call of a module: operators ``start <= i < end`` ran inside; tensors among the leaves are numbers."""

    name: str
    module: nn.Module
    start: int
    end: int = -1
    args: tuple[Any, ...] = ()
    outputs: tuple[Any, ...] = ()
    output_tree: Any = None
    children: list[RecordedCall] = field(default_factory=list)


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments or results of a call, by its number."""

    number: int


class CallRecorder(TorchDispatchMode):
    """Numbers every tensor that it sees by identity, and keeps the operators and module calls of a run in order.

    ``made``, ``first_use`` and ``last_use`` give the position of the operator that made or took a tensor (made -1:
    a parameter, an input or another tensor from outside); ``born`` that of the operator that allocated its memory.
    """

    def __init__(self, root: nn.Module, keys: dict[Any, int]) -> None:
        """``keys`` numbers what operators do; runs that share it can be compared."""
        super().__init__()
        self.ops: list[RecordedOp] = []
        self.root = RecordedCall("", root, 0)
        self.tensors: list[Tensor] = []
        self.made: list[int] = []
        self.storage: list[int] = []
        self.born: dict[int, int] = {}
        self.first_use: dict[int, int] = {}
        self.last_use: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._keys = keys
        self._open = [self.root]
        self._names = {id(module): name for name, module in root.named_modules()}

    def number(self, tensor: Tensor) -> int:
        """The number of ``tensor``, which is kept alive so that no other takes its identity."""
        number = self._numbers.get(id(tensor))
        if number is None:
            number = self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.made.append(-1)
            self.storage.append(_storage(tensor))
            self.born.setdefault(self.storage[-1], -1)
        return number

    def is_inside(self, number: int, call: RecordedCall) -> bool:
        """Tell whether an operator of ``call`` made the tensor."""
        return call.start <= self.made[number] < call.end

    @property
    def has_custom_backward(self) -> bool:
        """Whether the backward pass holds code that the recorded operators do not show: user functions and hooks."""
        if any(tensor._backward_hooks for tensor in self.tensors):
            return True
        results = [self.tensors[leaf.number] for leaf in self.root.outputs if isinstance(leaf, Leaf)]
        pending = [result.grad_fn for result in results if result.grad_fn is not None]
        seen = set(pending)
        while pending:
            function = pending.pop()
            if is_custom_backward(function):
                return True
            for source, _ in function.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    pending.append(source)
        return False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside; afterwards ``root`` is the call tree and its outputs are those of the model."""
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, with_kwargs=True),
        ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()
        self.root = self.root.children[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked most of all; the way through the modes below takes longest
        result = func(*args, **(kwargs or {}))
        position = len(self.ops)
        inputs: list[int] = []
        constants = (self._frozen(args, inputs), self._frozen(kwargs or {}, inputs))
        outputs = [self.number(leaf) for leaf in _tensors(result)]
        if not outputs and not func._schema.is_mutable:  # a question about a device or a size
            return result
        for number in inputs:
            self.first_use.setdefault(number, position)
            self.last_use[number] = position
        for number in outputs:
            if self.made[number] < 0 and number not in inputs:
                self.made[number] = position
                if self.storage[number] not in {self.storage[source] for source in inputs}:
                    self.born[self.storage[number]] = position
        sizes = tuple((tuple(self.tensors[n].shape), self.tensors[n].dtype) for n in outputs)
        key = (func, constants, sizes, torch.is_grad_enabled())
        self.ops.append(
            RecordedOp(
                self._keys.setdefault(key, len(self._keys)),
                self._open[-1].name,
                tuple(inputs),
                tuple(outputs),
                tuple(self.number(leaf) for leaf in _written(func, args, kwargs or {})),
            )
        )
        return result

    def _frozen(self, value: Any, inputs: list[int]) -> Any:
        """``value`` as a key with holes for tensors, whose numbers are appended to ``inputs``."""
        if isinstance(value, Tensor):
            text = constant_value(value, _MOST_CONSTANTS)
            if text is not None:
                return (str(value.dtype), tuple(value.shape), text)
            inputs.append(self.number(value))
            return _HOLE
        if isinstance(value, (list, tuple)):
            return tuple([self._frozen(item, inputs) for item in value])
        if isinstance(value, dict):
            return tuple([(key, self._frozen(item, inputs)) for key, item in sorted(value.items())])
        return (value.__class__, repr(value) if isinstance(value, float) else value)

    def _enter(self, module: nn.Module, args: Any) -> None:
        call = RecordedCall(self._names.get(id(module), ""), module, len(self.ops))
        self._open[-1].children.append(call)
        self._open.append(call)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open.pop()
        call.end = len(self.ops)
        leaves, call.output_tree = flatten(output)
        call.args = tuple(self._leaf(leaf) for leaf in flatten((args, kwargs))[0])
        call.outputs = tuple(self._leaf(leaf) for leaf in leaves)

    def _leaf(self, leaf: Any) -> Any:
        return Leaf(self.number(leaf)) if isinstance(leaf, Tensor) else leaf


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, (list, tuple)):
        return [tensor for item in result for tensor in _tensors(item)]
    return []


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Position and name of the arguments that an operator changes in place."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    values = [args[at] if at < len(args) else kwargs.get(name) for at, name in _written_arguments(func)]
    return [tensor for value in values for tensor in _tensors(value)]


def _storage(tensor: Tensor) -> int:
    """What says whose memory a tensor is in; the tensor itself where it has none, inside of torch.func's transforms."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)
