"""Calls of the store through which ranks found each other, which do not wait for ever for the process that hosts it."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import torch.distributed as dist

from galvatron_fx.ir.torch_compat.processes import store_is_served

__all__ = ["DEADLINE_S", "answered", "host_rank"]

T = TypeVar("T")

DEADLINE_S = 5.0
"""How long a store may take for what is asked of it beyond waiting for other ranks."""


def answered(ask: Callable[[], T], within_s: float) -> T:
    """What ``ask`` returns, which asks the store; raises its error, or DistStoreError after ``within_s`` seconds.

    A store whose host has stopped keeps a call for as long as its own timeout, or for ever: a thread waits for it.
    """
    answers: list[T] = []
    errors: list[Exception] = []

    def wait() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = Thread(target=wait, daemon=True, name="galvatron_fx store")
    thread.start()
    thread.join(within_s)
    if errors:
        raise errors[0]
    if not answers:
        raise dist.DistStoreError(f"no answer in {within_s:.0f} s")
    return answers[0]


def host_rank() -> int | None:
    """The rank whose process hosts the store; None where torchrun's agent does, or a file is the store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not store_is_served():
        return None
    return 0
