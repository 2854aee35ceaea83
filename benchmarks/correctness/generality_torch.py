"""Models in plain torch, as people write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.models import zoo

_CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def _ids(*shape: int, high: int = 64, seed: int = 5) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def _add(name: str, make: Callable[[], nn.Module], inputs: Callable[[], Any]) -> None:
    _CASES[f"torch {name}"] = lambda: (zoo.build(make), inputs())


class Attention(nn.Module):
    """Causal attention written out, or with torch's kernel."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(32, 96), nn.Linear(32, 32), fused
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 4, 8).transpose(1, 2) for t in self.qkv(x).split(width, 2))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(8)
            y = scores.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1) @ v
        return self.out(y.transpose(1, 2).contiguous().view(batch, length, width))


class Layer(nn.Module):
    """One layer of :class:`Gpt`."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(32), Attention(fused), nn.LayerNorm(32)
        self.mlp = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.between(x))


class Gpt(nn.Module):
    """A hand-written GPT with tied weights that returns (logits, loss)."""

    def __init__(self, fused: bool = True, checkpointed: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(64, 32), nn.Embedding(16, 32)
        self.layers, self.norm = nn.ModuleList(Layer(fused) for _ in range(3)), nn.LayerNorm(32)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight, self.checkpointed = self.words.weight, checkpointed

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Applied(nn.Module):
    """A function of the modules given, in the order of their names, and of the inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function, self.parts = function, nn.ModuleDict(modules)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.parts, *inputs)


def _square(modules: Any, x: Tensor) -> Tensor:
    return modules["body"](x).square().mean()


