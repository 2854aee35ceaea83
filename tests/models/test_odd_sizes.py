"""Sizes that no axis divides, and models of unusual shape: the plan splits what it can and stays exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from galvatron_fx.ir.graph.metadata import signature
from passes.analysis.blocks import num_blocks
from tests.helpers import assert_exact, captured, one_device, simulate, uniform
from tests.models import zoo


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


class Untidy(nn.Module):
    """Tied and frozen weights, a parameter that nothing uses, two inputs and several outputs, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.side = nn.Linear(6, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(8, 8)
        self.side.weight.requires_grad_(False)
        self.mix.bias.requires_grad_(False)

    def forward(self, ids: Tensor, extra: Tensor, targets: Tensor) -> dict[str, Any]:
        hidden = self.mix(F.gelu(self.embed(ids) + self.side(extra)))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"loss": loss, "parts": (logits, [hidden]), "name": "untidy"}


class Convolutions(nn.Module):
    """Convolutions with batch normalisation, whose running statistics are updated buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(image).mean((2, 3)))
        return F.cross_entropy(logits, label), logits


class Regression(nn.Module):
    """A mean squared error over everything, and its root beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), y)


class Classifier(nn.Module):
    """torch's own TransformerEncoder with a classification head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), label)


class Translator(nn.Module):
    """torch's own Transformer, causal by its mask alone, which keeps the sequence first inside."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(16, 4, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
        return self.transformer(source, target, tgt_mask=mask).square().mean()


@dataclass
class Scores:
    """What :class:`Dataclasses` returns."""

    loss: Tensor
    parts: list[Tensor]
    name: str = "scores"


@dataclass
class Samples:
    """What :class:`Dataclasses` takes."""

    x: Tensor
    y: Tensor


class Dataclasses(nn.Module):
    """Takes and returns dataclasses that torch has not heard of."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, samples: Samples) -> Scores:
        out = self.layers(samples.x)
        return Scores(F.mse_loss(out, samples.y), [out])


class LogitsOnly(nn.Module):
    """A model that leaves the loss to its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(ids)


