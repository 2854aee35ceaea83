"""One rank of ring_by_hand.py. Started through torchrun.

Arguments: a folder; what to do (JSON: sizes, steps, which of the three).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional

import galvatron_fx as gfx
from benchmarks.common.contender import WARM_UP, Contender
from benchmarks.common.tensor_memory import TensorMemory
from galvatron_fx.profiling import measure_calls, measure_cluster
from passes.lowering.apply_plan import lower
from passes.lowering.lower_step import Lowered
from passes.simulation.step import SimulateStep

aten = torch.ops.aten
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of one device."""
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    """Attention and a residual; ``key_heads`` of the ``heads`` are stored."""

    def __init__(self, task: dict[str, Any], attend: Attend) -> None:
        super().__init__()
        width, self.attend = task["hidden"], attend
        self.heads, self.key_heads = task["heads"], task["key_heads"]
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        narrow = width * self.key_heads // self.heads
        self.key, self.value = nn.Linear(width, narrow, bias=False), nn.Linear(width, narrow, bias=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden]."""
        batch, length, width = x.shape
        y = self.norm(x)
        heads = (
            projection(y).view(batch, length, count, width // self.heads).transpose(1, 2)
            for projection, count in (
                (self.query, self.heads),
                (self.key, self.key_heads),
                (self.value, self.key_heads),
            )
        )
        return x + self.out(self.attend(*heads).transpose(1, 2).reshape(batch, length, width))


class Decoder(nn.Module):
    """Token ids -> the mean square of what the layers make of them."""

    def __init__(self, task: dict[str, Any], attend: Attend = causal) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, task["hidden"])
        self.layers = nn.ModuleList(Layer(task, attend) for _ in range(task["layers"]))

    def forward(self, ids: Tensor) -> Tensor:
        """[batch, sequence] -> a number."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def tokens(length: int) -> Tensor:
    """The same on every rank."""
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(1))


# ---- by hand ----


def rows_of(rank: int, ranks: int, length: int, is_zigzag: bool) -> Tensor:
    """The positions that a rank holds."""
    if not is_zigzag:
        return torch.arange(length).chunk(ranks)[rank]
    chunks = torch.arange(length).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def send_on(tensors: list[Tensor]) -> tuple[list[Tensor], list[dist.Work]]:
    """Start to send to the next rank, and to receive as much from the one before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    came = [torch.empty_like(each) for each in tensors]
    sends = [dist.P2POp(dist.isend, each, (rank + 1) % ranks) for each in tensors]
    receives = [dist.P2POp(dist.irecv, each, (rank - 1) % ranks) for each in came]
    return came, dist.batch_isend_irecv([*sends, *receives])


def finish(works: list[dist.Work]) -> None:
    """Wait for what was started."""
    for work in works:
        work.wait()


def parts_of_step(step: int, length: int, is_zigzag: bool) -> list[tuple[slice, slice, bool]]:
    """Which queries see which keys at a step, and whether causally."""
    whole, rank = slice(0, length), dist.get_rank()
    if step == 0:
        return [(whole, whole, True)]
    front, back = slice(0, length // 2), slice(length // 2, length)
    if not is_zigzag:
        return [(whole, whole, False)] if step <= rank else []
    if step <= rank:
        return [(whole, front, False)]
    return [(back, whole, False)]


class Ring(torch.autograd.Function):
    """Keys and values go around; in backward their gradients go after them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_zigzag: bool) -> Tensor:
        """[batch, heads, sequence / ranks, width]."""
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        own, ranks = (key, value), dist.get_world_size()
        for step in range(ranks):
            came, works = send_on([key, value]) if step < ranks - 1 else ([], [])
            for queries, keys, is_causal in parts_of_step(step, query.shape[2], is_zigzag):
                part, part_sums = aten._scaled_dot_product_flash_attention_for_cpu(
                    query[:, :, queries], key[:, :, keys], value[:, :, keys], 0.0, is_causal
                )
                if step == 0:
                    out, sums = part.contiguous(), part_sums.contiguous()
                    continue
                total = torch.logaddexp(sums[:, :, queries], part_sums)
                out[:, :, queries] *= (sums[:, :, queries] - total).exp().unsqueeze(-1)
                out[:, :, queries] += part * (part_sums - total).exp().unsqueeze(-1)
                sums[:, :, queries] = total
            finish(works)
            key, value = came or (key, value)
        ctx.save_for_backward(query, *own, out, sums)
        ctx.is_zigzag = is_zigzag
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        """Gradients of query, key and value."""
        query, key, value, out, sums = ctx.saved_tensors
        grad, ranks = grad.contiguous(), dist.get_world_size()
        to_query, travelling, on_their_way = torch.zeros_like(query), [], []
        for step in range(ranks):
            came, works = send_on([key, value]) if step < ranks - 1 else ([], [])
            made = [torch.zeros_like(key), torch.zeros_like(value)]
            for queries, keys, is_causal in parts_of_step(step, query.shape[2], ctx.is_zigzag):
                arguments = (x[:, :, queries] for x in (out, sums))
                to_rows, *to_keys = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    grad[:, :, queries], query[:, :, queries], key[:, :, keys], value[:, :, keys],
                    *arguments, 0.0, is_causal,
                )  # fmt: skip
                to_query[:, :, queries] += to_rows
                for whole, part in zip(made, to_keys, strict=True):
                    whole[:, :, keys] += part
            finish(on_their_way)
            if step == 0:
                own = made
            else:
                sent = [x + y for x, y in zip(travelling, made, strict=True)] if travelling else made
                travelling, on_their_way = send_on(sent)
            finish(works)
            key, value = came or (key, value)
        finish(on_their_way)
        return to_query, own[0] + travelling[0], own[1] + travelling[1], None


