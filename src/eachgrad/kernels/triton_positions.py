"""The Triton code of `position_sums`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


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
    g, h, out, T, run, n, g_sample, g_row, h_sample, h_row,
    TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[0, b, part] = the sum over `run` positions of g for COLUMNS numbers, out[1] that of h; out is (2, B, parts, n)."""
    part, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    first = part * run
    last = tl.minimum(first + run, T)
    place = (sample * tl.num_programs(1) + part) * n + column
    tl.store(out + place, summed(g + sample * g_sample, first, last, g_row, column, inside, ROWS, COLUMNS), mask=inside)
    if TWO:
        place += tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * n
        total = summed(h + sample * h_sample, first, last, h_row, column, inside, ROWS, COLUMNS)
        tl.store(out + place, total, mask=inside)
