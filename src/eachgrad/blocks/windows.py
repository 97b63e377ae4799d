"""Where a convolution reads, and what follows from it for its input: patches, their Gram, the weight's gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks.arithmetic import on_gpu, products
from eachgrad.kernels.launching import is_unwatched


@dataclass(frozen=True)
class Geometry:
    """Where a convolution reads: one entry per spatial dimension, padding as (before, after) pairs."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    def pad(self, x: Tensor) -> Tensor:
        # F.pad copies even where it adds nothing.
        return F.pad(x, [n for pair in reversed(self.padding) for n in pair]) if any(map(any, self.padding)) else x

    def unfold(self, x: Tensor, out: torch.Size) -> Tensor:
        """(n, m, C, *spatial) -> (n, groups, C/groups * K, m L): what each of the L outputs of m maps reads."""
        x = self.pad(x).contiguous()
        # Windows as a strided view: any number of dimensions, stride and dilation in one expression, and one copy.
        (n, m, c), spatial = x.stride()[:3], x.stride()[3:]
        kernel = [s * k for s, k in zip(spatial, self.dilation, strict=True)]
        steps = [s * k for s, k in zip(spatial, self.stride, strict=True)]
        shape = (len(x), x.shape[2], *self.kernel, x.shape[1], *out)
        windows = x.as_strided(shape, (n, c, *kernel, m, *steps))
        inputs = x.shape[2] // self.groups * math.prod(self.kernel)
        return windows.reshape(len(x), self.groups, inputs, x.shape[1] * math.prod(out))

    def convolve(self, x: Tensor, weight: Tensor, out: torch.Size) -> Tensor:
        """(N, C, *spatial) -> (N, p, *out): the convolution itself."""
        zeros = [0] * len(self.kernel)
        value = torch.convolution(
            self.pad(x), weight, None, self.stride, zeros, self.dilation, False, zeros, self.groups
        )
        # A transposed convolution may leave room for positions that nothing was read from.
        return value[(..., *(slice(n) for n in out))]

    def weight_gradient(self, x: Tensor, g: Tensor, groups: int) -> Tensor:
        """(N, C, *spatial), (N, p, *out) -> (p, C/groups, *kernel): torch's own, summed over the N maps."""
        zeros, padding = [0] * len(self.kernel), [before for before, _ in self.padding]
        if not self._as_torch_pads(x.shape[2:], g.shape[2:]):
            x, padding = self.pad(x)[(..., *(slice(n) for n in self._reach(g.shape[2:])))], zeros
        weight = x.new_empty(g.shape[1], x.shape[1] // groups, *self.kernel)  # only its shape is read
        settings = (None, self.stride, padding, self.dilation, False, zeros, groups)
        return torch.ops.aten.convolution_backward(g, x, weight, *settings, [False, True, False])[1]

    def _reach(self, out: torch.Size) -> list[int]:
        """How much of the padded input the outputs read."""
        return [
            (n - 1) * s + d * (k - 1) + 1
            for n, s, d, k in zip(out, self.stride, self.dilation, self.kernel, strict=True)
        ]

    def _as_torch_pads(self, spatial: torch.Size, out: torch.Size) -> bool:
        """Whether a torch convolution, which pads both sides alike, makes `out` of this input by itself."""
        # 3d, float32, C = 8, 8 x 16 x 16 on a CPU: 8.0 ms where torch pads, 3.2 ms padded before; in 1d and 2d the
        # other way round, 12 ms against 15 ms (C = 64, 8 x 8).
        if len(spatial) == 3 or any(a != b for a, b in self.padding):
            return False
        padded = [n + sum(pair) for n, pair in zip(spatial, self.padding, strict=True)]
        spare = [n - reach for n, reach in zip(padded, self._reach(out), strict=True)]
        return all(n < s for n, s in zip(spare, self.stride, strict=True))

    def _as_torch_pools(self, spatial: torch.Size, out: torch.Size) -> bool:
        """Whether a pooling of torch's, which pads both sides alike and by no more than half, has these windows."""
        if set(self.dilation) != {1} or any(2 * a > k for (a, _), k in zip(self.padding, self.kernel, strict=True)):
            return False
        return self._as_torch_pads(spatial, out)

    def windows(self, x: Tensor, out: torch.Size) -> Tensor:
        """(..., *spatial) -> (..., *out): the sum of what each output reads."""
        if len(out) == 2 and is_unwatched(x) and self._as_torch_pools(x.shape[-2:], out):
            flat = x.reshape(-1, 1, *x.shape[-2:])
            sides = [pair[0] for pair in self.padding]
            pooled = F.avg_pool2d(flat, self.kernel, self.stride, sides, divisor_override=1)
            return pooled.view(*x.shape[:-2], *out)
        first = x.ndim - len(out)
        for dim, size in enumerate(out):
            k, shifts = first + dim, self._shifts(dim, x.shape[first + dim], size)
            parts = [_widened(_both(x, k, k, pixels), k, k, outputs, size) for outputs, pixels in shifts]
            # Outputs may lie in the padding alone.
            x = reduce(torch.add, parts) if parts else x.new_zeros(*x.shape[:k], size, *x.shape[k + 1 :])
        return x

    def gram(self, x: Tensor, out: torch.Size) -> Tensor:
        """(n, m, C, *spatial) -> (n, m L, m L): inner products of the patches that the L outputs of m maps read.

        Two patches shifted alike meet in pixels shifted alike: a sum of windows of the pixels' Gram, along one
        dimension after the other, so that nothing is unfolded. Padding is a window cut short.
        """
        flat = x.movedim(2, 1).flatten(2)  # (n, C, m S)
        value, dims = products(flat.mT, flat), len(out)
        sides = [*x.shape[1:2], *x.shape[3:]]
        value = value.view(len(x), *sides, *sides)
        for dim in reversed(range(dims)):
            row, column = 2 + dim, 3 + dims + dim
            shifts = list(self._shifts(dim, value.shape[row], out[dim]))
            if on_gpu(x):  # one kernel reads all windows, cut short or not
                windows = [
                    _widened(_both(value, row, column, pixels), row, column, outputs, out[dim])
                    for outputs, pixels in shifts
                ]
                if windows:
                    value = reduce(torch.add, windows)
                    continue
            shape = list(value.shape)
            shape[row] = shape[column] = out[dim]
            total = value.new_zeros(shape)
            for outputs, pixels in shifts:
                _both(total, row, column, outputs).add_(_both(value, row, column, pixels))
            value = total
        return value.flatten(dims + 2).flatten(1, -2)

    def _shifts(self, dim: int, pixels: int, out: int) -> Iterator[tuple[slice, slice]]:
        """For each place in the kernel along `dim`: the outputs that read a pixel there, and those pixels."""
        stride = self.stride[dim]
        for k in range(self.kernel[dim]):
            shift = k * self.dilation[dim] - self.padding[dim][0]
            first, last = max(0, -(shift // stride)), min(out - 1, (pixels - 1 - shift) // stride)
            if first <= last:
                yield slice(first, last + 1), slice(first * stride + shift, last * stride + shift + 1, stride)


def _widened(part: Tensor, row: int, column: int, place: slice, size: int) -> Tensor:
    """A window with zeros around it, so that along both dimensions it lies at `place` in `size`."""
    sides = (place.start, size - place.stop)
    pads = [sides if dim in (row, column) else (0, 0) for dim in reversed(range(part.ndim))]
    return F.pad(part, [n for pair in pads for n in pair]) if any(sides) else part


def _both(value: Tensor, row: int, column: int, part: slice) -> Tensor:
    index = [slice(None)] * value.ndim
    index[row] = index[column] = part
    return value[tuple(index)]
