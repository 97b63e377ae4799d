"""Moments of samples gathered batch by batch, and the gradient noise scale."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eachgrad.blocks.arithmetic import dots


@dataclass(frozen=True)
class Moments:
    """The mean of some samples, and the sum of squares about it."""

    count: int
    mean: Tensor
    squares: Tensor

    def __add__(self, other: Moments) -> Moments:
        # Chan's formula: no difference of large numbers.
        count = self.count + other.count
        gap = other.mean - self.mean
        between = gap.abs().square().to(self.squares.dtype) * (self.count * other.count / count)
        return Moments(count, self.mean + gap * (other.count / count), self.squares + other.squares + between)


@dataclass(frozen=True)
class NoiseScale:
    """tr(Sigma) / |G|^2: about the batch size at which noise and signal of a gradient step are equal."""

    value: float
    error: float  # jackknife standard error of the value, leaving out a sample, or a batch where there are several
    noise: float  # tr(Sigma), unbiased
    signal: float  # |G|^2, unbiased, so that it may be below zero


@dataclass
class Noise:
    """What the noise scale of several batches needs: their squared norms, products with their sum, and sums."""

    batches: list[tuple[Tensor, Tensor, dict[str, Tensor]]] = field(default_factory=list)
    sums: dict[str, Tensor] = field(default_factory=dict)

    def add(self, squares: Tensor, dots: Tensor, sums: dict[str, Tensor]) -> None:
        """|g[i]|^2 and <g[i], S>, both (B,), and S = sum_i g[i] of one batch."""
        self.batches.append((squares.detach().double(), dots.detach().double(), sums))
        for name, value in sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def scale(self) -> NoiseScale:
        B = sum(len(squares) for squares, _, _ in self.batches)
        if B < 2:
            raise ValueError(
                f"a noise scale needs two samples at least, not {B}: ask a larger batch, or gather several in an Accumulator"
            )
        every = torch.stack([squares.sum() for squares, _, _ in self.batches]).sum()
        if len(self.batches) == 1:
            ((squares, dots, _),) = self.batches
            whole = dots.sum()
            # Without sample i: |S - g_i|^2 = |S|^2 - 2 <g_i, S> + |g_i|^2.
            parts = (every - squares, whole - 2 * dots + squares, torch.full_like(squares, B - 1))
        else:
            whole = _product(self.sums, self.sums)
            of_batch = torch.stack([squares.sum() for squares, _, _ in self.batches])
            own = torch.stack([dots.sum() for _, dots, _ in self.batches])  # |S_k|^2
            mutual = torch.stack([_product(sums, self.sums) for _, _, sums in self.batches])
            left = torch.tensor([B - len(squares) for squares, _, _ in self.batches], dtype=torch.float64)
            parts = (every - of_batch, whole - 2 * mutual + own, left.to(own))
        noise, signal = _estimates(every, whole, B)
        return NoiseScale(float(noise / signal), _jackknife(*parts), float(noise), float(signal))


def _jackknife(every: Tensor, whole: Tensor, B: Tensor) -> float:
    """The standard error from the estimates that leave something out, one each."""
    if bool((B < 2).any()):
        return float("nan")
    top, bottom = _estimates(every, whole, B)
    left_out, n = top / bottom, len(every)
    return float(((left_out - left_out.mean()).square().sum() * (n - 1) / n).sqrt())


def _product(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
    return torch.stack([dots(a[name][None], b[name][None]).sum() for name in a]).sum()


def _estimates(every: Tensor, whole: Tensor, B: Tensor | int) -> tuple[Tensor, Tensor]:
    """tr(Sigma) and |G|^2 from sum_i |g_i|^2 and |sum_i g_i|^2."""
    return (every - whole / B) / (B - 1), (whole - every) / (B * (B - 1))
