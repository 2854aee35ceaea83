"""A step runs in one thread at a time, in the dtypes of its program whatever autocast says, and in no transform."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.torch_compat.transforms import active_transform

__all__ = ["OneAtATime", "refuse_autocast", "refuse_transforms", "without_autocast"]


class OneAtATime:
    """Lets one thread in, and refuses others meanwhile: collectives of two would meet in another order on each rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the model; raises InputError where another thread does."""
        if not self._lock.acquire(blocking=False):
            raise InputError(
                "another thread runs this compiled model: its collectives and gradients would mix. Call it from one "
                "thread, or hold a lock of your own around the step"
            )
        try:
            yield
        finally:
            self._lock.release()


def refuse_autocast(device: str, policy: MixedPrecisionPolicy | None) -> None:
    """Raise InputError inside of ``torch.autocast``, unless ``policy`` computes in its dtype."""
    if not torch.is_autocast_enabled(device):
        return
    dtype = torch.get_autocast_dtype(device)
    if policy is None or policy.param_dtype != dtype:
        has = "is None" if policy is None else f"has {policy.param_dtype}"
        raise InputError(
            f"torch.autocast is on ({dtype}), and a compiled program computes in the dtypes it was traced in: take "
            f"the step out of autocast, and give compile mixed_precision=MixedPrecisionPolicy(param_dtype={dtype}), "
            f"which now {has}"
        )


def refuse_transforms(arguments: Any) -> None:
    """Raise InputError where a call is inside of a function transform: its derivatives would be zero or missing."""
    transform = active_transform(arguments)
    if transform is not None:
        raise InputError(
            f"{transform} do not reach a compiled program, which has a backward of its own: use loss.backward() or "
            f"torch.autograd.grad, or transform the plain model that galvatron_fx.gather gives"
        )


@contextmanager
def without_autocast(device: str) -> Iterator[None]:
    """Run what is inside as it is written."""
    if not torch.is_autocast_enabled(device):
        yield
        return
    with torch.autocast(device, enabled=False):
        yield
