"""The model inside what other tools wrap around it: :func:`plain_model`."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.arguments import check_arguments

__all__ = ["plain_model"]


def plain_model(model: nn.Module) -> nn.Module:
    """Take a model out of DistributedDataParallel, DataParallel and torch.compile, which change no result.

    Raises InputError for what is no model, and for one that something else has split or compiled already.
    """
    check_arguments(model=model)
    inner = model
    while True:
        if isinstance(inner, (DistributedDataParallel, DataParallel)):
            inner = inner.module
        elif isinstance(original := inner._modules.get("_orig_mod"), nn.Module):  # what torch.compile returns
            inner = original
        else:
            break
    _check_plain(inner)
    return inner


def _check_plain(model: nn.Module) -> None:
    for name, module in model.named_modules():
        owner = type(module).__module__
        if owner.startswith("galvatron_fx.runtime."):
            raise InputError(f"{_place(name)} is compiled already: give the model that it was made of")
        if owner.startswith("torch.distributed.fsdp."):
            raise InputError(f"{_place(name)} is wrapped by {type(module).__name__}: give the model inside, {_SPLITS}")
        if module._compiled_call_impl is not None:
            raise InputError(
                f"{_place(name)} was compiled in place by its method compile(): leave that call out, {_SPLITS}, with "
                f"kernels of torch's inductor where backend='inductor' is given"
            )
        if isinstance(module, (DistributedDataParallel, DataParallel)) or "_orig_mod" in module._modules:
            raise InputError(
                f"{_place(name)} is wrapped by {type(module).__name__}: give a model whose modules are not wrapped, "
                f"{_SPLITS}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise InputError(
                f"'{name}' has no shape yet, as its module is a lazy one: run a batch through the model first, as "
                f"model(*batch) under torch.no_grad()"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise InputError(
                f"parameter '{name}' is a DTensor, so something has split the model already (fully_shard or "
                f"parallelize_module): give the model as it was before, {_SPLITS}"
            )


_SPLITS = "as Galvatron-FX splits and compiles it itself"


def _place(name: str) -> str:
    return f"module '{name}'" if name else "the model"
