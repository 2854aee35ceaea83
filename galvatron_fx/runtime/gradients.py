"""What happens to a gradient that a program returns: the hooks of its parameter, and the sum with what is there."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.dtensor_operators import NOT_SCALED
from galvatron_fx.runtime.dtensor_views import lie_like, local_part
from galvatron_fx.runtime.host_parameters import gradient_on_host, is_on_host
from galvatron_fx.runtime.stage_tensors import as_stage_tensor

__all__ = ["accumulate"]


def accumulate(name: str, parameter: Tensor, local: Tensor) -> None:
    """Add a rank's part of a gradient to ``parameter.grad``, as ``backward()`` would.

    Hooks of the parameter are called with the gradient of the whole step. Raises InputError where what is in ``.grad``
    does not lie as the parameter does.
    """
    hooks = parameter._backward_hooks
    if hooks:
        local = _hooked(name, parameter, gradient_of(parameter, local), list(hooks.values()))
    held = parameter.grad
    if held is None:
        parameter.grad = gradient_of(parameter, local)
        setattr(parameter.grad, NOT_SCALED, True)
    else:
        _refuse_others(name, parameter, held)
        local_part(held).add_(local)
    after = parameter._post_accumulate_grad_hooks
    if after:
        for hook in list(after.values()):
            hook(parameter)


def gradient_of(parameter: Tensor, local: Tensor) -> Tensor:
    """A local gradient as it is shown: as its parameter lies, and marked where it is of one stage."""
    is_there = is_on_host(parameter) and local.device != local_part(parameter).device
    gradient = gradient_on_host(parameter, local) if is_there else lie_like(parameter, local)
    if hasattr(parameter, "of_one_stage") and isinstance(gradient, DTensor):
        return as_stage_tensor(gradient)
    return gradient


def _hooked(name: str, parameter: Tensor, gradient: Tensor, hooks: list[object]) -> Tensor:
    """The local part of what hooks make of a gradient."""
    for hook in hooks:
        result = hook(gradient)  # type: ignore[operator]
        if result is not None:
            _refuse_others(name, parameter, result)
            gradient = result
    return local_part(gradient)


def _refuse_others(name: str, parameter: Tensor, gradient: Tensor) -> None:
    if not isinstance(parameter, DTensor):
        return
    places = gradient.placements if isinstance(gradient, DTensor) else "no placements (it is a plain tensor)"
    if places != parameter.placements:
        raise InputError(
            f"the gradient of '{name}' has {places}, and the parameter {parameter.placements}: make what is put there "
            f"of the gradient itself, or as torch.zeros_like(parameter)"
        )
