"""norm_sums: what each sample adds up over its positions for the weight and the bias of a norm.

The norm's input is given as terms that are to be added: in a transformer it is the sum of what the layers before have put
out, which a compiler adds up anew wherever it is read, and writes every few layers alone. To have g times the normalised
input written, and read that, took as long on an H200 as the compiler's own sums: 1.5 ms for the 25 norms of GPT-2 small. The
terms are 3.1 GB, 0.7 ms at its bandwidth. The Triton code is apart, as triton is there only where a GPU is.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from eachgrad.choices import chosen
from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty
from eachgrad.kernels.positions import tiling

MOST = 6  # terms
ROWS, WARPS = 64, 8  # of a tile, and for it; as many numbers as `tiling` says


def _check(g: Tensor, terms: list[Tensor], mean: Tensor | None, scale: Tensor) -> None:
    for t in (g, *terms):
        if t.dtype not in DTYPES:
            raise TypeError(f"norm_sums takes {', '.join(map(str, DTYPES))}, not {t.dtype}")
        if t.ndim != 3 or t.shape != g.shape:
            raise ValueError(f"g {tuple(g.shape)} and the terms, {tuple(t.shape)}, must be (B, T, n)")
    for t in (scale,) if mean is None else (scale, mean):
        if t.dtype != torch.float32 or t.shape != (*g.shape[:2], 1):
            raise ValueError(f"statistics are (B, T, 1) in float32, not {tuple(t.shape)} in {t.dtype}")
    if not 1 <= len(terms) <= MOST:
        raise ValueError(f"norm_sums takes 1 to {MOST} terms, not {len(terms)}")


def _room(g: Tensor, parts: int) -> Tensor:
    """For the sums of each part of the positions, of g and of g times the normalised input: (2, B, parts, n)."""
    B, T, n = g.shape
    return new_empty(g, (2, B, parts or tiling(B, T, n).parts, n), torch.float32)


def plain(g: Tensor, terms: list[Tensor], mean: Tensor | None, scale: Tensor, parts: int = 0) -> Tensor:
    """The same in torch's own ops: all of it in the first part."""
    _check(g, terms, mean, scale)
    wide, x = g.to(torch.float32), reduce(torch.add, (t.to(torch.float32) for t in terms))
    normal = (x if mean is None else x - mean) * scale
    out = _room(g, parts).zero_()
    out[:, :, 0] = torch.stack([wide.sum(1), (wide * normal).sum(1)])
    return out


def launched(g: Tensor, terms: list[Tensor], mean: Tensor | None, scale: Tensor, parts: int = 0) -> Tensor:
    """The same by the kernel."""
    from eachgrad.kernels.triton_norm_sums import norm_sums_kernel

    _check(g, terms, mean, scale)
    out, (B, T, n) = _room(g, parts), g.shape
    g, *terms = (t if t.stride(2) == 1 else t.contiguous() for t in (g, *terms))
    statistics = [t.contiguous() for t in (scale if mean is None else mean, scale)]
    columns, parts = tiling(B, T, n).columns, out.shape[2]
    if out.numel():
        strides = *g.stride()[:2], tuple([n for t in terms for n in t.stride()[:2]])
        args = (g, tuple(terms), *statistics, out, T, -(-T // parts), n, parts, *strides)
        constants = {"CENTRED": mean is not None, "ROWS": ROWS, "COLUMNS": columns}
        launch(norm_sums_kernel, -(-n // columns) * parts * B, out, args, constants, num_warps=WARPS)
    return out


library.define(
    "norm_sums(Tensor g, Tensor[] terms, Tensor? mean, Tensor scale, int parts=0) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
library.impl("norm_sums", plain, "CPU")
library.impl("norm_sums", launched, "CUDA")


@torch.library.register_fake("eachgrad::norm_sums", lib=library)
def _(g: Tensor, terms: list[Tensor], mean: Tensor | None, scale: Tensor, parts: int = 0) -> Tensor:
    _check(g, terms, mean, scale)
    return _room(g, parts)


def norm_sums(g: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor]:
    """sum_t g[:, t] and sum_t g[:, t] (x[:, t] - mean) scale of (B, T, n), in float32: (B, n) each.

    mean, None for 0, and scale are (B, T, 1) in float32.
    """
    op, parts = torch.ops.eachgrad.norm_sums, chosen(tiling(*g.shape).parts)
    found = direct(op, launched, g, g, [x], mean, scale, parts)
    of_bias, of_weight = (found[:, :, 0] if found.shape[2] == 1 else found.sum(2)).unbind()
    return of_bias, of_weight
