"""Weights computed from parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from .base import SEQUENCE, B, Case, Maker, T, batch, d, frozen, ids, image, linear, net, reals, weight


def straight_through(w: Tensor) -> Tensor:
    return w + ((w * 4).round() / 4 - w).detach()


def accumulated(m: nn.Module, x: Tensor) -> Tensor:
    """A derived tensor that grows in place between its uses."""
    level = m.w * 1.0
    x = (x + level).tanh()
    level.mul_(3.0)
    return (x + level).tanh()


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def parametrized(module: nn.Module, transform: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(module, "weight", transform)


def derived(name: str, body: Callable[..., object], *hazards: str, x: Maker | None = None, **parts) -> Case:
    return Case(name, ("derived weight", *hazards), net(body, **parts), batch(x or reals(B, T, d)))


def pruned(module: nn.Module) -> nn.Module:
    """Every other row of the weight is masked; a mask that is computed from the values would not survive a copy."""
    mask = torch.ones_like(module.weight)
    mask[::2] = 0
    return parametrized(module, Masked(mask))


class Masked(nn.Module):
    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, w: Tensor) -> Tensor:
        return w * self.mask


def cached(m: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return m.fc(m.fc(x).tanh())


def learned_step(m: nn.Module, x: Tensor) -> Tensor:
    step = m.step.abs() + 0.1
    level = (m.w / step).clamp(-3, 3)
    return F.linear(x, (level + (level.round() - level).detach()) * step)


def by_parts(x: Tensor, a: Tensor, a_bias: Tensor, b: Tensor, b_bias: Tensor) -> Tensor:
    return F.linear(F.linear(x, a.view(4, d), a_bias).tanh(), b.view(2, 4), b_bias)


def changing(m: nn.Module, x: Tensor) -> Tensor:
    w = m.w
    for _ in range(3):
        x, w = (x @ w).tanh(), 0.9 * w + m.v
    return x


def direction(m: nn.Module, x: Tensor) -> Tensor:
    w = m.w + m.b @ m.a
    return F.linear(x, m.size * w / w.norm(dim=1, keepdim=True))


def reflections(m: nn.Module, x: Tensor) -> Tensor:
    w = torch.eye(d, dtype=x.dtype)
    for v in m.v:
        w = w - 2 * torch.outer(w @ v, v) / v.dot(v)
    return x @ w


def triangle(m: nn.Module, x: Tensor) -> Tensor:
    w = torch.zeros(d, d, dtype=x.dtype)
    w[torch.tril_indices(d, d).unbind()] = m.w
    return x @ w


def chosen(m: nn.Module, x: Tensor) -> Tensor:
    p = m.s.sigmoid()
    return F.linear(x, m.w * ((p > 0.5).to(p.dtype) + p - p.detach()))


# fmt: off
DERIVED = [
    derived("transposed weight", lambda m, x: F.linear(x, m.w.T), w=weight(d, 2)),
    derived(
        "transposed weight d = B", lambda m, x: x @ m.w.t() @ m.w, "d = B", "T = B", w=weight(B, B), x=reals(B, B, B),
    ),
    derived(
        "weight viewed", lambda m, x: F.linear(x, m.w.view(2, d), m.b.squeeze(0)), w=weight(2 * d), b=weight(1, 2),
    ),
    Case("weight_norm", ("derived weight",), lambda: parametrizations.weight_norm(nn.Linear(d, 2)), SEQUENCE),
    Case(
        "weight_norm of a convolution", ("derived weight",), lambda: parametrizations.weight_norm(nn.Conv1d(4, 2, 3)),
        image(6),
    ),
    Case(
        "spectral_norm", ("derived weight", "buffers"), lambda: parametrizations.spectral_norm(nn.Linear(d, 3)),
        SEQUENCE,
    ),
    Case(
        "spectral_norm in eval", ("derived weight",), lambda: parametrizations.spectral_norm(nn.Linear(d, 3)).eval(),
        SEQUENCE,
    ),
    Case(
        "orthogonal", ("derived weight",), lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
        batch(reals(B, T, 3)),
    ),
    Case(
        "symmetric", ("derived weight", "d = B"), lambda: parametrized(nn.Linear(B, B), Symmetric()),
        batch(reals(B, B, B)),
    ),
    derived("product of two weights", lambda m, x: F.linear(x, m.a @ m.b), a=weight(2, 4), b=weight(4, d)),
    derived(
        "masked weight", lambda m, x: F.linear(x, m.w * m.mask[0]), w=weight(2, d),
        mask=lambda: [torch.arange(d) % 2],
    ),
    derived(
        "masked weight all sizes = B", lambda m, x: F.linear(x, m.w * m.mask[0]), "T = B", "d = B", w=weight(B, B),
        mask=lambda: [torch.ones(B, B).tril()], x=reals(B, B, B),
    ),
    derived(
        "masked weight plus itself B = 1", lambda m, x: F.linear(x, m.w * m.mask[0] + m.w), "B = 1", w=weight(2, d),
        mask=lambda: [torch.arange(d) % 2], x=reals(1, T, d),
    ),
    derived(
        "slices of a packed weight",
        lambda m, x: (x @ m.w[:d].T @ (x @ m.w[d : 2 * d].T).mT).softmax(-1) @ (x @ m.w[2 * d :].T),
        w=weight(3 * d, d),
    ),
    derived(
        "chunks of a packed weight",
        lambda m, x: torch.cat([F.linear(x, w) * k for k, w in enumerate(m.w.chunk(3), 1)], -1), w=weight(6, d),
    ),
    derived(
        "LoRA merge", lambda m, x: F.linear(x, m.w + 0.5 * m.b @ m.a), w=weight(2, d), a=weight(1, d), b=weight(2, 1),
    ),
    derived(
        "LoRA on a frozen layer", lambda m, x: m.fc(x) + F.linear(F.linear(x, m.a), m.b), "frozen",
        fc=lambda: frozen(nn.Linear(d, 2), "weight", "bias"), a=weight(1, d), b=weight(2, 1),
    ),
    derived("straight-through quantiser", lambda m, x: F.linear(x, straight_through(m.w)), w=weight(2, d)),
    derived("cat of parameters", lambda m, x: F.linear(x, torch.cat([m.a, m.b])), a=weight(1, d), b=weight(2, d)),
    derived(
        "stack of parameters", lambda m, x: x @ torch.stack([m.a, m.b], 1) + torch.stack([m.a, m.b]).sum(),
        a=weight(d), b=weight(d),
    ),
    Case(
        "weight in another dtype", ("derived weight", "dtype"),
        net(lambda m, x: F.linear(x.float(), m.w.float()).double(), w=weight(2, d)), SEQUENCE, tolerance=1e-6,
    ),
    derived("softmax of a weight", lambda m, x: x @ m.w.softmax(0), w=weight(d, 2)),
    derived(
        "normalised rows", lambda m, x: F.linear(F.normalize(x, dim=-1), F.normalize(m.w, dim=-1)), w=weight(2, d),
    ),
    derived("state space decay", lambda m, x: (x.cumsum(1) * torch.exp(-torch.exp(m.w))).tanh(), w=weight(d)),
    derived("1 + w", lambda m, x: F.layer_norm(x, (d,), 1 + m.w, m.b * 2), w=weight(d), b=weight(d)),
    derived(
        "derived once, used twice", lambda m, x: (lambda w: F.linear(F.linear(x, w).tanh(), w.T))(m.w.exp()),
        "module used twice", w=weight(2, d),
    ),
    derived(
        "derived and used directly", lambda m, x: F.linear(x, m.w) + F.linear(x, m.w.tanh()), "module used twice",
        w=weight(2, d),
    ),
    derived(
        "generated by a layer", lambda m, x: F.linear(x, m.fc(m.code).view(2, d)), fc=linear(3, 2 * d),
        code=weight(3),
    ),
    derived("changed in place after its use", accumulated, "in-place after", w=weight(d)),
    derived(
        "filled in place d = B", lambda m, x: F.linear(x, m.w.clone().masked_fill_(m.mask[0], 0.3)),
        "in-place before", "d = B", "T = B", w=weight(B, B), mask=lambda: [torch.ones(B, B, dtype=torch.bool).tril()],
        x=reals(B, B, B),
    ),
    derived("fake quantised bias", lambda m, x: F.linear(x, m.w, straight_through(m.b)), w=weight(2, d), b=weight(2)),
    derived(
        "embedding of a derived table", lambda m, i: F.embedding(i, m.w * m.w), "repeated index", w=weight(4, d),
        x=ids(4, B, T),
    ),
    derived(
        "convolution by a derived kernel", lambda m, x: F.conv1d(x, m.w - m.w.mean((1, 2), keepdim=True)),
        w=weight(2, T, 3),
    ),
    derived("expanded kernel", lambda m, x: F.conv1d(x, m.w.expand(T, 1, 3), groups=T), w=weight(1, 1, 3)),
    Case("pruned", ("derived weight", "buffers"), lambda: pruned(nn.Linear(d, 3)), SEQUENCE),
    Case("pruned rows of a convolution", ("derived weight", "buffers"), lambda: pruned(nn.Conv1d(4, 6, 3)), image(6)),
    Case(
        "parametrized by two steps", ("derived weight",),
        lambda: parametrized(parametrized(nn.Linear(d, 2), nn.Tanh()), nn.Softplus()), SEQUENCE,
    ),
    Case(
        "parametrized and cached", ("derived weight", "module used twice", "d = B"),
        net(cached, fc=lambda: parametrized(nn.Linear(B, B), Symmetric())), batch(reals(B, T, B)),
    ),
    Case(
        "parametrized embedding", ("derived weight", "repeated index"),
        lambda: parametrized(nn.Embedding(4, d), nn.Softmax(-1)), batch(ids(4, B, T)),
    ),
    Case(
        "orthogonal by a Cayley map", ("derived weight",),
        lambda: parametrizations.orthogonal(nn.Linear(3, 3), orthogonal_map="cayley"), batch(reals(B, T, 3)),
    ),
    derived("learned step of a quantiser", learned_step, w=weight(2, d), step=lambda: torch.tensor(0.5)),
    derived(
        "Toeplitz by index T = B",
        lambda m, x: torch.einsum("ts,bsd->btd", m.w[torch.arange(B)[:, None] - torch.arange(B) + B - 1], x), "T = B",
        "repeated index", w=weight(2 * B - 1), x=reals(B, B, d),
    ),
    derived("circulant by rolls", lambda m, x: x @ torch.stack([m.w.roll(k) for k in range(d)]), w=weight(d)),
    derived("Kronecker product", lambda m, x: x @ torch.kron(m.a, m.b), a=weight(1, 2), b=weight(d, 2)),
    derived("matrix exponential", lambda m, x: x @ torch.matrix_exp(m.w - m.w.T), w=weight(d, d)),
    derived(
        "Cholesky factor", lambda m, x: x @ torch.linalg.cholesky(m.w @ m.w.T + d * torch.eye(d)), w=weight(d, d),
    ),
    derived("QR factor", lambda m, x: x @ torch.linalg.qr(m.w)[0], w=weight(d, d)),
    derived(
        "low rank and diagonal", lambda m, x: x @ (m.u @ m.v + torch.diag(m.s)), u=weight(d, 1), v=weight(1, d),
        s=weight(d),
    ),
    derived(
        "one flat parameter, split", lambda m, x: by_parts(x, *m.w.split([4 * d, 4, 8, 2])),
        w=weight(4 * d + 4 + 8 + 2),
    ),
    derived("weight that changes from step to step", changing, "module used twice", w=weight(d, d), v=weight(d, d)),
    derived("direction and magnitude", direction, w=weight(2, d), a=weight(1, d), b=weight(2, 1), size=weight(2, 1)),
    derived("reflections", reflections, v=weight(2, d)),
    derived("block diagonal", lambda m, x: x @ torch.block_diag(m.a, m.b), a=weight(2, 1), b=weight(d - 2, 2)),
    derived("triangle filled by index", triangle, "setitem", w=weight(d * (d + 1) // 2)),
    derived("mask chosen by its own scores", chosen, w=weight(2, d), s=weight(2, d)),
    derived(
        "experts merged for each sample",
        lambda m, x: x @ torch.einsum("be,epd->bdp", m.fc(x.mean(1)).softmax(-1), m.w), "hypernetwork",
        fc=linear(d, 3), w=weight(3, 2, d),
    ),
    derived(
        "cut points in order",
        lambda m, x: torch.sigmoid(torch.cat([m.a, m.a + F.softplus(m.w).cumsum(0)]) - m.fc(x)), a=weight(1),
        w=weight(2), fc=linear(d, 1),
    ),
    derived(
        "log determinant in every loss",
        lambda m, x: torch.cat([(x @ m.w).flatten(1), torch.linalg.slogdet(m.w)[1].expand(len(x), 1)], 1),
        w=weight(d, d),
    ),
    derived(
        "indexed in every way",
        lambda m, x: x * m.w[0, :, None, -1].sum() + m.w[:, [0, 1]].sum() + m.w[..., ::2].flip(0)[0].sum(),
        w=weight(2, 3, 2),
    ),
]
# fmt: on
