"""torchtitan: its Trainer with a compiled model in the place of ``parallelize_fn``.

``planned(llama3_8b(), memory_budget="70GiB")`` is a configuration of torchtitan's that trains by a plan.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from galvatron_fx.integrations.preparing import compiled_for_ranks, policy_named
from galvatron_fx.ir.errors import InputError
from galvatron_fx.runtime.module import DistributedGraphModule

__all__ = ["planned"]

_DEGREES = ("tensor", "context", "pipeline", "expert")


def planned(config: Trainer.Config, **galvatron: Any) -> Trainer.Config:
    """Return torchtitan's ``config`` with a model that :func:`galvatron_fx.compile` makes for all its processes.

    ``galvatron``: options of ``compile``, such as ``plan`` or ``memory_budget``. Batches, optimizers, schedules,
    validation, checkpoints and logs are torchtitan's. A chunked loss is computed whole, inside of the model.
    Weights are drawn by the modules' own initialisation, from ``seed``, each rank's alone. Attention over packed
    documents is torch's with a mask, which computes what FlexAttention does and can be traced.

    Raises InputError, when the model is built, for degrees of parallelism in ``config``, which a plan chooses, for
    plans with stages, offloading and CUDA graphs, and for models that are no decoders or make masks of their own.
    """
    spec = config.model_spec
    if spec is None:
        raise InputError("the configuration names no model: set model_spec before planned(...)")
    loss = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    model = copy.deepcopy(spec.model)
    for kind in (FlexAttention.Config, VarlenAttention.Config):
        for _, _, holder, name in list(model.traverse(kind)):
            setattr(holder, name, _MaskedAttention.Config())
    return dataclasses.replace(
        config,
        loss=_LossInside.Config(),
        model_spec=dataclasses.replace(spec, model=model, parallelize_fn=_Parallelize(loss, galvatron)),
        parallelism=dataclasses.replace(config.parallelism, spmd_backend="partial_dtensor"),
        training=dataclasses.replace(config.training, disable_cuda_graphs=True),
    )


class _Parallelize:
    """What torchtitan calls with a model on the meta device, to have it parallelized."""

    def __init__(self, loss: BaseLoss.Config, options: dict[str, Any]) -> None:
        self._loss = loss
        self._options = options

    def __call__(
        self, model: Any, *, parallel_dims: Any, training: Any, parallelism: Any, compile_config: Any, **_: Any
    ) -> _PlannedModel:
        _refuse(model, training, parallelism)
        rows = torch.zeros(training.local_batch_size, training.seq_len, dtype=torch.int64)
        example = {
            "tokens": rows,
            "positions": rows + 0,
            "labels": rows + 0,
            "count": torch.ones((), dtype=torch.int64),
        }
        compiles = compile_config.enable and "model" in compile_config.components
        lowers = TORCH_DTYPE_MAP[training.mixed_precision_param] != TORCH_DTYPE_MAP[training.dtype]
        options = policy_named("bf16" if lowers else "no", self._options)
        options = {"backend": "inductor", **options} if compiles else options
        inside = _with_loss(model, self._loss.build(compile_config=None))
        compiled = compiled_for_ranks(inside, example, device_type, options)
        if compiled.plan.pipelining.num_stages > 1:
            raise InputError(
                "torchtitan clips and saves what each process holds as if it were all: give a plan without stages, or "
                "num_stages=1"
            )
        return _PlannedModel(compiled)


def _refuse(model: Any, training: Any, parallelism: Any) -> None:
    for name in _DEGREES:
        degree = getattr(parallelism, f"{name}_parallel_degree")
        if degree > 1:
            raise InputError(
                f"{name}_parallel_degree={degree}: the plan says how the model is split; leave it at 1, and say what "
                f"you want as plan=, constraints= or roles="
            )
    if training.enable_cpu_offload:
        raise InputError("enable_cpu_offload: leave it out, and give planned(config, offload=('states',))")
    if not training.disable_cuda_graphs or parallelism.spmd_backend != "partial_dtensor":
        raise InputError("leave disable_cuda_graphs and spmd_backend as planned(...) sets them")
    if not isinstance(model, Decoder) or type(model).get_attention_masks is not Decoder.get_attention_masks:
        raise InputError(
            f"{type(model).__name__} is no decoder with torchtitan's masks of packed documents: use "
            f"galvatron_fx.compile in a loop of your own"
        )


def _with_loss(model: Any, loss: BaseLoss) -> nn.Module:
    """``model`` with a forward that makes masks and returns the loss, and modules that are initialised one by one."""
    kind = type(model)

    def forward(self: Any, tokens: Tensor, positions: Tensor, labels: Tensor, count: Tensor) -> dict[str, Tensor]:
        outputs = kind.forward(self, tokens, positions=positions, attention_masks=_document_mask(positions))
        return {"loss": loss(outputs, labels, count)[0]}

    def initialise(self: Any, module: Module) -> None:
        module._init_self_parameters()
        module._init_self_buffers()

    inside: nn.Module = copy.copy(model)
    added = {"forward": forward, "_init_weights": initialise, "__module__": kind.__module__}
    inside.__class__ = type(kind.__name__, (kind,), added)
    return inside


def _document_mask(positions: Tensor) -> Tensor:
    """Which keys each query of ``positions`` [rows, length] sees: those before it of its document, which starts where
    positions are 0. Bools of [rows, 1, length, length]."""
    document = (positions == 0).cumsum(1)
    place = torch.arange(positions.shape[1], device=positions.device)
    seen = (document[:, :, None] == document[:, None, :]) & (place[:, None] >= place)
    return seen[:, None]


class _MaskedAttention(Module):
    """torch's attention under a mask of bools, with the arguments of FlexAttention's module."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Of nothing."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        **others: Any,
    ) -> Tensor:
        """[rows, length, heads, width], as what it returns."""
        unknown = [name for name, value in others.items() if value is not None]
        if unknown:
            raise InputError(f"attention with {unknown[0]} is computed by FlexAttention alone, which is not traced")
        query, key, value = (tensor.transpose(1, 2) for tensor in (queries, keys, values))
        outputs = scaled_dot_product_attention(query, key, value, attention_masks, scale=scale, enable_gqa=enable_gqa)
        return outputs.transpose(1, 2)


