"""Compositions of seams: what people do around a compiled model, several of them at once, each made by one seed.

Shared by ``tests/seams/test_compositions.py``, which runs a few, and ``benchmarks/correctness/compose_seams.py``.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import galvatron_fx
from galvatron_fx import DistributedGraphModule, Plan, own_rows
from galvatron_fx.errors import GalvatronError
from galvatron_fx.ir.plan.pipelining import Pipelining

SAMPLES, LENGTH, WIDTH, WORDS = 4, 6, 8, 11
STEPS = 3
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Composition:
    """What is composed.

    ``losses``: "one", "loss and another" (of which ``loss`` is trained) or "two" (added up outside); ``buffer``: how
    a running mean is updated; ``stored``: where a part of the loss is kept; ``freeze``: when a parameter is; ``rows``:
    who brings the batch; ``resume``: what a new model loads after a step; ``call``: what differentiates;
    ``vocabulary``: where embedding and head are under stages.
    """

    seed: int
    role: str
    microbatches: int
    recompute: bool
    tied: bool
    losses: str
    buffer: str
    stored: str
    ignored: bool
    dropout: str
    freeze: str
    rows: str
    autocast: bool
    accumulate: int
    clip: bool
    optimizer: str
    resume: str
    call: str
    vocabulary: str = "ends"

    def __str__(self) -> str:
        parts = [
            f"{name}={value}" for name, value in vars(self).items() if value not in (False, "none", "no", "ends", 1)
        ]
        return " ".join(parts)


def draw(seed: int) -> Composition:
    """Make the composition of a seed."""
    random = Random(seed)
    role = random.choice(("data", "zero", "tensor", "sequence", "pipeline"))
    losses = random.choice(("one", "one", "loss and another", "loss and another", "two"))
    microbatches = random.choice((1, 2)) if role == "pipeline" else random.choice((1, 1, 1, 1, 2))
    often = "backward" if losses == "two" or random.random() < 0.5 else "forward_backward"
    return Composition(
        seed=seed,
        role=role,
        microbatches=microbatches,
        recompute=random.random() < 0.25,
        tied=random.random() < 0.4,
        losses=losses,
        buffer=random.choice(("no", "no", "in place", "assigned")),
        stored=random.choice(("none", "none", "on the module", "in a list")),
        ignored=random.random() < 0.5,
        dropout=random.choice(("no", "no", "off")),
        freeze=random.choice(("no", "no", "before", "after")),
        rows=random.choice(("global", "global", "own", "local")),
        autocast=random.random() < 0.08,
        accumulate=random.choice((1, 1, 2)),
        clip=random.random() < 0.3,
        optimizer=random.choice(("sgd", "adamw")),
        resume=random.choice(("no", "no", "state dict")),
        call=often if random.random() < 0.9 else random.choice(("forward_backward", "backward")),
        vocabulary=Random(f"{seed}, vocabulary").choice(("ends", "spread")) if role == "pipeline" else "ends",
    )


# ---- the model -------------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A feed-forward layer that keeps a penalty of its hidden values, and their running mean, as it is told."""

    def __init__(self, what: Composition) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.buffer, self.stored = what.buffer, what.stored
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.buffer == "in place":
            with torch.no_grad():
                self.mean.mul_(0.9).add_(h.detach().mean((0, 1)), alpha=0.1)
        elif self.buffer == "assigned":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean((0, 1))
        if self.stored == "on the module":
            self.penalty = h.square().mean()
        elif self.stored == "in a list":
            kept.append(h.square().mean())
        return x + self.down(self.drop(h))


class Tagger(nn.Module):
    """Embeddings, two layers, a head; a mean over the labels that count."""

    def __init__(self, what: Composition) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Layer(what) for _ in range(2))
        self.losses, self.stored = what.losses, what.stored
        if what.tied:
            self.head.weight = self.embed.weight
        if what.freeze == "before":
            self.layers[0].up.weight.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, kept = self.embed(ids), []
        for layer in self.layers:
            x = layer(x, kept)
        if self.stored == "on the module":
            kept = [layer.penalty for layer in self.layers]
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        extra = 0.1 * sum(kept) if kept else 0.0
        if self.losses == "one":
            return {"loss": loss + extra, "logits": logits}
        size = 0.01 * logits.square().mean()
        if self.losses == "two":
            return {"fit": loss + extra, "size": size}
        return {"loss": loss + extra, "size": size, "logits": logits}


def model_of(what: Composition) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(what.seed)
        model = Tagger(what).double()
    return model.eval() if what.dropout == "off" else _without_dropout(model)


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch_of(what: Composition, step: int, part: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + part)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    if what.ignored:
        labels[0, 1:] = -100
        labels[SAMPLES - 1, :2] = -100
    return {"ids": ids, "labels": labels}


# ---- training --------------------------------------------------------------------------------------------------------

Record = dict[str, Tensor]


