"""conv_squares, conv_gradients, conv_sum: gradients of a convolution's weight for each sample, with nothing unfolded.

An unfolded input is kh kw times as large: 600 MB for 64 channels of 32 x 32 under 3 x 3, 512 samples, in bfloat16. The
kernels read each window where it lies. Inputs x (B, C, H, W) and gradients of the outputs g (B, p, Ho, Wo) are of one
dtype, of sixteen bits or float32; `padding` is what lies before the input (top, left), and all that is read outside of
the input is zero. The Triton code is apart, as triton is there only where a GPU is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty

# The largest tile of a gradient, outputs by columns, and the positions read at a time; 3 of these are in flight. Of six
# tilings on an H200 this was the fastest, or within a quarter of it, for 16 of 20 layers of ResNet-18 and -50; squares ran
# at 150 to 380 TFLOP/s. In float32 they take twice the room, and the products are made without tensor cores.
OUTPUTS, COLUMNS, POSITIONS = 128, 128, 64
OUTPUTS_FLOAT32, COLUMNS_FLOAT32, POSITIONS_FLOAT32 = 64, 64, 32
WARPS, STAGES = 4, 3
PROGRAMS = 528  # that a sum is divided among, about: four for each multiprocessor of an H200

Ints = Sequence[int]  # a pair: down, across


class Tiling(NamedTuple):
    """How a kernel divides its work."""

    outputs: int
    columns: int
    positions: int
    warps: int
    stages: int


def tiling(p: int, columns: int, positions: int, dtype: torch.dtype) -> Tiling:
    """The tiles for a gradient of p by `columns` numbers over so many positions."""
    wide = dtype.itemsize > 2
    outputs = _block(p, OUTPUTS_FLOAT32 if wide else OUTPUTS)
    columns = _block(columns, COLUMNS_FLOAT32 if wide else COLUMNS)
    return Tiling(outputs, columns, _block(positions, POSITIONS_FLOAT32 if wide else POSITIONS), WARPS, STAGES)


def _block(n: int, most: int) -> int:
    return max(16, min(most, 1 << max(0, n - 1).bit_length()))


def _check(x: Tensor, g: Tensor) -> None:
    if x.dtype != g.dtype or x.dtype not in DTYPES:
        raise TypeError(f"x is {x.dtype} and g {g.dtype}; both must be of one of {', '.join(map(str, DTYPES))}")
    if x.ndim != 4 or g.ndim != 4 or x.shape[0] != g.shape[0]:
        raise ValueError(f"x {tuple(x.shape)} and g {tuple(g.shape)} must be (B, C, H, W) and (B, p, Ho, Wo)")


class _Launch:
    """The arguments of a kernel: both tensors with their channels last, all sizes, the tiles.

    A tile has positions of one sample if the answer is for `each`, otherwise of as many as fill it.
    """

    def __init__(self, x: Tensor, g: Tensor, window: tuple[Ints, ...], tiles: Tiling | None, each: bool = True) -> None:
        _check(x, g)
        self.x, self.g = x, g
        (self.B, C, H, W), (_, p, Ho, Wo) = x.shape, g.shape
        self.p, self.C, self.kernel, self.rows = p, C, tuple(window[0]), self.B * Ho * Wo
        self.columns = C * window[0][0] * window[0][1]
        # Inside of a sample the kernels count in 32 bits.
        if max(C * H * W, p * Ho * Wo, p * self.columns) >= 2**31:
            raise ValueError(f"a sample of x {tuple(x.shape)}, of g {tuple(g.shape)} or of the gradients is too large")
        self.tiles = tiles or tiling(p, self.columns, Ho * Wo if each else POSITIONS, x.dtype)
        self.grid = (-(-p // self.tiles.outputs), -(-self.columns // self.tiles.columns))
        self.sizes, self.window = (H, W, C, p, Ho, Wo), tuple(n for pair in window for n in pair)

    def squares(self) -> Tensor:
        """Room for what each tile adds to each sample's square: (B, tiles)."""
        return new_empty(self.x, (self.B, self.grid[0] * self.grid[1]), torch.float32)

    def sums(self, programs: int) -> tuple[Tensor, int]:
        """Room for the sums over as many parts of the positions as keep the device busy, and the tiles in each part.

        That is (parts, p, kh, kw, C). Of however many samples there are as many parts, and the last ones may be empty: one
        graph may be for any number of samples.
        """
        tiles = -(-self.rows // self.tiles.positions)
        parts = min(max(1, programs // (self.grid[0] * self.grid[1])), tiles)
        steps = -(-tiles // max(1, parts))
        return new_empty(self.x, (parts, self.p, *self.kernel, self.C), torch.float32), steps

    def __call__(self, kernel: Any, times: int, out: Tensor, *arguments: int) -> None:
        """Run the kernel `times` times for each tile."""
        blocks = {"BLOCK_P": self.tiles.outputs, "BLOCK_C": self.tiles.columns, "BLOCK_T": self.tiles.positions}
        options = {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages}
        programs = times * self.grid[0] * self.grid[1]
        x, g = (t.contiguous(memory_format=torch.channels_last) for t in (self.x, self.g))
        launch(kernel, programs, out, (x, g, out, *arguments, self.sizes, self.window, self.grid), blocks, **options)


def _channels_last(x: Tensor, B: int, p: int, C: int, kernel: Ints) -> Tensor:
    """Room for (B, p, C, kh, kw), with the channels last in memory, as the kernel writes them: in a row."""
    return new_empty(x, (B, p, *kernel, C)).permute(0, 1, 4, 2, 3)


def launched_squares(
    x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, tiles: Tiling | None = None
) -> Tensor:
    """The parts of `conv_squares` by its kernel."""
    from eachgrad.kernels.triton_convolution import squares_kernel

    launch = _Launch(x, g, (kernel, stride, padding, dilation), tiles)
    out = launch.squares()
    launch(squares_kernel, launch.B, out)
    return out


def launched_gradients(
    x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, tiles: Tiling | None = None
) -> Tensor:
    """`conv_gradients` by its kernel."""
    from eachgrad.kernels.triton_convolution import gradients_kernel

    launch = _Launch(x, g, (kernel, stride, padding, dilation), tiles)
    out = _channels_last(x, launch.B, launch.p, launch.C, kernel)
    launch(gradients_kernel, launch.B, out)
    return out


def launched_sum(
    x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, tiles: Tiling | None = None,
    programs: int = PROGRAMS,
) -> Tensor:  # fmt: skip
    """The parts of `conv_sum` by its kernel."""
    from eachgrad.kernels.triton_convolution import sum_kernel

    launch = _Launch(x, g, (kernel, stride, padding, dilation), tiles, each=False)
    out, steps = launch.sums(programs)
    launch(sum_kernel, len(out), out, launch.rows, steps)
    return out


def _unfolded(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """What the outputs read: (B, C kh kw, Ho Wo) in float32."""
    sides = zip(x.shape[2:], g.shape[2:], kernel, stride, padding, dilation, strict=True)
    # Before the input, and after it up to the last pixel that is read: fewer than there are, maybe.
    pads = [(before, (n - 1) * s + d * (k - 1) + 1 - size - before) for size, n, k, s, before, d in sides]
    padded = F.pad(x.to(torch.float32), [n for pair in reversed(pads) for n in pair])
    return F.unfold(padded, tuple(kernel), tuple(dilation), 0, tuple(stride))


def _exact(x: Tensor, g: Tensor, *window: Ints) -> Tensor:
    """(B, p, C, kh, kw) in float32."""
    _check(x, g)
    value = torch.einsum("bpt,bkt->bpk", g.flatten(2).to(torch.float32), _unfolded(x, g, *window))
    return value.reshape(len(x), g.shape[1], x.shape[1], *window[0])


def plain_squares(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The parts of `conv_squares` in torch's own ops: all of it in the first."""
    out = _Launch(x, g, (kernel, stride, padding, dilation), None).squares().zero_()
    out[:, 0] = _exact(x, g, kernel, stride, padding, dilation).square().flatten(1).sum(1)
    return out


def plain_gradients(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """`conv_gradients` in torch's own ops."""
    value = _exact(x, g, kernel, stride, padding, dilation)
    return _channels_last(x, len(x), g.shape[1], x.shape[1], kernel).copy_(value)


def plain_sum(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The parts of `conv_sum` in torch's own ops: all of it in the first."""
    out, _ = _Launch(x, g, (kernel, stride, padding, dilation), None, each=False).sums(PROGRAMS)
    patches = _unfolded(x, g, kernel, stride, padding, dilation)
    value = torch.einsum("bpt,bkt->pk", g.flatten(2).to(torch.float32), patches)
    if len(out):
        out.zero_()[0] = value.reshape(g.shape[1], x.shape[1], *kernel).permute(0, 2, 3, 1)
    return out


_WINDOW = "int[] kernel, int[] stride, int[] padding, int[] dilation"
_OPS = {
    "conv_squares": (plain_squares, launched_squares),
    "conv_gradients": (plain_gradients, launched_gradients),
    "conv_sum": (plain_sum, launched_sum),
}
for _name, (_plain, _launched) in _OPS.items():
    # With strides as they are in the graph, where channels are last: a compiler that was free to choose wrote most maps with
    # channels first, and the 22 copies here took 0.7 ms of ResNet-18's 14.3.
    library.define(f"{_name}(Tensor x, Tensor g, {_WINDOW}) -> Tensor", tags=(torch.Tag.needs_fixed_stride_order,))
    library.impl(_name, _plain, "CPU")
    library.impl(_name, _launched, "CUDA")


@torch.library.register_fake("eachgrad::conv_squares", lib=library)
def _(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return _Launch(x, g, (kernel, stride, padding, dilation), None).squares()


@torch.library.register_fake("eachgrad::conv_gradients", lib=library)
def _(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return _channels_last(x, x.shape[0], g.shape[1], x.shape[1], kernel)


@torch.library.register_fake("eachgrad::conv_sum", lib=library)
def _(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    return _Launch(x, g, (kernel, stride, padding, dilation), None, each=False).sums(PROGRAMS)[0]


def conv_squares(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """|gradient of sample b|^2 of the weight (p, C, kh, kw), in float32: (B,)."""
    # Parts are added here and not in the op: a compiler joins that with what comes next.
    op = torch.ops.eachgrad.conv_squares
    return direct(op, launched_squares, x, x, g, kernel, stride, padding, dilation).sum(1)


def conv_gradients(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The gradients of the samples (B, p, C, kh, kw), added in float32 and given in x's dtype."""
    op = torch.ops.eachgrad.conv_gradients
    return direct(op, launched_gradients, x, x, g, kernel, stride, padding, dilation)


def conv_sum(x: Tensor, g: Tensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Tensor:
    """The sum of the gradients of the samples, added and given in float32: (p, C, kh, kw)."""
    parts = direct(torch.ops.eachgrad.conv_sum, launched_sum, x, x, g, kernel, stride, padding, dilation)
    return parts.sum(0).permute(0, 3, 1, 2).contiguous()
