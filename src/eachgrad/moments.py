"""The gradient noise scale, from B samples."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class NoiseScale:
    """tr(Sigma) / |G|^2: about the batch size at which noise and signal of a gradient step are equal."""

    value: float
    error: float  # jackknife standard error of the value; NaN for two samples
    noise: float  # tr(Sigma), unbiased
    signal: float  # |G|^2, unbiased, so that it may be below zero


def noise_scale(squared_norms: Tensor, dots: Tensor) -> NoiseScale:
    """From |g[i]|^2 and <g[i], sum_j g[j]>, both (B,)."""
    B = len(squared_norms)
    if B < 2:
        raise ValueError(f"a noise scale needs two samples at least, not {B}")
    squares, dots = squared_norms.detach().double(), dots.detach().double()
    every, whole = squares.sum(), dots.sum()
    noise, signal = _estimates(every, whole, B)
    error = float("nan")
    if B > 2:
        # Without sample i: |S - g_i|^2 = |S|^2 - 2 <g_i, S> + |g_i|^2.
        top, bottom = _estimates(every - squares, whole - 2 * dots + squares, B - 1)
        left_out = top / bottom
        error = float(((left_out - left_out.mean()).square().sum() * (B - 1) / B).sqrt())
    return NoiseScale(float(noise / signal), error, float(noise), float(signal))


def _estimates(every: Tensor, whole: Tensor, B: int) -> tuple[Tensor, Tensor]:
    """tr(Sigma) and |G|^2 from sum_i |g_i|^2 and |sum_i g_i|^2."""
    return (every - whole / B) / (B - 1), (whole - every) / (B * (B - 1))
