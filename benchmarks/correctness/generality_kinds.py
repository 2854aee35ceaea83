"""Kinds of models in plain torch: diffusion, towers, linear attention, recommendation, speech, segmentation, ..."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from benchmarks.correctness.generality_torch import Applied, Gpt, _ids, _noise
from tests.models import zoo

_CASES: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def _add(name: str, make: Callable[[], nn.Module], inputs: Callable[[], Any]) -> None:
    _CASES[f"kind {name}"] = lambda: (zoo.build(make), inputs())


def _mlp(width: int, out: int | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, out or width))


def _heads(x: Tensor, heads: int = 4) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(-2, -3)


class Modulated(nn.Module):
    """A layer of a diffusion transformer: attention within ``dim`` of [batch, frames, places, width], and an MLP."""

    def __init__(self, width: int, along: int) -> None:
        super().__init__()
        self.along, self.shift = along, nn.Linear(width, 6 * width)
        self.qkv, self.out, self.mlp = nn.Linear(width, 3 * width), nn.Linear(width, width), _mlp(width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = (part[:, None, None] for part in self.shift(F.silu(condition)).chunk(6, -1))
        y = F.layer_norm(x, x.shape[-1:]) * (1 + a) + b
        y = y.transpose(1, self.along)
        y = F.scaled_dot_product_attention(*map(_heads, self.qkv(y).chunk(3, -1))).transpose(-2, -3).flatten(-2)
        x = x + c * self.out(y).transpose(1, self.along)
        return x + f * self.mlp(F.layer_norm(x, x.shape[-1:]) * (1 + d) + e)


class VideoDit(nn.Module):
    """Spatial and temporal attention in turns over patches of a video [batch, channels, frames, height, width]."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv3d(4, 32, (1, 2, 2), (1, 2, 2)), nn.Linear(32, 32)
        self.layers = nn.ModuleList(Modulated(32, along) for along in (1, 2, 1, 2))
        self.head, self.checkpointed = nn.Linear(32, 16), checkpointed

    def forward(self, video: Tensor, time: Tensor, target: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(16, dtype=video.dtype) / 4)
        angles = time[:, None] * frequencies
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        x = self.patches(video).flatten(3).permute(0, 2, 3, 1)
        for layer in self.layers:
            x = checkpoint(layer, x, condition, use_reentrant=False) if self.checkpointed else layer(x, condition)
        out = self.head(x).unflatten(2, (4, 4)).unflatten(-1, (4, 2, 2)).permute(0, 4, 1, 2, 5, 3, 6)
        return F.mse_loss(out.flatten(5).flatten(3, 4), target)


