"""Modules of torch whose forward looks at values, or at the job's ranks, while a model is traced: the same without."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.adaptive import _ASMoutput
from torch.nn.modules.batchnorm import _BatchNorm

from galvatron_fx.ir.errors import InputError
from passes.frontend.replaced_functions import replaced

_normalised: Any = _BatchNorm.forward
_apply: Any = nn.Module._apply
_log_softmax_with_loss: Any = nn.AdaptiveLogSoftmaxWithLoss.forward


def value_free_modules() -> contextlib.AbstractContextManager[None]:
    """Average the statistics of all batches (``momentum=None``) by tensors, normalise over the batch of the trace,
    which is that of all ranks, look every class of an adaptive softmax up, and leave a module alone that is cast to
    what it is.
    """
    places = (_BatchNorm, _normalise), (nn.SyncBatchNorm, _normalise), (nn.AdaptiveLogSoftmaxWithLoss, _adaptive)
    forwards = [(owner, "forward", function) for owner, function in places]
    return replaced([*forwards, (nn.Module, "_apply", _applied)])


def _applied(module: nn.Module, change: Any, recurse: bool = True) -> nn.Module:
    """As ``Module._apply``, which gives its parameters new memory also where they stay as they are."""
    tensors = (*module.parameters(recurse), *module.buffers(recurse))
    changed: nn.Module = module if all(change(t) is t for t in tensors) else _apply(module, change, recurse)
    return changed


def _normalise(module: Any, input: Tensor) -> Tensor:
    """As forward of batch norms: ``running += (batch - running) / batches`` where momentum is None."""
    if isinstance(module, nn.SyncBatchNorm):
        module._check_non_zero_input_channels(input)
        _refuse_some_ranks(module)
    averages = module.training and module.track_running_stats and module.num_batches_tracked is not None
    if module.momentum is not None or not averages:
        same: Tensor = _normalised(module, input)
        return same
    module._check_input_dim(input)
    module.num_batches_tracked.add_(1)
    mean, var = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
    output = F.batch_norm(input, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    with torch.no_grad():
        share = (1.0 / module.num_batches_tracked.double()).to(mean.dtype)
        module.running_mean.copy_((1 - share) * module.running_mean + share * mean)
        module.running_var.copy_((1 - share) * module.running_var + share * var)
    return output


def _refuse_some_ranks(module: nn.SyncBatchNorm) -> None:
    group, everyone = module.process_group, dist.group.WORLD if dist.is_initialized() else None
    if group is not None and everyone is not None and group.size() != everyone.size():
        raise InputError(
            f"a SyncBatchNorm takes the statistics of {group.size()} of {everyone.size()} ranks: a compiled model "
            f"normalises over the global batch, as one device does; make it by convert_sync_batchnorm(model) without a "
            f"process group"
        )


def _adaptive(module: nn.AdaptiveLogSoftmaxWithLoss, input: Tensor, target: Tensor) -> Any:
    """As forward of torch, with all classes for all rows. A target that is no class is an error of the step."""
    if input.dim() not in (1, 2) or target.dim() != input.dim() - 1 or input.shape[: target.dim()] != target.shape:
        return _log_softmax_with_loss(module, input, target)  # which says what does not fit
    rows, targets = input.reshape(-1, input.shape[-1]), target.reshape(-1, 1)
    output = module.log_prob(rows).gather(1, targets).reshape(target.shape)
    return _ASMoutput(output, (-output).mean())
