"""Train a small LLaMA under Ray Train, each worker a rank with rows of its own.

    pip install "ray[train]"
    python examples/ray_train.py --workers 2 --checkpoints /shared/runs/1

Ray starts the workers and their process group; nothing else differs from a script under torchrun. Started again, or
restarted by Ray (``FailureConfig``), it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
from itertools import count
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, get_device
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import galvatron_fx


def train(options: dict[str, Any]) -> None:
    """What each worker does."""
    device = get_device()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):  # no worker holds it whole
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4
            )
        )

    tokens = torch.randint(256, (64, 32), generator=torch.Generator().manual_seed(0))  # yours, of which
    sampler = DistributedSampler(TensorDataset(tokens), drop_last=True)  # each worker reads rows of its own: "local"
    loader = DataLoader(sampler.dataset, options["rows"], sampler=sampler, drop_last=True)
    every = ({"input_ids": ids, "labels": ids} for _ in count() for (ids,) in loader)
    model = galvatron_fx.compile(model, mesh, next(every), batch="local", memory_budget=options["memory_budget"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = galvatron_fx.Checkpointer(options["checkpoints"], keep=2)
    restored = checkpoints.load(model=model, optimizer=optimizer)
    for step in range(restored.step + 1 if restored else 1, options["steps"] + 1):
        loss = model.forward_backward(**next(every)).loss
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % options["save_every"] == 0 or step == options["steps"]:
            checkpoints.save(step, model=model, optimizer=optimizer)
        ray.train.report({"step": step, "loss": float(loss), "norm": float(norm)})
        if dist.get_rank() == 0:
            print(f"step {step}  loss {float(loss):.4f}")


def main() -> None:
    """Start the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus", action="store_true", help="one a worker")
    parser.add_argument("--rows", type=int, default=4, help="of a worker, a step")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--memory-budget", help="bytes of a device, such as 12GiB")
    parser.add_argument("--checkpoints", required=True, help="a folder that all nodes see")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config=vars(options),
        torch_config=TorchConfig(backend="nccl" if options.gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpus),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
