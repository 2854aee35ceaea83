"""Torch.compile of a loop that calls a compiled model: Dynamo leaves the model's step, which is compiled already."""

from __future__ import annotations

import torch

__all__ = ["untraced"]

# Also on backward, which Dynamo would trace as the code that ``loss.backward()`` calls.
untraced = torch.compiler.disable(reason="a compiled model runs as the program that it is")
