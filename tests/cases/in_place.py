"""In-place ops."""

from __future__ import annotations

from torch import Tensor, nn

from .base import SEQUENCE, B, Case, T, batch, d, ids, image, linear, net, reals, weight


def added_in_place(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h += m.w
    h.mul_(m.v)
    return m.b(h.tanh_())


def multiplied_into_copies(m: nn.Module, x: Tensor) -> Tensor:
    """A tensor made of a parameter is the target of an in-place op whose result is not looked at."""
    h = m.w.expand(len(x), d).clone()
    h.mul_(x)
    return m.b(h)


def written_back(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h[:, 0] = h[:, 0] * 2
    h[:, 1:] += m.w
    return m.b(h)


# fmt: off
IN_PLACE = [
    Case(
        "relu in place", ("in-place after",),
        lambda: nn.Sequential(nn.Linear(d, 4), nn.ReLU(inplace=True), nn.Linear(4, 2)), SEQUENCE,
    ),
    Case(
        "residual in place", ("in-place after",),
        net(lambda m, x: m.b(m.a(x).add_(x)), a=linear(d, d), b=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "relu in place on a convolution and norm", ("in-place after",),
        lambda: nn.Sequential(
            nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2), nn.ReLU(inplace=True),
        ),
        image(4, 4),
    ),
    Case(
        "parameters in place", ("in-place after", "in-place before", "raw parameter"),
        net(added_in_place, a=linear(d, 4), b=linear(4, 2), w=weight(4), v=weight(4)), SEQUENCE,
    ),
    Case(
        "in place on copies of a parameter", ("in-place before", "raw parameter"),
        net(multiplied_into_copies, w=weight(d), b=linear(d, 2)), batch(reals(B, d)),
    ),
    Case(
        "slices written back", ("in-place after", "in-place before"),
        net(written_back, a=linear(d, 4), b=linear(4, 2), w=weight(4)), SEQUENCE,
    ),
    Case(
        "input changed before its use", ("in-place before",),
        net(lambda m, x: m.fc(x.clone().mul_(2).add_(1)), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "in place on an embedding", ("in-place after", "repeated index"),
        net(lambda m, i: m.fc(m.tok(i).mul_(3).tanh_()), tok=lambda: nn.Embedding(4, d), fc=linear(d, 2)),
        batch(ids(4, B, T)),
    ),
    Case(
        "sigmoid in place on a sum with a parameter", ("in-place after", "raw parameter"),
        net(lambda m, x: (x + m.w).sigmoid_() * (x * m.w).exp_(), w=weight(d)), SEQUENCE,
    ),
]
# fmt: on
