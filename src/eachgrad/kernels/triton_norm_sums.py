"""The Triton code of `norm_sums`."""

# To a type checker Triton's ranges cannot be walked through.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from eachgrad.kernels.triton_positions import tile


@triton.jit
def norm_sums_kernel(
    g, terms, mean, scale, out, T, run, n, parts, g_sample, g_row, strides,
    CENTRED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over `run` positions, for COLUMNS numbers: out[0] of g, out[1] of g times the normalised sum of the terms.

    out is (2, B, parts, n); strides are those of samples and of positions, term by term.
    """
    block, part, sample = tile(parts, n, COLUMNS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    first = part * run
    last = tl.minimum(first + run, T)
    of_bias = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    of_weight = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        known = row < last
        mask = known[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None]
        x = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for k in tl.static_range(len(terms)):
            place = sample * strides[2 * k] + at * strides[2 * k + 1] + column[None, :]
            x += tl.load(terms[k] + place, mask=mask, other=0.0).to(tl.float32)
        if CENTRED:
            x -= tl.load(mean + sample * T + row, mask=known, other=0.0)[:, None]
        x *= tl.load(scale + sample * T + row, mask=known, other=0.0)[:, None]
        given = tl.load(g + (sample * g_sample + at * g_row + column[None, :]), mask=mask, other=0.0)
        of_bias += given.to(tl.float32)
        of_weight += given.to(tl.float32) * x
    place = (sample * parts + part) * n + column
    tl.store(out + place, tl.sum(of_bias, 0), mask=inside)
    place += tl.num_programs(0).to(tl.int64) // tl.cdiv(n, COLUMNS) * n  # all samples' parts
    tl.store(out + place, tl.sum(of_weight, 0), mask=inside)
