"""The Triton code of `gram` for samples of few positions: rows in blocks of 64, FULL of them, and a last one of TAIL.

Tensor cores take 64 rows at a time, but any sixteenth column: 197 positions are 3 x 64 + 16 columns, and all products of
blocks that are not below the diagonal are 28,672, where three tiles of 128 x 128 are 49,152. A factor is two descriptors,
of 64 rows and of TAIL, or twice a pointer; its `shape` is as in `triton_gram`.

A program has some strips of one sample: strip k is block k times all blocks from k on, and the last of them has also the
tail times itself. Of the second factor a program forms a strip at a time, so that the registers suffice.
"""

# Triton takes a number where a constant is due, and skips an `if` of constants that is not met.
# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from eachgrad.kernels.triton_gram import _rows


@triton.jit
def _dot(a, b, total):
    return tl.dot(a, tl.trans(b), total, input_precision="ieee")


@triton.jit
def _strip(x, x_tail, sample, T, shape, K: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr,
           UNIT: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """Block K times itself, times the next and the one after that, times the tail; and the tail times itself."""
    own, next1, next2 = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    last, corner = tl.zeros((64, 16), tl.float32), tl.zeros((64, 16), tl.float32)
    for start in range(0, shape[0] * UNIT, STEP):
        # All loads before all products: then they have one barrier.
        mine = _rows(x, sample, K * 64, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        if K + 1 < FULL:
            block1 = _rows(x, sample, K * 64 + 64, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        if K + 2 < FULL:
            block2 = _rows(x, sample, K * 64 + 128, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        if TAIL:
            tail = _rows(x_tail, sample, FULL * 64, start, T, shape, TAIL, STEP, UNIT, EVEN, BULK)
            if K + 1 == FULL:
                # Rows by 64: those beyond the tail are zeros that nobody reads from memory.
                tail_rows = _rows(x, sample, FULL * 64, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        own = _dot(mine, mine, own)
        if K + 1 < FULL:
            next1 = _dot(mine, block1, next1)
        if K + 2 < FULL:
            next2 = _dot(mine, block2, next2)
        if TAIL:
            last = _dot(mine, tail, last)
            if K + 1 == FULL:
                corner = _dot(tail_rows, tail, corner)
    return own, next1, next2, last, corner


@triton.jit
def _two_strips(x, x_tail, sample, T, shape, TAIL: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
                EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """Strips 1 and 2 of three, of rows that are read once."""
    own1, next1, own2 = tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32), tl.zeros((64, 64), tl.float32)
    last1, last2, corner = (
        tl.zeros((64, 16), tl.float32),
        tl.zeros((64, 16), tl.float32),
        tl.zeros((64, 16), tl.float32),
    )
    for start in range(0, shape[0] * UNIT, STEP):
        one = _rows(x, sample, 64, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        two = _rows(x, sample, 128, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        if TAIL:
            tail = _rows(x_tail, sample, 192, start, T, shape, TAIL, STEP, UNIT, EVEN, BULK)
            tail_rows = _rows(x, sample, 192, start, T, shape, 64, STEP, UNIT, EVEN, BULK)
        own1 = _dot(one, one, own1)
        next1 = _dot(one, two, next1)
        own2 = _dot(two, two, own2)
        if TAIL:
            last1 = _dot(one, tail, last1)
            last2 = _dot(two, tail, last2)
            corner = _dot(tail_rows, tail, corner)
    return own1, next1, last1, own2, last2, corner


@triton.jit
def _added(total, sizes, a, b, row, column, T, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sums of rows with what blocks `a` and `b` of the Grams add; one off the diagonal counts twice."""
    # Beyond the edge stand zeros times numbers that may be infinite.
    inside = (row + tl.arange(0, ROWS) < T)[:, None] & (column + tl.arange(0, COLUMNS) < T)[None, :]
    value = tl.where(inside, a * b, 0.0) * (1.0 if row == column else 2.0)
    return total + tl.sum(value, 1), sizes + tl.sum(tl.abs(value), 1)


@triton.jit
def _added_strip(total, sizes, a, b, T, K: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr):
    total, sizes = _added(total, sizes, a[0], b[0], K * 64, K * 64, T, 64, 64)
    if K + 1 < FULL:
        total, sizes = _added(total, sizes, a[1], b[1], K * 64, K * 64 + 64, T, 64, 64)
    if K + 2 < FULL:
        total, sizes = _added(total, sizes, a[2], b[2], K * 64, K * 64 + 128, T, 64, 64)
    if TAIL:
        total, sizes = _added(total, sizes, a[3], b[3], K * 64, FULL * 64, T, 64, 16)
        if K + 1 == FULL:
            total, sizes = _added(total, sizes, a[4], b[4], FULL * 64, FULL * 64, T, 64, 16)
    return total, sizes


@triton.jit
def _put_strip(out, left, left_tail, right, right_tail, sample, T, samples, left_shape, right_shape, PARTS: tl.constexpr,
               K: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
               EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    total, sizes = tl.zeros((64,), tl.float32), tl.zeros((64,), tl.float32)
    if PARTS < FULL and K == 1:  # three strips in two parts
        first = _two_strips(left, left_tail, sample, T, left_shape, TAIL, STEP, UNIT, EVEN, BULK)
        a = first[0], first[1], first[1], first[2], first[2]
        b = _strip(right, right_tail, sample, T, right_shape, 1, 3, TAIL, STEP, UNIT, EVEN, BULK)
        total, sizes = _added_strip(total, sizes, a, b, T, 1, 3, TAIL)
        a = first[3], first[3], first[3], first[4], first[5]
        b = _strip(right, right_tail, sample, T, right_shape, 2, 3, TAIL, STEP, UNIT, EVEN, BULK)
        total, sizes = _added_strip(total, sizes, a, b, T, 2, 3, TAIL)
    else:
        a = _strip(left, left_tail, sample, T, left_shape, K, FULL, TAIL, STEP, UNIT, EVEN, BULK)
        b = _strip(right, right_tail, sample, T, right_shape, K, FULL, TAIL, STEP, UNIT, EVEN, BULK)
        total, sizes = _added_strip(total, sizes, a, b, T, K, FULL, TAIL)
    out += sample.to(tl.int64) * PARTS + K
    tl.store(out, tl.sum(total))
    tl.store(out + samples.to(tl.int64) * PARTS, tl.sum(sizes))


@triton.jit
def _put(out, left, left_tail, right, right_tail, part, sample, T, samples, left_shape, right_shape, PARTS: tl.constexpr,
         FULL: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr,
         BULK: tl.constexpr):  # fmt: skip
    """out[0, b, part] = the sum of some strips of sample b's product of Grams, out[1, b, part] = that of its sizes."""
    if part == 0:
        _put_strip(out, left, left_tail, right, right_tail, sample, T, samples, left_shape, right_shape, PARTS, 0, FULL,
                   TAIL, STEP, UNIT, EVEN, BULK)  # fmt: skip
    if PARTS > 1:  # noqa: SIM102  (known while it compiles)
        if part == 1:
            _put_strip(out, left, left_tail, right, right_tail, sample, T, samples, left_shape, right_shape, PARTS, 1,
                       FULL, TAIL, STEP, UNIT, EVEN, BULK)  # fmt: skip


@triton.jit(do_not_specialize=["T", "samples"])
def gram_short_kernel(left, left_tail, right, right_tail, out, T, samples, left_shape, right_shape, PARTS: tl.constexpr,
                      FULL: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
                      EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """out (2, B, PARTS) of one pair."""
    part, sample = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    _put(out, left, left_tail, right, right_tail, part, sample, T, samples, left_shape, right_shape, PARTS, FULL, TAIL,
         STEP, UNIT, EVEN, BULK)  # fmt: skip


@triton.jit(do_not_specialize=["T", "samples", "place0", "place1", "place2", "place3"])
def gram_short_of_many_kernel(left0, left0_tail, right0, right0_tail, left1, left1_tail, right1, right1_tail, left2,
                              left2_tail, right2, right2_tail, left3, left3_tail, right3, right3_tail, out, T,
                              samples, place0, place1, place2, place3, shapes, PARTS: tl.constexpr,
                              FULL: tl.constexpr, TAIL: tl.constexpr, STEP: tl.constexpr, UNIT: tl.constexpr,
                              EVEN: tl.constexpr, BULK: tl.constexpr):  # fmt: skip
    """out[place_k] (2, B, PARTS) of pair k, pair by pair; `shapes`: that of left0, of right0, of left1, ..."""
    programs = samples * PARTS
    pair, program = tl.program_id(0) // programs, tl.program_id(0) % programs
    size = 2 * programs.to(tl.int64)
    # A descriptor cannot be chosen: each pair has its own code.
    if pair == 0:
        _put(out + place0 * size, left0, left0_tail, right0, right0_tail, program % PARTS, program // PARTS, T, samples,
             shapes[0], shapes[1], PARTS, FULL, TAIL, STEP, UNIT, EVEN, BULK)  # fmt: skip
    elif pair == 1:
        _put(out + place1 * size, left1, left1_tail, right1, right1_tail, program % PARTS, program // PARTS, T, samples,
             shapes[2], shapes[3], PARTS, FULL, TAIL, STEP, UNIT, EVEN, BULK)  # fmt: skip
    elif pair == 2:
        _put(out + place2 * size, left2, left2_tail, right2, right2_tail, program % PARTS, program // PARTS, T, samples,
             shapes[4], shapes[5], PARTS, FULL, TAIL, STEP, UNIT, EVEN, BULK)  # fmt: skip
    else:
        _put(out + place3 * size, left3, left3_tail, right3, right3_tail, program % PARTS, program // PARTS, T, samples,
             shapes[6], shapes[7], PARTS, FULL, TAIL, STEP, UNIT, EVEN, BULK)  # fmt: skip
