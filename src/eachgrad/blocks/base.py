"""What every representation of B gradients answers, with a dense default for each query."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which sums of squares of `dtype` numbers are formed: never less than float32."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    return dtype


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a norm of `dtype` numbers."""
    return accumulation_dtype(dtype.to_real() if dtype.is_complex else dtype)


@dataclass(frozen=True)
class Fold:
    """How N rows make up B samples: `index[i]` are the rows of sample i, -1 where it has fewer."""

    index: Tensor  # (B, m)
    kind: str  # "outer": row = i * m + j;  "inner": row = j * B + i;  "ragged": look at the index

    def join(self, rows: Tensor) -> Tensor:
        """(N, *rest) -> (B, m, *rest); rows that a sample lacks are zero."""
        B, m = self.index.shape
        if self.kind == "outer":
            return rows.reshape(B, m, *rows.shape[1:])
        if self.kind == "inner":
            return rows.reshape(m, B, *rows.shape[1:]).transpose(0, 1)
        present = (self.index >= 0).view(B, m, *[1] * (rows.ndim - 1))
        return torch.where(present, rows[self.index.clamp(min=0)], rows.new_zeros(()))


class Block:
    """B gradients of one parameter. `dense` and `fold` are required; the queries may be cheaper."""

    def dense(self) -> Tensor:  # (B, *shape)
        raise NotImplementedError

    def fold(self, fold: Fold) -> Block:
        """The gradients of B samples, from those of the N rows that make them up."""
        raise NotImplementedError

    def take(self, index: Tensor) -> Block:
        """The gradients of the samples in `index` alone."""
        return Dense(self.dense()[index])

    def weighted_sum(self, c: Tensor) -> Tensor:  # sum_i c[i] g[i] -> (*shape)
        value = self.dense()
        return torch.tensordot(c.to(value.dtype), value, dims=1)

    def squared_norms(self) -> Tensor:  # (B,)
        return squared_norms(self.dense())

    def dots(self, other: Block) -> Tensor:
        """<g[i], h[i]> of two blocks of the same parameter, real part: (B,)."""
        return dots(self.dense(), other.dense())


@dataclass(frozen=True)
class Dense(Block):
    """The gradients themselves."""

    value: Tensor  # (B, *shape)

    def dense(self) -> Tensor:
        return self.value

    def take(self, index: Tensor) -> Dense:
        return Dense(self.value[index])

    def fold(self, fold: Fold) -> Dense:
        return Dense(fold.join(self.value).sum(1))


def recomputed(total: Tensor, bound: Tensor, exact: Callable[[Tensor], Tensor]) -> Tensor:
    """`total`, (B,), with the samples replaced by `exact(index)` whose terms, of size `bound`, cancel.

    A sum of terms is off by about their size times the machine's precision: float32 loses its fourth digit
    where they cancel to a thousandth.
    """
    share = 1e-3 if total.dtype == torch.float32 else 1e-5
    index = (total < share * bound).nonzero().squeeze(1)
    return total.index_copy(0, index, exact(index).to(total.dtype)) if len(index) else total


def squared_norms(value: Tensor) -> Tensor:
    """(B, *shape) -> (B,), accumulated in float32 or better."""
    flat = value.reshape(len(value), -1)
    return torch.linalg.vector_norm(flat, dim=1, dtype=accumulation_dtype(flat.dtype)).square()


def dots(left: Tensor, right: Tensor) -> Tensor:
    """Row-wise real inner product of two (B, *shape) tensors: (B,)."""
    dtype = accumulation_dtype(torch.promote_types(left.dtype, right.dtype))
    product = left.to(dtype) * right.to(dtype).conj()
    if product.is_complex():
        product = product.real
    return product.reshape(len(product), -1).sum(1)
