"""Patches: the gradient of a convolution's weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks.arithmetic import (
    FLOAT32_ROUNDING,
    is_rounded,
    on_gpu,
    products,
    rounding,
    scaled,
    squared_norms,
)
from eachgrad.blocks.base import Block, Fold, Measured, Rough, Shared
from eachgrad.blocks.outer import Outer, bound_of
from eachgrad.blocks.windows import Geometry
from eachgrad.dtypes import accumulation_dtype
from eachgrad.kernels.convolution import conv_gradients, conv_squares, conv_sum
from eachgrad.kernels.launching import is_unwatched

# An element added to a Gram, against a multiplication in a matrix product. On one core over 140 shapes (C 8 to 256,
# p 16 to 256, maps of 16 to 256 positions) the choice made with 2 to 6 took 0.5% more time than the best of both.
ADDITION = 4

# Positions from which a GPU's kernel forms each gradient for its norm: 0.15 ms for 512 of 256 x 2304 over 64 positions.
MANY = 64


@dataclass(frozen=True)
class Patches(Block):
    """g[i] = sum over m and positions of (output gradient) x (patch), of shape (p, C/groups, *kernel)."""

    x: Tensor  # (B, m, C, *spatial), already conjugated when complex
    g: Tensor  # (B, m, p, *out)
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.g.shape[2], self.x.shape[2] // self.geometry.groups, *self.geometry.kernel)

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.x.dtype, self.g.dtype)

    @property
    def positions(self) -> int:
        return self.g.shape[1] * math.prod(self.g.shape[3:])

    @property
    def pixels(self) -> int:
        return self.x.shape[1] * math.prod(self.x.shape[3:])

    def dense(self) -> Tensor:
        if self._implicit:
            return conv_gradients(*self._maps())
        step = self._step()
        # Autograd does not follow what is written into parts, and a compiler copies all for each.
        if step >= len(self.g) or on_gpu(self.g) or self.x.requires_grad or self.g.requires_grad:
            return torch.cat([self._direct(x, g) for x, g in self._split(self.g)])
        value = self.g.new_empty(len(self.g), *self.shape, dtype=self.dtype)
        for part, x, g in zip(value.split(step), self.x.split(step), self.g.split(step), strict=True):
            part.copy_(self._direct(x, g))
        return value

    def fold(self, fold: Fold) -> Patches:
        return Patches(fold.join(self.x).flatten(1, 2), fold.join(self.g).flatten(1, 2), self.geometry)

    def take(self, index: Tensor) -> Patches:
        return Patches(self.x[index], self.g[index], self.geometry)

    def cost(self) -> plan.Cost:
        (B, p, K), T, item = self.sizes(), self.positions, self.dtype.itemsize
        once, chunk = 2 * B * T * p * K, min(B, self._step()) * self._unfolded() * item
        factors, dense = (self.x.numel() + self.g.numel()) * item, B * p * K * item
        direct = plan.Route("direct", once, dense + chunk, "every gradient is asked for")
        total = plan.Route("convolution", once, min(factors, plan.CHUNK * item), "scaled factors, a few at a time")
        if self._implicit:
            direct = replace(direct, bytes=dense)
            total = plan.Route("implicit", once, self.g.numel() * item, "scaled gradients, and nothing unfolded")
        elif not self._native:
            total = plan.Route("unfolded", once, chunk + self.g.numel() * item, "complex, or not on a CPU")
        return plan.Cost("Patches", B, T, K, p, factors, dense, self._norms(), direct, total, once)

    def _norms(self) -> plan.Route:
        """The cheapest way to |g[i]|^2."""
        (B, p, K), T, item = self.sizes(), self.positions, self.dtype.itemsize
        # With no compiler to join them, the many windows of a Gram take longer to start than all else to run.
        if self._implicit and (T >= MANY or is_unwatched(self.g)):
            return plan.Route("implicit", 2 * B * T * p * K, 0, "nothing is unfolded")
        if self.geometry.groups > 1:
            return plan.Route("direct", 2 * B * T * p * K, min(B, self._step()) * self._unfolded() * item, "groups")
        product = plan.product_norms(B, T, p, K, item, self.g.device.type)
        gram = 2 * B * (self.pixels**2 * self.x.shape[2] + T**2 * p)
        share = (gram + 2 * B * ADDITION * sum(self.geometry.kernel) * T**2) / max(1, product.flops)
        # A kernel of one pixel leaves nothing to unfold.
        if share < 1 and math.prod(self.geometry.kernel) > 1 and T > 1 and not self.dtype.is_complex:
            size = 3 * min(B, self._gram_step()) * max(self.pixels, T) ** 2 * max(4, item)
            return plan.Route("Gram of pixels", gram, size, f"{share:.0%} of {product.name}")
        unfolded = min(B, self._unfolded_step()) * self._unfolded() * item
        return replace(product, bytes=product.bytes + unfolded)

    def weighted_sum(self, c: Tensor) -> Tensor:
        if self._implicit:
            x, _, *where = self._maps()
            return conv_sum(x, scaled(self.g, c)[:, 0], *where)
        if not self._native:
            parts = (self._sum(x.flatten(0, 1)[None], s.flatten(0, 1)[None]) for x, s in self._split(scaled(self.g, c)))
            return reduce(torch.add, parts)
        # On one core it took 0.2 to 1.1 of the time of an unfolding for 26 shapes in float32, 1.2 to 2.3 for 4 small
        # depthwise ones. Half precision by way of float32: 0.2 to 0.9 for all but one, and no less precise, where
        # torch's own float16 was off by 2e-3 instead of 2e-4.
        x, g, c = self.x, self.g, c.to(accumulation_dtype(self.dtype)).view(-1, *[1] * (self.g.ndim - 1))
        # A few samples at a time are as fast as all, and more precise: 3e-6 instead of 7e-6 over 131072 positions.
        step = max(1, plan.CHUNK * len(g) // max(1, x.numel() + g.numel()))
        total = c.new_zeros(self.shape)
        for a, b, w in zip(x.split(step), g.split(step), c.split(step), strict=True):
            a, b = (a * w, b.to(w.dtype)) if x.numel() < g.numel() else (a.to(w.dtype), b * w)
            total += self.geometry.weight_gradient(a.flatten(0, 1), b.flatten(0, 1), self.geometry.groups)
        return total

    def mean(self, c: Tensor) -> Tensor:
        return conv_sum(*self._maps()) / len(c) if self._implicit else self.weighted_sum(c)

    def _sum(self, x: Tensor, g: Tensor) -> Tensor:
        """The gradient of one sample that has many maps, in float32 or better."""
        g, x = (t[0] for t in self._factors(x, g))  # of each group
        return products(g, x.mT).reshape(self.shape)

    def weighted_sums(self, c: Tensor) -> Tensor:
        # Several sums share one unfolding.
        parts = (self._direct(x, g) for x, g in self._split(self.g))
        pairs = zip(c.split(self._step(), dim=1), parts, strict=True)
        return reduce(torch.add, (torch.tensordot(w.to(part.dtype), part, dims=1) for w, part in pairs))

    def measured(self, shared: Shared | None = None) -> Measured:
        found = self.roughly(shared)
        return found.settled() if isinstance(found, Rough) else found

    def roughly(self, shared: Shared | None = None) -> Rough | Measured:
        unit, route = rounding(self.g), self._norms().name
        if route == "implicit":
            return conv_squares(*self._maps()), self._bound() * unit**2
        if self.geometry.groups > 1:
            parts = [self._factors(x, g) for x, g in self._split(self.g)] if unit > FLOAT32_ROUNDING else []
            return self._direct_norms(), torch.cat([bound_of(g, x, 2) for g, x in parts]) * unit**2 if parts else None
        if route != "Gram of pixels":
            found = [self._product(x, g).measured() for x, g in self._split(self.g, self._unfolded_step())]
            bounds = [bound for _, bound in found if bound is not None]
            return torch.cat([squares for squares, _ in found]), torch.cat(bounds) if bounds else None
        total, bound = self._gram()
        return Rough(total, bound, lambda index: self.take(index)._direct_norms(), unit)

    def _bound(self) -> Tensor:
        """(sum over positions of |g| |patch|)^2: (B,), no smaller than any sum of the terms."""
        pixels = torch.linalg.vector_norm(self.x, dim=2, dtype=torch.float32).square()
        sizes = torch.linalg.vector_norm(self.g, dim=2, dtype=torch.float32)
        return (sizes * self.geometry.windows(pixels, self.g.shape[3:]).sqrt()).flatten(1).sum(1).square()

    def _direct_norms(self) -> Tensor:
        if self._implicit:
            return conv_squares(*self._maps())
        return torch.cat([squared_norms(self._direct(x, g)) for x, g in self._split(self.g)])

    def _product(self, x: Tensor, g: Tensor) -> Outer:
        """Gradients times patches, or the other way round: a transposed matrix has the same norm."""
        left, right = (t[:, 0].mT for t in self._factors(x, g))
        return Outer(right, left) if self._narrow else Outer(left, right)

    def _gram(self) -> tuple[Tensor, Tensor]:
        """Squared norms, and the size of the terms that they are sums of: sum (A A^T) * (G G^T)."""
        dtype, step, parts = accumulation_dtype(self.dtype), self._gram_step(), []
        for x, g in zip(self.x.to(self.dtype).split(step), self.g.to(self.dtype).split(step), strict=True):
            if not on_gpu(x):  # which multiplies sixteen bits exactly, and adds in float32
                x, g = x.to(dtype), g.to(dtype)
            g = g.movedim(2, 1).flatten(2)
            product, own = self.geometry.gram(x, self.g.shape[3:]), products(g.mT, g)
            product = (product * own if on_gpu(own) else product.mul_(own)).flatten(1)
            bound = product.abs().sum(1) if on_gpu(product) else torch.linalg.vector_norm(product, 1, dim=1)
            parts.append((product.sum(1), bound))
        total, bound = (torch.cat(column) for column in zip(*parts, strict=True))
        return total, bound

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
        value = Patches(x, g, replace(self.geometry, groups=b - a)).dense().flatten(1)
        return value[:, start - first * row : stop - first * row]

    def dot(self, directions: Tensor) -> Tensor:
        dtype = torch.promote_types(self.dtype, directions.dtype)
        # Several directions share one unfolding; torch.convolution takes no complex numbers.
        if len(directions) > 1 or dtype.is_complex:
            return super().dot(directions)
        x, g, weight = (t.to(accumulation_dtype(dtype)) for t in (self.x, self.g, directions[0]))
        out = self.geometry.convolve(x.flatten(0, 1), weight, g.shape[3:])
        return (out * g.flatten(0, 1)).reshape(len(x), -1).sum(1, keepdim=True)

    def _split(self, g: Tensor, step: int = 0):
        step = step or self._step()
        return zip(self.x.split(step), g.split(step), strict=True)

    def _step(self) -> int:
        """How many samples at a time keep the unfolded input and the gradients small."""
        return max(1, self._chunk() // max(1, self._unfolded(), math.prod(self.shape)))

    def _unfolded_step(self) -> int:
        """The same where no gradient is formed, or a few at a time: on a GPU all samples, of whatever number."""
        return max(1, self._chunk() // max(1, self._unfolded()))

    def _gram_step(self) -> int:
        return max(1, self._chunk() // max(1, self.pixels, self.positions) ** 2)

    def _chunk(self) -> int:
        return plan.chunk(self.g.device.type)

    def _unfolded(self) -> int:
        return self.positions * self.x.shape[2] * math.prod(self.geometry.kernel)

    @property
    def _narrow(self) -> bool:
        # 27 inputs (3 channels, 3 x 3): the product with the patches on the left took 0.67 of the time, on one core;
        # from 64 inputs on neither order was faster.
        return math.prod(self.shape[1:]) < 32

    @property
    def _native(self) -> bool:
        """Whether torch's own gradient of a weight will do."""
        # It knows no complex numbers, and on a GPU it rounds float32 to 10 bits, where a matrix product does not.
        return self.g.device.type == "cpu" and not self.dtype.is_complex

    @property
    def _implicit(self) -> bool:
        """Whether there are kernels that read the patches where they lie."""
        suits = len(self.geometry.kernel) == 2 and self.geometry.groups == 1 and self.x.shape[1] == 1
        followed = self.x.requires_grad or self.g.requires_grad
        return suits and is_rounded(self.g) and self.dtype == torch.bfloat16 and not followed

    def _maps(self) -> tuple[Any, ...]:
        """The arguments of these kernels."""
        where = self.geometry
        before = [pair[0] for pair in where.padding]
        return (
            self.x[:, 0].to(self.dtype),
            self.g[:, 0],
            list(where.kernel),
            list(where.stride),
            before,
            list(where.dilation),
        )

    @property
    def _grouped(self) -> bool:
        """Whether each sample is a group of one convolution's gradient, rather than a batch of small products."""
        groups, width, outputs = self.geometry.groups, self.shape[1], self.shape[0] // self.geometry.groups
        size = math.prod(self.geometry.kernel)
        # On one core it took 0.2 to 0.6 of the time for depthwise kernels of up to 9 pixels and 0.5 to 0.8 for groups
        # of 8 and more; but 1.5 for 7 x 7 and 2.3 for two outputs a channel. Only oneDNN, so float32, is that fast.
        suited = size <= 9 if width == outputs == 1 else min(width, outputs) >= 8
        here = self._native and self.dtype == torch.float32 and torch.backends.mkldnn.is_available()
        return groups > 1 and size > 1 and suited and here

    def _direct(self, x: Tensor, g: Tensor) -> Tensor:
        B = len(x)
        if self._grouped:
            x, g = (t.to(self.dtype).transpose(0, 1).flatten(1, 2) for t in (x, g))
            return self.geometry.weight_gradient(x, g, B * self.geometry.groups).view(B, *self.shape)
        g, x = self._factors(x, g)
        value = (x @ g.mT).mT if self._narrow else g @ x.mT
        return value.reshape(B, *self.shape)

    def _factors(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (n, groups, p/groups, m L) and patches (n, groups, K, m L)."""
        n, groups, out = len(g), self.geometry.groups, g.shape[3:]
        patches = self.geometry.unfold(x.to(self.dtype), out)
        return g.to(self.dtype).movedim(2, 1).reshape(n, groups, g.shape[2] // groups, patches.shape[-1]), patches
