"""Outer: the gradient of a weight matrix in any matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks.arithmetic import (
    FLOAT32_ROUNDING,
    accumulation_dtype,
    cast,
    dots,
    is_traced,
    on_gpu,
    product,
    products,
    rounding,
    scaled,
    scaled_by,
    squared_norms,
)
from eachgrad.blocks.base import Block, Fold, Measured, Rough, Shared
from eachgrad.kernels.gram import gram_norms, gram_parts


@dataclass(eq=False)  # not frozen, which takes longer to make: each use has one
class Outer(Block):
    """g[i] = sum_t left[i,t,:] right[i,t,:]^T, of shape (p, d), or `shape` when that is given."""

    left: Tensor  # (B, T, p)
    right: Tensor  # (B, T, d), already conjugated when complex
    shape: tuple[int, ...] | None = None

    def dense(self) -> Tensor:
        left, right = self._factors()
        # Of one position a product element by element: 164 ms instead of 178 for 256 gradients (1024, 784) on two cores.
        value = left.mT * right if left.shape[1] == 1 else left.mT @ right
        return value if self.shape is None else value.reshape(len(value), *self.shape)

    def take(self, index: Tensor) -> Outer:
        return Outer(self.left[index], self.right[index], self.shape)

    @property
    def matrix(self) -> tuple[int, int]:
        return self.left.shape[2], self.right.shape[2]

    def fold(self, fold: Fold) -> Outer:
        left, right = (fold.join(t).flatten(1, 2) for t in (self.left, self.right))
        return Outer(left, right, self.shape)

    def cost(self) -> plan.Cost:
        (p, d), item = self.matrix, max(self.left.element_size(), self.right.element_size())
        return plan.product(len(self.left), self.left.shape[1], p, d, item, self.left.device.type)

    def factors(self) -> tuple[Tensor, ...]:
        return self.left, self.right

    def weighted_sum(self, c: Tensor) -> Tensor:
        left, right = self._factors()
        p, d = self.matrix
        if p >= d:  # the smaller factor is scaled
            return self._sum(left, scaled(right, c))
        # A compiler writes the left factor of a product transposed, which took a GPU six times as long.
        return self._sum(scaled(left, c), right, mirrored=on_gpu(left) and is_traced(left))

    def sum_by_weights(self, weights: Tensor) -> Tensor:
        """`weighted_sum` of what `has_parts`, eagerly: `weights` is (B, 1, 1), in float32."""
        p, d = self.matrix
        if p >= d:  # the smaller factor is scaled
            return self._sum(self.left, scaled_by(self.right, weights))
        return self._sum(scaled_by(self.left, weights), self.right)

    def mean(self, c: Tensor) -> Tensor:
        # Nothing is scaled: a copy of a factor would be written for it.
        return self._sum(*self._factors()) / len(c)

    def _sum(self, left: Tensor, right: Tensor, mirrored: bool = False) -> Tensor:
        """The sum over samples and positions of their products, (*shape); `mirrored`: by the transposed product."""
        left, right = _flat(left, right)  # positions and samples in the order that needs no copy
        value = product(right.mT, left).mT.contiguous() if mirrored else product(left.mT, right)
        return value if self.shape is None else value.reshape(self.shape)

    def measured(self, shared: Shared | None = None) -> Measured:
        found = self.roughly(shared)
        return found.settled() if isinstance(found, Rough) else found

    def roughly(self, shared: Shared | None = None) -> Rough | Measured:
        left, right = self._factors()
        unit = rounding(left)
        route = self._route
        if route == "product of norms":
            total = squared_norms(left) * squared_norms(right)
            return total, total * unit**2 if unit else None
        if route == "direct":
            # Sums in float32 of so many positions are of gradients that are kept, and then have their own norms.
            return self._direct(), bound_of(left, right, 2) * unit**2 if unit > FLOAT32_ROUNDING else None
        total, bound = self._gram(shared or Shared())
        return Rough(total, bound, self.exact, unit)

    def exact(self, index: Tensor) -> Tensor:
        """The squared norms of the samples in `index`, by their gradients."""
        return self.take(index)._direct()

    @property
    def has_parts(self) -> bool:
        """Whether a kernel gives the norms, as `parts`."""
        left, right = self.left, self.right
        narrow = left.dtype == right.dtype and left.dtype.itemsize == 2
        return narrow and on_gpu(left) and not (left.requires_grad or right.requires_grad) and self._route == "Gram"

    def parts(self) -> Tensor:
        """(2, B, n), whose sums over n are squared norms and the sizes of their terms."""
        return gram_parts(self.left, self.right)

    @property
    def unit(self) -> float:
        """How far a weighted sum rounds its terms, as a share of their size."""
        return rounding(self.left)

    @property
    def _route(self) -> str:
        (B, T), (p, d) = self.left.shape[:2], self.matrix
        item = max(self.left.element_size(), self.right.element_size())
        return plan.product_norms(B, T, p, d, item, self.left.device.type).name

    def _direct(self) -> Tensor:
        left, right = self._factors()
        step = plan.direct_samples(len(left), *self.matrix, left.device.type)
        return torch.cat(
            [squared_norms(products(a.mT, b)) for a, b in zip(left.split(step), right.split(step), strict=True)]
        )

    def _gram(self, shared: Shared) -> tuple[Tensor, Tensor]:
        """Squared norms, and the size of the terms that they are sums of: sum (A A^T) * (G G^T)."""
        # Never below float32: in bfloat16 this sum was wrong by up to 7% where gradients cancel over T.
        left, right = self._factors()
        if on_gpu(left) and left.dtype.itemsize == 2 and not (left.requires_grad or right.requires_grad):
            return gram_norms(left, right)  # which multiplies sixteen bits exactly, and adds in float32
        left, right = cast(left, accumulation_dtype(left.dtype)), cast(right, accumulation_dtype(right.dtype))
        step = plan.gram_samples(len(left), left.shape[1], left.device.type)
        if step >= len(left):
            return _gram(left, right, shared)
        parts = [_gram(a, b, Shared()) for a, b in zip(left.split(step), right.split(step), strict=True)]
        total, bound = (torch.cat(column) for column in zip(*parts, strict=True))
        return total, bound

    def dots(self, other: Block) -> Tensor:
        if not isinstance(other, Outer) or self.matrix != other.matrix:
            return super().dots(other)
        T, S, p, d = self.left.shape[1], other.left.shape[1], self.left.shape[2], self.right.shape[2]
        by_gram = T * S * (p + d) < (T + S) * p * d
        size = (T, S) if by_gram else (p, d)
        step = plan.direct_samples(len(self.left), *size, self.left.device.type)
        factors = [t.split(step) for t in (*self._factors(), *other._factors())]
        if by_gram:
            return torch.cat([_crossed(*four) for four in zip(*factors, strict=True)])
        return torch.cat([dots(a.mT @ b, c.mT @ e) for a, b, c, e in zip(*factors, strict=True)])

    def sizes(self) -> tuple[int, int, int]:
        return len(self.left), *self.matrix

    def slice(self, start: int, stop: int) -> Tensor:
        left, right = self._factors()
        d = right.shape[2]
        first, last = start // d, -(-stop // d)
        return (left[..., first:last].mT @ right).flatten(1)[:, start - first * d : stop - first * d]

    def dot(self, directions: Tensor) -> Tensor:
        K, T = len(directions), self.left.shape[1]
        # Factor by factor 2 K T p d a sample, by dense tiles 2 (K + T) p d.
        if K * T > K + T:
            return super().dot(directions)
        return torch.stack([self._dot(v) for v in directions], 1)

    def dot_by_position(self, direction: Tensor) -> Tensor:
        return self._terms(direction).sum(2)

    def _dot(self, direction: Tensor) -> Tensor:
        return self._terms(direction).sum((1, 2))

    def _terms(self, direction: Tensor) -> Tensor:
        """The terms of <g[i], v> position by position, (A V^T) * G, by the side that leaves less: (B, T, n)."""
        left, right = self._factors()
        dtype = accumulation_dtype(torch.promote_types(left.dtype, direction.dtype))
        p, d = self.matrix
        left, right, direction = left.to(dtype), right.to(dtype), direction.to(dtype).conj().reshape(p, d)
        product = _times(right, direction.mT) * left if p < d else _times(left, direction) * right
        return product.real

    def gram(self, other: Block) -> Tensor:
        if isinstance(other, Outer) and self.left.shape[1] == other.left.shape[1] == 1 and self.matrix == other.matrix:
            factors = (self.left, other.left, self.right, other.right)
            dtype = accumulation_dtype(reduce(torch.promote_types, (t.dtype for t in factors)))
            a, b, c, e = (t[:, 0].to(dtype) for t in factors)
            return ((a @ b.mH) * (c @ e.mH)).real
        return super().gram(other)

    def sum_of_squares(self, center: Tensor | None = None) -> Tensor:
        # About a center there is no such product: expanding the square would cancel.
        if self.left.shape[1] == 1 and center is None:
            left, right = (t[:, 0].to(accumulation_dtype(t.dtype)).abs().square() for t in self._factors())
            return (left.mT @ right).flatten()
        return super().sum_of_squares(center)

    def compressed(self, left: Tensor, right: Tensor) -> Tensor:
        if self.matrix != (left.shape[1], right.shape[1]):
            return super().compressed(left, right)
        return (self.left.to(left.dtype) @ left.mT).mT @ (self.right.to(right.dtype) @ right.mT)

    def concatenate(self, other: Outer) -> Outer:
        """The sum of two uses of one parameter: their positions one after another."""
        (a, b), (c, d) = self._factors(), other._factors()
        return Outer(torch.cat([a, c], 1), torch.cat([b, d], 1), self.shape)

    def _factors(self) -> tuple[Tensor, Tensor]:
        if self.left.dtype == self.right.dtype:
            return self.left, self.right
        dtype = torch.promote_types(self.left.dtype, self.right.dtype)
        return cast(self.left, dtype), cast(self.right, dtype)


def bound_of(left: Tensor, right: Tensor, dim: int) -> Tensor:
    """(sum over positions of |left| |right|)^2, of vectors along `dim`: (B,), no smaller than any sum of the terms."""
    sizes = [torch.linalg.vector_norm(t, dim=dim, dtype=torch.float32) for t in (left, right)]
    return (sizes[0] * sizes[1]).flatten(1).sum(1).square()


def _gram(left: Tensor, right: Tensor, shared: Shared) -> tuple[Tensor, Tensor]:
    """Of (n, T, p) and (n, T, d): sum (A A^T) * (G G^T) and the sum of its terms' sizes, by strips up to the diagonal."""
    totals, bounds = [], []
    for start, end in plan.strip_bounds(left.shape[1], left.device.type):
        product = shared.gram(left, start, end) * shared.gram(right, start, end)
        product = product.real if product.is_complex() else product
        # What lies before the diagonal block stands for its mirror image as well.
        weighted = torch.cat([2 * product[..., :start], product[..., start:]], 2) if start else product
        flat = weighted.flatten(1)
        totals.append(flat.sum(1))
        bounds.append(flat.abs().sum(1) if on_gpu(flat) else torch.linalg.vector_norm(flat, 1, dim=1))
    return reduce(torch.add, totals), reduce(torch.add, bounds)


def _times(rows: Tensor, matrix: Tensor) -> Tensor:
    """(B, T, n) @ (n, m) as one product, in the order in which the rows lie in memory."""
    if rows.stride(0) < rows.stride(1):
        return (rows.transpose(0, 1) @ matrix).transpose(0, 1)
    return rows @ matrix


def _crossed(a: Tensor, b: Tensor, c: Tensor, e: Tensor) -> Tensor:
    """<a^T b, c^T e> sample by sample, through their positions: (n,)."""
    dtype = accumulation_dtype(reduce(torch.promote_types, (t.dtype for t in (a, b, c, e))))
    a, b, c, e = (t.to(dtype) for t in (a, b, c, e))
    product = (a @ c.mH) * (b @ e.mH)
    return (product.real if product.is_complex() else product).sum((1, 2))


def _flat(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T, p) and (B, T, d) as rows of all samples; their order is free, and a time-first one needs no copy."""
    if left.stride(0) < left.stride(1):
        left, right = left.transpose(0, 1), right.transpose(0, 1)
    return left.flatten(0, 1), right.flatten(0, 1)
