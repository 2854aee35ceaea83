"""Replace causal attention masks that a model builds as tensors by the attention kernel's own causal mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from galvatron_fx.ir.graph.metadata import meta_of
from galvatron_fx.ir.graph.rewrite import eliminate_dead_code
from passes.analysis.constant_folding import MOST_ELEMENTS, Constants
from passes.analysis.diagonal_values import Diagonals, diagonals

aten = torch.ops.aten

# Position of ``is_causal`` among the arguments, and of the query (whose length must be the key's, one behind it).
_KERNELS: dict[Any, tuple[int, int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: (4, 0),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (7, 1),
}


@dataclass(frozen=True)
class FoldCausalMasks:
    """Use ``is_causal`` where a mask made of constants says just that, and no mask where it masks nothing.

    Models traced without padding build ``[batch, 1, sequence, sequence]`` masks of ``arange``, ``index`` and ``where``.
    They cost memory on every device, and kernels do half the work if causality is told by the flag.

    Rewrite: ``attention(q, k, v, attn_mask=where(i >= j, 0, -inf))`` -> ``attention(q, k, v, 0.0, True)``, and so its
    backward.

    Masks that depend on the difference of two positions are recognised at any length. One that depends on an input, a
    parameter or a buffer stays, as does one of another form (sliding window, padding), and one that is made otherwise
    and has to be evaluated in a tensor of more than ``most_elements`` elements.
    """

    most_elements: int = MOST_ELEMENTS

    def run(self, graph: fx.GraphModule) -> fx.GraphModule:
        """Rewrite ``graph`` in place and return it."""
        constants = Constants(graph, self.most_elements)
        kinds: dict[int, str] = {}
        for node in list(graph.graph.nodes):
            mask = node.kwargs.get("attn_mask") if node.target in _KERNELS else None
            if mask is None:
                continue
            kind = _kind_of(mask, constants, kinds)
            if kind == "causal" and _is_square(node):
                _set_causal(node)
            elif kind != "open":
                continue
            node.kwargs = {key: value for key, value in node.kwargs.items() if key != "attn_mask"}
        eliminate_dead_code(graph)
        graph.recompile()
        return graph


def _is_square(node: fx.Node) -> bool:
    """Whether there are as many queries as keys."""
    query = _KERNELS[node.target][1]
    lengths = [meta_of(node.args[at]).spec.shape[-2] for at in (query, query + 1)]  # type: ignore[arg-type]
    return lengths[0] == lengths[1]


def _set_causal(node: fx.Node) -> None:
    """Set ``is_causal``, spelling out the dropout before it where that was left to its default."""
    at = _KERNELS[node.target][0]
    args = list(node.args)
    if len(args) < at:
        args.append(0.0)
    node.args = (*args[:at], True, *args[at + 1 :])


def _kind_of(mask: Any, constants: Constants, kinds: dict[int, str]) -> str:
    """Tell what ``mask`` is: "causal", "open" (nothing is masked) or "other"; layers repeat the same ones."""
    number = constants.number_of[mask]
    if number is None:
        return "other"
    if number not in kinds:
        followed = diagonals(mask, {})
        if followed is not None:
            kinds[number] = _kind_of_diagonals(followed)
        else:
            value = constants.value(mask)
            kinds[number] = "other" if value is None else _kind(value)
    return kinds[number]


def _kind_of_diagonals(mask: Diagonals) -> str:
    """The same of a mask [.., queries, keys] of which the diagonals are known."""
    keeps = _keeps(mask.values)
    if len(mask.shape) < 2 or keeps is None:
        return "other"
    if bool(keeps.all()):
        return "open"
    of_positions = (mask.rows, mask.columns) == (len(mask.shape) - 2, len(mask.shape) - 1)
    is_square = mask.shape[-1] == mask.shape[-2]
    return "causal" if of_positions and is_square and torch.equal(keeps, mask.differences >= 0) else "other"


def _kind(mask: Tensor) -> str:
    """The same of a mask [.., queries, keys], repeats folded."""
    if mask.dim() < 2 or any(size != 1 for size in mask.shape[:-2]):
        return "other"
    keeps = _keeps(mask.reshape(mask.shape[-2:]))
    if keeps is None:
        return "other"
    if bool(keeps.all()):
        return "open"
    square = keeps.shape[0] == keeps.shape[1]
    return "causal" if square and torch.equal(keeps, torch.ones_like(keeps).tril()) else "other"


def _keeps(mask: Tensor) -> Tensor | None:
    """Which elements a mask keeps; None for what is a bias."""
    if mask.dtype == torch.bool:
        return mask
    keeps = mask == 0
    masked = mask < torch.finfo(mask.dtype).min / 2
    return keeps if bool((keeps | masked).all()) else None
