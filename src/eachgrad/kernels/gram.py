"""gram_norms: squared norms of a weight's gradients by the Grams of its factors, with no Gram written.

|A^T G|^2 = sum (A A^T) * (G G^T) for each sample. Here a tile of both Grams stays in registers, and a tile below the
diagonal is not formed: it is the mirror image of one above. For the 48 layers of ViT-B/16 (64 samples of 197 positions) an
H200 took 1.22 ms, and 11.0 by two products for each, which it wrote, read and added (benchmarks/kernels.py asks for both;
its results file is of before there were blocks of 64 rows, and has 1.72).
The Triton code is apart, as triton is there only where a GPU is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty

# The largest tile of a Gram, the numbers of each row read at a time, and how many of these are in flight. Two tiles of
# 128 x 128 in float32 are half of the registers of a multiprocessor. Of six tilings on an H200 this was the fastest for ViT's
# layers (2.29 ms; 64 numbers at a time 2.48, tiles of 64 x 64 2.39) and for 1024 positions (0.140 ms, 0.154, 0.172).
BLOCK, STEP, STAGES = 128, 128, 3
# For tiles that are smaller, and wait for more of them.
STEP_SMALL, STAGES_SMALL = 64, 4
# In float32 numbers take twice the room, and the products are made without tensor cores.
BLOCK_FLOAT32, STEP_FLOAT32, STAGES_FLOAT32 = 64, 32, 3
# Pairs of one launch. Of 64 samples of 197 positions one has 192 programs, 1.45 for each multiprocessor of an H200, and takes
# as long as 2 for each; four have 5.8, and take as long as 6: ViT's 48 layers, by tiles, 1.72 ms, and 2.25 one by one.
MOST = 4
TURN = 48  # programs, about, of which those that read most go first; no others have been tried
# Samples of few positions have blocks of ROWS rows, LARGEST at most, and a last one of TAIL where that is enough; see
# `triton_gram_short`. Its programs have four warps, of which a multiprocessor has room for two: one waits, the other works.
# On an H200 ViT's 48 layers took 1.22 ms instead of 1.72 by tiles (in three parts of a strip each 1.68, in one of eight warps
# 1.56), four of its layers with 256 samples of 65 positions 0.127 instead of 0.185.
ROWS, TAIL, LARGEST = 64, 16, 3
STEP_SHORT, STAGES_SHORT = 64, 4


class Tiling(NamedTuple):
    """How the kernel divides its work."""

    block: int  # rows, and columns, of a tile
    step: int
    warps: int
    stages: int
    bulk: bool  # whether the device may copy whole tiles; otherwise threads copy sixteen bytes each
    parts: int = 0  # of a sample of few positions, by blocks; 0: tiles


def tiling(T: int, width: int, dtype: torch.dtype, short: bool = True) -> Tiling:
    """The tiles for T positions of at most `width` numbers; `short`: samples of few positions may be in parts."""
    if dtype.itemsize > 2:
        return Tiling(_block(T, BLOCK_FLOAT32), _block(width, STEP_FLOAT32), 4, STAGES_FLOAT32, bulk=False)
    # Between ROWS + TAIL and BLOCK positions there would be more blocks than one, in as many products as in one tile.
    if short and (ROWS < T <= ROWS + TAIL or BLOCK < T <= LARGEST * ROWS + TAIL):
        return Tiling(ROWS, _block(width, STEP_SHORT), 4, STAGES_SHORT, bulk=True, parts=1 if T <= BLOCK else 2)
    block = _block(T, BLOCK)
    if block <= 64:
        return Tiling(block, _block(width, STEP_SMALL), 4, STAGES_SMALL, bulk=True)
    # With four warps of 128 x 128 one of the two tiles would not fit into registers.
    return Tiling(block, _block(width, STEP), 8, STAGES, bulk=True)


def _block(n: int, most: int) -> int:
    return next((size for size in (16, 32, 64) if n <= size < most), most)


def blocks(T: int) -> tuple[int, int]:
    """How many blocks of ROWS rows T positions have, and the rows of a narrow last one."""
    narrow = 0 < T % ROWS <= TAIL
    return (T // ROWS, TAIL) if narrow else (-(-T // ROWS), 0)


def _side(T: int, tiles: Tiling) -> int:
    return -(-T // tiles.block)


def _count(T: int, tiles: Tiling) -> int:
    """How many tiles, or parts, a sample has."""
    side = _side(T, tiles)
    return tiles.parts or side * (side + 1) // 2


def order(side: int) -> list[tuple[int, int]]:
    """Row and column of each tile up to the diagonal: the first row, the last, the second, the last but one, ..."""
    lines = (dict.fromkeys((line, side - 1 - line)) for line in range((side + 1) // 2))
    return [(i, j) for line in lines for i in line for j in range(i, side)]


def _check(left: Tensor, right: Tensor) -> None:
    if left.dtype != right.dtype or left.dtype not in DTYPES:
        names = ", ".join(map(str, DTYPES))
        raise TypeError(f"left is {left.dtype} and right {right.dtype}; both must be of one of {names}")
    if left.ndim != 3 or right.ndim != 3 or left.shape[:2] != right.shape[:2]:
        raise ValueError(f"left {tuple(left.shape)} and right {tuple(right.shape)} must be (B, T, p) and (B, T, d)")


def _check_many(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> None:
    if not lefts or len(lefts) != len(rights):
        raise ValueError(f"{len(lefts)} lefts and {len(rights)} rights are no pairs")
    for left, right in zip(lefts, rights, strict=True):
        _check(left, right)
    # The kernel goes by the sizes of the first, and by addresses.
    kinds = {(*t.shape[:2], t.dtype, t.device) for t in (*lefts, *rights)}
    if len(kinds) > 1:
        raise ValueError(f"pairs must have one B, T, dtype and device, not {sorted(map(str, kinds))}")


def _tiles(left: Tensor, right: Tensor) -> Tiling:
    # Other devices' tensor cores take sixteen rows at a time, and both factors from registers, which have no room for parts.
    return tiling(left.shape[1], max(left.shape[2], right.shape[2]), left.dtype, short=_copies_tiles(left.device))


def plain(left: Tensor, right: Tensor, tiles: Tiling | None = None) -> Tensor:
    """The same in torch's own ops."""
    _check(left, right)
    tiles = tiles or _tiles(left, right)
    left, right = left.to(torch.float32), right.to(torch.float32)
    product = (left @ left.mT) * (right @ right.mT)
    both = torch.stack([product, product.abs()])
    if tiles.parts:
        row = torch.arange(left.shape[1], device=left.device) // tiles.block
        part = torch.minimum(row[:, None], row).clamp(max=tiles.parts - 1)
        return torch.stack([torch.where(part == k, both, 0.0).sum((2, 3)) for k in range(tiles.parts)], 2)
    side = _side(left.shape[1], tiles)
    rest = side * tiles.block - left.shape[1]
    whole = F.pad(both, (0, rest, 0, rest))
    sums = whole.unflatten(3, (side, tiles.block)).unflatten(2, (side, tiles.block)).sum((3, 5))
    i, j = torch.tensor(order(side), dtype=torch.int64).view(-1, 2).unbind(1)
    return sums[..., i, j] * torch.where(i == j, 1.0, 2.0)


