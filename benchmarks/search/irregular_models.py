"""Models in which little repeats: a UNet of guided diffusion, MaxViT, and the pair stack of AlphaFold."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualConv(nn.Module):
    """Two convolutions with a time embedding between them, as in guided diffusion (Dhariwal and Nichol 2021)."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.shift = nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * outputs))
        self.norm = nn.GroupNorm(32, outputs)
        self.leave = nn.Sequential(nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.around = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.shift(time)[:, :, None, None].chunk(2, 1)
        return self.around(x) + self.leave(self.norm(self.enter(x)) * (1 + scale) + shift)


class PixelAttention(nn.Module):
    """Attention over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.GroupNorm(32, channels), channels // 64
        self.enter, self.leave = nn.Conv1d(channels, 3 * channels, 1), nn.Conv1d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.enter(self.norm(x).flatten(2)).unflatten(1, (3, self.heads, 64)).transpose(3, 4)
        mixed = F.scaled_dot_product_attention(flat[:, 0], flat[:, 1], flat[:, 2])
        return x + self.leave(mixed.transpose(2, 3).flatten(1, 2)).view_as(x)


class GuidedUNet(nn.Module):
    """The UNet of guided diffusion at 64 x 64 pixels: ``blocks`` residual blocks a level, attention from 32 down."""

    def __init__(self, blocks: int, width: int = 128, growth: tuple[int, ...] = (1, 2, 3, 4)) -> None:
        super().__init__()
        embedding = 4 * width
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, channels = [width], width
        for level, factor in enumerate(growth):
            for _ in range(blocks):
                self.down.append(self._block(channels, width * factor, embedding, level > 0))
                channels = width * factor
                skips.append(channels)
            if level < len(growth) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                skips.append(channels)
        self.middle = self._block(channels, channels, embedding, True)
        for level, factor in reversed(list(enumerate(growth))):
            for index in range(blocks + 1):
                self.up.append(self._block(channels + skips.pop(), width * factor, embedding, level > 0))
                channels = width * factor
                if level and index == blocks:
                    self.up.append(nn.Upsample(scale_factor=2))
        self.last = nn.Sequential(nn.GroupNorm(32, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def _block(self, inputs: int, outputs: int, embedding: int, attends: bool) -> nn.Module:
        return nn.ModuleList(
            [ResidualConv(inputs, outputs, embedding), PixelAttention(outputs) if attends else nn.Identity()]
        )

    def forward(self, x: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        """The mean squared error of the noise that is predicted."""
        time, h = self.time(time), self.first(x)
        skips = [h]
        for part in self.down:
            h = part[1](part[0](h, time)) if isinstance(part, nn.ModuleList) else part(h)
            skips.append(h)
        h = self.middle[1](self.middle[0](h, time))
        for part in self.up:
            h = part[1](part[0](torch.cat([h, skips.pop()], 1), time)) if isinstance(part, nn.ModuleList) else part(h)
        return F.mse_loss(self.last(h), noise)


class InvertedConv(nn.Module):
    """MBConv with squeeze and excitation (Tan and Le 2019)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        wide = 4 * outputs
        self.enter = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.Conv2d(inputs, wide, 1), nn.BatchNorm2d(wide), nn.GELU(),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide), nn.BatchNorm2d(wide), nn.GELU(),
        )  # fmt: skip
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, outputs // 4, 1), nn.SiLU(), nn.Conv2d(outputs // 4, wide, 1)
        )
        self.leave = nn.Conv2d(wide, outputs, 1)
        shrink = [nn.AvgPool2d(2)] if stride > 1 else []
        self.around = nn.Sequential(*shrink, *([nn.Conv2d(inputs, outputs, 1)] if inputs != outputs else []))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        return self.around(x) + self.leave(h * torch.sigmoid(self.excite(h)))