class ByFrequency(nn.Module):
    """An embedding whose gradient is divided by how often a word occurs in the global batch, and its weight beside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, scale_grad_by_freq=True)
        self.head = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.embed(ids)).square().mean(), self.head.weight


def untidy() -> zoo.Case:
    """The untidy model and a batch."""
    ids = torch.arange(24).reshape(4, 6) % 16
    return zoo.build(Untidy), {"ids": ids, "extra": _noise(4, 6, 6), "targets": (ids * 3 + 1) % 16}


def _convolutions() -> zoo.Case:
    return zoo.build(Convolutions), {"image": _noise(4, 3, 8, 8), "label": torch.tensor([0, 4, 2, 1])}


def _classifier(dropout: float = 0.0) -> zoo.Case:
    return zoo.build(lambda: Classifier(dropout)), {"x": _noise(4, 6, 32), "label": torch.tensor([0, 4, 2, 1])}


def _odd_batch(make: Callable[..., zoo.Case], batch: int, sequence: int, **changes: Any) -> zoo.Case:
    model, inputs = make(layers=1, **changes)
    size = model.config.vocab_size
    odd = zoo.masked_tokens if "attention_mask" in inputs else zoo.tokens
    return model, odd(batch, sequence, size)


def _frozen_llama() -> zoo.Case:
    model, inputs = zoo.llama(layers=2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "norm" in name)
    return model, inputs


CASES: dict[str, Callable[[], zoo.Case]] = {
    "gpt2: 3 heads, 67 words": lambda: zoo.gpt2(layers=1, n_head=3, n_embd=33, vocab_size=67),
    "gpt2: 1 sequence of 7": lambda: _odd_batch(zoo.gpt2, 1, 7, n_head=3, n_embd=30, vocab_size=67),
    "llama: 6 heads over 3": lambda: zoo.llama(
        layers=1, num_attention_heads=6, num_key_value_heads=3, hidden_size=36, intermediate_size=50, vocab_size=67
    ),
    "llama: 1 key head": lambda: zoo.llama(layers=1, num_key_value_heads=1, tie_word_embeddings=True),
    "llama: frozen": _frozen_llama,
    "bert: 5 sequences of 13": lambda: _odd_batch(zoo.bert, 5, 13, vocab_size=61),
    "untidy": untidy,
    "convolutions": _convolutions,
    "regression": lambda: (zoo.build(Regression), {"x": _noise(12, 6), "y": _noise(12, 3)}),
    "regression over a batch of 5": lambda: (zoo.build(Regression), {"x": _noise(5, 6), "y": _noise(5, 3)}),
    "torch encoder": _classifier,
    "torch transformer": lambda: (
        zoo.build(Translator),
        {"source": _noise(4, 6, 16), "target": _noise(4, 6, 16).flip(1)},
    ),
    "dataclasses": lambda: (zoo.build(Dataclasses), {"samples": Samples(_noise(12, 6), _noise(12, 3))}),
    "by frequency": lambda: (zoo.build(ByFrequency), {"ids": torch.arange(24).square().reshape(4, 6) % 16}),
    "logits only": lambda: (zoo.build(LogitsOnly), {"ids": torch.arange(24).reshape(4, 6) % 16}),
}

PLANS: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, bool]]] = {
    "data": ((2,), ("data",), {}),
    "zero x3": ((3,), ("zero",), {}),
    "tensor": ((2,), ("tensor",), {}),
    "tensor x3": ((3,), ("tensor",), {"recompute": True}),
    "sequence": ((2,), ("sequence",), {}),
    "zero, tensor_sequence": ((2, 2), ("zero", "tensor_sequence"), {"recompute": True}),
    "sequence, zero, tensor": ((2, 2, 2), ("sequence", "zero", "tensor"), {}),
}

Prepared = tuple[nn.Module, dict[str, Any], fx.GraphModule, dict[str, Tensor], dict[Any, Any]]


@cache
def prepared(name: str) -> Prepared:
    """A case with its graph, what one device computes, and a cache of solved blocks."""
    model, inputs = CASES[name]()
    return model, inputs, captured(model, inputs), one_device(model, inputs), {}


@pytest.mark.sampled(27)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str, plan: str) -> None:
    model, inputs, graph, expected, solved = prepared(name)
    sizes, roles, options = PLANS[plan]
    got = simulate(graph, model, inputs, sizes, uniform(graph, *roles, **options), solved)
    assert_exact(got, expected, f"{name}, {plan}")
    extra = {n for n in got if n.startswith("grad") and n not in expected and not n.startswith("grad none")}
    assert not extra, f"{name}, {plan}: gradients that one device has not: {extra}"


@pytest.mark.parametrize("plan", PLANS)
def test_running_statistics(plan: str) -> None:
    """Batch normalisation takes its statistics over the global batch."""
    model, inputs = CASES["convolutions"]()
    _, _, graph, _, solved = prepared("convolutions")
    sizes, roles, options = PLANS[plan]
    before = {name: value.clone() for name, value in model.named_buffers()}
    got = simulate(graph, model, inputs, sizes, uniform(graph, *roles, **options), solved)
    for name, value in model.named_buffers():
        torch.testing.assert_close(value, before[name], msg="the simulation wrote into the model")
    model.train()(**inputs)
    for name, value in model.named_buffers():
        torch.testing.assert_close(got[f"buffer {name}"], value, rtol=1e-10, atol=1e-12, msg=f"{plan}: {name}")
        assert not torch.equal(value, before[name])


def test_frozen_and_unused_parameters_get_no_gradient() -> None:
    model, inputs, graph, expected, _ = prepared("untidy")
    got = simulate(graph, model, inputs, (2, 2), uniform(graph, "zero", "tensor"), {})
    for name in ("side.weight", "mix.bias", "unused.weight", "unused.bias"):
        assert f"grad {name}" not in got
        assert f"grad {name}" not in expected
    assert signature(graph).loss == 0
    assert num_blocks(graph) >= 1


DROPOUT: dict[str, Callable[[], zoo.Case]] = {
    "gpt2": lambda: zoo.gpt2(layers=1, resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1),
    "torch encoder": lambda: _classifier(0.2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_the_same_on_any_mesh(name: str) -> None:
    """With one seed, N ranks draw the masks that one rank draws, also when they compute them again."""
    model, inputs = DROPOUT[name]()
    graph = captured(model.train(), inputs)
    alone = simulate(graph, model, inputs, (1,), uniform(graph, "data"), {})
    without_dropout = one_device(model.eval(), inputs)
    model.train()
    assert not torch.equal(alone["output 0"], without_dropout["output 0"])
    for setting in ("data", "tensor x3", "sequence", "zero, tensor_sequence"):
        sizes, roles, options = PLANS[setting]
        got = simulate(graph, model, inputs, sizes, uniform(graph, *roles, **options), {})
        assert_exact(got, alone, f"{name}, {setting}")
