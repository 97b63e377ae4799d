"""The Triton code of `gram`: a tile of two Grams in registers, their product, and two numbers of it.

A program has rows i and columns j of both Grams of one sample, BLOCK by BLOCK of them, and forms them one after the
other, STEP numbers of each row at a time. Both are symmetric: tiles with i <= j will do; those off the diagonal count
twice.

A factor is a pointer, or where BULK a descriptor of a tensor (B, T, width), by which the device copies whole tiles and
puts zeros where no row is. Its `shape` is (width, stride of samples, stride of rows), all divided by UNIT: what is
a multiple of eight is known to be one, and copied sixteen bytes at a time.
"""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def _pair(tile, side):
    """Row and column of a tile among those of `side` by `side` with i <= j.

    Row r, of side - r tiles, and row side - 1 - r, of r + 1, fill a line of side + 1; the middle one fills half a line.
    """
    line, place = tile // (side + 1), tile % (side + 1)
    first = place < side - line
    i = tl.where(first, line, side - 1 - line)
    return i, tl.where(first, line + place, place - 1)


@triton.jit
def _rows(x, sample, first, start, T, shape, BLOCK: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
          EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """(BLOCK, STEP) numbers from `start` on of the rows from `first` on, zero beyond the last row and their width."""
    if BULK:
        value = x.load([sample, first, start]).reshape(BLOCK, STEP)
    else:
        row, k = first + tl.arange(0, BLOCK), start + tl.arange(0, STEP)
        inside = (row < T)[:, None]
        if not EVEN:
            inside = inside & (k < shape[0] * UNIT)[None, :]
        place = x + sample.to(tl.int64) * shape[1] * UNIT
        value = tl.load(place + row.to(tl.int64)[:, None] * shape[2] * UNIT + k[None, :], mask=inside, other=0.0)
    return value


@triton.jit
def _gram(x, sample, i, j, T, shape, BLOCK: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
          EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """A tile (BLOCK, BLOCK) of the inner products of one sample's rows."""
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    if i == j:  # the rows are read once
        for start in range(0, shape[0] * UNIT, STEP):
            mine = _rows(x, sample, i * BLOCK, start, T, shape, BLOCK, STEP, UNIT, EVEN, BULK)
            total = tl.dot(mine, tl.trans(mine), total, input_precision="ieee")
    else:
        for start in range(0, shape[0] * UNIT, STEP):
            mine = _rows(x, sample, i * BLOCK, start, T, shape, BLOCK, STEP, UNIT, EVEN, BULK)
            other = _rows(x, sample, j * BLOCK, start, T, shape, BLOCK, STEP, UNIT, EVEN, BULK)
            total = tl.dot(mine, tl.trans(other), total, input_precision="ieee")
    return total


# Batches of texts have other lengths each time: one code for all.
@triton.jit(do_not_specialize=["T", "side", "samples"])
def gram_kernel(left, right, out, T, side, samples, left_shape, right_shape, BLOCK: tl.constexpr, STEP: tl.constexpr,
                UNIT: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """out[0, b, tile] = the sum of a tile of sample b's product of Grams, out[1, b, tile] = that of its sizes."""
    tiles = side * (side + 1) // 2
    sample = tl.program_id(0) // tiles
    i, j = _pair(tl.program_id(0) % tiles, side)
    value = _gram(left, sample, i, j, T, left_shape, BLOCK, STEP, UNIT, EVEN, BULK)
    value *= _gram(right, sample, i, j, T, right_shape, BLOCK, STEP, UNIT, EVEN, BULK)
    # Beyond the edge stand zeros times numbers that may be infinite.
    place = tl.arange(0, BLOCK)
    inside = (i * BLOCK + place < T)[:, None] & (j * BLOCK + place < T)[None, :]
    value = tl.where(inside, value, 0.0)
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(out + tl.program_id(0), times * tl.sum(value))
    tl.store(out + (samples.to(tl.int64) * tiles + tl.program_id(0)), times * tl.sum(tl.abs(value)))
