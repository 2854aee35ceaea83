"""Train a causal language model of transformers on text files, on as many processes as torchrun starts.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else restarted ranks read the addresses of those before them
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train.py --model llama --set hidden_size=256 \\
        --set intermediate_size=704 --set num_hidden_layers=4 --set num_attention_heads=8 --set vocab_size=256 \\
        --batch-size 16 --sequence-length 128 --text FOLDER --steps 200 --memory-budget 60MB --checkpoints runs/1

``--model``: a folder as save_pretrained writes it (its weights and its tokenizer are taken), a config.json, or a model
type; without a tokenizer, tokens are bytes. Started again, it goes on from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from metrics import Metrics
from text import PackedText, Tokens, split
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import get_cosine_schedule_with_warmup

import galvatron_fx
from galvatron_fx import own_rows
from galvatron_fx.cli import models
from galvatron_fx.cli import options as flags

PROFILED = schedule(wait=2, warmup=1, active=3, repeat=1)  # steps: the first ones compile and allocate


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_model(parser)
    flags.add_search(parser)
    parser.set_defaults(dtype="float32")
    group = parser.add_argument_group("training")
    group.add_argument("--text", nargs="+", type=Path, required=True, help="text files, and folders of them")
    group.add_argument("--pattern", default="*", help="which files of the folders (default: all)")
    group.add_argument("--steps", type=int, default=200)
    group.add_argument("--accumulate", type=int, default=1, help="batches whose gradients add up to a step's")
    group.add_argument("--learning-rate", type=float, default=1e-3)
    group.add_argument("--warm-up", type=int, default=10, help="steps of a rising learning rate")
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--largest-norm", type=float, default=1.0, help="gradients are scaled down to this norm")
    group.add_argument("--backend", default="eager", help="eager or inductor")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--timeout", type=float, default=600, help="seconds to wait for another rank")
    group.add_argument("--checkpoints", type=Path, required=True, help="a folder to save in and to go on from")
    group.add_argument("--save-every", type=int, default=50, help="steps")
    group.add_argument("--evaluate-every", type=int, default=50, help="steps")
    group.add_argument("--evaluate-batches", type=int, default=4)
    group.add_argument("--log-every", type=int, default=10, help="steps")
    group.add_argument("--tensorboard", type=Path, help="a folder for TensorBoard")
    group.add_argument("--profile", type=Path, help="a folder for a trace of three steps of every rank")
    group.add_argument("--save-weights", type=Path, help="a folder for from_pretrained of transformers, at the end")
    return parser.parse_args(given)


def evaluate(model: galvatron_fx.DistributedGraphModule, text: PackedText, batches: int) -> float:
    """Mean loss on the first batches of held-out text; nan where it is too short for one."""
    own = list(islice(DataLoader(deepcopy(text), len(model.batch_rows), drop_last=True), batches))  # a copy: it moves
    count = torch.tensor(len(own), device=model.mesh.device_type)
    dist.all_reduce(count, dist.ReduceOp.MIN)  # parts of the text that ranks read may end at different batches
    model.eval()
    with torch.no_grad():
        losses = [float(model(**own_rows(batch)).loss) for batch in own[: int(count)]]
    model.train()
    return sum(losses) / len(losses) if losses else float("nan")


def main(given: Sequence[str] | None = None) -> None:
    """Train."""
    options = arguments(given)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        raise SystemExit("--max-restarts of torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment")
    dist.init_process_group(timeout=timedelta(seconds=options.timeout))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    # The model is on the meta device: no process ever holds it whole.
    folder = Path(options.model)
    subject = models.load(options)
    if not {"input_ids", "labels"} <= subject.inputs.keys():
        raise SystemExit(f"{options.model} takes {', '.join(subject.inputs)}: give a causal language model")
    model = galvatron_fx.compile(
        subject.model, mesh, subject.inputs, backend=options.backend, seed=options.seed, **flags.search_of(options)
    )
    if (folder / "config.json").is_file():
        galvatron_fx.load_weights(model, folder, cast=True)

    # Every rank reads the rows that it computes, of the same batches whatever the mesh.
    tokens = Tokens.of(folder)
    if tokens.count > (vocabulary := subject.model.config.get_text_config().vocab_size):
        raise SystemExit(f"the text has {tokens.count} kinds of tokens and the model {vocabulary}: --set vocab_size=")
    batch_size, length = subject.inputs["input_ids"].shape
    training, held_out = split(options.text, options.pattern)
    rows = model.batch_rows
    text = PackedText(training, tokens, length, options.seed, rows=rows, of=batch_size)
    loader = StatefulDataLoader(text, len(rows))
    evaluation = PackedText(held_out, tokens, length, epochs=1, rows=rows, of=batch_size)

    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=options.learning_rate, betas=(0.9, 0.95))
    scheduler = get_cosine_schedule_with_warmup(optimizer, options.warm_up, options.steps)

    checkpoints = galvatron_fx.Checkpointer(options.checkpoints, keep=2, asynchronous=True)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    restored = checkpoints.load(**state)
    start = restored.step if restored else 0

    metrics = Metrics(
        options.tensorboard, device, throughput=model.plan.throughput, batches=options.accumulate, start=start
    )
    metrics.say(f"{subject}\n\n{model.plan}\n")
    if restored:
        metrics.say(f"going on after step {start}")

    trace = profile(schedule=PROFILED, on_trace_ready=tensorboard_trace_handler(str(options.profile)))
    batches = iter(loader)
    with trace if options.profile else nullcontext():
        for step in range(start + 1, options.steps + 1):
            with metrics.timed():
                loss = 0.0
                for _ in range(options.accumulate):
                    loss += model.forward_backward(**own_rows(next(batches))).loss / options.accumulate
                for gradient in [p.grad for p in model.parameters() if p.grad is not None]:
                    gradient /= options.accumulate
                norm = model.clip_grad_norm_(options.largest_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if options.profile:
                trace.step()
            if step % options.log_every == 0 or step == options.steps:
                metrics.report(step, float(loss), scheduler.get_last_lr()[0], float(norm))
                metrics.report_experts(step, model.expert_loads())
            if step % options.evaluate_every == 0 or step == options.steps:
                found = evaluate(model, evaluation, options.evaluate_batches)
                metrics.write(step, {"held out/loss": found})
                metrics.say(f"step {step}  held-out loss {found:.4f}")
            if step % options.save_every == 0 or step == options.steps:
                checkpoints.save(step, **state)

    checkpoints.wait()
    if options.save_weights:
        pretrained = folder if (folder / "config.json").is_file() else None
        galvatron_fx.save_weights(model, options.save_weights, like=pretrained)
        if pretrained is None and dist.get_rank() == 0:
            subject.model.config.save_pretrained(options.save_weights)
    metrics.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
