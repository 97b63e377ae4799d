"""Outer: the gradient of a weight matrix in any matrix product."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from eachgrad.blocks.base import Block, Dense, Fold, accumulation_dtype, dots, recomputed, squared_norms

# Largest (chunk, p, d) buffer of the direct norm route, in elements: bounds its memory at 32 MiB in
# float32 whatever B is. A choice of memory, not of speed.
DIRECT_CHUNK = 1 << 23


@dataclass(frozen=True)
class Outer(Block):
    """g[i] = sum_t left[i,t,:] right[i,t,:]^T, of shape (p, d), or `shape` when that is given."""

    left: Tensor  # (B, T, p)
    right: Tensor  # (B, T, d), already conjugated when complex
    shape: tuple[int, ...] | None = None

    def dense(self) -> Tensor:
        left, right = self._factors()
        value = left.mT @ right
        return value if self.shape is None else value.reshape(len(value), *self.shape)

    def take(self, index: Tensor) -> Outer:
        return Outer(self.left[index], self.right[index], self.shape)

    def kept(self) -> Block:
        p, d = self.matrix
        # One product in all, instead of one for the norms and one for the sum.
        return Dense(self.dense()) if p * d <= self.left.shape[1] * (p + d) else self

    @property
    def matrix(self) -> tuple[int, int]:
        return self.left.shape[2], self.right.shape[2]

    def fold(self, fold: Fold) -> Outer:
        left, right = (fold.join(t).flatten(1, 2) for t in (self.left, self.right))
        return Outer(left, right, self.shape)

    def weighted_sum(self, c: Tensor) -> Tensor:
        left, right = self._factors()
        left = left * c.to(left.dtype)[:, None, None]
        value = left.flatten(0, 1).mT @ right.flatten(0, 1)
        return value if self.shape is None else value.reshape(self.shape)

    def squared_norms(self, precise: bool = False) -> Tensor:
        left, right = self._factors()
        T, p, d = left.shape[1], left.shape[2], right.shape[2]
        if T == 1:
            return squared_norms(left) * squared_norms(right)
        # Gram costs 2 T^2 (p + d) a sample, direct 2 T p d.
        if T * (p + d) < p * d:
            total, bound = self._gram(self)
            return recomputed(total, bound, lambda index: self.take(index)._direct(), precise)
        return self._direct()

    def _direct(self) -> Tensor:
        left, right = self._factors()
        step = max(1, DIRECT_CHUNK // math.prod(self.matrix))
        parts = [squared_norms(a.mT @ b) for a, b in zip(left.split(step), right.split(step), strict=True)]
        return torch.cat(parts)

    def dots(self, other: Block) -> Tensor:
        if not isinstance(other, Outer) or self.matrix != other.matrix:
            return super().dots(other)
        T, S, p, d = self.left.shape[1], other.left.shape[1], self.left.shape[2], self.right.shape[2]
        if T * S * (p + d) < (T + S) * p * d:
            return self._gram(other)[0]
        step = max(1, DIRECT_CHUNK // (p * d))
        factors = [t.split(step) for t in (*self._factors(), *other._factors())]
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
        return torch.stack([self._dot(v) for v in directions.reshape(K, *self.matrix)], 1)

    def _dot(self, direction: Tensor) -> Tensor:
        """rowsum((A V^T) * G), by the side that leaves less: (B,)."""
        left, right = self._factors()
        dtype = accumulation_dtype(torch.promote_types(left.dtype, direction.dtype))
        left, right, direction = left.to(dtype), right.to(dtype), direction.to(dtype).conj()
        p, d = self.matrix
        product = (right @ direction.mT) * left if p < d else (left @ direction) * right
        return product.real.sum((1, 2))

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
        dtype = torch.promote_types(self.left.dtype, self.right.dtype)
        return self.left.to(dtype), self.right.to(dtype)

    def _gram(self, other: Outer) -> tuple[Tensor, Tensor]:
        """The inner products, and the size of the terms that they are sums of."""
        # Never below float32: in bfloat16 this sum was wrong by up to 7% where gradients cancel over T.
        dtype = accumulation_dtype(torch.promote_types(self.left.dtype, self.right.dtype))
        left = self.left.to(dtype) @ other.left.to(dtype).mH
        right = self.right.to(dtype) @ other.right.to(dtype).mH
        product = left * right
        product = product.real if product.is_complex() else product
        return product.sum((1, 2)), product.abs().sum((1, 2))
