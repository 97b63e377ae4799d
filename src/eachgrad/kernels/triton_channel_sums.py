"""The Triton code of `channel_sums`."""

# To a type checker Triton's ranges cannot be walked through.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def channel_sums_kernel(
    g, x, mean, scale, out, C, S, size, g_sample, g_channel, g_place, x_sample, x_channel, x_place,
    CHANNELS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """Sums over S positions, for CHANNELS channels: out[0] of g, out[1] of g times the normalised x; out is (2, B, C).

    mean and scale are (B, C / size); strides are those of samples, of channels and of positions.
    """
    blocks = tl.cdiv(C, CHANNELS)
    sample = (tl.program_id(0) // blocks).to(tl.int64)
    channel = tl.program_id(0) % blocks * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < C
    group = sample * (C // size) + channel // size
    middle = tl.load(mean + group, mask=inside, other=0.0)[:, None]
    factor = tl.load(scale + group, mask=inside, other=0.0)[:, None]
    g += sample * g_sample
    x += sample * x_sample
    of_bias = tl.zeros((CHANNELS, POSITIONS), dtype=tl.float32)
    of_weight = tl.zeros((CHANNELS, POSITIONS), dtype=tl.float32)
    line = channel.to(tl.int64)[:, None]
    for start in range(0, S, POSITIONS):
        place = start + tl.arange(0, POSITIONS)
        mask = inside[:, None] & (place < S)[None, :]
        at = place.to(tl.int64)[None, :]
        given = tl.load(g + (line * g_channel + at * g_place), mask=mask, other=0.0).to(tl.float32)
        value = tl.load(x + (line * x_channel + at * x_place), mask=mask, other=0.0).to(tl.float32)
        of_bias += given
        of_weight += given * ((value - middle) * factor)
    place = sample * C + channel
    tl.store(out + place, tl.sum(of_bias, 1), mask=inside)
    place += tl.num_programs(0).to(tl.int64) // blocks * C  # all samples
    tl.store(out + place, tl.sum(of_weight, 1), mask=inside)
