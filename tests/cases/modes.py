"""Checkpoints, dtypes, autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .attention import encoder
from .base import SEQUENCE, B, Case, T, batch, d, ids, image, linear, made, net, reals, score, weight
from .recurrent import recurrent
from .several import tied


def checkpointed(reentrant: bool, **parts) -> Callable[[], nn.Module]:
    return net(lambda m, x: m.c(checkpoint(lambda h: m.b(h).tanh(), m.a(x), use_reentrant=reentrant)), **parts)


def two_checkpoints(m: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    h = m.a(x)
    for layer in (m.b, m.b, m.c):
        h = checkpoint(layer, h, use_reentrant=reentrant)
    return h


def derived_in_checkpoint(m: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda h: m.b(h).tanh() @ m.w.tanh() + m.v, m.a(x), use_reentrant=reentrant)


def in_bfloat16(model: nn.Module, *batch: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(*batch)
    return score(out.float())


ENCODER = encoder(True, norm_first=True)
# fmt: off
MODES = [
    *(
        Case(
            f"checkpoint, {'' if reentrant else 'non-'}reentrant{' T = B' if t == B else ''}", ("checkpointing",),
            checkpointed(reentrant, a=linear(d, 4), b=linear(4, 4), c=linear(4, 2)), batch(reals(B, t, d)),
        )
        for reentrant in (True, False)
        for t in (T, B)
    ),
    *(
        Case(
            f"derived weight inside a checkpoint, {'' if reentrant else 'non-'}reentrant",
            ("checkpointing", "derived weight"),
            net(
                partial(derived_in_checkpoint, reentrant=reentrant), a=linear(d, 4), b=linear(4, 4), w=weight(4, 2),
                v=weight(T, 2),
            ),
            SEQUENCE,
        )
        for reentrant in (True, False)
    ),
    *(
        Case(
            f"checkpoints in a row, {'' if reentrant else 'non-'}reentrant", ("checkpointing", "module used twice"),
            net(
                partial(two_checkpoints, reentrant=reentrant), a=linear(d, 4),
                b=lambda: nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.ReLU(inplace=True)), c=encoder(True),
            ),
            SEQUENCE,
        )
        for reentrant in (True, False)
    ),
    *(
        Case(name, ("autocast",), make, data, in_bfloat16, dtype=torch.float32, tolerance=9e-3)
        for name, make, data in [
            ("autocast linear", lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE),
            ("autocast encoder", ENCODER, batch(reals(B, T, 4))),
            ("autocast convolution", lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.GroupNorm(2, 4)), image(4, 4)),
            ("autocast lstm", recurrent(nn.LSTM, d, 4), SEQUENCE),
            (
                "autocast one sample at a time",
                net(lambda m, x: torch.stack([m.b(m.a(row).tanh()) for row in x]), a=linear(d, 3), b=linear(3, 2)),
                batch(reals(B, d)),
            ),
            (
                "autocast layer_norm of bfloat16",
                net(lambda m, x: m.norm(m.fc(x)), fc=linear(d, 4), norm=lambda: nn.LayerNorm(4)), SEQUENCE,
            ),
            (
                "autocast einsum",
                net(lambda m, x: torch.einsum("...d,pd->...p", x, m.w) + m.b, w=weight(2, d), b=weight(2)), SEQUENCE,
            ),
            (
                "autocast weight per position",
                net(lambda m, x: (x.transpose(0, 1) @ m.w).transpose(0, 1), w=weight(T, d, 2)), SEQUENCE,
            ),
            ("autocast tied", tied, batch(ids(6, B, T))),
            (
                "autocast derived weight", net(lambda m, x: F.linear(x, m.w.T, m.b * 2), w=weight(d, 2), b=weight(2)),
                SEQUENCE,
            ),
        ]
    ),
    *(
        Case(
            f"{name}, {str(dtype)[6:]}", ("dtype",), make, data, lambda m, *batch: score(m(*batch).float()),
            dtype=dtype, tolerance=tolerance,
        )
        for dtype, tolerance in ((torch.bfloat16, 9e-3), (torch.float16, 1e-3), (torch.float32, 1e-5))
        for name, make, data in [
            ("linear", lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), SEQUENCE),
            ("tied", tied, batch(ids(6, B, T))),
            ("raw", net(lambda m, x: F.layer_norm(x * m.w, (d,)) + m.w, w=weight(d)), SEQUENCE),
            ("convolution", made(nn.Conv1d, 4, 2, 3, padding=1), image(6)),
        ]
    ),
]
# fmt: on