@cache
def _copies_tiles(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _is_bulk(t: Tensor) -> bool:
    """Whether the device can copy tiles of it: sizes from the innermost out, every row at a multiple of 16 bytes."""
    samples, rows, one = t.stride()
    nested = one == 1 and t.shape[2] <= rows <= samples
    aligned = not (samples * t.element_size() % 16 or rows * t.element_size() % 16 or t.data_ptr() % 16)
    return t.numel() > 0 and nested and aligned and _copies_tiles(t.device)


class _Pair(NamedTuple):
    """Two factors as a kernel takes them, and which of all pairs they are."""

    left: Tensor
    right: Tensor
    tiles: Tiling
    bulk: bool
    place: int = 0

    @classmethod
    def of(cls, left: Tensor, right: Tensor, tiles: Tiling | None, place: int = 0, bulk: bool = True) -> _Pair:
        tiles = tiles or _tiles(left, right)
        left, right = (t if t.stride(2) == 1 else t.contiguous() for t in (left, right))
        return cls(left, right, tiles, bulk and tiles.bulk and _is_bulk(left) and _is_bulk(right), place)

    @property
    def width(self) -> int:
        return self.left.shape[2] + self.right.shape[2]

    @property
    def ordered(self) -> tuple[Tensor, Tensor]:
        """Left and right; of parts the wider first, as rows of the other are read again."""
        swapped = self.tiles.parts and self.left.shape[2] < self.right.shape[2]
        return (self.right, self.left) if swapped else (self.left, self.right)


def _room(left: Tensor, tiles: Tiling, *pairs: int) -> Tensor:
    return new_empty(left, (*pairs, 2, left.shape[0], _count(left.shape[1], tiles)), torch.float32)


def launched(left: Tensor, right: Tensor, tiles: Tiling | None = None) -> Tensor:
    """The same by the kernel."""
    _check(left, right)
    pair = _Pair.of(left, right, tiles)
    out = _room(left, pair.tiles)
    _launch([pair], out)
    return out


def plain_of_many(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    """What `plain` gives for each pair: (pairs, 2, B, tiles)."""
    _check_many(lefts, rights)
    return torch.stack([plain(left, right) for left, right in zip(lefts, rights, strict=True)])


def launched_of_many(
    lefts: list[Tensor], rights: list[Tensor], tiles: Tiling | None = None, bulk: bool = True
) -> Tensor:
    """The same by the kernel, of at most MOST pairs at a time. `bulk`: by descriptors, where that may be."""
    _check_many(lefts, rights)
    out, pairs = _room(lefts[0], tiles or _tiles(lefts[0], rights[0]), len(lefts)), list[_Pair]()
    for place, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        pair = _Pair.of(left, right, tiles, place, bulk)
        if pair.left is left and pair.right is right:
            pairs.append(pair)
        else:  # at once, so that no two copies are there together
            _launch([pair], out)
    # The widest first: what is started last is to be short.
    pairs.sort(key=lambda pair: -pair.width)
    for kind in dict.fromkeys((pair.tiles, pair.bulk) for pair in pairs):
        some = [pair for pair in pairs if (pair.tiles, pair.bulk) == kind]
        for start in range(0, len(some), MOST):
            _launch(some[start : start + MOST], out)
    return out


def _launch(pairs: list[_Pair], out: Tensor) -> None:
    """Let a kernel write what is asked of pairs of one kind, each to its place in `out`."""
    from eachgrad.kernels.triton_gram import gram_kernel, gram_of_many_kernel

    tiles, bulk, (B, T, _) = pairs[0].tiles, pairs[0].bulk, pairs[0].left.shape
    side, programs = _side(T, tiles), len(pairs) * B * out.shape[-1]
    repeated = [*pairs, *pairs[-1:] * (MOST - len(pairs))] if len(pairs) > 1 else pairs
    given = [t for pair in repeated for t in pair.ordered]
    sizes = [(t.shape[2], *t.stride()[:2]) for t in given]
    unit = 1 if any(n % 8 for size in sizes for n in size) else 8
    even = not any(size[0] % tiles.step for size in sizes)
    constants = {"BLOCK": tiles.block, "STEP": tiles.step, "UNIT": unit, "EVEN": even, "BULK": bulk}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    shapes = tuple(tuple(n // unit for n in size) for size in sizes)
    room = out if out.ndim == 3 else out[pairs[0].place]
    places = [pair.place for pair in repeated]
    if tiles.parts:
        _launch_short(
            given, room if len(pairs) == 1 else out, programs, T, B, places, shapes, tiles, constants, options
        )
        return
    factors = [_described(t, tiles.block, tiles.step) if bulk else t for t in given]
    if len(pairs) == 1:
        launch(gram_kernel, programs, out, (*factors, room, T, side, B, *shapes), constants, **options)
        return
    turn = max(1, TURN // max(1, out.shape[-1]))
    args = (*factors, out, T, side, B, turn, *places, shapes)
    launch(gram_of_many_kernel, programs, out, args, constants, **options)


def _launch_short(
    given: list[Tensor], out: Tensor, programs: int, T: int, B: int, places: list[int], shapes: tuple, tiles: Tiling,
    constants: dict[str, Any], options: dict[str, int],
) -> None:  # fmt: skip
    """The same of samples of few positions."""
    from eachgrad.kernels import triton_gram_short as short

    full, tail = blocks(T)
    factors = [_described(t, n, tiles.step) if constants["BULK"] else t for t in given for n in (ROWS, TAIL)]
    del constants["BLOCK"]
    constants |= {"FULL": full, "TAIL": tail, "PARTS": tiles.parts}
    if len(places) == 1:
        kernel, args = short.gram_short_kernel, (T, B, *shapes)
    else:
        kernel, args = short.gram_short_of_many_kernel, (T, B, *places, shapes)
    launch(kernel, programs, out, (*factors, out, *args), constants, **options)


def _described(t: Tensor, rows: int, step: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor  # pyright: ignore[reportMissingImports]

    return TensorDescriptor(t, list(t.shape), list(t.stride()), [1, rows, step])


# With strides as they come: a compiler need not copy what the kernel takes as it is. The parts are added outside, where
# a compiler joins that with what comes next.
library.define("gram_norms(Tensor left, Tensor right) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("gram_norms", plain, "CPU")
library.impl("gram_norms", launched, "CUDA")
library.define("gram_norms_of_many(Tensor[] lefts, Tensor[] rights) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("gram_norms_of_many", plain_of_many, "CPU")
library.impl("gram_norms_of_many", launched_of_many, "CUDA")


@torch.library.register_fake("eachgrad::gram_norms", lib=library)
def _(left: Tensor, right: Tensor) -> Tensor:
    return _room(left, _tiles(left, right))


@torch.library.register_fake("eachgrad::gram_norms_of_many", lib=library)
def _(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    return _room(lefts[0], _tiles(lefts[0], rights[0]), len(lefts))


def gram_parts(left: Tensor, right: Tensor) -> Tensor:
    """What each tile adds to `gram_norms`: (2, B, tiles)."""
    return direct(torch.ops.eachgrad.gram_norms, launched, left, left, right)


def gram_parts_of_many(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    """The same of many pairs that have one B and T: (pairs, 2, B, tiles)."""
    return direct(torch.ops.eachgrad.gram_norms_of_many, _launched_eagerly, lefts[0], lefts, rights)


def _launched_eagerly(lefts: list[Tensor], rights: list[Tensor]) -> Tensor:
    # A launch for few positions has sixteen descriptors, which take the host longer than they spare the device: on an H200
    # ViT's 48 layers took 2.0 to 3.6 ms of the host by descriptors, 1.8 to 2.0 by addresses, and 1.25 and 1.35 of the device.
    return launched_of_many(lefts, rights, bulk=not (len(lefts) and _tiles(lefts[0], rights[0]).parts))


def gram_norms(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """|left[b]^T right[b]|^2 of (B, T, p) and (B, T, d), and the sizes of the terms that it is a sum of: (B,), (B,).

    That is sum_ij S_ij R_ij and sum_ij |S_ij R_ij|, S and R being the Grams of the rows, all in float32.
    """
    total, bound = gram_parts(left, right).sum(2).unbind()
    return total, bound
