"""The eight models of the GPU comparison, each with a batch and its losses, in plain PyTorch.

Parameters sit in modules that Opacus can follow: positions and the class token are a layer of their own, and no
layer has buffers. `tiny` gives the same code at sizes for a smoke test on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Losses = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Setup:
    """A model with one batch; `losses(model, x, y)` is (B,)."""

    model: nn.Module
    x: Tensor
    y: Tensor
    losses: Losses
    fullgraph: bool = True  # whether torch.compile takes the plain model in one graph
    recompute: float = 0.1  # eachgrad.compile's option


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self, d: int, heads: int, causal: bool):
        super().__init__()
        self.inputs, self.output = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        q, k, v = self.inputs(x).view(B, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.output(mixed.transpose(1, 2).reshape(B, T, d))


class Block(nn.Module):
    """A pre-norm transformer block with LayerNorm and GELU."""

    def __init__(self, d: int, heads: int, causal: bool):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(d), Attention(d, heads, causal)
        self.norm2, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Positions(nn.Module):
    """Adds a learned vector to each position."""

    def __init__(self, T: int, d: int):
        super().__init__()
        self.table = nn.Parameter(torch.randn(T, d) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Decoder(nn.Module):
    """A GPT-2-like decoder over token ids (B, T); logits (B, T, V)."""

    def __init__(self, d: int, layers: int, heads: int, V: int, T: int, tied: bool):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(V, d), Positions(T, d)
        self.blocks = nn.Sequential(*(Block(d, heads, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, V, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.positions(self.tokens(ids)))))


def turned(x: Tensor) -> Tensor:
    """Rotary positions: each pair of features of (B, heads, T, h) turned by an angle of its position."""
    T, half = x.shape[-2], x.shape[-1] // 2
    speed = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(T, device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class LlamaBlock(nn.Module):
    """RMSNorm, rotary positions, grouped queries, gated MLP; no biases."""

    def __init__(self, d: int, heads: int, groups: int, hidden: int):
        super().__init__()
        self.size, shared = d // heads, d // heads * groups
        self.norm1, self.norm2 = nn.RMSNorm(d, eps=1e-5), nn.RMSNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(a, b, False) for a, b in ((d, d), (d, shared), (d, shared), (d, d)))
        self.gate, self.up, self.down = (nn.Linear(a, b, False) for a, b in ((d, hidden), (d, hidden), (hidden, d)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (layer(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        share = q.shape[1] // k.shape[1]
        k, v = turned(k).repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        mixed = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """A Llama-like decoder over token ids (B, T); logits (B, T, V)."""

    def __init__(self, d: int, layers: int, heads: int, groups: int, hidden: int, V: int):
        super().__init__()
        self.tokens = nn.Embedding(V, d)
        self.blocks = nn.Sequential(*(LlamaBlock(d, heads, groups, hidden) for _ in range(layers)))
        self.norm, self.head = nn.RMSNorm(d, eps=1e-5), nn.Linear(d, V, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(ids))))


class ClassToken(nn.Module):
    """Puts a learned vector before the positions."""

    def __init__(self, d: int):
        super().__init__()
        self.vector = nn.Parameter(torch.randn(1, 1, d) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.vector.to(x.dtype).expand(len(x), -1, -1), x], 1)


class ViT(nn.Module):
    """A vision transformer over images (B, 3, side, side); logits (B, classes) from the class token."""

    def __init__(self, d: int, layers: int, heads: int, side: int, patch: int, classes: int):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, d, patch, patch), ClassToken(d)
        self.positions = Positions((side // patch) ** 2 + 1, d)
        self.blocks = nn.Sequential(*(Block(d, heads, causal=False) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.positions(self.token(self.patches(images).flatten(2).transpose(1, 2)))
        return self.head(self.norm(self.blocks(x))[:, 0])


def conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    """A convolution that keeps the side up to the stride, and GroupNorm of 32 groups, of fewer where it is narrow."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.GroupNorm(min(32, outputs // 2), outputs))


class Residual(nn.Module):
    """A ResNet block of (size, outputs, stride) convolutions, with a projection where the shape changes."""

    def __init__(self, inputs: int, convs: list[tuple[int, int, int]]):
        super().__init__()
        sizes = [inputs, *(outputs for _, outputs, _ in convs)]
        layers = (conv(sizes[k], outputs, size, stride) for k, (size, outputs, stride) in enumerate(convs))
        self.convs = nn.ModuleList(layers)
        stride = max(stride for _, _, stride in convs)
        same = stride == 1 and inputs == sizes[-1]
        self.shortcut = nn.Identity() if same else conv(inputs, sizes[-1], 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in list(self.convs)[:-1]:
            h = F.relu(layer(h))
        return F.relu(self.convs[-1](h) + self.shortcut(x))


def resnet(stem: list[nn.Module], width: int, depths: list[int], wide: int, classes: int) -> nn.Sequential:
    """Stages of basic blocks (`wide` = 1) or of bottlenecks `wide` times as wide at their ends."""
    layers, inputs = list(stem), width
    for stage, depth in enumerate(depths):
        d = width * 2**stage
        for block in range(depth):
            stride = 2 if stage and not block else 1
            convs = [(3, d, stride), (3, d, 1)] if wide == 1 else [(1, d, 1), (3, d, stride), (1, wide * d, 1)]
            layers.append(Residual(inputs, convs))
            inputs = wide * d
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Recurrent(nn.Module):
    """A language model with an LSTM over token ids (B, T); logits (B, T, V)."""

    def __init__(self, d: int, layers: int, V: int):
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(V, d), nn.LSTM(d, d, layers, batch_first=True), nn.Linear(d, V)
        # Large, so that gradients are above 1 and clipping acts.
        nn.init.normal_(self.head.weight, std=2.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(ids))[0])