@dataclass
class Trainer:
    """Trains the model of a composition, compiled or plain, and records what comes of it."""

    what: Composition
    mesh: DeviceMesh | None

    def run(self) -> Record:
        """Losses, gradient norms, parameters, buffers and stored tensors of all steps."""
        record: Record = {}
        model = self._model()
        optimizer = self._optimizer(model)
        for step in range(STEPS):
            for part in range(self.what.accumulate):
                for name, value in self._losses(model, batch_of(self.what, step, part)).items():
                    record[f"step {step}.{part} {name}"] = _whole(value)
            record |= {
                f"step {step} grad {n}": _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None
            }
            if self.what.clip:
                record[f"step {step} norm"] = _whole(self._clipped(model))
            optimizer.step()
            optimizer.zero_grad()
            record |= {f"step {step} {n}": _whole(v) for n, v in (*model.named_parameters(), *model.named_buffers())}
            if self.what.stored == "on the module" and hasattr(model, "layers"):
                kept = [getattr(layer, "penalty", None) for layer in model.layers.children()]
                record |= {f"step {step} stored {i}": _whole(v) for i, v in enumerate(kept) if v is not None}
            if self.what.freeze == "after" and step == 0:
                self._freeze(model)
            if self.what.resume != "no" and step == 1:
                model, optimizer = self._resumed(model, optimizer)
        return record

    def _model(self) -> nn.Module:
        plain, what = model_of(self.what), self.what
        if self.mesh is None:
            return plain
        options: dict[str, Any] = {}
        batch = batch_of(what, 0, 0)
        if what.rows == "local" and _knows_local_batches():
            options["batch"] = "local"
            batch = self._rows(batch)
        stages = 2 if what.role == "pipeline" else 1
        pipelining = Pipelining(stages, what.microbatches, vocabulary=what.vocabulary)
        plan = Plan.uniform((2,), (what.role,), recompute=what.recompute, pipelining=pipelining)
        return galvatron_fx.compile(plain, self.mesh, batch, plan=plan, **options)

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.what.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)

    def _losses(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Forward and backward; the losses, and whatever else has no dims."""
        compiled = isinstance(model, DistributedGraphModule)
        scope: AbstractContextManager[Any] = torch.autocast("cpu") if self.what.autocast else nullcontext()
        with scope:
            if compiled and self.what.call == "forward_backward":
                out = model.forward_backward(**self._given(model, batch))
            else:
                out = model(**self._given(model, batch) if compiled else batch)
        if not (compiled and self.what.call == "forward_backward"):
            total = out["fit"] + out["size"] if self.what.losses == "two" else out["loss"]
            total.backward()
        return {name: value for name, value in out.items() if isinstance(value, Tensor) and value.dim() == 0}

    def _given(self, model: DistributedGraphModule, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.what.rows == "own" or (self.what.rows == "local" and not _knows_local_batches()):
            rows = list(model.batch_rows)
            return own_rows({name: value[rows] for name, value in batch.items()})
        return self._rows(batch) if self.what.rows == "local" else batch

    def _rows(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """This rank's half of the batch, as a sampler would hand it out."""
        half = SAMPLES // 2
        return {name: value[dist.get_rank() * half :][:half] for name, value in batch.items()}

    def _clipped(self, model: nn.Module) -> Tensor:
        if isinstance(model, DistributedGraphModule):
            return model.clip_grad_norm_(0.2)
        return nn.utils.clip_grad_norm_(model.parameters(), 0.2)

    def _freeze(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name == "layers.1.down.weight":
                parameter.requires_grad_(False)

    def _resumed(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        """A new model and optimizer with the state of the old ones."""
        other = self._model()
        if self.what.freeze == "after":
            self._freeze(other)
        other.load_state_dict(copy.deepcopy(model.state_dict()))
        later = self._optimizer(other)
        later.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return other, later


def _knows_local_batches() -> bool:
    return "batch" in inspect.signature(galvatron_fx.compile).parameters


def _whole(value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


# ---- what becomes of it ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """``kind``: "equal", "refused", "wrong" or "crashed"; ``reason``: the error, or what differs most."""

    kind: str
    reason: str = ""


def run(what: Composition, mesh: DeviceMesh) -> Outcome:
    """Train eager and compiled, on every rank; what all ranks say of it."""
    expected = Trainer(what, None).run()
    try:
        own = _compared(Trainer(what, mesh).run(), expected)
    except GalvatronError as error:
        own = Outcome("refused", f"{type(error).__name__}: {str(error).splitlines()[0]}"), set()
    except Exception:
        own = Outcome("crashed", traceback.format_exc(limit=-8)), set()
    heard: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(heard, own)
    return _together(what, heard, expected)


def _compared(got: Record, expected: Record) -> tuple[Outcome, set[str]]:
    worst, name = 0.0, ""
    for key in got.keys() & expected.keys():
        scale = max(float(expected[key].abs().max()), 1e-3)
        error = float((got[key] - expected[key]).abs().max()) / scale
        if not error <= worst:
            worst, name = error, key
    more = sorted(got.keys() - expected.keys())
    if more:
        return Outcome("wrong", f"eager has no {more[0]}"), set(got)
    if not worst < TOLERANCE:
        return Outcome("wrong", f"{name} differs by {worst:.1e}"), set(got)
    return Outcome("equal"), set(got)


def _together(what: Composition, heard: list[tuple[Outcome, set[str]]], expected: Record) -> Outcome:
    """The worst that any rank says; what no rank holds is missing."""
    for kind in ("crashed", "wrong", "refused"):
        found = [(rank, outcome) for rank, (outcome, _) in enumerate(heard) if outcome.kind == kind]
        if found and kind == "refused" and len(found) < len(heard):
            return Outcome("crashed", f"only rank {found[0][0]} refused: {found[0][1].reason}")
        if found:
            return found[0][1]
    missing = expected.keys() - set().union(*(keys for _, keys in heard))
    missing = {name for name in missing if " stored " not in name}
    return Outcome("wrong", f"missing: {sorted(missing)[0]}") if missing else Outcome("equal")