def _classify(modules: Any, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(modules["body"](x), labels)


def _words(modules: Any, ids: Tensor, targets: Tensor) -> Tensor:
    hidden, _ = modules["body"](modules["words"](ids))
    return F.cross_entropy(modules["head"](hidden).transpose(1, 2), targets)


def _encoded(modules: Any, x: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
    padding = torch.arange(x.shape[1])[None] >= lengths[:, None]
    return F.cross_entropy(modules["head"](modules["body"](x, src_key_padding_mask=padding)[:, 0]), labels)


def _seq2seq(modules: Any, source: Tensor, target: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
    return modules["body"](source, target, tgt_mask=mask).square().mean()


def _rotated(modules: Any, x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(x.shape[1]), torch.arange(4) / 4.0).to(x.dtype)
    pairs = torch.view_as_complex(modules["body"](x).unflatten(-1, (-1, 4, 2)))
    turned = pairs * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    return torch.view_as_real(turned).flatten(2).tanh().square().mean()


def _routed(modules: Any, x: Tensor) -> Tensor:
    weights, chosen = modules["router"](x).softmax(-1).topk(2, -1)
    gates = torch.zeros_like(x[..., :4]).scatter(-1, chosen, weights)
    outs = torch.stack([modules[f"expert{i}"](x) for i in range(4)], -1)
    return (torch.einsum("btdx,btx->btd", outs, gates) - x).square().mean()


def _contrastive(modules: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = F.normalize(modules["a"](x), dim=-1) @ F.normalize(modules["b"](y), dim=-1).T * 5
    return F.cross_entropy(scores, torch.arange(x.shape[0]))


def _segmented(modules: Any, image: Tensor, labels: Tensor) -> Tensor:
    weights = image.new_tensor([1.0, 2.0, 1.0, 0.5, 1.0])
    return F.cross_entropy(modules["body"](image), labels, weights, ignore_index=0)


def _in_place(modules: Any, x: Tensor) -> Tensor:
    y = modules["body"](x)
    y += 1
    y.mul_(2).relu_()
    shifted = torch.zeros_like(y)
    shifted[:, 1:] = y[:, :-1]
    return shifted.square().mean()


def _last_token(modules: Any, ids: Tensor, labels: Tensor) -> Tensor:
    hidden, _ = modules["body"](modules["words"](ids))
    last = (ids != 0).long().sum(-1) - 1
    return F.cross_entropy(modules["head"](hidden)[torch.arange(len(ids)), last], labels)


def _next_words(modules: Any, ids: Tensor) -> Tensor:
    scores = modules["head"](torch.tanh(modules["words"](ids)))
    return F.cross_entropy(scores[:, :-1].reshape(-1, scores.shape[-1]), ids[:, 1:].reshape(-1))


def _likelihood(modules: Any, x: Tensor) -> Tensor:
    mean, spread = modules["body"](x).chunk(2, -1)
    return -torch.distributions.Normal(mean, F.softplus(spread) + 0.1).log_prob(x).mean()


def _pairs(modules: Any, x: Tensor, y: Tensor) -> Tensor:
    return modules["body"](x, y.repeat(2, 1).roll(1, 0)[: len(y)]).square().mean()


def _networks() -> None:
    body = partial(nn.Sequential, nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    pooled = partial(body, nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(144, 5))
    _add("cnn", lambda: Applied(_classify, body=pooled()), lambda: (_noise(4, 3, 16, 16), _ids(4, high=5)))
    segmenting = partial(body, nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(8, 5, 2, 2))
    images = lambda: (_noise(4, 3, 16, 16), _ids(4, 16, 16, high=5))  # noqa: E731
    _add("segmentation", lambda: Applied(_segmented, body=segmenting()), images)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        make = partial(_recurrent, kind)
        _add(kind.__name__, make, lambda: (_ids(4, 6), _ids(4, 6, seed=6)))


def _recurrent(kind: Any) -> nn.Module:
    parts = {"words": nn.Embedding(64, 16), "body": kind(16, 32, 2, batch_first=True), "head": nn.Linear(32, 64)}
    return Applied(_words, **parts)


def _transformers() -> None:
    options: dict[str, Any] = {"dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
    pair = lambda: (_noise(4, 6, 32), _noise(4, 5, 32))  # noqa: E731
    _add("nn.Transformer", lambda: Applied(_seq2seq, body=nn.Transformer(32, 4, 2, 2, **options)), pair)
    encoder = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, **options), 2)  # noqa: E731
    padded = lambda: (_noise(4, 8, 32), torch.tensor([8, 6, 4, 7]), _ids(4, high=5))  # noqa: E731
    _add("nn.TransformerEncoder", lambda: Applied(_encoded, body=encoder(), head=nn.Linear(32, 5)), padded)
    words = lambda: (_ids(4, 16), _ids(4, 16, seed=6))  # noqa: E731
    _add("gpt", Gpt, words)
    _add("gpt, attention written out", partial(Gpt, False), words)
    _add("gpt, checkpointed", partial(Gpt, True, True), words)
    _add("gpt without targets", Gpt, lambda: (_ids(4, 16),))


def _tricks() -> None:
    rows = lambda: (_noise(4, 8),)  # noqa: E731
    tokens = lambda: (_noise(4, 16, 8),)  # noqa: E731
    _add("weight norm", lambda: Applied(_square, body=parametrizations.weight_norm(nn.Linear(8, 16))), rows)
    _add("complex rotary", lambda: Applied(_rotated, body=nn.Linear(8, 32)), tokens)
    experts = lambda: {f"expert{i}": nn.Linear(8, 8) for i in range(4)}  # noqa: E731
    _add("dense experts", lambda: Applied(_routed, router=nn.Linear(8, 4), **experts()), tokens)
    both = lambda: (_noise(4, 8), _noise(4, 8).flip(0))  # noqa: E731
    _add("contrastive", lambda: Applied(_contrastive, a=nn.Linear(8, 16), b=nn.Linear(8, 16)), both)
    _add("in place", lambda: Applied(_in_place, body=nn.Linear(8, 16)), tokens)
    _add("bilinear", lambda: Applied(_pairs, body=nn.Bilinear(8, 8, 4)), both)
    _add("normal likelihood", lambda: Applied(_likelihood, body=nn.Linear(8, 16)), tokens)
    words = lambda: {"words": nn.Embedding(64, 16), "head": nn.Linear(16, 64)}  # noqa: E731
    picked = lambda: Applied(_last_token, body=nn.LSTM(16, 16, batch_first=True), **words())  # noqa: E731
    _add("last token", picked, lambda: (_ids(4, 6).tril(3), _ids(4)))
    _add("next words", lambda: Applied(_next_words, **words()), lambda: (_ids(4, 9),))


def cases() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Models by name."""
    _transformers()
    _networks()
    _tricks()
    return dict(_CASES)
