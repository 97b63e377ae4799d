"""squares_of_many, weighted_of_many: norms and weighted sums of many gradients that are there, in one launch each.

A private step of GPT-2 small keeps the gradients of 50 matrices, 3.9 GB for 16 samples in bfloat16. An op for each norm and
for each sum took 220 launches, with a gap of 2.6 us after each in a CUDA graph on an H200: 0.57 ms of a step of 37.8 ms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty

# Numbers of one sample that a program squares and adds. 2^15 of bfloat16 are 64 KiB: GPT-2's gradients make 3,800 runs a
# sample, and their sums are 1 / 16,000 of what is read. In float32 a sum of 2^22 equal numbers, one after another, was
# 7e-5 too small; here no number goes through more than 16 + 8 + 8 additions before the runs are added.
RUN = 1 << 15
# Tensors a launch: their addresses and those of the answers are 1 KiB. The arguments of a kernel may be 4 KiB.
MOST = 64
SHELF = 8  # tensors that a program compares with one by one, once it has found their shelf


class Tiles(NamedTuple):
    """How many numbers a program reads at a time, by how many warps, and how often that is unrolled."""

    block: int = 2048  # eight numbers a thread: sixteen bytes of bfloat16 at a time
    warps: int = 8
    unroll: int = 4


TILES = Tiles()


def plain_squares(values: list[Tensor]) -> Tensor:
    """The same in torch's own ops: what each run adds to each sample's square, (B, runs)."""
    parts = []
    for value in values:
        flat = value.reshape(len(value), _numbers(value)).to(torch.float32).square()
        runs = _runs(value, RUN)
        parts.append(F.pad(flat, (0, runs * RUN - flat.shape[1])).view(len(value), runs, RUN).sum(2))
    return torch.cat(parts, 1)


def plain_sums(c: Tensor, values: list[Tensor]) -> list[Tensor]:
    """The same in torch's own ops."""
    wide = (value.to(torch.float32) * c.view(-1, *[1] * (value.ndim - 1)) for value in values)
    return [value.sum(0).contiguous() for value in wide]


def launched_squares(values: list[Tensor], tiles: Tiles = TILES, run: int | None = None) -> Tensor:
    """The same by the kernel. `run`: how many numbers make a run, RUN if it is not said."""
    run, B = run or RUN, len(values[0])
    partial = new_empty(values[0], (B, sum(_runs(value, run) for value in values)), torch.float32)
    if not partial.numel():
        return partial
    from eachgrad.kernels.triton_many import squares_kernel

    column = 0
    for part in _launches(values):
        place = part.place(run)
        runs = place["FIRST"][-1]
        args = (part.values, partial[:, column:], runs, partial.stride(0))
        constants = {**place, "SHELF": SHELF, "RUN": run, "BLOCK": tiles.block, "UNROLL": tiles.unroll}
        launch(squares_kernel, B * runs, partial, args, constants, num_warps=tiles.warps)
        column += runs
    return partial


def launched_sums(c: Tensor, values: list[Tensor], tiles: Tiles = TILES) -> list[Tensor]:
    """The same by the kernel."""
    if not len(c):
        return [c.new_zeros(value.shape[1:]) for value in values]
    from eachgrad.kernels.triton_many import weighted_kernel

    outs, c = [new_empty(c, value.shape[1:]) for value in values], c.contiguous()
    for part in _launches(values):
        place = part.place(tiles.block)
        args = (c, part.values, tuple([outs[k] for k in part.which]), len(c))
        constants = {**place, "SHELF": SHELF, "BLOCK": tiles.block, "UNROLL": tiles.unroll}
        launch(weighted_kernel, place["FIRST"][-1], c, args, constants, num_warps=tiles.warps)
    return outs


class _Part(NamedTuple):
    """The tensors of one launch, and which of all they are."""

    which: list[int]
    values: tuple[Tensor, ...]  # each sample of each lies in one piece
    aligned: bool

    def place(self, size: int) -> dict[str, Any]:
        """Where each tensor begins, with programs of `size` numbers; the same for every batch: it is compiled in."""
        first = [0]
        for value in self.values:
            first.append(first[-1] + _runs(value, size))
        first += first[-1:] * (-len(self.values) % SHELF)
        strides = tuple(value.stride(0) for value in self.values)
        numbers = tuple(_numbers(value) for value in self.values)
        return {"FIRST": tuple(first), "NUMBERS": numbers, "STRIDES": strides, "ALIGNED": self.aligned}


