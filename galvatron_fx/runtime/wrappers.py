"""Wrappers for several devices around a compiled model, or a module of one: each is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.wrappers import ASKED_BY_WRAPPERS, SET_BY_FSDP, STATES_OF_WRAPPERS

__all__ = ["check_read", "check_set", "refuse_fully_shard", "refuse_wrapper"]


def check_read(name: str) -> None:
    """Raise InputError where attribute ``name`` is one that a wrapper asks for."""
    if name in ASKED_BY_WRAPPERS:
        refuse_wrapper(ASKED_BY_WRAPPERS[name])


def check_set(name: str) -> None:
    """Raise InputError where attribute ``name`` is one that a wrapper assigns."""
    if name == SET_BY_FSDP:
        refuse_wrapper("FullyShardedDataParallel")


def refuse_fully_shard(module: nn.Module) -> None:
    """Have ``fully_shard`` and ``replicate`` of ``module`` raise InputError before they change anything."""
    module.__dict__[STATES_OF_WRAPPERS] = _NothingApplied()


class _NothingApplied(dict[Callable[..., Any], Any]):
    """What was applied to a module, by function: whoever asks for one is about to apply it."""

    def __contains__(self, function: object) -> NoReturn:
        refuse_wrapper(getattr(function, "__name__", str(function)))


def refuse_wrapper(wrapper: str) -> NoReturn:
    """Raise InputError for ``wrapper`` around a compiled model."""
    raise InputError(
        f"{wrapper} of a compiled model: its program splits parameters and reduces gradients itself, so train it as it "
        f"is, without the wrapper, or give the wrapper the original model. Roles are asked for by compile(..., roles=) "
        f"or constraints= ('zero' is what fully_shard does)"
    )
