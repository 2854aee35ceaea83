"""Pretrained weights in the format of transformers: see :func:`load_weights` and :func:`save_weights`."""

from galvatron_fx.weights.read import load_weights
from galvatron_fx.weights.write import save_weights

__all__ = ["load_weights", "save_weights"]