def _launches(values: list[Tensor]) -> Iterator[_Part]:
    """All tensors with numbers, at most MOST at a time; one that is not aligned does not make the others' reads narrow."""
    # Samples may lie apart, as they do where a product was made of padded matrices and cut.
    given = {k: v if v[0].is_contiguous() else v.contiguous() for k, v in enumerate(values) if v.numel()}
    for aligned in (True, False):
        some = [k for k, value in given.items() if _is_aligned(value) == aligned]
        for start in range(0, len(some), MOST):
            which = some[start : start + MOST]
            yield _Part(which, tuple(given[k] for k in which), aligned)


def _is_aligned(value: Tensor) -> bool:
    """Whether each sample begins at a multiple of sixteen bytes."""
    return value.data_ptr() % 16 == 0 and value.stride(0) * value.element_size() % 16 == 0


def _numbers(value: Tensor) -> int:
    """Of one sample."""
    return math.prod(value.shape[1:])


def _runs(value: Tensor, size: int) -> int:
    return -(-_numbers(value) // size)


# These take the gradients as they lie. A compiler would copy those that lie apart, 0.6 ms for a head of 50257 tokens and 16
# samples on an H200, to hand them over as they lay when it traced.
_FLEXIBLE = (torch.Tag.flexible_layout,)
library.define("squares_of_many(Tensor[] values) -> Tensor", tags=_FLEXIBLE)
library.impl("squares_of_many", plain_squares, "CPU")
library.impl("squares_of_many", launched_squares, "CUDA")
library.define("weighted_of_many(Tensor c, Tensor[] values) -> Tensor[]", tags=_FLEXIBLE)
library.impl("weighted_of_many", plain_sums, "CPU")
library.impl("weighted_of_many", launched_sums, "CUDA")


@torch.library.register_fake("eachgrad::squares_of_many", lib=library)
def _(values: list[Tensor]) -> Tensor:
    runs = sum(_runs(value, RUN) for value in values)
    return values[0].new_empty((values[0].shape[0], runs), dtype=torch.float32)


@torch.library.register_fake("eachgrad::weighted_of_many", lib=library)
def _(c: Tensor, values: list[Tensor]) -> list[Tensor]:
    return [c.new_empty(value.shape[1:]) for value in values]


def squares_of_many(values: Sequence[Tensor]) -> Tensor:
    """sum_k |values[k][i]|^2 of values[k] (B, *shape_k), added in float32: (B,)."""
    if not values:
        raise ValueError("squares_of_many: without a tensor there are no samples")
    _check(values, len(values[0]))
    return direct(torch.ops.eachgrad.squares_of_many, launched_squares, values[0], list(values)).sum(1)


def weighted_of_many(c: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    """sum_i c[i] values[k][i] of c (B,) in float32 and values[k] (B, *shape_k), in float32: (*shape_k) for each k."""
    if c.ndim != 1 or c.dtype != torch.float32:
        raise TypeError(f"weighted_of_many takes c (B,) in float32, not {tuple(c.shape)} in {c.dtype}")
    _check([*values], len(c))
    if values and values[0].device != c.device:
        raise TypeError(f"c is on {c.device}, the values are on {values[0].device}")
    return direct(torch.ops.eachgrad.weighted_of_many, launched_sums, values[0], c, list(values)) if values else []


def _check(values: Sequence[Tensor], B: int) -> None:
    """The kernels go by addresses: a tensor of another dtype or device would be read wildly."""
    kinds = {(value.dtype, value.device) for value in values}
    if len(kinds) > 1 or any(dtype not in DTYPES for dtype, _ in kinds):
        found = sorted(f"{dtype} on {device}" for dtype, device in kinds)
        raise TypeError(f"the values are all of bfloat16, float16 or float32, on one device, not {found}")
    if any(value.ndim == 0 or len(value) != B for value in values):
        raise ValueError(f"each value is ({B}, ...), not {[tuple(value.shape) for value in values]}")
