"""The loss of a step whose backward ran with its forward: ``backward()`` scales gradients and hands them over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.torch_compat.dtensors import whole_tensor
from galvatron_fx.ir.torch_compat.tensors import keeps_graph, scale_all
from galvatron_fx.runtime.backward_refusals import refuse_higher_orders, refuse_second_backward
from galvatron_fx.runtime.gradients import gradient_of
from galvatron_fx.runtime.untraced import untraced

__all__ = ["Differentiated", "scheduled_loss"]


@dataclass(frozen=True)
class Differentiated:
    """A step that has run.

    ``loss``: without dims; ``gradients``: this rank's part of the loss's gradients, by name of parameter;
    ``require_kept``: raises InputError where what backward has read was changed since.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor]
    require_kept: Callable[[], None]


def scheduled_loss(step: Differentiated, names: Sequence[str], parameters: Sequence[Tensor]) -> Tensor:
    """Return the step's loss, of which the ``parameters`` called ``names`` get their gradients in ``backward()``.

    The loss needs a gradient also where this rank trains no parameter, as every rank calls ``backward()``.
    """
    loss: Tensor = _ScheduledLoss.apply(step, names, torch.empty(0, requires_grad=True), *parameters)
    return loss


class _ScheduledLoss(torch.autograd.Function):
    """All gradients are linear in that of the loss, whatever is made of the loss outside."""

    @staticmethod
    def forward(ctx: Any, step: Differentiated, names: Sequence[str], anchor: Tensor, *parameters: Tensor) -> Tensor:
        ctx.step, ctx.names, ctx.parameters = step, names, parameters
        return step.loss.clone()

    @staticmethod
    @untraced
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_backward(ctx.step is None)
        refuse_higher_orders()
        step: Differentiated = ctx.step
        step.require_kept()
        gradients = dict(step.gradients)
        if keeps_graph():
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        else:
            ctx.step = None
        (tangent,) = tangents
        _scale(gradients.values(), whole_tensor(tangent))  # of a DTensor where penalties on parameters are added
        handed = (
            gradient_of(parameter, gradients[name]) if name in gradients else None
            for name, parameter in zip(ctx.names, ctx.parameters, strict=True)
        )
        return (None, None, None, *handed)


def _scale(gradients: Collection[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, unless by a one that can be read for free."""
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    for dtype in {gradient.dtype for gradient in gradients}:
        scale_all([gradient for gradient in gradients if gradient.dtype == dtype], factor.to(dtype))