def by_hand(task: dict[str, Any], is_zigzag: bool) -> Contender:
    """Each rank computes its rows; gradients are summed in one collective."""
    rank, ranks, length = dist.get_rank(), dist.get_world_size(), task["sequence"]
    model = Decoder(task, lambda query, key, value: Ring.apply(query, key, value, is_zigzag))  # type: ignore[no-untyped-call]
    rows = tokens(length)[:, rows_of(rank, ranks, length, is_zigzag)]

    def step() -> Tensor:
        loss = model(rows) / ranks
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([loss.detach().reshape(1), *(each.flatten() for each in gradients)])
        dist.all_reduce(flat)
        parts = flat[1:].split([each.numel() for each in gradients])
        for each, part in zip(gradients, parts, strict=True):
            each.copy_(part.view_as(each))
        return flat[0]

    return Contender(step, torch.optim.SGD(model.parameters(), lr=0.01))


# ---- ours ----


def compiled(task: dict[str, Any], mesh: DeviceMesh, role: str, length: int) -> Contender:
    """Ours, with one role on all ranks."""
    ids = tokens(length)
    plan = gfx.Plan.uniform((mesh.size(),), (role,))
    model = gfx.compile(Decoder(task), mesh, {"ids": ids}, plan=plan, cluster=gfx.Cluster.from_mesh(mesh))
    return Contender(lambda: model.forward_backward(ids=ids), torch.optim.SGD(model.parameters(), lr=0.01))


def in_turns(contenders: dict[str, Contender], steps: int) -> dict[str, float]:
    """The median step of each."""
    for _ in range(WARM_UP + steps):
        for contender in contenders.values():
            contender.timed()
    return {name: contender.step_s for name, contender in contenders.items()}


def against_hand(task: dict[str, Any], mesh: DeviceMesh) -> dict[str, tuple[float, float]]:
    """Steps of ours and of those by hand, which compute the same; and what the busiest rank computes in one."""
    contenders = {
        "context": compiled(task, mesh, "context", task["sequence"]),
        "by hand, zigzag": by_hand(task, True),
        "by hand, in order": by_hand(task, False),
    }
    losses = [float(contender.step()) for _ in range(2) for contender in contenders.values()]  # type: ignore[arg-type]
    for i, loss in enumerate(losses):
        assert abs(loss - losses[i // 3 * 3]) < 1e-4 * loss, f"losses differ: {losses}"
    times = in_turns(contenders, task["steps"])
    return {name: (times[name], contender.busy_s) for name, contender in contenders.items()}


def by_length(task: dict[str, Any], mesh: DeviceMesh) -> dict[int, tuple[dict[str, float], dict[str, float]]]:
    """Measured and predicted steps of both roles by length."""
    cluster = measure_cluster(mesh, seconds=task["profile_s"])
    results = {}
    for length in task["lengths"]:
        graph = gfx.capture(Decoder(task), {"ids": tokens(length)})
        lowered = {
            role: lower(graph, gfx.Plan.uniform((mesh.size(),), (role,)), cluster) for role in ("context", "sequence")
        }
        steps = {role: low for role, low in lowered.items() if isinstance(low, Lowered)}
        halves = [half for low in steps.values() for half in (low.halves.forward, low.halves.backward)]
        known = measure_calls(cluster, mesh, halves, seconds=task["calls_s"])
        predicted = {role: SimulateStep(known).run(low).step_time_s for role, low in steps.items()}
        contenders = {role: compiled(task, mesh, role, length) for role in steps}
        results[length] = in_turns(contenders, task["steps"]), predicted
    return results


def peak(task: dict[str, Any], mesh: DeviceMesh) -> dict[str, float]:
    """The most bytes of tensors in a step of ``context``, beside parameters and gradients."""
    contender = compiled(task, mesh, "context" if mesh.size() > 1 else "data", task["sequence"])
    contender.step()
    held = [p for group in contender.optimizer.param_groups for p in group["params"]]
    with TensorMemory(held) as memory:
        before = memory.bytes
        contender.step()
    return {"bytes": memory.peak_bytes - 2 * before}


def main() -> None:
    """Run one rank."""
    folder, task = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    what: dict[str, Callable[..., Any]] = {"hand": against_hand, "lengths": by_length, "memory": peak}
    result = what[task["what"]](task, mesh)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(result), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
