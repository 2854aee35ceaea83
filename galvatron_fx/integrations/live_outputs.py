"""A loss that a tool makes of what a model returns, be there a loss among it or not: :func:`with_live_outputs`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from galvatron_fx.ir.torch_compat.tensors import pytree
from galvatron_fx.loss_inside import with_forward
from galvatron_fx.runtime.module import DistributedGraphModule

__all__ = ["give_scalars_back", "with_live_outputs"]


class _Scalar(NamedTuple):
    """A scalar as a tensor of one element."""

    vector: Tensor


def with_live_outputs(model: nn.Module) -> nn.Module:
    """Return ``model`` so that compiled for batches of ranks, it returns outputs of which all can be differentiated.

    Beside a loss, ``compile`` hands the others out for reading; this model's scalars are not known as losses. The rest
    is as of :func:`galvatron_fx.with_loss`. After compile, :func:`give_scalars_back`.
    """

    def forward(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return pytree.tree_map(_hidden, original(*args, **kwargs))

    return with_forward(model, forward)


def _hidden(leaf: Any) -> Any:
    is_scalar = isinstance(leaf, Tensor) and leaf.ndim == 0
    return _Scalar(leaf.reshape(1)) if is_scalar else leaf


def give_scalars_back(compiled: DistributedGraphModule, share_of: Callable[[dict[str, Any]], float]) -> None:
    """Have what :func:`with_live_outputs` made, compiled, return scalars as such.

    They are those of the rows of all ranks; ``share_of``: what part of them each rank gets, by the arguments of a call.
    """

    def shown(model: nn.Module, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        share = share_of(kwargs)

        def scalar(leaf: Any) -> Any:
            if not isinstance(leaf, _Scalar):
                return leaf
            value = leaf.vector[0]
            return value * share if value.is_floating_point() else value

        return pytree.tree_map(scalar, outputs, is_leaf=lambda leaf: isinstance(leaf, _Scalar))

    compiled.register_forward_hook(shown, with_kwargs=True)
