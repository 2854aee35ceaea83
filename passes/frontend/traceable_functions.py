"""All that stands in for functions of torch while a model is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from passes.frontend.byte_masks import byte_masks
from passes.frontend.dense_lookups import dense_lookups
from passes.frontend.fresh_tensors import fresh_tensors
from passes.frontend.value_free import value_free
from passes.frontend.value_free_modules import value_free_modules


@contextlib.contextmanager
def traceable_functions() -> Iterator[None]:
    """Functions without what a trace cannot follow: lookups, checks and shapes by values, constants' likenesses, and
    masks of bytes.
    """
    with dense_lookups(), value_free(), value_free_modules(), fresh_tensors(), byte_masks():
        yield