class LoRA(nn.Module):
    """A frozen Linear and a trainable product of rank `rank` beside it."""

    def __init__(self, frozen: nn.Linear, rank: int):
        super().__init__()
        self.frozen, self.a = frozen, nn.Linear(frozen.in_features, rank, bias=False)
        self.b = nn.Linear(rank, frozen.out_features, bias=False)
        # Not zero, as at the start of a training: with gradients above 1 clipping acts, and a wrong norm is seen.
        nn.init.normal_(self.b.weight, std=0.6)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.b(self.a(x))


def with_lora(model: Decoder, rank: int) -> Decoder:
    """The model with all of it frozen, and LoRA on the projections and the MLP of each block."""
    model.requires_grad_(False)
    for block in model.blocks:
        assert isinstance(block, Block)
        for owner, name in ((block.attention, "inputs"), (block.attention, "output"), (block, "up"), (block, "down")):
            setattr(owner, name, LoRA(getattr(owner, name), rank))
    return model


def token_losses(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy for each sample (B,), its mean over positions."""
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="none").view(ids.shape).mean(1)


def image_losses(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels, reduction="none")


def _text(model: nn.Module, B: int, T: int, V: int, fullgraph: bool = True) -> Setup:
    return Setup(model, torch.randint(V, (B, T)), torch.randint(V, (B, T)), token_losses, fullgraph)


def _images(model: nn.Module, B: int, side: int, classes: int, recompute: float = 0.1) -> Setup:
    x, y = torch.randn(B, 3, side, side), torch.randint(classes, (B,))
    return Setup(model, x, y, image_losses, recompute=recompute)


def gpt2(tiny: bool) -> Setup:
    d, layers, heads, V, T, B = (16, 1, 2, 40, 8, 4) if tiny else (768, 12, 12, 50257, 1024, 16)
    return _text(Decoder(d, layers, heads, V, T, tied=True), B, T, V)


def decoder(tiny: bool) -> Setup:
    # 0.94 billion parameters; the head has a matrix of its own, which all contenders take.
    d, layers, heads, V, T, B = (16, 1, 2, 40, 8, 4) if tiny else (2048, 16, 16, 32000, 2048, 4)
    return _text(Decoder(d, layers, heads, V, T, tied=False), B, T, V)


def llama(tiny: bool) -> Setup:
    # 0.90 billion parameters.
    d, layers, heads, groups, hidden, V = (16, 1, 4, 2, 24, 40) if tiny else (2048, 16, 32, 8, 6144, 32000)
    B, T = (4, 8) if tiny else (4, 2048)
    return _text(Llama(d, layers, heads, groups, hidden, V), B, T, V)


def vit(tiny: bool) -> Setup:
    d, layers, heads, side, patch, classes = (16, 1, 2, 8, 4, 10) if tiny else (768, 12, 12, 224, 16, 1000)
    return _images(ViT(d, layers, heads, side, patch, classes), 4 if tiny else 64, side, classes)


def resnet18(tiny: bool) -> Setup:
    width, depths, B, side = (8, [1, 1], 4, 8) if tiny else (64, [2, 2, 2, 2], 512, 32)
    return _images(resnet([conv(3, width, 3, 1), nn.ReLU()], width, depths, 1, 10), B, side, 10, recompute=1.0)


def resnet50(tiny: bool) -> Setup:
    width, depths, B, side, classes = (8, [1, 1], 4, 16, 10) if tiny else (64, [3, 4, 6, 3], 64, 224, 1000)
    stem = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return _images(resnet(stem, width, depths, 4, classes), B, side, classes, recompute=1.0)


def lstm(tiny: bool) -> Setup:
    d, V, B, T = (8, 40, 4, 6) if tiny else (512, 10000, 64, 128)
    # The compiler breaks off at an LSTM, and so leaves it to cuDNN; in one graph it would unroll the 2 T steps.
    return _text(Recurrent(d, 2, V), B, T, V, fullgraph=False)


def lora(tiny: bool) -> Setup:
    base = decoder(tiny)
    assert isinstance(base.model, Decoder)
    return Setup(with_lora(base.model, 2 if tiny else 16), base.x, base.y, base.losses)


MODELS: dict[str, Callable[[bool], Setup]] = {
    "gpt2": gpt2, "decoder": decoder, "llama": llama, "vit": vit, "resnet18": resnet18, "resnet50": resnet50,
    "lstm": lstm, "lora": lora,
}  # fmt: skip
