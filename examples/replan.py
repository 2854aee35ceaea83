"""Train a small model on changing numbers of ranks in one run: ranks leave and join between steps.

    torchrun --nproc-per-node 4 examples/replan.py --ranks 4,3,4 --steps 10

Prints what each change took, and the losses, which are those of one device.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import galvatron_fx

WIDTH, LAYERS, CLASSES, BATCH = 64, 6, 10, 24


class Classifier(nn.Module):
    """A stack of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(LAYERS))
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.head(self.layers(x)), labels)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (BATCH,), generator=generator)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="4,3,4", help="how many train, one number after the other")
    parser.add_argument("--steps", type=int, default=10, help="on each number of ranks")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = galvatron_fx.compile(Classifier().double(), init_device_mesh("cpu", (dist.get_world_size(),)), batch(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    for count in map(int, options.ranks.split(",")):
        change = galvatron_fx.replan(model, DeviceMesh("cpu", list(range(count))), optimizer=optimizer)
        if dist.get_rank() == 0:
            print(f"{count} ranks: {change}\n{model.plan}")
        for _ in range(options.steps):
            step += 1
            if not change.is_member:
                continue
            loss = model.forward_backward(*batch(step))
            optimizer.step()
            optimizer.zero_grad()
            if dist.get_rank() == 0:
                print(f"step {step}  loss {loss.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
