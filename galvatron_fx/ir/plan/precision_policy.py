"""A mixed-precision policy as plans hold it: plain JSON values and words. Reading a plan does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

ROLES = ("param_dtype", "reduce_dtype", "output_dtype")
"""The fields of a policy that name dtypes."""

DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What they may be."""


def policy_to_dict(policy: MixedPrecisionPolicy | None) -> dict[str, Any] | None:
    """The policy as plain JSON values; dtypes by name."""
    if policy is None:
        return None
    dtypes = {role: getattr(policy, role) for role in ROLES}
    named = {role: None if dtype is None else str(dtype).removeprefix("torch.") for role, dtype in dtypes.items()}
    return {**named, "cast_forward_inputs": policy.cast_forward_inputs}


def policy_from_dict(fields: Mapping[str, Any] | None) -> MixedPrecisionPolicy | None:
    """The policy that :func:`policy_to_dict` wrote; the plan's schema has checked ``fields``."""
    if fields is None:
        return None
    import torch  # slow to import, and few plans need it
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtypes = {role: None if fields[role] is None else getattr(torch, fields[role]) for role in ROLES}
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
