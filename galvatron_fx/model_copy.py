"""Copies of users' models."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from galvatron_fx.ir.errors import InputError


def model_copy(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """``copy.deepcopy(model, memo)``; raises InputError naming the attribute that it cannot copy."""
    known = dict(memo)
    try:
        twin: nn.Module = copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"{type(model).__name__} cannot be copied by copy.deepcopy, which is done without its weights: "
            f"{_uncopied(model, known)}{type(error).__name__}: {error}. Keep what it is in a module's class or in a "
            f"global, or give its class a __deepcopy__"
        ) from error
    return twin


def _uncopied(model: nn.Module, memo: dict[int, Any]) -> str:
    """Which attribute fails by itself, with a colon; nothing where each can be copied."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                return f"'{f'{path}.{name}'.removeprefix('.')}': "
    return ""
