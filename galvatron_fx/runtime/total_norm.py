"""The norm of all gradients of a model, also where a rank holds those of some stages alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from galvatron_fx.ir.torch_compat.dtensors import STAGES_DIM, whole_tensor
from galvatron_fx.runtime.stage_tensors import of_one_stage

__all__ = ["total_norm"]


def total_norm(
    gradients: Mapping[str, Tensor], norm_type: float, copies: Set[str], group: dist.ProcessGroup | None
) -> Tensor:
    """Return the norm of the gradients of all stages, each counted once; every rank calls it alike.

    ``gradients``: this rank's, by name; ``copies``: names of those that an earlier stage has, too; ``group``: of the
    ranks that hold the stages, None without stages.
    """
    plain = {name: of_one_stage(gradient) for name, gradient in gradients.items()}
    together = {name for name, gradient in plain.items() if _is_of_all_stages(gradient)}
    norm = _norm([gradient for name, gradient in plain.items() if name not in copies | together], norm_type)
    if group is not None:
        norm = _norm_over(norm, norm_type, group)
    if not together:
        return norm
    spread = _norm([plain[name] for name in sorted(together)], norm_type)
    both: Tensor = torch.linalg.vector_norm(torch.stack([norm, spread]), norm_type)
    return both


def _is_of_all_stages(gradient: Tensor) -> bool:
    """Whether all pipeline ranks hold a gradient, or parts of it."""
    return isinstance(gradient, DTensor) and STAGES_DIM in (gradient.device_mesh.mesh_dim_names or ())


def _norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of gradients on one mesh, the same on all ranks that hold them."""
    norm = torch.nn.utils.get_total_norm(gradients, norm_type)
    total = whole_tensor(norm)
    return total


def _norm_over(norm: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """The norm of all stages' gradients from each stage's."""
    if norm_type == float("inf"):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm**norm_type
    dist.all_reduce(power, group=group)
    total: Tensor = power ** (1.0 / norm_type)
    return total
