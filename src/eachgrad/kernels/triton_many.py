"""The Triton code of `squares_of_many` and `weighted_of_many`.

The tensors are arguments themselves, as a tuple: a table of their addresses would have to be copied to the device, which a
CUDA graph that is being captured does not allow. The code of a program is there once; only its tensor's place is chosen.
"""

# To a type checker Triton's ranges cannot be walked through, and its constants are no tuples.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def find(program, values, outs, FIRST: tl.constexpr, NUMBERS: tl.constexpr, STRIDES: tl.constexpr, SHELF: tl.constexpr):
    """The addresses of the value and of the answer that a program has, its first program, numbers and stride.

    FIRST: the first program of each tensor, and at the end that of the next one, up to a multiple of SHELF tensors.
    Shelf by shelf, so that of 64 tensors 16 are compared and not all.
    """
    value = values[0].to(tl.int64)
    out = outs[0].to(tl.int64)
    first = value * 0
    n = first + NUMBERS[0]
    stride = first + STRIDES[0]
    for shelf in tl.static_range(0, len(FIRST) - 1, SHELF):
        if (program >= FIRST[shelf]) & (program < FIRST[shelf + SHELF]):
            for k in tl.static_range(shelf, shelf + SHELF):
                if k < len(NUMBERS):
                    here = program >= FIRST[k]
                    value = tl.where(here, values[k].to(tl.int64), value)
                    out = tl.where(here, outs[k].to(tl.int64), out)
                    first = tl.where(here, FIRST[k], first)
                    n = tl.where(here, NUMBERS[k], n)
                    stride = tl.where(here, STRIDES[k], stride)
    return value, out, first, n, stride


@triton.jit
def squares_kernel(
    values, partial, runs, row,
    FIRST: tl.constexpr, NUMBERS: tl.constexpr, STRIDES: tl.constexpr, SHELF: tl.constexpr,
    RUN: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """partial[i, r] = the sum of the squares of run r, RUN numbers of one tensor, of sample i; `runs` in all.

    A thread adds RUN / BLOCK numbers for each of its few places, and then those in a tree: no sum is long.
    """
    program = tl.program_id(0)
    sample, run = program // runs, program % runs
    source, _, first, n, stride = find(run, values, values, FIRST, NUMBERS, STRIDES, SHELF)
    start = (run - first) * RUN  # int64, as `first` is
    value = source.to(tl.pointer_type(values[0].dtype.element_ty)) + (sample * stride + start)
    if ALIGNED:
        value = tl.multiple_of(value, 16)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    # A mask that ends anywhere makes every access a narrow one: only a tensor's last run has one.
    if start + RUN <= n:
        for k in tl.range(0, RUN, BLOCK, loop_unroll_factor=UNROLL):
            x = tl.load(value + (k + place)).to(tl.float32)
            total += x * x
    else:
        for k in range(0, (n - start).to(tl.int32), BLOCK):
            x = tl.load(value + (k + place), mask=k + place < n - start, other=0.0).to(tl.float32)
            total += x * x
    tl.store(partial + (sample.to(tl.int64) * row + run), tl.sum(total, 0))


@triton.jit
def weighted_kernel(
    c, values, outs, B,
    FIRST: tl.constexpr, NUMBERS: tl.constexpr, STRIDES: tl.constexpr, SHELF: tl.constexpr,
    BLOCK: tl.constexpr, UNROLL: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """out[k] = sum_i c[i] value[i, k] for BLOCK numbers k of one tensor."""
    program = tl.program_id(0)
    source, target, first, n, stride = find(program, values, outs, FIRST, NUMBERS, STRIDES, SHELF)
    start = (program - first) * BLOCK  # int64, as `first` is
    value = source.to(tl.pointer_type(values[0].dtype.element_ty)) + start
    out = target.to(tl.pointer_type(tl.float32)) + start
    if ALIGNED:
        out = tl.multiple_of(out, 16)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if start + BLOCK <= n:
        for i in tl.range(0, B, loop_unroll_factor=UNROLL):
            row = value + i * stride
            if ALIGNED:
                row = tl.multiple_of(row, 16)
            total += tl.load(c + i) * tl.load(row + place).to(tl.float32)
        tl.store(out + place, total)
    else:
        inside = place < n - start
        for i in range(B):
            total += tl.load(c + i) * tl.load(value + i * stride + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, total, mask=inside)
