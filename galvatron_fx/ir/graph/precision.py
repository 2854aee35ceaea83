"""Mixed precision as a captured graph says it: the policy, the parameters' own dtypes, and the casts between the two.

The terms are those of ``torch.distributed.fsdp.MixedPrecisionPolicy``: parameters are cast to ``param_dtype`` for use,
gradients to ``reduce_dtype`` before they are reduced, and come back in the dtype of the parameter, which the optimizer
updates (Micikevicius et al. 2018, Mixed precision training, section 3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx

from galvatron_fx.ir.errors import InputError
from galvatron_fx.ir.plan.precision_policy import DTYPES, ROLES

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

_KEY = "precision"


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
    graph_precision: Precision | None = graph.meta.get(_KEY)
    return graph_precision


def set_precision(graph: fx.GraphModule, value: Precision) -> None:
    """Attach the precision to the graph."""
    graph.meta[_KEY] = value


def policy_of(graph: fx.GraphModule) -> MixedPrecisionPolicy | None:
    """The policy that ``graph`` was captured with."""
    graph_precision = precision(graph)
    return graph_precision.policy if graph_precision is not None else None


def checked_policy(policy: MixedPrecisionPolicy | None) -> MixedPrecisionPolicy | None:
    """The policy, None for one that casts nothing. Raises InputError for what is no policy, and for dtypes that models
    are not trained in.
    """
    if policy is None:
        return None
    if not all(hasattr(policy, field) for field in (*ROLES, "cast_forward_inputs")):
        raise InputError(f"mixed_precision is {policy!r}: give a torch.distributed.fsdp.MixedPrecisionPolicy, or None")
    dtypes = {role: getattr(policy, role) for role in ROLES}
    for role, dtype in dtypes.items():
        if dtype is not None and dtype not in [getattr(torch, name) for name in DTYPES]:
            raise InputError(f"{role} of mixed_precision is {dtype!r}: use one of {', '.join(DTYPES)}")
    return policy if any(dtype is not None for dtype in dtypes.values()) else None
