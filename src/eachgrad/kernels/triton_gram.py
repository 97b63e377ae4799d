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
def _tile(i, j, side):
    """Which of these tiles has this row and column."""
    line = tl.minimum(i, side - 1 - i)
    return line * (side + 1) + tl.where(i == line, j - i, j + 1)


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


@triton.jit
def _put(out, left, right, sample, i, j, T, side, samples, left_shape, right_shape, BLOCK: tl.constexpr,
         STEP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """out[0, b, tile] = the sum of a tile of sample b's product of Grams, out[1, b, tile] = that of its sizes."""
    value = _gram(left, sample, i, j, T, left_shape, BLOCK, STEP, UNIT, EVEN, BULK)
    value *= _gram(right, sample, i, j, T, right_shape, BLOCK, STEP, UNIT, EVEN, BULK)
    # Beyond the edge stand zeros times numbers that may be infinite.
    place = tl.arange(0, BLOCK)
    inside = (i * BLOCK + place < T)[:, None] & (j * BLOCK + place < T)[None, :]
    value = tl.where(inside, value, 0.0)
    times = tl.where(i == j, 1.0, 2.0)
    tiles = (side * (side + 1) // 2).to(tl.int64)
    out += sample * tiles + _tile(i, j, side)
    tl.store(out, times * tl.sum(value))
    tl.store(out + samples * tiles, times * tl.sum(tl.abs(value)))


# Batches of texts have other lengths each time: one code for all.
@triton.jit(do_not_specialize=["T", "side", "samples"])
def gram_kernel(left, right, out, T, side, samples, left_shape, right_shape, BLOCK: tl.constexpr, STEP: tl.constexpr,
                UNIT: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """out (2, B, tiles) of one pair."""
    tiles = side * (side + 1) // 2
    sample = tl.program_id(0) // tiles
    i, j = _pair(tl.program_id(0) % tiles, side)
    _put(out, left, right, sample, i, j, T, side, samples, left_shape, right_shape, BLOCK, STEP, UNIT, EVEN, BULK)


@triton.jit
def _turn(program, side, samples, turn):
    """The sample, row and column of the tile that a program of one pair has.

    Tiles off the diagonal read twice as much, and go first; but of `turn` samples at a time, so that the tiles on the
    diagonal find near by what these have read.
    """
    tiles, off = side * (side + 1) // 2, side * (side - 1) // 2
    first = program // (turn * tiles) * turn
    rest = program - first * tiles
    before = tl.minimum(turn, samples - first) * off  # programs of this turn that are off the diagonal
    i, j = _pair(rest % tl.maximum(off, 1), side - 1)
    is_off = rest < before
    on = rest - before
    sample = first + tl.where(is_off, rest // tl.maximum(off, 1), on // side)
    return sample, tl.where(is_off, i, on % side), tl.where(is_off, j + 1, on % side)


@triton.jit(do_not_specialize=["T", "side", "samples", "turn", "place0", "place1", "place2", "place3"])
def gram_of_many_kernel(left0, right0, left1, right1, left2, right2, left3, right3, out, T, side, samples, turn,
                        place0, place1, place2, place3, shapes, BLOCK: tl.constexpr, STEP: tl.constexpr,
                        UNIT: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """out[place_k] (2, B, tiles) of pair k, pair by pair; `shapes`: that of left0, of right0, of left1, ..."""
    tiles = side * (side + 1) // 2
    pair = tl.program_id(0) // (samples * tiles)
    sample, i, j = _turn(tl.program_id(0) % (samples * tiles), side, samples, turn)
    size = 2 * tiles.to(tl.int64) * samples
    # A descriptor cannot be chosen: each pair has its own code.
    if pair == 0:
        _put(out + place0 * size, left0, right0, sample, i, j, T, side, samples, shapes[0], shapes[1], BLOCK, STEP, UNIT,
             EVEN, BULK)  # fmt: skip
    elif pair == 1:
        _put(out + place1 * size, left1, right1, sample, i, j, T, side, samples, shapes[2], shapes[3], BLOCK, STEP, UNIT,
             EVEN, BULK)  # fmt: skip
    elif pair == 2:
        _put(out + place2 * size, left2, right2, sample, i, j, T, side, samples, shapes[4], shapes[5], BLOCK, STEP, UNIT,
             EVEN, BULK)  # fmt: skip
    else:
        _put(out + place3 * size, left3, right3, sample, i, j, T, side, samples, shapes[6], shapes[7], BLOCK, STEP, UNIT,
             EVEN, BULK)  # fmt: skip
