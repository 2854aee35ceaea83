"""The ``tp_plan`` of a transformers model as constraints of a search: :func:`tp_constraints`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

from galvatron_fx.ir.errors import InputError

__all__ = ["tp_constraints"]

# transformers.distributed.tensor_parallel, ALL_PARALLEL_STYLES. These split a weight. How, the role leaves to the
# solver of a block, which finds the split by columns and rows (docs/architecture.md).
_SPLIT = (
    "colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise", "embedding_rowwise", "moe_tp_experts",
    "packed_colwise", "packed_rowwise", "rowwise", "rowwise_rep", "rowwise_split_input",
)  # fmt: skip
# And these say what becomes of values beside split weights, which the solver sees to.
_BESIDE = (
    "all_reduce",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "replicate",
    "replicated_with_grad_allreduce",
)
_OTHER_ROLES = {"ep_dispatch_experts": "expert", "grouped_gemm": "expert", "sequence_parallel": "tensor_sequence"}


def tp_constraints(
    model: nn.Module, axis: str = "tp", plan: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Constraints that give mesh axis ``axis`` the role ``tensor`` in the blocks whose modules ``plan`` splits.

    ``plan``: styles by names of modules or parameters, in which ``*`` stands for any text (default: that of the model,
    its ``tp_plan``). Other axes, and blocks that it does not name, are searched. Names that the model does not have are
    left out with a warning, as transformers does. Raises InputError for a model without a plan, and for styles that
    are another role's or unknown.
    """
    styles = plan if plan is not None else getattr(model, "tp_plan", None)
    if not styles:
        raise InputError(
            f"{type(model).__name__} declares no tp_plan: give plan={{'model.layers.*.mlp.up_proj': 'colwise', ...}}, "
            f"or constraints={{{axis!r}: 'tensor'}}, which holds for all blocks"
        )
    for name, style in styles.items():
        _check(name, style, axis)
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    constraints: dict[str, dict[str, str]] = {}
    absent = []
    for name, style in styles.items():
        if any(fnmatchcase(module, name) for module in modules):
            held_in = name
        elif any(fnmatchcase(parameter, name) for parameter in parameters):
            held_in = name.rpartition(".")[0]
        else:
            absent.append(name)
            continue
        if style in _SPLIT:
            constraints[held_in] = {axis: "tensor"}
    if absent:
        warnings.warn(f"the tp_plan names what {type(model).__name__} does not have: {', '.join(absent)}", stacklevel=2)
    return constraints


def _check(name: str, style: str, axis: str) -> None:
    if style in _OTHER_ROLES:
        raise InputError(
            f"the tp_plan gives {name!r} the style {style!r}, which is another role: leave it out of plan=, and give "
            f"constraints={{{name!r}: {{{axis!r}: {_OTHER_ROLES[style]!r}}}}}"
        )
    if style not in (*_SPLIT, *_BESIDE):
        raise InputError(
            f"the tp_plan gives {name!r} the style {style!r}, which is not known: use one of {', '.join(_SPLIT)}"
        )
