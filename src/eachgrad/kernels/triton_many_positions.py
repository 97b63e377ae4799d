"""The Triton code of `position_sums_of_many`."""

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

from eachgrad.kernels.triton_many import find
from eachgrad.kernels.triton_positions import summed


@triton.jit
def position_sums_of_many_kernel(
    values, out, T, blocks, row,
    FIRST: tl.constexpr, NUMBERS: tl.constexpr, STRIDES: tl.constexpr, SHELF: tl.constexpr,
    ALIGNED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[b, block] = the sum over T positions of COLUMNS numbers of one tensor; `row`: numbers from sample to sample."""
    program = tl.program_id(0)
    sample, block = (program // blocks).to(tl.int64), program % blocks
    source, _, first, n, stride = find(block, values, values, FIRST, NUMBERS, STRIDES, SHELF)
    value = source.to(tl.pointer_type(values[0].dtype.element_ty)) + sample * stride
    if ALIGNED:
        value = tl.multiple_of(value, 16)
        n = tl.multiple_of(n, 8 if values[0].dtype.element_ty.primitive_bitwidth == 16 else 4)
    column = (block - first).to(tl.int32) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < n
    total = summed(value, 0, T, n, column, inside, ROWS, COLUMNS)
    tl.store(out + sample * row + block * COLUMNS + tl.arange(0, COLUMNS), total, mask=inside)
