"""Several uses, sharing, freezing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import SEQUENCE, B, Case, Net, T, batch, d, frozen, ids, image, linear, made, net, reals, score, weight


class Aliased(nn.Module):
    """Layers that a plain list holds as well: the forward goes through the list."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, 2)
        self.steps = [self.a, torch.tanh, self.b]
        self.own = [self.a.weight]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x + F.linear(x[..., :1].expand(-1, -1, d), self.own[0])[..., :2]


class Hooked(nn.Module):
    """Nested modules whose forward hooks change what passes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Sequential(nn.Linear(d, 4), nn.Tanh()), nn.Linear(4, 2))
        self.body[0][0].register_forward_hook(lambda module, args, out: out * 2)
        self.body[1].register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": self.body(x), "extra": x}


def tied() -> nn.Module:
    m = Net(
        lambda m, i: m.head(m.fc(m.tok(i)).tanh()),
        tok=nn.Embedding(6, d),
        fc=nn.Linear(d, d),
        head=nn.Linear(d, 6, bias=False),
    )
    m.head.weight = m.tok.weight
    return m


def shared_layers() -> nn.Module:
    one = nn.Linear(d, d)
    return nn.Sequential(one, nn.Tanh(), one, nn.Tanh(), nn.Linear(d, 2))


def partly_frozen(m: nn.Module) -> nn.Module:
    return frozen(m, "0.weight", "2.bias")


# fmt: off
TWICE = [
    Case(
        "module used twice", ("module used twice",), net(lambda m, x: m.fc(m.fc(x).tanh()), fc=linear(d, d)),
        SEQUENCE,
    ),
    Case("one layer under two names", ("shared",), shared_layers, SEQUENCE),
    Case("tied embedding and head", ("tied", "repeated index"), tied, batch(ids(6, B, T))),
    Case("tied embedding and head T = B", ("tied", "T = B"), tied, batch(ids(6, B, B))),
    Case(
        "tied by call and functionally", ("tied", "functional use"),
        net(lambda m, x: F.linear(m.fc(x).tanh(), m.fc.weight.T), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "tied convolution and its transpose", ("tied",),
        net(lambda m, x: F.conv_transpose1d(m.conv(x).tanh(), m.conv.weight), conv=made(nn.Conv1d, 4, 2, 3)),
        image(6),
    ),
    Case(
        "convolution used twice", ("module used twice",),
        net(lambda m, x: m.c(m.c(x).tanh()), c=made(nn.Conv1d, 4, 4, 3, padding=1)), image(5),
    ),
    Case(
        "weight used in linear and by multiplication", ("tied", "raw parameter"),
        net(lambda m, x: m.fc(x) * m.fc.weight.sum(1) + m.fc.bias, fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "norm used twice on different shapes", ("module used twice",),
        net(lambda m, x: m.norm(x).mean(1) * m.norm(x[:, 0]), norm=lambda: nn.LayerNorm(d)), SEQUENCE,
    ),
    Case(
        "embedding used for (B,) and (B, T)", ("module used twice", "two inputs"),
        net(lambda m, i, j: m.tok(i).sum(1) * m.tok(j), tok=lambda: nn.Embedding(5, d)),
        batch(ids(5, B, T), ids(5, B)),
    ),
    Case("aliases in a list", ("aliased",), Aliased, SEQUENCE),
    Case("forward hooks and a dict", ("dict output", "hooks"), Hooked, SEQUENCE, lambda m, x: score(m(x)["out"])),
    Case(
        "unused parameter", ("unused",), net(lambda m, x: m.fc(x), fc=linear(d, 2), other=linear(d, 3), w=weight(2)),
        SEQUENCE,
    ),
    Case(
        "used but not in the loss", ("unused",),
        net(lambda m, x: (m.fc(x), m.other(x))[0], fc=linear(d, 2), other=linear(d, 3)), SEQUENCE,
    ),
    Case(
        "used under no_grad", ("unused",),
        net(lambda m, x: m.fc(x) * m.other(x).detach(), fc=linear(d, 2), other=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "partly frozen", ("frozen",),
        lambda: partly_frozen(nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2))), SEQUENCE,
    ),
    Case(
        "frozen trunk", ("frozen",),
        lambda: nn.Sequential(frozen(nn.Linear(d, 4), "weight", "bias"), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE,
    ),
    Case(
        "siamese, two calls of the model", ("module used twice", "two inputs"), linear(d, 2),
        batch(reals(B, d), reals(B, d)), lambda m, x, y: score(m(x) * m(y)),
    ),
    Case(
        "submodules called, never the model", ("functional use",),
        net(lambda m, x: x, a=linear(d, 4), b=linear(4, 2)), SEQUENCE, lambda m, x: score(m.b(m.a(x).tanh())),
    ),
    Case(
        "micro-batches in one recording", ("module used twice",), linear(d, 2), batch(reals(5, T, d)),
        lambda m, x: torch.cat([score(m(part)) for part in x.split(2)]), batch_size=5,
    ),
    Case(
        "one sample at a time", ("rank 1",),
        net(lambda m, x: torch.stack([m.b(m.a(row).tanh()) for row in x]), a=linear(d, B), b=linear(B, B)),
        batch(reals(B, d)),
    ),
    Case(
        "one map at a time", ("no batch dimension",),
        net(
            lambda m, x: torch.stack([m.norm(m.conv(row)) for row in x]), conv=made(nn.Conv2d, 2, B, 2),
            norm=lambda: nn.LayerNorm(3),
        ),
        batch(reals(B, 2, 4, 4)),
    ),
    Case(
        "one sequence at a time", ("no batch dimension",),
        net(lambda m, x: torch.stack([m.rnn(row)[0] for row in x]), rnn=lambda: nn.LSTM(d, 2)), SEQUENCE,
    ),
]
# fmt: on
