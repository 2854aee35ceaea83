"""Which kernels run the operators of captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from galvatron_fx.ir.graph.metadata import TensorSpec
from galvatron_fx.ir.kernels.attention import ON_GPUS
from galvatron_fx.ir.kernels.cpu_attention import ON_CPUS
from galvatron_fx.ir.kernels.onednn import on_onednn
from galvatron_fx.ir.kernels.windows import WINDOWS

__all__ = ["Kernels"]


@dataclass(frozen=True)
class Kernels:
    """What operators are on devices of ``device_type``; ``onednn``: whether products of float32 go to oneDNN.

    Models are traced on fake CPU tensors, so graphs name the CPU's own kernels, whatever they will run on: a plan that
    is made on a laptop is the plan of a cluster of GPUs. Code generation puts these in their place.
    """

    device_type: str = "cpu"
    onednn: bool = False

    def of(
        self, target: Callable[..., Any], inputs: Sequence[TensorSpec | None], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """What runs ``target`` for tensors like ``inputs``: itself, but for what is said above."""
        target = WINDOWS.get(target, target)
        if self.device_type != "cpu":
            return ON_GPUS.get(target, target)
        target = ON_CPUS.get(target, target)
        return on_onednn(target, inputs) if self.onednn and not kwargs else target
