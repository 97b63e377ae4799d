"""The Triton code of `squares_and_mean`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def squares_and_mean_kernel(value, parts, out, B, n, stride, SAMPLES: tl.constexpr, BLOCK: tl.constexpr):
    """For the BLOCK numbers of this program: their mean over all samples, and each sample's squares added up.

    parts is (programs, B); samples begin `stride` numbers apart.
    """
    program = tl.program_id(0).to(tl.int64)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < n
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, B, SAMPLES):
        sample = first + tl.arange(0, SAMPLES)
        known = sample < B
        at = value + sample.to(tl.int64)[:, None] * stride + place[None, :]
        given = tl.load(at, mask=known[:, None] & inside[None, :], other=0.0).to(tl.float32)
        total += tl.sum(given, 0)
        tl.store(parts + program * B + sample, tl.sum(given * given, 1), mask=known)
    tl.store(out + place, total / B, mask=inside)
