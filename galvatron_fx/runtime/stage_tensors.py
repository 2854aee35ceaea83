"""Tensors of one pipeline stage, of which torch's utilities for a whole model would take a part for the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.dtensors import dtensor_like
from galvatron_fx.ir.torch_compat.tensors import plain_function, total_norm_functions

__all__ = [
    "StageTensor",
    "as_stage_tensor",
    "has_hooks_of_users",
    "in_stages",
    "mark_of_stage",
    "of_one_stage",
    "refuse_whole_model",
]


class StageTensor(DTensor):
    """A gradient or a value of a parameter of one stage; other ranks hold the other stages.

    It is a DTensor in all but what torch's ``get_total_norm`` and ``get_model_state_dict`` do to all tensors of a
    model: these raise InputError. What is computed from it is a plain DTensor.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in total_norm_functions():
            raise InputError(
                "under a plan with stages a rank holds the gradients of its own stages alone, and their norm is not "
                "that of the model: call model.clip_grad_norm_(max_norm) (of one gradient: gradient.full_tensor())"
            )
        return plain_function(func, args, kwargs or {})

    def redistribute(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse, as ``full_state_dict=True`` would return this rank's stages for the whole model."""
        raise InputError(
            "under a plan with stages a rank holds the state of its own stages alone, which cannot be gathered into a "
            "full state dict: use galvatron_fx.save_weights(model, folder) or a Checkpointer (of one tensor: "
            "full_tensor())"
        )

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor, gathered from the ranks of its stage."""
        whole: Tensor = dtensor_like(DTensor, self).full_tensor(grad_placements=grad_placements)
        return whole

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copy: DTensor = dtensor_like(DTensor, self).clone()
        return copy

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InputError(
            "under a plan with stages a rank's state dict is a part of the model, and torch.save would keep that "
            "alone: use galvatron_fx.save_weights(model, folder), a Checkpointer, or torch.distributed.checkpoint.save"
        )


def as_stage_tensor(tensor: DTensor) -> StageTensor:
    """The same memory as a tensor of one stage."""
    stage: StageTensor = dtensor_like(StageTensor, tensor)
    return stage


def of_one_stage(tensor: Tensor) -> Tensor:
    """The same memory as a plain DTensor, for what knows that it is of one stage."""
    plain: Tensor = dtensor_like(DTensor, tensor) if isinstance(tensor, StageTensor) else tensor
    return plain


def in_stages(state: Any) -> Any:
    """A nest of dicts with the DTensors in it as tensors of one stage."""
    if isinstance(state, DTensor):
        return as_stage_tensor(state)
    return {key: in_stages(value) for key, value in state.items()} if isinstance(state, dict) else state


def mark_of_stage(parameter: Tensor) -> None:
    """Say that other ranks hold other parameters of the model, and that its gradients are of one stage."""
    parameter.of_one_stage = True  # type: ignore[attr-defined]
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(_mark_gradient)


def has_hooks_of_users(parameter: Tensor) -> bool:
    """Whether a parameter has hooks beside the one of :func:`mark_of_stage`."""
    after = parameter._post_accumulate_grad_hooks or {}
    return bool(parameter._backward_hooks) or any(hook is not _mark_gradient for hook in after.values())


def _mark_gradient(parameter: Tensor) -> None:
    """What ``backward()`` puts into ``.grad`` is a plain DTensor."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and not isinstance(gradient, StageTensor):
        parameter.grad = as_stage_tensor(gradient)


def refuse_whole_model(optimizer: Optimizer) -> None:
    """Let the states of an optimizer of stages be told from those of a whole model, from its first step on.

    Raises InputError for one whose update of a parameter depends on the others.
    """
    is_of_stage = _is_of_stage(optimizer)
    if is_of_stage and isinstance(optimizer, LBFGS):
        raise InputError(
            "LBFGS takes products over all parameters, and under a plan with stages a rank holds those of its own "
            "stages alone: compile without stages (num_stages=1), or train with another optimizer"
        )
    if is_of_stage and _marked not in optimizer._optimizer_state_dict_post_hooks.values():
        optimizer.register_state_dict_post_hook(_marked)


def _is_of_stage(optimizer: Optimizer) -> bool:
    first = (parameter for group in optimizer.param_groups for parameter in group["params"][:1])
    return any(hasattr(parameter, "of_one_stage") for parameter in first)


def _marked(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    if not _is_of_stage(optimizer):  # any more
        return state_dict
    return {**state_dict, "state": in_stages(state_dict["state"])}