class _PlannedModel(nn.Module):
    """What torchtitan's loop holds: the compiled model's tensors under their names; called, it waits for labels."""

    def __init__(self, compiled: DistributedGraphModule) -> None:
        super().__init__()
        object.__setattr__(self, "compiled", compiled)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> _Outputs:
        """``tokens``: this rank's own rows [rows, length]; without ``positions`` each row is one document."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return _Outputs(self.compiled, {"tokens": tokens, "positions": positions})

    def to_empty(self, *, device: Any, recurse: bool = True) -> _PlannedModel:
        """Leave the weights, which lie on their devices."""
        return self

    def init_weights(self, **_: Any) -> None:
        """Leave the weights, which are those of the modules' own initialisation."""

    def train(self, mode: bool = True) -> _PlannedModel:
        """Of the compiled model."""
        self.compiled.train(mode)
        self.training = mode
        return self

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Those of the compiled model, and so its parameters and buffers."""
        modules: Iterator[tuple[str, nn.Module]] = self.compiled.named_modules(*args, **kwargs)
        return modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the compiled model."""
        return self.compiled.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Into the compiled model."""
        return self.compiled.load_state_dict(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


@dataclass
class _Outputs:
    """A call that waits for the labels of its rows."""

    model: DistributedGraphModule
    inputs: dict[str, Tensor] = field(repr=False)


class _LossInside(BaseLoss):
    """The loss that the compiled model computes: the share of this rank, as torchtitan adds up the ranks' for its logs.

    Gradients are those of the whole.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        """Of nothing."""

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        """The loss is compiled with the model."""

    def __call__(
        self, outputs: _Outputs, labels: Tensor, global_valid_tokens: Tensor | None = None, **_: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``labels`` of this rank's rows; the sum over all ranks' tokens is divided by ``global_valid_tokens``."""
        count = torch.ones((), dtype=torch.int64) if global_valid_tokens is None else global_valid_tokens
        loss = outputs.model(**outputs.inputs, labels=labels, count=count)["loss"]
        return loss + loss.detach() * (1 / dist.get_world_size() - 1), {}
