"""The Triton code of `entropies` and `entropy_gradient`.

Rows begin at multiples of UNIT numbers, which a compiler sees as it is a factor. All blocks but the last are full: a mask
that ends anywhere would have every number loaded on its own.
"""

# To a type checker Triton's ranges cannot be walked through.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def added(most, total, x):
    """The largest number so far, and the sum of all exponentials beside it, with those of x."""
    top = tl.maximum(most, tl.max(x, 0))
    beside = tl.where(top == float("-inf"), 0.0, top)  # where nothing but that has come, the sum is zero
    return top, total * tl.exp(most - beside) + tl.sum(tl.exp(x - beside), 0)


@triton.jit
def entropies_kernel(
    logits, targets, out, ignored, n, distance, UNIT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[0]: the largest of a row; out[1]: the logarithm of the sum of exp(x - largest); out[2]: the loss."""
    row = tl.program_id(0).to(tl.int64)
    rows = tl.num_programs(0).to(tl.int64)
    logits += row * distance * UNIT
    column = tl.arange(0, COLUMNS)
    most = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    full = n // COLUMNS * COLUMNS
    for start in range(0, full, COLUMNS):
        most, total = added(most, total, tl.load(logits + start + column).to(tl.float32))
    if full < n:
        x = tl.load(logits + full + column, mask=full + column < n, other=float("-inf")).to(tl.float32)
        most, total = added(most, total, x)
    target = tl.load(targets + row)
    is_class = (target >= 0) & (target < n)
    of_target = tl.load(logits + target, mask=is_class, other=0.0).to(tl.float32)
    loss = tl.where(is_class, tl.log(total) - (of_target - most), float("nan"))
    tl.store(out + row, most)
    tl.store(out + rows + row, tl.log(total))
    tl.store(out + 2 * rows + row, tl.where(target == ignored, 0.0, loss))


@triton.jit
def gradient(x, column, most, log, given, target):
    return tl.exp(x.to(tl.float32) - most - log) * given - tl.where(column == target, given, 0.0)


@triton.jit
def entropy_gradient_kernel(
    logits, sums, g, targets, out, ignored, n, distance, width,
    UNIT: tl.constexpr, OUT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[r] = (softmax(logits[r]) - [class is the target]) g[r], with 0 for g where the target is ignored.

    Its rows have `width` times OUT numbers, with zeros at the end.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * distance * UNIT
    out += row * width * OUT
    target = tl.load(targets + row)
    most = tl.load(sums + row)
    log = tl.load(sums + tl.num_programs(0) + row)
    given = tl.where((target >= 0) & (target < n), tl.load(g + row).to(tl.float32), float("nan"))
    given = tl.where(target == ignored, 0.0, given)
    column = tl.arange(0, COLUMNS)
    full = n // COLUMNS * COLUMNS
    for start in range(0, full, COLUMNS):
        found = gradient(tl.load(logits + start + column), start + column, most, log, given, target)
        tl.store(out + start + column, found.to(out.dtype.element_ty))
    if full < n:
        inside = full + column < n
        x = tl.load(logits + full + column, mask=inside, other=0.0)
        found = tl.where(inside, gradient(x, full + column, most, log, given, target), 0.0)
        tl.store(out + full + column, found.to(out.dtype.element_ty), mask=full + column < width * OUT)
