"""What people put in place of a compiled model's own parts, where its program does not see it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.runtime.dtensor_views import local_part

__all__ = [
    "DecidingBuffers",
    "MemoryOfParameters",
    "refuse_assignment",
    "refuse_changed_output",
    "refuse_part",
]
__all__ += ["require_like"]

IN_PLACE = "write the values in place, as in 'with torch.no_grad(): parameter.copy_(values)'"


def refuse_assignment(model: nn.Module, original: nn.Module, name: str, value: Any) -> None:
    """Raise InputError for an attribute of a compiled ``model`` that its program would have to see.

    That are those of the ``original``, its ``forward``, and new parameters and modules; what else people keep on a
    model is theirs.
    """
    held = model._parameters.keys() | model._buffers.keys()
    is_known = name in held or name in model._modules or hasattr(original, name)
    if is_known or isinstance(value, (nn.Parameter, nn.Module)):
        remedy = IN_PLACE if name in held else "set it before compile, and compile again"
        raise InputError(
            f"'{name}' of a compiled model is assigned, and the compiled program does not see it: {remedy}"
        )


def refuse_part(name: str) -> NoReturn:
    """Raise InputError for a part of a compiled model that is taken away, or added."""
    raise InputError(f"'{name}' of a compiled model is added or deleted: change the model before compile")


def refuse_changed_output(made: Any, returned: Any) -> None:
    """Raise InputError where a forward hook has put another output in the place of what ``forward_backward`` made."""
    leaves = [pytree.tree_leaves(outputs) for outputs in (made, returned)]
    if len(leaves[0]) != len(leaves[1]) or any(one is not other for one, other in zip(*leaves, strict=True)):
        raise InputError(
            "a forward hook of the compiled model returns another output, after forward_backward has differentiated "
            "the loss: call the model and backward() on the loss that the hook returns, or return it from forward"
        )


def require_like(name: str, held: Tensor, given: Tensor) -> None:
    """Raise InputError where ``given``, which takes a parameter's place for one call, does not lie as ``held`` does."""
    lies = [(t.shape, t.dtype, getattr(t, "device_mesh", None), getattr(t, "placements", None)) for t in (held, given)]
    if lies[0] != lies[1]:
        raise InputError(
            f"'{name}' of a compiled model is replaced for a call (functional_call) by a tensor that does not lie as "
            f"it does: make it from the model's own parameter, or by distribute_tensor with its device_mesh and "
            f"placements"
        )


class DecidingBuffers:
    """Buffers by whose values forward decided while it was traced: read again where somebody wrote into them since."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[int, int, int]] = {}

    def require_kept(self, decided_by: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
        """Raise InputError, naming it, for one of ``buffers`` that has another value now; waits for the device where it
        may have.
        """
        for name, value in decided_by.items():
            if name not in buffers:
                continue
            local = local_part(buffers[name])
            seen = id(decided_by), id(local), local._version
            if self._read.get(name) == seen:
                continue
            if local.tolist() != value:
                raise InputError(
                    f"buffer '{name}' is {local.tolist()}, and forward decided by its value when it was compiled, "
                    f"which was {value}: change or load it before compile, and compile again"
                )
            self._read[name] = seen


class MemoryOfParameters:
    """Where parameters lie, so that ``parameter.data = values`` is noticed: torch drops it silently for DTensors."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._names = list(parameters)
        self._lies = _storages(parameters)

    def require_kept(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise InputError, naming it, for a parameter whose ``.data`` was assigned since."""
        now = _storages(parameters)
        if now != self._lies:
            name = next(n for n, is_, was in zip(self._names, now, self._lies, strict=True) if is_ != was)
            raise InputError(f"the .data of '{name}' was assigned, which has no effect on a DTensor: {IN_PLACE}")


def _storages(parameters: Mapping[str, Tensor]) -> list[int]:
    """What the wrapper of each DTensor lies in: it has no values, and is another one after an assignment."""
    return [p.untyped_storage()._cdata if isinstance(p, DTensor) else 0 for p in parameters.values()]
