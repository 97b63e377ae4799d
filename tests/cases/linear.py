"""Linear layers: ranks, layouts, calls."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import (
    B,
    Case,
    T,
    batch,
    complex_weight,
    complexes,
    cut_second,
    d,
    ids,
    linear,
    made,
    net,
    reals,
    score,
    scored_second,
    weight,
)


def windows(m: nn.Module, x: Tensor) -> Tensor:
    """Windows of 2 x 2 of a map (B, 4, 4, d) attended one by one, as rows of the batch."""
    rows = x.view(len(x), 2, 2, 2, 2, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, d)
    return m.out(m.fc(rows).softmax(1)).view(len(x), 2, 2, 2, 2, -1)


# fmt: off
LINEAR = [
    Case("linear", ("rank 2",), linear(d, 2), batch(reals(B, d))),
    Case("linear without bias", ("rank 2",), linear(d, 2, bias=False), batch(reals(B, d))),
    Case("linear rank 3", ("rank 3",), linear(d, 2), batch(reals(B, T, d))),
    Case("linear rank 4", ("rank 4",), linear(d, 2), batch(reals(B, 2, T, d))),
    Case("linear T = B", ("T = B",), linear(d, 2), batch(reals(B, B, d))),
    Case("linear d = B", ("d = B",), linear(B, B), batch(reals(B, B))),
    Case("linear all sizes = B", ("T = B", "d = B"), linear(B, B), batch(reals(B, B, B))),
    Case("linear T = 1", ("T = 1",), linear(d, 2), batch(reals(B, 1, d))),
    Case("linear B = 1", ("B = 1",), linear(d, 2), batch(reals(1, T, d))),
    Case("linear long and narrow", ("Gram or direct",), linear(2, 2), batch(reals(B, 40, 2))),
    Case("linear short and wide", ("Gram or direct",), linear(40, 30), batch(reals(B, 2, 40))),
    Case(
        "linear keyword call", ("functional use",),
        net(lambda m, x: F.linear(bias=m.b, weight=m.w, input=x), w=weight(2, d), b=weight(2)), batch(reals(B, d)),
    ),
    Case("linear time first", ("time first",), linear(d, 2), batch(reals(T, B, d)), scored_second, 1, cut_second),
    Case(
        "linear time first T = B", ("time first", "T = B"), linear(d, 2), batch(reals(B, B, d)), scored_second, 1,
        cut_second,
    ),
    Case(
        "linear time first inside", ("time first", "T = B"),
        net(lambda m, x: m.fc(x.transpose(0, 1)).tanh().transpose(0, 1), fc=linear(d, 2)), batch(reals(B, B, d)),
    ),
    Case(
        "linear folded (B*T, d)", ("folded",),
        net(lambda m, x: m.b(m.a(x.reshape(-1, d)).tanh()).view(len(x), -1, 2), a=linear(d, 4), b=linear(4, 2)),
        batch(reals(B, T, d)),
    ),
    Case(
        "linear folded (T*B, d)", ("folded", "time first"),
        net(
            lambda m, x: (m.b(m.a(x.transpose(0, 1).reshape(-1, d)).tanh()).view(-1, len(x), 2).transpose(0, 1)),
            a=linear(d, 4), b=linear(4, 2),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "linear folded T = B", ("folded", "T = B"),
        net(
            lambda m, x: (m.b(m.a(x.transpose(0, 1).reshape(-1, d)).tanh()).view(-1, len(x), 2).transpose(0, 1)),
            a=linear(d, 4), b=linear(4, 2),
        ),
        batch(reals(B, B, d)),
    ),
    Case(
        "addmm on folded rows", ("folded", "functional use"),
        net(lambda m, x: torch.addmm(m.b, x.reshape(-1, d), m.w).view(len(x), -1, 2), w=weight(d, 2), b=weight(2)),
        batch(reals(B, T, d)),
    ),
    Case(
        "windows folded into the batch", ("folded", "windows"), net(windows, fc=linear(d, d), out=linear(d, 2)),
        batch(reals(B, 4, 4, d)),
    ),
    Case(
        "bilinear", ("two inputs",), net(lambda m, x, y: m.fc(x, y), fc=lambda: nn.Bilinear(d, 4, 3)),
        batch(reals(B, d), reals(B, 4)),
    ),
    Case(
        "complex linear", ("complex",), lambda: nn.Linear(d, 2, dtype=torch.complex128), batch(complexes(B, T, d)),
        lambda m, x: score(m(x).abs()),
    ),
    Case(
        "complex convolution", ("complex",), made(nn.Conv1d, 4, 2, 3, padding=1, dtype=torch.complex128),
        batch(complexes(B, 4, 6)), lambda m, x: score(m(x).abs()),
    ),
    Case(
        "complex filter of a spectrum", ("complex", "raw parameter"),
        net(lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * m.w, n=T, dim=1), w=complex_weight(3, d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "filter of a spectrum kept as pairs", ("complex", "derived weight"),
        net(
            lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=1) * torch.view_as_complex(m.w), n=T, dim=1),
            w=weight(3, d, 2),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "complex matmul and einsum", ("complex", "raw parameter"),
        net(lambda m, x: torch.einsum("btd,dp->btp", x @ m.w, m.v), w=complex_weight(d, 3), v=complex_weight(3, 2)),
        batch(complexes(B, T, d)), lambda m, x: score(m(x).abs()),
    ),
    Case(
        "complex raw parameter", ("complex", "raw parameter"),
        net(lambda m, x: x * m.w + m.b, w=complex_weight(d), b=weight(d)), batch(reals(B, T, d)),
        lambda m, x: score((m(x) ** 2).abs()),
    ),
]
# fmt: on


def cross_entropy_in_chunks(m: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """In chunks it has no second derivative, and one sample needs none."""
    options = nn.LinearCrossEntropyOptions() if len(x) > 1 else None
    rows, target = x.flatten(0, 1), y.flatten()
    each = F.linear_cross_entropy(rows, m.w, target, linear_bias=m.b, reduction="none", options=options)
    return each.view(y.shape)


if hasattr(F, "linear_cross_entropy"):  # not in every version of torch
    # fmt: off
    LINEAR += [
        Case(
            "linear and cross entropy in chunks", ("folded", "functional use"),
            net(cross_entropy_in_chunks, w=weight(3, d), b=weight(3)), batch(reals(B, T, d), ids(3, B, T)),
        ),
    ]
    # fmt: on
