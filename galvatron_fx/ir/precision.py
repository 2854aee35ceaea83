"""Mixed precision as a captured graph says it: the policy, the parameters' own dtypes, and the casts between the two.

The terms are those of ``torch.distributed.fsdp.MixedPrecisionPolicy``: parameters are cast to ``param_dtype`` for use,
gradients to ``reduce_dtype`` before they are reduced, and come back in the dtype of the parameter, which the optimizer
updates (Micikevicius et al. 2018, Mixed precision training, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from galvatron_fx.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_KEY = "precision"
_DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
_ROLES = ("param_dtype", "reduce_dtype", "output_dtype")


def cast_parameter(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter, or a shard of one, in the dtype that its block computes in."""
    return x.to(dtype)


def cast_gradient(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient in the dtype that it is reduced in or, behind the reduction, in that of its parameter.

    An operator of its own, as it stands for a promise: what is summed over ranks is summed behind it.
    """
    return x.to(dtype)


CASTS = (cast_parameter, cast_gradient)


@dataclass(frozen=True)
class Precision:
    """``policy``, and ``dtypes``: the own dtype of every floating-point parameter, by name."""

    policy: MixedPrecisionPolicy
    dtypes: Mapping[str, torch.dtype]

    def reduced(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that a gradient is reduced in, for one computed in ``dtype``."""
        return self.policy.reduce_dtype or dtype if dtype.is_floating_point else dtype


def computed_in(policy: MixedPrecisionPolicy | None, dtype: torch.dtype) -> torch.dtype:
    """The dtype that a parameter of ``dtype`` is computed in: integers, booleans and complex numbers stay as they
    are.
    """
    casts = policy is not None and policy.param_dtype is not None and dtype.is_floating_point
    return policy.param_dtype if casts else dtype  # type: ignore[union-attr, return-value]


def precision(graph: fx.GraphModule) -> Precision | None:
    """The precision that ``graph`` was captured with, None without a policy."""
    found: Precision | None = graph.meta.get(_KEY)
    return found


def set_precision(graph: fx.GraphModule, value: Precision) -> None:
    """Attach the precision to the graph."""
    graph.meta[_KEY] = value


def policy_of(graph: fx.GraphModule) -> MixedPrecisionPolicy | None:
    """The policy that ``graph`` was captured with."""
    found = precision(graph)
    return found.policy if found is not None else None


def checked_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    """The policy, None for one that casts nothing. Raises InputError for what is no policy, and for dtypes that models
    are not trained in.
    """
    if policy is None:
        return None
    if not all(hasattr(policy, field) for field in (*_ROLES, "cast_forward_inputs")):
        raise InputError(f"mixed_precision is {policy!r}: give a torch.distributed.fsdp.MixedPrecisionPolicy, or None")
    dtypes = {role: getattr(policy, role) for role in _ROLES}
    for role, dtype in dtypes.items():
        if dtype is not None and dtype not in _DTYPES.values():
            raise InputError(f"{role} of mixed_precision is {dtype!r}: use one of {', '.join(_DTYPES)}")
    return policy if any(dtype is not None for dtype in dtypes.values()) else None


def policy_to_dict(policy: MixedPrecisionPolicy | None) -> dict[str, Any] | None:
    """The policy as plain JSON values; dtypes by name."""
    if policy is None:
        return None
    dtypes = {role: getattr(policy, role) for role in _ROLES}
    named = {role: None if dtype is None else str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()}
    return {**named, "cast_forward_inputs": policy.cast_forward_inputs}


def policy_from_dict(fields: Mapping[str, Any] | None) -> MixedPrecisionPolicy | None:
    """The policy that :func:`policy_to_dict` wrote; the plan's schema has checked ``fields``."""
    if fields is None:
        return None
    from torch.distributed.fsdp import MixedPrecisionPolicy  # slow to import, and few plans need it

    dtypes = {role: None if fields[role] is None else _DTYPES[fields[role]] for role in _ROLES}
    return MixedPrecisionPolicy(**dtypes, cast_forward_inputs=fields["cast_forward_inputs"])


def describe_policy(policy: MixedPrecisionPolicy | None) -> str:
    """The policy in words: "computes in bfloat16, reduces gradients in float32"."""
    if policy is None:
        return "none"
    verbs = {"param_dtype": "computes in", "reduce_dtype": "reduces gradients in", "output_dtype": "returns"}
    named = policy_to_dict(policy) or {}
    parts = [f"{verb} {named[role]}" for role, verb in verbs.items() if named[role] is not None]
    if policy.param_dtype is not None and not policy.cast_forward_inputs:
        parts.append("inputs as they are")
    return ", ".join(parts) or "nothing is cast"
