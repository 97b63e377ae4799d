"""The Triton code of `position_sums`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def tile(parts, n, COLUMNS: tl.constexpr):
    """What a program has: which COLUMNS of n numbers, which of the parts of the positions, which sample."""
    program, blocks = tl.program_id(0), tl.cdiv(n, COLUMNS)
    rest = program // blocks
    return program % blocks, rest % parts, (rest // parts).to(tl.int64)


@triton.jit
def summed(value, first, last, step, column, inside, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The sum of the rows from `first` to before `last`, which begin `step` numbers apart: (COLUMNS,)."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * step + column[None, :]
        total += tl.load(value + place, mask=(row < last)[:, None] & inside[None, :], other=0.0).to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def position_sums_kernel(
    g, h, out, T, run, n, parts, g_sample, g_row, h_sample, h_row,
    TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[0, b, part] = the sum over `run` positions of g for COLUMNS numbers, out[1] that of h; out is (2, B, parts, n)."""
    block, part, sample = tile(parts, n, COLUMNS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    first = part * run
    last = tl.minimum(first + run, T)
    place = (sample * parts + part) * n + column
    tl.store(out + place, summed(g + sample * g_sample, first, last, g_row, column, inside, ROWS, COLUMNS), mask=inside)
    if TWO:
        place += tl.num_programs(0).to(tl.int64) // tl.cdiv(n, COLUMNS) * n  # all samples' parts
        total = summed(h + sample * h_sample, first, last, h_row, column, inside, ROWS, COLUMNS)
        tl.store(out + place, total, mask=inside)
