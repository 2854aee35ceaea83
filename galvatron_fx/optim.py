"""Optimizers of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.dtensor_views import local_part

__all__ = ["AdamA"]


class AdamA(Optimizer):
    """Adam whose states take up each micro-batch's gradient, so that no sum of gradients is kept (Zhang et al. 2023,
    Adam Accumulation, algorithm 2). It is another optimizer than Adam.

    With g_i the gradient of micro-batch i of N, over N: m = beta1 m + (1 - beta1) sum_i g_i, as Adam's, and
    v = beta2 v + (1 - beta2) sum_i g_i^2, where Adam squares the sum. The update is Adam's, with decoupled
    ``weight_decay`` as AdamW's (0 for none).

    ``num_microbatches``: N, by which each gradient is divided, as a loop over micro-batches of equal size has the mean
    of their losses. :meth:`accumulate` takes up what is in ``.grad`` and lets go of it; :meth:`step` takes up what is
    still there, and updates. A compiled model whose plan folds gradients calls it while backward computes, so that a
    micro-batch is a call of ``forward_backward``: ``model.fold_gradients(optimizer)``.

    Raises InputError for settings out of range.
    """

    accumulates_gradients = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        num_microbatches: int = 1,
    ) -> None:
        in_range = 0 <= betas[0] < 1 and 0 <= betas[1] < 1 and lr >= 0 and eps >= 0 and weight_decay >= 0
        if not in_range or type(num_microbatches) is not int or num_microbatches < 1:
            raise InputError(
                f"AdamA has lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay}, "
                f"num_microbatches={num_microbatches!r}: give betas of at least 0 and below 1, a number of "
                f"micro-batches from 1, and no negative numbers"
            )
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**given, "num_microbatches": num_microbatches})

    @torch.no_grad()
    def accumulate(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Take the gradients of ``parameters`` (None: of all) up into their states, and let go of them."""
        asked = None if parameters is None else set(parameters)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and (asked is None or parameter in asked):
                    self._take_up(group, parameter, parameter.grad)
                    parameter.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update by the gradients taken up since the last step, and those that are there; returns what ``closure``
        does, which is called first.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._take_up(group, parameter, parameter.grad)
                if self.state.get(parameter, {}).get("taken"):
                    self._update(group, parameter)
        return loss

    def _take_up(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state, (beta1, beta2), count = self.state[parameter], group["betas"], group["num_microbatches"]
        if not state:
            state["step"], state["taken"] = torch.zeros(()), torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        mean, square, given = local_part(state["exp_avg"]), local_part(state["exp_avg_sq"]), local_part(gradient)
        if not state["taken"]:
            mean.mul_(beta1)
            square.mul_(beta2)
        mean.add_(given, alpha=(1 - beta1) / count)
        square.addcmul_(given, given, value=(1 - beta2) / count**2)
        state["taken"] += 1

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state, (beta1, beta2), value = self.state[parameter], group["betas"], local_part(parameter)
        state["step"] += 1
        state["taken"].zero_()
        steps = int(state["step"])
        size = group["lr"] / (1 - beta1**steps)
        value.mul_(1 - group["lr"] * group["weight_decay"])
        below = local_part(state["exp_avg_sq"]).sqrt().div_(sqrt(1 - beta2**steps)).add_(group["eps"])
        value.addcdiv_(local_part(state["exp_avg"]), below, value=-size)