class AxisAttention(nn.Module):
    """Attention in windows of 7 x 7 pixels, or in grids of as many that lie apart, and an MLP."""

    def __init__(self, channels: int, in_grids: bool) -> None:
        super().__init__()
        self.in_grids, self.heads = in_grids, channels // 32
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(channels),
            nn.Linear(channels, 3 * channels),
            nn.Linear(channels, channels),
        )
        self.bias = nn.Parameter(torch.zeros(self.heads, 49, 49))
        self.mlp = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        rows, columns = height // 7, width // 7
        split = (batch, 7, rows, 7, columns, channels) if self.in_grids else (batch, rows, 7, columns, 7, channels)
        order = (0, 2, 4, 1, 3, 5) if self.in_grids else (0, 1, 3, 2, 4, 5)
        back = (0, 3, 1, 4, 2, 5) if self.in_grids else (0, 1, 3, 2, 4, 5)
        windows = x.view(split).permute(order).reshape(batch * rows * columns, 49, channels)
        q, k, v = self.qkv(self.norm(windows)).view(-1, 49, 3, self.heads, 32).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias).transpose(1, 2).flatten(2)
        windows = windows + self.out(mixed)
        windows = windows + self.mlp(windows)
        return windows.view(batch, rows, columns, 7, 7, channels).permute(back).reshape(x.shape)


class MaxViT(nn.Module):
    """MaxViT-T (Tu et al. 2022, table 1) of ``blocks`` blocks in the third of four stages, at 224 x 224 pixels."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.GELU(), nn.Conv2d(64, 64, 3, 1, 1))
        self.blocks, channels = nn.ModuleList(), 64
        for depth, width in ((2, 64), (2, 128), (blocks, 256), (2, 512)):
            for index in range(depth):
                mixing = (
                    InvertedConv(channels, width, 1 if index else 2),
                    AxisAttention(width, False),
                    AxisAttention(width, True),
                )
                self.blocks.append(nn.ModuleList(mixing))
                channels = width
        self.head = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, 1000))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of the labels."""
        h = self.stem(x)
        for convolve, windows, grids in self.blocks:
            h = grids(windows(convolve(h).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return F.cross_entropy(self.head(h.mean((2, 3))), labels)


class TriangleAttention(nn.Module):
    """Attention along the rows of pairs, biased by the third edge (Jumper et al. 2021, algorithm 13)."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(channels)
        self.qkv, self.bias = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, heads, bias=False)
        self.gate, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.norm(pairs)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5)
        scores = torch.einsum("brhqd,brhkd->brhqk", q, k) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores + self.bias(x).permute(0, 3, 1, 2)[:, None], -1)
        mixed = torch.einsum("brhqk,brhkd->brqhd", weights, v).flatten(3)
        return self.out(torch.sigmoid(self.gate(x)) * mixed)


class TriangleProduct(nn.Module):
    """The update of an edge by the two others of each triangle (Jumper et al. 2021, algorithm 11)."""

    def __init__(self, channels: int, equation: str) -> None:
        super().__init__()
        self.equation, self.norm, self.after = equation, nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.edges, self.gates = nn.Linear(channels, 2 * channels), nn.Linear(channels, 2 * channels)
        self.gate, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, pairs: Tensor) -> Tensor:
        x = self.norm(pairs)
        a, b = (torch.sigmoid(self.gates(x)) * self.edges(x)).chunk(2, -1)
        return torch.sigmoid(self.gate(x)) * self.out(self.after(torch.einsum(self.equation, a, b)))


class PairStack(nn.Module):
    """The pair half of Evoformer blocks (Jumper et al. 2021, algorithm 6)."""

    def __init__(self, blocks: int, channels: int = 128) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._block(channels) for _ in range(blocks))
        self.head = nn.Linear(channels, 64)

    def _block(self, channels: int) -> nn.Module:
        products = [TriangleProduct(channels, equation) for equation in ("bikc,bjkc->bijc", "bkic,bkjc->bijc")]
        attentions = [TriangleAttention(channels, 4) for _ in range(2)]
        wide = 4 * channels
        transition = [nn.LayerNorm(channels), nn.Linear(channels, wide), nn.ReLU(), nn.Linear(wide, channels)]
        return nn.ModuleList([*products, *attentions, nn.Sequential(*transition)])

    def forward(self, pairs: Tensor, bins: Tensor) -> Tensor:
        """The mean loss of binned distances."""
        for outgoing, incoming, starting, ending, transition in self.blocks:
            pairs = pairs + outgoing(pairs)
            pairs = pairs + incoming(pairs)
            pairs = pairs + starting(pairs)
            pairs = pairs + ending(pairs.transpose(1, 2)).transpose(1, 2)
            pairs = pairs + transition(pairs)
        return F.cross_entropy(self.head(pairs).flatten(0, 2), bins.flatten())
