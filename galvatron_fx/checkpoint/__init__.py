"""Checkpoints of training runs: see :class:`Checkpointer`."""

from galvatron_fx.checkpoint.checkpointer import Checkpointer, Restored

__all__ = ["Checkpointer", "Restored"]
