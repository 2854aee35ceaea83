"""Experts by operators that can be split: while a model is traced, in place of the functions of transformers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from galvatron_fx.ir.kernels.experts import combine, dispatch, route, spread

__all__ = ["routed_experts"]

_MODULE = "transformers.integrations.moe"
_NAMES = (None, "eager", "batched_mm", "grouped_mm")
"""The implementations of the library that compute the same; an experts module that stands alone names none."""


@contextlib.contextmanager
def routed_experts() -> Iterator[None]:
    """Let experts that transformers' interface dispatches be computed by ``route``, ``dispatch`` and ``combine``.

    Its own functions sort the copies of all tokens at once, which couples the samples of a batch; the eager one reads
    from the device which experts have tokens, which cannot be traced.
    """
    library = sys.modules.get(_MODULE)
    interface = getattr(library, "ALL_EXPERTS_FUNCTIONS", None)
    grouped_linear = getattr(library, "_grouped_linear", None)
    if interface is None or grouped_linear is None:
        yield
        return
    before = {name: interface._local_mapping[name] for name in _NAMES if name in interface._local_mapping}
    function = _experts_by(grouped_linear, interface["grouped_mm"])
    try:
        for name in _NAMES:
            interface[name] = function
        yield
    finally:
        for name in _NAMES:
            del interface[name]
        interface._local_mapping.update(before)


def _experts_by(grouped_linear: Callable[..., Tensor], whole: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``grouped_linear``: the library's product of groups of rows; ``whole``: its own function, for modules that it has
    split already."""

    def experts(module: Any, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if module._is_expert_parallel:
            return whole(module, x, expert_ids, weights)
        copies = expert_ids.size(-1)
        place, order, ends = route(expert_ids.reshape(-1), module.num_experts)

        def linear(rows: Tensor, name: str) -> Tensor:
            bias = spread(getattr(module, f"{name}_bias"), ends, order) if module.has_bias else None
            weight: nn.Parameter = getattr(module, name)
            return grouped_linear(rows, weight, ends, bias=bias, is_transposed=module.is_transposed)

        rows = dispatch(x, place, order, copies)
        if module.has_gate:
            rows = module._apply_gate(linear(rows, "gate_up_proj"))
        else:
            rows = module.act_fn(linear(rows, "up_proj"))
        rows = linear(rows, "down_proj")
        if module.has_post_expert_norm:
            rows = module.post_expert_norm(rows)
        weighted = rows * dispatch(weights.reshape(-1), place, order, 1).unsqueeze(-1)
        out: Tensor = combine(weighted, place, order, copies)
        return out.to(x.dtype)

    return experts
