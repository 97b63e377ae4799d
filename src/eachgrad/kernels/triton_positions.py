"""The Triton code of `position_sums`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def position_sums_kernel(
    g, h, out, T, n, g_sample, g_row, h_sample, h_row,
    TWO: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """out[b, run] = the sum over RUN positions of g * h, or of g, for COLUMNS numbers; out is (B, runs, n)."""
    run, sample = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, RUN, ROWS):
        row = run * RUN + start + tl.arange(0, ROWS)
        inside = (row < T)[:, None] & (column < n)[None, :]
        place = row.to(tl.int64)[:, None]
        term = tl.load(g + sample * g_sample + place * g_row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if TWO:
            other = tl.load(h + sample * h_sample + place * h_row + column[None, :], mask=inside, other=0.0)
            term *= other.to(tl.float32)
        total += term
    place = (sample * tl.num_programs(1) + run) * n + column
    tl.store(out + place, tl.sum(total, 0), mask=column < n)
