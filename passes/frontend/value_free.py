"""Functions of torch whose checks or shapes depend on values, while a model is traced: the same without them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from galvatron_fx.ir.errors import CaptureError
from galvatron_fx.ir.kernels import ctc
from passes.frontend.replaced_functions import replaced


def value_free() -> contextlib.AbstractContextManager[None]:
    """Compute covariances without a look at their weights, CTC losses of padded targets sample by sample, counts of
    numbers below ``minlength`` alone, and Gaussian losses without a look at their variances.

    Raises CaptureError, inside, for CTC losses of targets that lie behind each other.
    """
    owners = torch, torch.Tensor
    statistics = [(owner, name, _OF[name]) for owner in owners for name in _OF]
    gaussian = (torch.nn.functional, "gaussian_nll_loss", _gaussian_nll_loss)
    return replaced([*statistics, (torch, "ctc_loss", _ctc_loss), gaussian])


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """As ``torch.cov``, which looks whether its divisor is positive, and warns where it is not: it is zero then."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    if fweights is None and aweights is None:
        centred = x - (x.sum(1) / x.shape[1]).unsqueeze(1)
        return (centred @ centred.mH / max(x.shape[1] - correction, 0)).squeeze()
    given = [weights for weights in (fweights, aweights) if weights is not None]
    weights = given[0] if len(given) == 1 else given[0] * given[1]
    total = weights.sum()
    centred = x - ((x * weights).sum(1) / total).unsqueeze(1)
    divisor = total - correction * ((weights * aweights).sum() / total if aweights is not None else 1)
    return (centred @ (centred * weights).mH / divisor.clamp(min=0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    """As ``torch.corrcoef``."""
    covariance = _cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    scaled = covariance / deviations.unsqueeze(1) / deviations
    if scaled.is_complex():
        return torch.complex(scaled.real.clamp(-1, 1), scaled.imag.clamp(-1, 1))
    return scaled.clamp(-1, 1)


_bincount: Any = torch.bincount


def _count(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """As ``torch.bincount`` of numbers below ``minlength``: counts [minlength], or sums of ``weights``; others are an
    error of the step, where torch's counts would be longer. Without ``minlength`` it is torch's own.
    """
    if minlength < 1:
        counts: Tensor = _bincount(input, weights, minlength)
        return counts
    if weights is None:
        weights = torch.ones_like(input, dtype=torch.int64)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).scatter_add(0, input.long(), weights.detach())


_gaussian: Any = torch.nn.functional.gaussian_nll_loss


def _gaussian_nll_loss(input: Tensor, target: Tensor, var: Tensor | float, *args: Any, **options: Any) -> Tensor:
    """As ``torch.nn.functional.gaussian_nll_loss``; where a variance is negative, which torch raises for, it is NaN."""
    if isinstance(var, Tensor):
        var = torch.where(var < 0, torch.nan, var)
    with replaced([(torch, "any", lambda _: False)]):
        loss: Tensor = _gaussian(input, target, var, *args, **options)
    return loss


_OF = {"cov": _cov, "corrcoef": _corrcoef, "bincount": _count}


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """As ``torch.ctc_loss``: log_probs [T, B, C] and targets [B, S], or one sample without the batch."""
    lengths = [torch.as_tensor(given, device=log_probs.device) for given in (input_lengths, target_lengths)]
    single = log_probs.dim() == 2
    if single:
        log_probs, targets = log_probs.unsqueeze(1), targets.reshape(1, -1)
        lengths = [given.reshape(1) for given in lengths]
    if targets.dim() == 1:
        raise CaptureError(
            f"ctc_loss is given the targets of {log_probs.shape[1]} samples behind each other in one list, so that the "
            f"values of target_lengths say whose they are: pad them to [samples, longest target]"
        )
    losses: Tensor = ctc.ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == 1:
        return (losses / lengths[1].to(losses.dtype).clamp(min=1)).mean()
    return losses.sum() if reduction == 2 else losses[0] if single else losses
