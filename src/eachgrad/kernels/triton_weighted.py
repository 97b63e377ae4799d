"""The Triton code of `weighted`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def weighted_kernel(c, value, out, B, n, stride, BLOCK: tl.constexpr):
    """out[k] = sum_i c[i] value[i, k] for the BLOCK numbers of this program; the rows begin `stride` numbers apart."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    row = value + place
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in range(B):
        total += tl.load(c + i) * tl.load(row, mask=inside, other=0.0).to(tl.float32)
        row += stride
    tl.store(out + place, total, mask=inside)
