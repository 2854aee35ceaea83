"""Train a mixture of experts whose gate becomes sparse: tokens go to fewer experts as training goes on.

    torchrun --nproc-per-node 2 examples/dense_to_sparse.py --experts 4 --steps 4:20,2:20,1:40

Dense-to-sparse gates (Nie et al. 2021) let all experts learn first, and save work later; their falling temperature is
left out here. A program is of one number of experts a token, so the model is captured and compiled once for each, and
weights and optimizer states are carried over, whatever the plans are. Before training, the cost curve tells what a step
takes with each number. ``--check`` trains a plain copy beside it, whose gate changes in place, and compares all losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import MixtralConfig, MixtralForCausalLM

import galvatron_fx
from galvatron_fx.ir.plan.units import format_bytes, format_seconds

Batch = dict[str, Tensor]
Phases = list[tuple[int, int]]  # experts a token, and steps


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--steps", type=_phases, default=_phases("4:20,2:20,1:40"), help="EXPERTS:STEPS,...")
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--check", action="store_true", help="compare with a plain model, in float64")
    return parser.parse_args(given)


def _phases(text: str) -> Phases:
    return [(int(number), int(steps)) for number, _, steps in (phase.partition(":") for phase in text.split(","))]


def mixture(options: argparse.Namespace, experts_a_token: int) -> MixtralForCausalLM:
    """A small language model, with the same weights for every number of experts a token."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, hidden_size=options.hidden_size, intermediate_size=2 * options.hidden_size,
        num_hidden_layers=options.layers, num_attention_heads=4, num_key_value_heads=2, use_cache=False,
        num_local_experts=options.experts, num_experts_per_tok=experts_a_token,
    )  # fmt: skip
    model = MixtralForCausalLM(config).to(torch.float64 if options.check else torch.float32)
    model.set_experts_implementation("eager")  # which knows float64; compiled, all are the same
    return model


def change_gates(model: nn.Module, experts_a_token: int) -> None:
    """Let the gates of a model that is not compiled send each token to another number of experts."""
    for module in model.modules():
        if hasattr(module, "top_k"):
            module.top_k = experts_a_token


def batch_of(options: argparse.Namespace, step: int) -> Batch:
    """Sentences of a small language: each word says which two may come next."""
    chance = torch.Generator().manual_seed(step)
    words = torch.zeros(options.batch_size, options.sequence_length, dtype=torch.long)
    for place in range(1, options.sequence_length):
        choice = torch.randint(2, (options.batch_size,), generator=chance)
        words[:, place] = (5 * words[:, place - 1] + 7 * choice + 3) % 64
    return {"input_ids": words, "labels": words.clone()}


def cost_curve(options: argparse.Namespace, mesh: DeviceMesh) -> Table:
    """What the planner says of a step, by experts a token."""
    table = Table(title="Cost of a step by experts a token", title_justify="left")
    for heading in ("experts", "predicted step", "predicted peak"):
        table.add_column(heading, justify="right")
    cluster, batch = galvatron_fx.Cluster.from_mesh(mesh), batch_of(options, 0)
    for number, _ in options.steps:
        plan = galvatron_fx.plan(mixture(options, number), cluster, batch, simulate_runners_up=False)
        table.add_row(str(number), format_seconds(plan.step_time_s), f"{format_bytes(plan.peak_memory_bytes)} a rank")
    return table


def train(options: argparse.Namespace, mesh: DeviceMesh) -> list[float]:
    """Train through all phases and return the losses; one capture a phase, the state carried on."""
    losses: list[float] = []
    plain = deepcopy(mixture(options, options.steps[0][0])) if options.check else None
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=options.learning_rate) if plain is not None else None
    model = optimizer = None
    for number, steps in options.steps:
        subject = mixture(options, number)
        sparser = galvatron_fx.compile(subject, mesh, batch_of(options, 0))
        states = None
        if model is not None and optimizer is not None:
            sparser.load_state_dict(model.state_dict())
            states = get_optimizer_state_dict(model, optimizer)
        model, optimizer = sparser, torch.optim.AdamW(sparser.parameters(), lr=options.learning_rate)
        if states is not None:
            set_optimizer_state_dict(model, optimizer, states)
        if plain is not None:
            change_gates(plain, number)
        for _ in range(steps):
            batch = batch_of(options, len(losses))
            losses.append(model.forward_backward(**batch).loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if plain is not None and plain_optimizer is not None:
                _compare(plain, plain_optimizer, batch, losses)
        busiest = model.expert_loads().imbalance(options.experts)
        if dist.get_rank() == 0:
            print(f"{number} experts a token: loss {losses[-1]:.4f}, busiest expert {busiest:.2f} x mean", flush=True)
    return losses


def _compare(plain: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch, losses: Sequence[float]) -> None:
    """A step of the plain model. Raises SystemExit where its loss differs from the last of ``losses``."""
    result = plain(**batch).loss
    result.backward()
    loss = result.item()
    optimizer.step()
    optimizer.zero_grad()
    if abs(loss - losses[-1]) > 1e-8 * abs(loss):
        raise SystemExit(f"step {len(losses)}: loss {losses[-1]}, and of the plain model {loss}")


def main(given: Sequence[str] | None = None) -> None:
    """Tell the costs, and train."""
    options = arguments(given)
    dist.init_process_group()
    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (dist.get_world_size(),))
    curve = cost_curve(options, mesh)
    if dist.get_rank() == 0:
        Console().print(curve)
    losses = train(options, mesh)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}" + (", as of the plain model" if options.check else ""))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
