"""Patches: the gradient of a convolution's weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks.base import Block, Dense, Fold, accumulation_dtype, squared_norms
from eachgrad.blocks.outer import DIRECT_CHUNK


@dataclass(frozen=True)
class Geometry:
    """Where a convolution reads: one entry per spatial dimension, padding as (before, after) pairs."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def pad(self, x: Tensor) -> Tensor:
        return F.pad(x, [n for pair in reversed(self.padding) for n in pair])

    def unfold(self, x: Tensor, out: torch.Size) -> Tensor:
        """(N, C, *spatial) -> (N, groups, C/groups * K, L): what each of the L outputs reads."""
        x = self.pad(x).contiguous()
        # Windows as a strided view: any number of dimensions, stride and dilation in one expression.
        (n, c), spatial = x.stride()[:2], x.stride()[2:]
        kernel = [s * k for s, k in zip(spatial, self.dilation, strict=True)]
        steps = [s * k for s, k in zip(spatial, self.stride, strict=True)]
        windows = x.as_strided((len(x), x.shape[1], *self.kernel, *out), (n, c, *kernel, *steps))
        return windows.reshape(len(x), self.groups, -1, math.prod(out))

    def convolve(self, x: Tensor, weight: Tensor, out: torch.Size) -> Tensor:
        """(N, C, *spatial) -> (N, p, *out): the convolution itself."""
        zeros = [0] * len(self.kernel)
        value = torch.convolution(
            self.pad(x), weight, None, self.stride, zeros, self.dilation, False, zeros, self.groups
        )
        # A transposed convolution may leave room for positions that nothing was read from.
        return value[(..., *(slice(n) for n in out))]


@dataclass(frozen=True)
class Patches(Block):
    """g[i] = sum over m and positions of (output gradient) x (patch), of shape (p, C/groups, *kernel)."""

    x: Tensor  # (B, m, C, *spatial), already conjugated when complex
    g: Tensor  # (B, m, p, *out)
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.g.shape[2], self.x.shape[2] // self.geometry.groups, *self.geometry.kernel)

    def dense(self) -> Tensor:
        return self._direct(self.x, self.g)

    def fold(self, fold: Fold) -> Patches:
        return Patches(fold.join(self.x).flatten(1, 2), fold.join(self.g).flatten(1, 2), self.geometry)

    def kept(self) -> Block:
        # One unfolding in all, instead of one for the norms and one for the sum.
        factors = (self.x.numel() + self.g.numel()) // len(self.g)
        return Dense(self._in_chunks()) if math.prod(self.shape) <= factors else self

    def _in_chunks(self) -> Tensor:
        return torch.cat([self._direct(x, g) for x, g in self._split(self.g, self._step())])

    def take(self, index: Tensor) -> Patches:
        return Patches(self.x[index], self.g[index], self.geometry)

    def weighted_sum(self, c: Tensor) -> Tensor:
        # The sum over samples is a sum over positions as well: one sample with B m maps.
        g = self.g * c.to(self.g.dtype).view(-1, *[1] * (self.g.ndim - 1))
        step = self._step()
        parts = (self._direct(x.flatten(0, 1)[None], s.flatten(0, 1)[None]) for x, s in self._split(g, step))
        return reduce(torch.add, (part[0] for part in parts))

    def weighted_sums(self, c: Tensor) -> Tensor:
        # Several sums share one unfolding.
        step = self._step()
        parts = (self._direct(x, g) for x, g in self._split(self.g, step))
        pairs = zip(c.split(step, dim=1), parts, strict=True)
        return reduce(torch.add, (torch.tensordot(w.to(part.dtype), part, dims=1) for w, part in pairs))

    def squared_norms(self, precise: bool = False) -> Tensor:
        return torch.cat([squared_norms(self._direct(x, g)) for x, g in self._split(self.g, self._step())])

    def sizes(self) -> tuple[int, int, int]:
        return len(self.x), self.shape[0], math.prod(self.shape[1:])

    def slice(self, start: int, stop: int) -> Tensor:
        # Whole groups, or some outputs of a single one.
        groups, (_, p, row), channels = self.geometry.groups, self.sizes(), self.shape[1]
        size = p // groups
        first, last = start // row, -(-stop // row)
        a, b = first // size, -(-last // size)
        if b - a > 1:
            first, last = a * size, b * size
        x, g = self.x[:, :, a * channels : b * channels], self.g[:, :, first:last]
        part = Patches(x, g, replace(self.geometry, groups=b - a))
        value = torch.cat([part._direct(x, g).flatten(1) for x, g in part._split(part.g, part._step())])
        return value[:, start - first * row : stop - first * row]

    def dot(self, directions: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(self.x.dtype, self.g.dtype), directions.dtype)
        # Several directions share one unfolding; torch.convolution takes no complex numbers.
        if len(directions) > 1 or dtype.is_complex:
            return super().dot(directions)
        x, g, weight = (t.to(accumulation_dtype(dtype)) for t in (self.x, self.g, directions[0]))
        out = self.geometry.convolve(x.flatten(0, 1), weight, g.shape[3:])
        return (out * g.flatten(0, 1)).reshape(len(x), -1).sum(1, keepdim=True)

    def _split(self, g: Tensor, step: int):
        return zip(self.x.split(step), g.split(step), strict=True)

    def _step(self) -> int:
        """How many samples at a time keep the unfolded input and the gradients small."""
        positions = math.prod(self.g.shape[3:]) * self.g.shape[1]
        unfolded = positions * self.x.shape[2] * math.prod(self.geometry.kernel)
        return max(1, DIRECT_CHUNK // max(1, unfolded, math.prod(self.shape)))

    def _direct(self, x: Tensor, g: Tensor) -> Tensor:
        B, m, groups = *x.shape[:2], self.geometry.groups
        out = g.shape[3:]
        dtype = torch.promote_types(x.dtype, g.dtype)
        patches = self.geometry.unfold(x.flatten(0, 1).to(dtype), out)  # (B m, groups, K, L)
        patches = patches.unflatten(0, (B, m)).movedim(1, 3).flatten(3)  # (B, groups, K, m L)
        g = g.to(dtype).reshape(B, m, groups, g.shape[2] // groups, math.prod(out)).movedim(1, 3).flatten(3)
        return (g @ patches.mT).reshape(B, *self.shape)
