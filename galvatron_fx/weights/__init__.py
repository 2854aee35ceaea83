"""Whole weights of a compiled model: :func:`load_weights` and :func:`save_weights` in the format of transformers,
:func:`gather` as the original model.
"""

from galvatron_fx.weights.original_model import gather
from galvatron_fx.weights.read import load_weights
from galvatron_fx.weights.write import save_weights

__all__ = ["gather", "load_weights", "save_weights"]
