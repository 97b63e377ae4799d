"""Sums and products of tensors, in float32 or better: which precision each is formed in, and where it is rounded."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from eachgrad import plan
from eachgrad.choices import chosen
from eachgrad.dtypes import accumulation_dtype
from eachgrad.kernels.library import DTYPES
from eachgrad.kernels.many import squares_of_many, weighted_of_many
from eachgrad.kernels.positions import position_sums

# A norm of more numbers than this is put together from norms of so many: over 4 million numbers in float32
# vector_norm came out 7e-5 too small (torch 2.13, CPU), which would break a clipping bound.
RUN = 1024

# How far a product moves a number that it rounds, at most: to bfloat16, and both factors to TF32. Sums in float32 round as
# well: where a sample's terms cancelled, up to 9% more than its bound was left of it; with 2^-20 of the terms none.
BFLOAT16_ROUNDING, TF32_ROUNDING, FLOAT32_ROUNDING = 2.0**-9, 2.0**-10, 2.0**-20


# From so many numbers a gradient a kernel of its own pays for starting it.
LARGE = 1 << 16
# One for a sum over positions from so many numbers in all, and at each position.
MANY, WIDE = 1 << 20, 32


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """`t` in this dtype. Of the casts of a step most have nothing to do, which torch takes a microsecond to find out."""
    return t if t.dtype == dtype else t.to(dtype)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm of `dtype` numbers."""
    return accumulation_dtype(dtype.to_real() if dtype.is_complex else dtype)


def on_gpu(t: Tensor) -> bool:
    return t.is_cuda


def has_short_products() -> bool:
    """Whether a GPU multiplies float32 with fewer bits."""
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # it was set by a newer name, of one backend
        return torch.backends.cuda.matmul.fp32_precision not in ("none", "ieee")


def is_traced(t: Tensor) -> bool:
    """Whether this is no tensor but stands for one, while a compiler looks on."""
    return isinstance(t, FakeTensor)


def is_rounded(value: Tensor) -> bool:
    """Whether `scaled` gives these numbers back as bfloat16: what a GPU multiplies at full speed."""
    return value.dtype == torch.bfloat16 and on_gpu(value) and not value.requires_grad


def rounding(value: Tensor) -> float:
    """How far the terms of a weighted sum of such numbers may be moved, as a share of their size."""
    if is_rounded(value):
        return BFLOAT16_ROUNDING
    if value.requires_grad or real_dtype(value.dtype) != torch.float32:
        return 0.0
    tf32 = value.dtype == torch.float32 and on_gpu(value) and has_short_products()
    return TF32_ROUNDING if tf32 else FLOAT32_ROUNDING


def scaled(value: Tensor, c: Tensor) -> Tensor:
    """c[i] value[i], in float32 or better but for `is_rounded`.

    Rounded to sixteen bits, terms that cancel leave their rounding behind: a clipped sum must allow for it.
    """
    return scaled_by(value, cast(c, accumulation_dtype(value.dtype)).view(-1, *[1] * (value.ndim - 1)))


def scaled_by(value: Tensor, weight: Tensor) -> Tensor:
    """The same by weights that are in float32 or better, and in the rank of the value, already."""
    if not is_rounded(value):
        return value * weight
    if is_traced(value) or value.requires_grad or weight.requires_grad:
        return (value * weight).to(value.dtype)
    # The same in one kernel, with no float32 copy written and read; a compiler makes it one by itself.
    return torch.mul(value, weight, out=torch.empty_like(value))


def sum_of(c: Tensor, value: Tensor) -> Tensor:
    """c (B,) or (K, B) times (B, *shape), in float32 or better."""
    dtype = accumulation_dtype(value.dtype)
    if on_gpu(value) and c.ndim == 1 and not value.dtype.is_complex:  # read once, as they are
        if dtype == torch.float32 and value[0].numel() >= LARGE and not (value.requires_grad or c.requires_grad):
            return weighted_of_many(cast(c, dtype), [value])[0]
        return (value * cast(c, dtype).view(-1, *[1] * (value.ndim - 1))).sum(0)
    return torch.tensordot(cast(c, dtype), cast(value, dtype), dims=1)


def are_many(*values: Tensor) -> bool:
    """Whether a kernel of its own is worth it for a sum over the second dimension of these (B, T, ...)."""
    if not on_gpu(values[0]):
        return False
    B, T = values[0].shape[:2]
    many = chosen(T > 1 and values[0].numel() >= max(MANY, B * T * WIDE))
    return many and all(t.dtype in DTYPES and not t.requires_grad for t in values)


