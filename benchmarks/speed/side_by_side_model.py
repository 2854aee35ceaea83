"""The model of ``side_by_side.py`` in plain torch, and the parallelism that people write for it by hand with torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

Step = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """Sizes of the decoder and of its batch."""

    hidden: int
    layers: int
    batch: int
    sequence: int
    head: int = 32
    vocabulary: int = 512


class Attention(nn.Module):
    """Causal attention over as many heads as the weights of this rank hold."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part(x).view(batch, length, -1, self.head).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, hidden: int, head: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.feed_forward = Attention(hidden, head), FeedForward(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Decoder(nn.Module):
    """A LLaMA-like decoder with learned positions; gives the mean cross entropy where targets are given."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.layers = nn.ModuleList(Layer(size.hidden, size.head) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.hidden)
        self.head = nn.Linear(size.hidden, size.vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids)
        x = x + self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def new_model(size: Size) -> Decoder:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Decoder(size)


def new_batch(size: Size) -> dict[str, Tensor]:
    """The global batch."""
    ids = torch.randint(size.vocabulary, (size.batch, size.sequence + 1), generator=torch.Generator().manual_seed(0))
    return {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


@dataclass
class ByHand:
    """A model made parallel by hand: what to run as forward and backward, and what to optimise."""

    module: nn.Module
    forward_backward: Step


def _share(batch: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """This rank's samples."""
    return {name: value.chunk(ranks)[rank] for name, value in batch.items()}


def _plain(module: nn.Module, call: Callable[..., Tensor], batch: dict[str, Tensor]) -> ByHand:
    return ByHand(module, lambda: call(**batch).backward())


def ddp(size: Size, ranks: int, compiled: bool) -> ByHand:
    """``DistributedDataParallel`` with its defaults."""
    model = DistributedDataParallel(new_model(size))
    call = torch.compile(model) if compiled else model
    return _plain(model, call, _share(new_batch(size), dist.get_rank(), ranks))


def _fsdp(size: Size, ranks: int, compiled: bool, reshard: bool) -> ByHand:
    model = new_model(size)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return _plain(model, model, _share(new_batch(size), dist.get_rank(), ranks))


def fsdp_again(size: Size, ranks: int, compiled: bool) -> ByHand:
    """``fully_shard`` of every layer, gathered again for backward."""
    return _fsdp(size, ranks, compiled, reshard=True)


def fsdp_kept(size: Size, ranks: int, compiled: bool) -> ByHand:
    """``fully_shard`` of every layer, kept gathered until backward."""
    return _fsdp(size, ranks, compiled, reshard=False)


def _tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor parallelism with sequence parallelism between, as torch's tutorial has it for LLaMA."""
    split_factor = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, split_factor)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for layer in model.layers:
        plan = {
            "norm1": SequenceParallel(),
            "norm2": SequenceParallel(),
            "attention": whole,
            "feed_forward": whole,
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)


class _LocalPositions(nn.Module):
    """The positions of this rank's part of the sequence: what is written by hand for sequence parallelism."""

    def __init__(self, weight: nn.Parameter, mesh: DeviceMesh) -> None:
        super().__init__()
        self.share = nn.Parameter(distribute_tensor(weight.data, mesh, [Shard(0)]))

    @property
    def weight(self) -> Tensor:
        return self.share.to_local() if isinstance(self.share, DTensor) else self.share


def _with_tensor_parallelism(size: Size, mesh: DeviceMesh) -> Decoder:
    model = new_model(size)
    _tensor_parallel(model, mesh)
    model.positions = _LocalPositions(model.positions.weight, mesh)
    return model


def tensor_sequence(size: Size, ranks: int, compiled: bool) -> ByHand:
    """DTensor's ``parallelize_module``."""
    model = _with_tensor_parallelism(size, init_device_mesh("cpu", (ranks,)))
    return _plain(model, torch.compile(model) if compiled else model, new_batch(size))


def fsdp_by_tensor(size: Size, ranks: int, compiled: bool) -> ByHand:
    """``fully_shard`` over the outer axis of a 2-D mesh, ``parallelize_module`` over the inner one."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    model = _with_tensor_parallelism(size, mesh["tensor"])
    for layer in model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return _plain(model, model, _share(new_batch(size), mesh["data"].get_local_rank(), ranks // 2))


class _Stage(nn.Module):
    """Half of the decoder."""

    def __init__(self, model: Decoder, rank: int) -> None:
        super().__init__()
        half = len(model.layers) // 2
        self.embed = nn.ModuleList([model.tokens, model.positions]) if rank == 0 else None
        self.layers = model.layers[:half] if rank == 0 else model.layers[half:]
        self.end = nn.Sequential(model.norm, model.head) if rank == 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed[0](x) + self.embed[1].weight
        for layer in self.layers:
            x = layer(x)
        return self.end(x) if self.end is not None else x


def pipeline(size: Size, ranks: int, compiled: bool) -> ByHand:
    """Two stages on ``torch.distributed.pipelining``, four micro-batches in 1F1B."""
    rank, batch = dist.get_rank(), new_batch(size)
    module = _Stage(new_model(size), rank)
    if compiled:
        module.compile()
    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, targets: F.cross_entropy(y.flatten(0, 1), targets.flatten()))

    def step() -> None:
        if rank == 0:
            schedule.step(batch["ids"])
        else:
            schedule.step(target=batch["targets"])

    return ByHand(module, step)


def alone(size: Size, ranks: int, compiled: bool) -> ByHand:
    """One process."""
    model = new_model(size)
    return _plain(model, torch.compile(model) if compiled else model, new_batch(size))