class UNet(nn.Module):
    """Down, middle and up with skips; group norm; each level may be checkpointed."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        widths = (3, 8, 16, 16)
        self.down = nn.ModuleList(self._level(a, b) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(self._level(2 * b, max(a, 4)) for a, b in itertools.pairwise(widths))
        self.head = nn.Conv2d(4, 3, 1)

    def _level(self, width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())

    def _run(self, level: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(level, x, use_reentrant=False) if self.checkpointed else level(x)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = self._run(level, x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        for level, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = self._run(level, torch.cat([F.interpolate(x, scale_factor=2), skip], 1))
        return F.l1_loss(self.head(x), target)


class Codebook(nn.Module):
    """A VQ-VAE whose codebook is a moving average of what was assigned to it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = _mlp(8), _mlp(8)
        self.register_buffer("codes", torch.randn(16, 8))
        self.register_buffer("counts", torch.ones(16))
        self.register_buffer("sums", torch.randn(16, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        chosen = torch.cdist(z, self.codes).argmin(-1)
        quantized = F.embedding(chosen, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(chosen.flatten(), 16).to(x.dtype)
                self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ z.flatten(0, 1), alpha=0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
        straight = z + (quantized - z).detach()
        return F.mse_loss(self.decoder(straight), x) + 0.25 * F.mse_loss(z, quantized.detach()), chosen


def _vae(modules: Any, x: Tensor, noise: Tensor) -> Tensor:
    mean, spread = modules["encoder"](x).chunk(2, 1)
    out = modules["decoder"](mean + noise * (0.5 * spread).exp())
    divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).flatten(1).sum(1).mean()
    return F.mse_loss(out, x, reduction="none").flatten(1).sum(1).mean() + divergence


def _siglip(modules: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = F.normalize(modules["a"](x), dim=-1) @ F.normalize(modules["b"](y), dim=-1).T * 5 - 2
    signs = 2 * torch.eye(len(x), dtype=x.dtype) - 1
    return -F.logsigmoid(signs * scores).sum() / len(x)


def _clip(modules: Any, x: Tensor, y: Tensor) -> Tensor:
    scores = F.normalize(modules["a"](x), dim=-1) @ F.normalize(modules["b"](y), dim=-1).T * modules["scale"]().exp()
    same = torch.arange(len(x))
    return (F.cross_entropy(scores, same) + F.cross_entropy(scores.T, same)) / 2


def _barlow(modules: Any, x: Tensor, y: Tensor) -> Tensor:
    a, b = ((z - z.mean(0)) / z.std(0) for z in (modules["body"](x), modules["body"](y)))
    correlation = a.T @ b / len(x)
    on = (correlation.diagonal() - 1).square().sum()
    return on + 0.01 * (correlation.square().sum() - correlation.diagonal().square().sum())


class Scalar(nn.Module):
    """One number that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(1.5))

    def forward(self) -> Tensor:
        return self.value


def _tower(modules: Any, image: Tensor, ids: Tensor) -> Tensor:
    seen = modules["project"](modules["vision"](image).flatten(2).transpose(1, 2))
    words = modules["words"](ids)
    x = torch.cat([seen, words], 1)
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    x = modules["body"](x, mask=mask)[:, seen.shape[1] :]
    return F.cross_entropy(modules["head"](x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def _linear_attention(modules: Any, x: Tensor) -> Tensor:
    """Causal linear attention in chunks of four: states between, products within."""
    q, k, v = (_heads(part).unflatten(2, (-1, 4)) for part in modules["qkv"](x).chunk(3, -1))
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("bhnck,bhncv->bhnkv", k, v).cumsum(2)
    before = F.pad(state[:, :, :-1], (0, 0, 0, 0, 1, 0))
    within = (q @ k.transpose(-1, -2)).tril() @ v
    out = within + q @ before
    return modules["out"](out.flatten(2, 3).transpose(1, 2).flatten(2)).square().mean()


def _state_space(modules: Any, x: Tensor) -> Tensor:
    """The chunked form of a selective state space (Dao and Gu 2024): decays, chunk states, a scan over chunks."""
    u, gate, b, c = modules["inputs"](x).split([32, 32, 8, 8], -1)
    decay = -F.softplus(modules["decay"](x)).unflatten(1, (-1, 4))
    u, b, c = u.unflatten(-1, (4, 8)).unflatten(1, (-1, 4)), b.unflatten(1, (-1, 4)), c.unflatten(1, (-1, 4))
    total = decay.cumsum(2)
    gaps = (total[:, :, :, None] - total[:, :, None]).masked_fill(
        torch.ones(4, 4, dtype=torch.bool).triu(1)[:, :, None], float("-inf")
    )
    within = torch.einsum("bncs,bnds,bncdh,bndhp->bnchp", c, b, gaps.exp(), u)
    states = torch.einsum("bncs,bnch,bnchp->bnhsp", b, (total[:, :, -1:] - total).exp(), u)
    carried, all_before = torch.zeros_like(states[:, 0]), []
    for chunk in range(states.shape[1]):
        all_before.append(carried)
        carried = carried * total[:, chunk, -1].exp()[..., None, None] + states[:, chunk]
    across = torch.einsum("bncs,bnhsp,bnch->bnchp", c, torch.stack(all_before, 1), total.exp())
    return modules["out"]((within + across).flatten(3).flatten(1, 2) * F.silu(gate)).square().mean()


def _retention(modules: Any, x: Tensor) -> Tensor:
    q, k, v = map(_heads, modules["qkv"](x).chunk(3, -1))
    rates = 1 - 2.0 ** (-5 - torch.arange(4, dtype=x.dtype))
    places = torch.arange(x.shape[1])
    decay = (rates[:, None, None] ** (places[:, None] - places)).tril()
    out = (q @ k.transpose(-1, -2) * decay) @ v
    return modules["out"](F.group_norm(out.transpose(1, 2).flatten(2).flatten(0, 1), 4)).square().mean()


def _long_convolution(modules: Any, x: Tensor) -> Tensor:
    length = x.shape[1]
    kernel = modules["filter"](torch.linspace(0, 1, length, dtype=x.dtype)[:, None])
    y = torch.fft.irfft(torch.fft.rfft(x, 2 * length, 1) * torch.fft.rfft(kernel, 2 * length, 0), 2 * length, 1)
    return modules["out"](y[:, :length] * x).square().mean()


def _dit() -> None:
    video = lambda: (_noise(4, 4, 2, 8, 8), torch.arange(4.0).double(), _noise(4, 4, 2, 8, 8).flip(0))  # noqa: E731
    _add("video DiT, 3-D", VideoDit, video)
    _add("video DiT, 3-D, checkpointed", partial(VideoDit, True), video)
    still = lambda: (_noise(4, 4, 1, 8, 8), torch.arange(4.0).double(), _noise(4, 4, 1, 8, 8).flip(0))  # noqa: E731
    _add("DiT, 2-D", VideoDit, still)
    images = lambda: (_noise(4, 3, 16, 16), _noise(4, 3, 16, 16).flip(0))  # noqa: E731
    _add("U-Net", partial(UNet, False), images)
    _add("U-Net, checkpointed", partial(UNet, True), images)
    coder = lambda: {  # noqa: E731
        "encoder": nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1)),
        "decoder": nn.Sequential(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)),
    }
    _add("VAE", lambda: Applied(_vae, **coder()), lambda: (_noise(4, 3, 16, 16), _noise(4, 4, 4, 4)))
    _add("VQ-VAE, moving codebook", Codebook, lambda: (_noise(4, 6, 8),))


def _towers() -> None:
    pair = lambda: (_noise(4, 8), _noise(4, 8).flip(0) + 1)  # noqa: E731
    _add("CLIP", lambda: Applied(_clip, a=_mlp(8), b=_mlp(8), scale=Scalar()), pair)
    _add("SigLIP", lambda: Applied(_siglip, a=_mlp(8), b=_mlp(8)), pair)
    # Without biases that means take away again: their gradients are zero but for rounding.
    twins = lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8, bias=False))  # noqa: E731
    _add("Barlow twins", lambda: Applied(_barlow, body=twins()), pair)
    layer = lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)  # noqa: E731
    tower = lambda: Applied(  # noqa: E731
        _tower, vision=nn.Conv2d(3, 16, 4, 4), project=_mlp(16, 32), words=nn.Embedding(64, 32),
        body=nn.TransformerEncoder(layer(), 2), head=nn.Linear(32, 64),
    )  # fmt: skip
    _add("tower and language model", tower, lambda: (_noise(4, 3, 8, 8), _ids(4, 8)))


def _sequences() -> None:
    tokens = lambda: (_noise(4, 16, 32),)  # noqa: E731
    mixed = lambda f: lambda: Applied(f, qkv=nn.Linear(32, 96), out=nn.Linear(32, 32))  # noqa: E731
    _add("linear attention, chunked", mixed(_linear_attention), tokens)
    _add("retention", mixed(_retention), tokens)
    state = {"inputs": (32, 80), "decay": (32, 4), "out": (32, 32)}
    _add("state space, chunked", lambda: Applied(_state_space, **{k: nn.Linear(*v) for k, v in state.items()}), tokens)
    _add("long convolution", lambda: Applied(_long_convolution, filter=_mlp(1, 32), out=nn.Linear(32, 32)), tokens)
    _add("spectral norm", lambda: parametrizations.spectral_norm(nn.Linear(32, 8)), tokens)
    _add("gpt in 3 of 4 samples", Gpt, lambda: (_ids(3, 16), _ids(3, 16, seed=6)))


def cases() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """Models by name."""
    _dit()
    _towers()
    _sequences()
    return dict(_CASES)
