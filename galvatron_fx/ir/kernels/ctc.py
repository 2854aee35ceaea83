"""CTC loss of padded targets: torch's own has outputs whose size depends on the longest target of the batch.

Each sample is computed by itself, so that a batch can be split. The table of torch's forward pass, which is larger than
the log-probabilities, is not kept: backward computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["ctc_loss", "ctc_loss_backward"]

aten = torch.ops.aten

_library = torch.library.Library("galvatron_fx", "FRAGMENT")
_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, bool zero_infinity"
_library.define(f"ctc_loss({_GIVEN}) -> Tensor")
_library.define(f"ctc_loss_backward(Tensor gradient, {_GIVEN}) -> Tensor")

ctc_loss: Any = torch.ops.galvatron_fx.ctc_loss.default
"""``ctc_loss(log_probs[T, B, C], targets[B, S], input_lengths[B], target_lengths[B], blank, zero_infinity) -> [B]``."""

ctc_loss_backward: Any = torch.ops.galvatron_fx.ctc_loss_backward.default
"""``ctc_loss_backward(gradient[B], log_probs[T, B, C], ...) -> [T, B, C]``."""


@torch.library.impl(_library, "ctc_loss", "CompositeExplicitAutograd")
def _loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    given = log_probs, targets, input_lengths, target_lengths, blank, zero_infinity
    losses: Tensor = aten._ctc_loss.Tensor(*given)[0]
    return torch.where(losses == torch.inf, 0, losses) if zero_infinity else losses


@torch.library.impl(_library, "ctc_loss_backward", "CompositeExplicitAutograd")
def _backward(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    given = log_probs, targets, input_lengths, target_lengths
    losses, table = aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    result: Tensor = aten._ctc_loss_backward.Tensor(gradient, *given, losses, table, blank, zero_infinity)
    return result


@torch.library.register_fake("galvatron_fx::ctc_loss")
def _fake_loss(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty((log_probs.shape[1],))


@torch.library.register_fake("galvatron_fx::ctc_loss_backward")
def _fake_backward(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    return ctc_loss_backward(gradient, *ctx.saved_tensors, *ctx.options), *(None,) * 5


torch.library.register_autograd("galvatron_fx::ctc_loss", _gradients, setup_context=_keep)
