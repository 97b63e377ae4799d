"""The four models of the CPU comparison, each with a batch: (model, inputs, labels)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Setup = tuple[nn.Module, Tensor, Tensor]


class Transformer(nn.Module):
    """A pre-norm encoder over token ids, with a position table and a head over the vocabulary."""

    def __init__(self, d: int = 256, layers: int = 4, T: int = 128, V: int = 1000):
        super().__init__()
        self.tokens = nn.Embedding(V, d)
        self.positions = nn.Parameter(torch.randn(T, d) * 0.02)
        layer = nn.TransformerEncoderLayer(d, 4, 4 * d, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d, V)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.positions)).mean(1)


class Recurrent(nn.Module):
    """An LSTM and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(64, 256, batch_first=True), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def mlp() -> Setup:
    model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    return model, torch.randn(256, 784), torch.randint(0, 10, (256,))


def cnn() -> Setup:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip
    return model, torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))


def transformer(B: int = 16) -> Setup:
    return Transformer(), torch.randint(0, 1000, (B, 128)), torch.randint(0, 1000, (B,))


def lstm() -> Setup:
    return Recurrent(), torch.randn(32, 64, 64), torch.randint(0, 10, (32,))


MODELS: dict[str, Callable[[], Setup]] = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "lstm": lstm}
