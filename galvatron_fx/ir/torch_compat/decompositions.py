"""Decompositions of torch that give other values than the operators they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table, decompositions

__all__ = ["repair_multilabel_margin_loss", "repair_recurrent_dropout"]

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


def repair_recurrent_dropout() -> None:
    """Have ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN`` of several layers traced with the dropout between them.

    Torch's decomposition compares the number of layers with that of the layer the wrong way round, and so drops out
    nothing, in ``torch.compile``, too.
    """
    helper: Any = decompositions
    helper._rnn_helper = _layers_with_dropout(helper._rnn_helper)


def _layers_with_dropout(layers_of: Callable[..., tuple[Tensor, list[Any]]]) -> Callable[..., tuple[Tensor, list[Any]]]:
    """Layers [sequence, batch, width], or batch first, one by one by ``layers_of``, and what comes between them."""

    def layers(
        x: Tensor,
        hidden: Any,
        parameters: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Callable[..., Any],
    ) -> tuple[Tensor, list[Any]]:
        directions, ended = 1 + bidirectional, []
        x = x.transpose(0, 1) if batch_first else x
        for number in range(num_layers):
            if number > 0 and train and dropout > 0:
                x = torch.dropout(x, dropout, train=True)
            own = slice(number * directions, (number + 1) * directions)
            options = (has_biases, 1, 0.0, train, bidirectional, False, layer)
            x, states = layers_of(x, hidden[own], parameters[own], *options)
            ended += states
        return x.transpose(0, 1) if batch_first else x, ended

    return layers


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
