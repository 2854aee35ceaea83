"""Decompositions of torch that give other values than the operators they stand for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._decomp import decomposition_table

__all__ = ["repair_multilabel_margin_loss"]

_MEAN, _SUM = 1, 2


def repair_multilabel_margin_loss() -> None:
    """Have ``torch.nn.functional.multilabel_margin_loss`` traced as what it is.

    A row of labels ends at the first -1. Torch's decomposition counts what stands behind it as labels of class 0, so
    that ``torch.compile`` gives another loss than eager, too.
    """
    operator = torch.ops.aten.multilabel_margin_loss_forward.default
    operator.py_kernels[torch._C.DispatchKey.Autograd] = _multilabel_margin_loss
    operator._dispatch_cache.clear()
    decomposition_table[operator] = _multilabel_margin_loss


def _multilabel_margin_loss(scores: Tensor, labels: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Scores and labels [(batch), classes] -> the loss, and which classes are labels."""
    rows, given = torch.atleast_2d(scores), torch.atleast_2d(labels)
    classes = rows.shape[1]
    numbers = torch.arange(classes, device=labels.device)
    ends = torch.where(given == -1, numbers, classes).amin(1, keepdim=True)
    is_label = numbers < ends
    is_named = ((numbers == given.unsqueeze(2)) & is_label.unsqueeze(2)).any(1)
    of_labels = rows.gather(1, torch.where(is_label, given, 0))
    margins = 1 - of_labels.unsqueeze(2) + rows.unsqueeze(1)  # [batch, labels, classes]
    counted = is_label.unsqueeze(2) & ~is_named.unsqueeze(1) & (margins > 0)
    losses = torch.where(counted, margins, 0).sum((1, 2)) / classes
    losses = losses.reshape(scores.shape[:-1])
    loss = losses.mean() if reduction == _MEAN else losses.sum() if reduction == _SUM else losses
    return loss, is_named.to(scores.dtype).reshape(labels.shape)
