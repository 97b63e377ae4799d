"""channel_sums: what each sample adds up over its positions for the weight and the bias of a norm of groups of channels.

Torch's own ops normalise the input anew, multiply, and add up twice: the maps are read six times and written twice. Here they
are read once, normalised by the statistics of the forward. A compiler joins the ops by itself, so that this is for eager
steps alone. The Triton code is apart, as triton is there only where a GPU is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty

NUMBERS, WARPS = 2048, 4  # of a program's tile, channels by positions, and for it; no others have been tried
POSITIONS = 1024  # of a tile at most, and CHANNELS where these lie side by side in memory
CHANNELS = 64


def _check(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> None:
    for t in (g, x):
        if t.dtype not in DTYPES:
            raise TypeError(f"channel_sums takes {', '.join(map(str, DTYPES))}, not {t.dtype}")
    if g.ndim != 3 or g.shape != x.shape:
        raise ValueError(f"g {tuple(g.shape)} and x {tuple(x.shape)} must be (B, C, S)")
    for t in (mean, scale):
        if t.dtype != torch.float32 or t.ndim != 2 or t.shape[0] != g.shape[0] or t.shape != mean.shape:
            raise ValueError(f"statistics are (B, groups) in float32, not {tuple(t.shape)} in {t.dtype}")
    if not mean.shape[1] or g.shape[1] % mean.shape[1]:
        raise ValueError(f"{g.shape[1]} channels are not {mean.shape[1]} groups")


def _room(g: Tensor) -> Tensor:
    return new_empty(g, (2, *g.shape[:2]), torch.float32)


def plain(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The same in torch's own ops."""
    _check(g, x, mean, scale)
    mean, scale = (t.repeat_interleave(g.shape[1] // t.shape[1], 1)[..., None] for t in (mean, scale))
    wide, normal = g.to(torch.float32), (x.to(torch.float32) - mean) * scale
    return torch.stack([wide.sum(2), (wide * normal).sum(2)])


def launched(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The same by the kernel."""
    from eachgrad.kernels.triton_channel_sums import channel_sums_kernel

    _check(g, x, mean, scale)
    out, (B, C, S) = _room(g), g.shape
    if out.numel():
        channels, positions = tile(C, S, by_channels=x.stride(1) == 1 < x.stride(2))
        args = (g, x, mean.contiguous(), scale.contiguous(), out, C, S, C // mean.shape[1], *g.stride(), *x.stride())
        constants = {"CHANNELS": channels, "POSITIONS": positions}
        launch(channel_sums_kernel, B * -(-C // channels), out, args, constants, num_warps=WARPS)
    return out


def tile(C: int, S: int, by_channels: bool) -> tuple[int, int]:
    """Channels and positions that a program reads at a time; `by_channels`: the channels lie side by side."""
    if by_channels:
        channels = min(CHANNELS, _power(C))
        return channels, min(NUMBERS // channels, _power(S))
    positions = min(POSITIONS, _power(S))
    return min(NUMBERS // positions, _power(C)), positions


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


library.define(
    "channel_sums(Tensor g, Tensor x, Tensor mean, Tensor scale) -> Tensor", tags=(torch.Tag.flexible_layout,)
)
library.impl("channel_sums", plain, "CPU")
library.impl("channel_sums", launched, "CUDA")


@torch.library.register_fake("eachgrad::channel_sums", lib=library)
def _(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    _check(g, x, mean, scale)
    return _room(g)


def channel_sums(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """sum_s g[:, :, s] and sum_s g[:, :, s] (x[:, :, s] - mean) scale of (B, C, S), in float32: (B, C) each.

    mean and scale are (B, groups) in float32, each for C / groups channels one after another.
    """
    of_bias, of_weight = direct(torch.ops.eachgrad.channel_sums, launched, g, g, x, mean, scale).unbind()
    return of_bias, of_weight
