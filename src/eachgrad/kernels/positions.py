"""position_sums: what each sample adds up over its positions, for a bias or the weight of a norm.

A compiler joins such a sum with the code that makes its terms, and with those of other layers that read the same numbers.
The joint code ran at a quarter of an H200's memory bandwidth: 1.6 ms for the 25 norms of GPT-2 small (16 samples of 1024
positions), 1.6 for its 12 GELUs, each with the sum for the bias before it. To write the terms down and read them here
takes less. The Triton code is apart, as triton is there only where a GPU is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.choices import chosen
from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty

# A program adds up so many positions of so many numbers at a time. If there would be too few programs to keep the device
# busy, by two or three for each multiprocessor of an H200, each has a part of the positions.
PROGRAMS = 384


def _check(values: Sequence[Tensor]) -> None:
    for t in values:
        if t.dtype not in DTYPES:
            raise TypeError(f"position_sums takes {', '.join(map(str, DTYPES))}, not {t.dtype}")
        if t.ndim != 3 or t.shape != values[0].shape:
            raise ValueError(f"{tuple(values[0].shape)} and {tuple(t.shape)} must both be (B, T, n)")
    if not 1 <= len(values) <= 2:
        raise ValueError(f"position_sums takes one or two tensors, not {len(values)}")


class Tiling(NamedTuple):
    """How the kernel divides its work."""

    rows: int
    columns: int
    warps: int
    parts: int  # of the positions


def tiling(B: int, T: int, n: int) -> Tiling:
    """The tiles for B samples of T positions of n numbers."""
    # Asked three times for every sum. A symbol cannot be looked up.
    return (_known_tiling if type(B) is type(T) is type(n) is int else _tiling)(B, T, n)


def _tiling(B: int, T: int, n: int) -> Tiling:
    # Of seven on an H200 the fastest for (16, 1024, 3072), 28 us, and (64, 197, 768); for (16, 1024, 768) the other, 24 us
    # instead of 33 for two tensors.
    rows, columns, warps = (64, 64, 4) if B * -(-n // 64) >= 2 * PROGRAMS else (128, 32, 8)
    parts = -(-PROGRAMS // max(1, B * -(-n // columns)))
    return Tiling(rows, columns, warps, max(1, min(parts, T // rows)))


_known_tiling = lru_cache(4096)(_tiling)


def _room(values: Sequence[Tensor], parts: int) -> Tensor:
    """For the sums of each part of the positions of each tensor: (tensors, B, parts, n)."""
    _check(values)
    B, T, n = values[0].shape
    return new_empty(values[0], (len(values), B, parts or tiling(B, T, n).parts, n), torch.float32)


def plain(values: list[Tensor], parts: int = 0) -> Tensor:
    """The same in torch's own ops."""
    parts = _room(values, parts).shape[2]
    run = -(-values[0].shape[1] // parts)
    terms = torch.stack([F.pad(t.to(torch.float32), (0, 0, 0, parts * run - t.shape[1])) for t in values])
    return terms.unflatten(2, (parts, run)).sum(3)


def launched(values: list[Tensor], parts: int = 0) -> Tensor:
    """The same by the kernel."""
    from eachgrad.kernels.triton_positions import position_sums_kernel

    out = _room(values, parts)
    given = [t if t.stride(2) == 1 else t.contiguous() for t in (values[0], values[-1])]
    strides = [n for t in given for n in t.stride()[:2]]
    B, T, n = values[0].shape
    (rows, columns, warps, _), parts = tiling(B, T, n), out.shape[2]
    if out.numel():
        programs = -(-n // columns) * parts * B  # of other dimensions a grid has 65,535 at most
        constants = {"TWO": len(values) == 2, "ROWS": rows, "COLUMNS": columns}
        args = (*given, out, T, -(-T // parts), n, parts, *strides)
        launch(position_sums_kernel, programs, out, args, constants, num_warps=warps)
    return out


# The parts are added outside, where a compiler joins that with what comes next. 0 parts are as many as are best; a graph for
# any number of samples has as many as for those that it was traced with.
library.define("position_sums(Tensor[] values, int parts=0) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("position_sums", plain, "CPU")
library.impl("position_sums", launched, "CUDA")


@torch.library.register_fake("eachgrad::position_sums", lib=library)
def _(values: list[Tensor], parts: int = 0) -> Tensor:
    return _room(values, parts)


def position_sums(*values: Tensor) -> tuple[Tensor, ...]:
    """sum_t value[:, t] of one or two (B, T, n), in float32: (B, n) for each."""
    _check(values)
    parts = chosen(tiling(*values[0].shape).parts)
    found = direct(torch.ops.eachgrad.position_sums, launched, values[0], list(values), parts)
    return (found[:, :, 0] if found.shape[2] == 1 else found.sum(2)).unbind()