def over_positions(*values: Tensor) -> tuple[Tensor, ...]:
    """The sums over the second dimension of one or two (B, T, *shape), in float32 or better: (B, *shape) for each."""
    if values[0].shape[1] == 1:
        return tuple([cast(t[:, 0], accumulation_dtype(t.dtype)) for t in values])  # no copies
    if are_many(*values):
        (B, T), shape = values[0].shape[:2], values[0].shape[2:]
        sums = position_sums(*(t if t.ndim == 3 else t.reshape(B, T, -1) for t in values))
        return tuple(t if len(shape) == 1 else t.view(B, *shape) for t in sums)
    return tuple([t.sum(1, dtype=accumulation_dtype(t.dtype)) for t in values])


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of matrices of which one may be wider than the other, in float32 or better."""
    narrow = left.dtype if left.dtype.itemsize <= right.dtype.itemsize else right.dtype
    dtype = accumulation_dtype(narrow)
    if narrow == dtype or not on_gpu(left) or left.requires_grad or right.requires_grad:
        return cast(left, dtype) @ cast(right, dtype)
    if left.dtype == right.dtype:
        return wide_product(left, right)
    # Tensor cores take sixteen bits: the wide one as a sum of two such numbers, about 1 in size.
    wide, other = (left, right) if left.dtype == dtype else (right, left)
    unit = torch.exp2(torch.floor(torch.log2(wide.abs().amax().clamp(min=torch.finfo(dtype).tiny))))
    high = (wide / unit).to(narrow)
    low = (wide / unit - high).to(narrow)
    pairs = [(part, other) if wide is left else (other, part) for part in (high, low)]
    return torch.stack([wide_product(a, b) for a, b in pairs]).sum(0) * unit


def wide_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right of sixteen bit matrices on a GPU, as float32."""
    n, m = left.shape[0], right.shape[1]
    # F.pad copies even where it adds nothing.
    if n % plan.ALIGNED:
        wide = _with_room(left.mT)
        left = F.pad(left, (0, 0, 0, -n % plan.ALIGNED)) if wide is None else wide.mT
    if m % plan.ALIGNED:
        wide = _with_room(right)
        right = F.pad(right, (0, -m % plan.ALIGNED)) if wide is None else wide
    value = torch.mm(left, right, out_dtype=torch.float32)
    return value if value.shape == (n, m) else value[:n, :m]


def _with_room(t: Tensor) -> Tensor | None:
    """(k, n) with what lies behind each row, up to a multiple of eight; None where there is no such room.

    Whatever is there: the product of a column that was added is cut off.
    """
    k, n = t.shape
    width = n + -n % plan.ALIGNED
    if is_traced(t) or not k or t.stride(1) != 1 or t.stride(0) < width or t.stride(0) % plan.ALIGNED:
        return None
    end = t.storage_offset() + (k - 1) * t.stride(0) + width
    return t.as_strided((k, width), t.stride()) if end * t.element_size() <= t.untyped_storage().nbytes() else None


def products(left: Tensor, right: Tensor) -> Tensor:
    """left[i] @ right[i] of batches of matrices, in float32 or better."""
    dtype = accumulation_dtype(left.dtype)
    if on_gpu(left) and dtype != left.dtype and not (left.requires_grad or right.requires_grad):
        return torch.bmm(left, right, out_dtype=dtype)
    left, right = cast(left, dtype), cast(right, dtype)
    return torch.bmm(left, right) if left.ndim == 3 == right.ndim else left @ right


def squared_norms(value: Tensor) -> Tensor:
    """(B, *shape) -> (B,), accumulated in float32 or better."""
    flat, dtype = value.reshape(len(value), -1), accumulation_dtype(value.dtype)
    if on_gpu(value):  # which adds in a tree
        if flat.shape[1] >= LARGE and value.dtype in DTYPES and not value.requires_grad:
            return squares_of_many([value])
        return torch.linalg.vector_norm(flat, dim=1, dtype=dtype).square()
    runs = flat.shape[1] // RUN
    rest = torch.linalg.vector_norm(flat[:, runs * RUN :], dim=1, dtype=dtype).square()
    if not runs:
        return rest
    whole = flat[:, : runs * RUN].unflatten(1, (runs, RUN))
    return rest + torch.linalg.vector_norm(whole, dim=2, dtype=dtype).square().sum(1)


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise real inner product of two (B, *shape) tensors: (B,)."""
    dtype = accumulation_dtype(torch.promote_types(left.dtype, right.dtype))
    product = cast(left, dtype) * cast(right, dtype).conj()
    if product.is_complex():
        product = product.real
    return product.reshape(len(product), -1).sum(1)


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Real inner products of all rows of (B, n) with all rows of (K, n): (B, K), in float32 or better."""
    dtype = accumulation_dtype(torch.promote_types(left.dtype, right.dtype))
    return as_real(cast(left, dtype)) @ as_real(cast(right, dtype)).mT


def as_real(value: Tensor) -> Tensor:
    """(B, n) complex -> (B, 2n) real, with the same real inner products."""
    return torch.view_as_real(value.resolve_conj()).flatten(1) if value.is_complex() else value


def matrix_sizes(value: Tensor) -> tuple[int, int, int]:
    """(B, *shape) as B matrices: the first dimension of the shape, and all others together."""
    rows = value.shape[1] if value.ndim > 1 else 1
    return len(value), rows, math.prod(value.shape[2:])
