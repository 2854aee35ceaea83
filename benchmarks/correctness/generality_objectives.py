"""Objectives in plain torch: two models and one loss, preferences, teachers, penalties, heads, tables, norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from benchmarks.correctness.generality_kinds import _mlp
from benchmarks.correctness.generality_torch import Applied, Gpt, _classify, _ids, _noise, _square
from tests.models import zoo

_CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def _add(name: str, make: Callable[[], nn.Module], inputs: Callable[[], Any]) -> None:
    _CASES[f"objective {name}"] = lambda: (zoo.build(make), inputs())


def frozen(model: nn.Module) -> nn.Module:
    """The same without gradients."""
    return model.requires_grad_(False)


class Doubled(torch.autograd.Function):
    """A function with a gradient of its own: a clipped one."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        (x,) = context.saved_tensors
        return grads[0] * (x.abs() < 1)


def _generator(modules: Any, noise: Tensor) -> Tensor:
    return F.softplus(-modules["judge"](modules["make"](noise))).mean()


def _discriminator(modules: Any, noise: Tensor, real: Tensor) -> Tensor:
    made = modules["make"](noise).detach()
    return F.softplus(modules["judge"](made)).mean() + F.softplus(-modules["judge"](real)).mean()


def _both(modules: Any, noise: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    return _generator(modules, noise), _discriminator(modules, noise, real)


def _penalty(modules: Any, noise: Tensor, real: Tensor) -> Tensor:
    mixed = (0.3 * modules["make"](noise).detach() + 0.7 * real).requires_grad_()
    (slope,) = torch.autograd.grad(modules["judge"](mixed).sum(), mixed, create_graph=True)
    return _discriminator(modules, noise, real) + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


def _likelihood(model: Any, ids: Tensor) -> Tensor:
    scores = model(ids)[0].log_softmax(-1)[:, :-1]
    return scores.gather(-1, ids[:, 1:, None]).squeeze(-1).sum(-1)


def _preferences(modules: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    policy, reference = modules["policy"], modules["reference"]
    gain = _likelihood(policy, chosen) - _likelihood(policy, rejected)
    with torch.no_grad():
        base = _likelihood(reference, chosen) - _likelihood(reference, rejected)
    return -F.logsigmoid(0.1 * (gain - base)).mean()


def _clipped_policy(modules: Any, ids: Tensor, advantages: Tensor, before: Tensor) -> Tensor:
    ratio = (_likelihood(modules["policy"], ids) - before).exp()
    normed = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return -torch.minimum(ratio * normed, ratio.clamp(0.8, 1.2) * normed).mean()


def _distilled(modules: Any, x: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        target = (modules["teacher"](x) / 2).softmax(-1)
    scores = modules["student"](x)
    return F.kl_div((scores / 2).log_softmax(-1), target, reduction="batchmean") * 4 + F.cross_entropy(scores, labels)


def _rounded(modules: Any, x: Tensor) -> Tensor:
    return modules["out"](Doubled.apply(modules["body"](x))).square().mean()


def _tables(modules: Any, dense: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
    """DLRM: rows of large tables, all pairs of products, and an MLP."""
    rows = [modules[f"table{i}"](ids[:, i]) for i in range(3)]
    features = torch.stack([modules["bottom"](dense), *rows], 1)
    pairs = features @ features.transpose(1, 2)
    upper = pairs[:, *torch.triu_indices(4, 4, 1)]
    scores = modules["top"](torch.cat([features[:, 0], upper], 1)).squeeze(-1)
    return F.binary_cross_entropy_with_logits(scores, labels)


def _in_batch(modules: Any, users: Tensor, items: Tensor) -> Tensor:
    scores = modules["user"](users) @ modules["item"](items).T
    return F.cross_entropy(scores, torch.arange(len(users)))


def _speech(modules: Any, waves: Tensor, targets: Tensor) -> Tensor:
    spectrum = torch.stft(waves, 32, 16, window=torch.hann_window(32, dtype=waves.dtype), return_complex=True)
    hidden, _ = modules["body"](modules["mels"](spectrum.abs().square().log1p().transpose(1, 2)))
    log_probs = modules["head"](hidden).log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(waves),), log_probs.shape[0]), torch.full((len(waves),), targets.shape[1])
    return F.ctc_loss(log_probs, targets, *lengths)


def _dice(modules: Any, image: Tensor, labels: Tensor) -> Tensor:
    scores = modules["body"](image)
    hot = F.one_hot(labels, scores.shape[1]).movedim(-1, 1).to(image.dtype)
    shares = scores.softmax(1)
    both, each = (shares * hot).sum((0, 2, 3)), (shares + hot).sum((0, 2, 3))
    return F.cross_entropy(scores, labels) + 1 - ((2 * both + 1) / (each + 1)).mean()


def _detection(modules: Any, image: Tensor, classes: Tensor, boxes: Tensor, is_object: Tensor) -> Tensor:
    """A dense head: focal loss over classes, generalised IoU over the places that hold objects."""
    features = modules["body"](image)
    scores = modules["classes"](features).flatten(2).transpose(1, 2)
    sides = F.softplus(modules["boxes"](features)).flatten(2).transpose(1, 2)
    hot = F.one_hot(classes, scores.shape[-1]).to(scores.dtype) * is_object[..., None]
    probability = scores.sigmoid()
    sure = torch.where(hot > 0, probability, 1 - probability)
    focal = ((1 - sure).square() * F.binary_cross_entropy_with_logits(scores, hot, reduction="none")).sum()
    small, large = torch.minimum(sides, boxes), torch.maximum(sides, boxes)
    inner = (small[..., 0] + small[..., 2]) * (small[..., 1] + small[..., 3])
    outer = (large[..., 0] + large[..., 2]) * (large[..., 1] + large[..., 3])
    area = sum((s[..., 0] + s[..., 2]) * (s[..., 1] + s[..., 3]) for s in (sides, boxes))
    union = area - inner
    giou = ((1 - inner / union + (outer - union) / outer) * is_object).sum()
    return (focal + giou) / is_object.sum().clamp(min=1)


class StochasticDepth(nn.Module):
    """Branches that are left out for some samples, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_mlp(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            kept = torch.rand(len(x), 1, dtype=x.dtype) < 0.8
            x = x + F.dropout(layer(x), 0.1, self.training) * kept / 0.8
        return x.square().mean()


class Averaged(nn.Module):
    """A student that learns from the moving average of itself (BYOL), kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.predictor = nn.Linear(8, 8), _mlp(8)
        self.register_buffer("teacher", torch.randn(8, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.mul_(0.99).add_(self.student.weight, alpha=0.01)
            target = F.linear(y, self.teacher)
        return 2 - 2 * F.cosine_similarity(self.predictor(self.student(x)), target).mean()


def _two_models() -> None:
    pair = lambda: {"make": _mlp(8), "judge": _mlp(8, 1)}  # noqa: E731
    rows = lambda: (_noise(4, 8), _noise(4, 8).flip(0))  # noqa: E731
    _add("GAN, generator", lambda: Applied(_generator, **pair()), lambda: (_noise(4, 8),))
    _add("GAN, discriminator", lambda: Applied(_discriminator, **pair()), rows)
    _add("GAN, both", lambda: Applied(_both, **pair()), rows)
    _add("gradient penalty", lambda: Applied(_penalty, **pair()), rows)
    words = lambda: (_ids(4, 12), _ids(4, 12, seed=6))  # noqa: E731
    _add("DPO", lambda: Applied(_preferences, policy=Gpt(), reference=frozen(Gpt())), words)
    rollouts = lambda: (_ids(4, 12), _noise(4), -12 * torch.ones(4).double() * 4.2)  # noqa: E731
    _add("clipped policy", lambda: Applied(_clipped_policy, policy=Gpt()), rollouts)
    labelled = lambda: (_noise(4, 8), _ids(4, high=5))  # noqa: E731
    _add("distillation", lambda: Applied(_distilled, student=_mlp(8, 5), teacher=frozen(_mlp(8, 5))), labelled)
    _add("moving teacher", Averaged, rows)


def _heads() -> None:
    body = lambda out=5: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, out, 1))  # noqa: E731
    segmented = lambda: (_noise(4, 3, 8, 8), _ids(4, 8, 8, high=5))  # noqa: E731
    _add("dice", lambda: Applied(_dice, body=body()), segmented)
    head = lambda: {"body": body(8), "classes": nn.Conv2d(8, 5, 1), "boxes": nn.Conv2d(8, 4, 1)}  # noqa: E731
    found = lambda: (_noise(4, 3, 4, 4), _ids(4, 16, high=5), _noise(4, 16, 4).exp(), (_ids(4, 16) % 3 == 0).double())  # noqa: E731
    _add("detection", lambda: Applied(_detection, **head()), found)
    listening = lambda: {  # noqa: E731
        "mels": nn.Linear(17, 16), "body": nn.GRU(16, 16, batch_first=True), "head": nn.Linear(16, 12),
    }  # fmt: skip
    _add("speech", lambda: Applied(_speech, **listening()), lambda: (_noise(4, 256), _ids(4, 3, high=11) + 1))


def _recommendation() -> None:
    for sparse in (False, True):
        tables = lambda sparse=sparse: {f"table{i}": nn.Embedding(50, 8, sparse=sparse) for i in range(3)}  # noqa: E731
        make = lambda tables=tables: Applied(_tables, bottom=_mlp(8), top=_mlp(14, 1), **tables())  # noqa: E731
        inputs = lambda: (_noise(4, 8), _ids(4, 3, high=50), (_ids(4) % 2).double())  # noqa: E731
        _add("DLRM, sparse gradients" if sparse else "DLRM", make, inputs)
    bags = lambda: {"user": nn.EmbeddingBag(50, 8), "item": nn.Embedding(50, 8)}  # noqa: E731
    _add(
        "two towers, in-batch softmax",
        lambda: Applied(_in_batch, **bags()),
        lambda: (_ids(4, 3, high=50), _ids(4, high=50)),
    )


def _parts() -> None:
    _add(
        "function with its own gradient", lambda: Applied(_rounded, body=_mlp(8), out=_mlp(8)), lambda: (_noise(4, 8),)
    )
    _add("stochastic depth and dropout", StochasticDepth, lambda: (_noise(4, 8),))
    for norm in (nn.BatchNorm2d, nn.SyncBatchNorm, nn.InstanceNorm2d):
        make = lambda norm=norm: nn.Sequential(  # noqa: E731
            nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        )
        inputs = lambda: (_noise(4, 3, 8, 8), _ids(4, high=5))  # noqa: E731
        _add(norm.__name__, lambda make=make: Applied(_classify, body=make()), inputs)
    normed = lambda: nn.Sequential(  # noqa: E731
        parametrizations.spectral_norm(nn.Linear(8, 16)), nn.LeakyReLU(), parametrizations.weight_norm(nn.Linear(16, 8))
    )
    _add("spectral and weight norm", lambda: Applied(_square, body=normed()), lambda: (_noise(4, 8),))
    turned = lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(8, 8)), _mlp(8))  # noqa: E731
    _add("orthogonal", lambda: Applied(_square, body=turned()), lambda: (_noise(4, 8),))


def cases() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Models by name."""
    _two_models()
    _heads()
    _recommendation()
    _parts()
    return dict(_CASES)
