"""Gradients of a convolution's weight: torch's own ops against a loop in float64, and the kernels against both."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.kernels import convolution, library
from eachgrad.kernels.convolution import Tiling, conv_gradients, conv_squares, conv_sum
from interpreter import assert_as_in_float64
from oracle import error

Pair = tuple[int, int]
ALL = (conv_squares, conv_gradients, conv_sum)


class Case(NamedTuple):
    B: int
    C: int
    p: int
    size: Pair
    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    more: Pair = (0, 0)  # outputs beyond those of a convolution that pads both sides alike, or fewer

    @property
    def window(self) -> tuple[list[int], ...]:
        return tuple(list(pair) for pair in (self.kernel, self.stride, self.padding, self.dilation))

    @property
    def out(self) -> list[int]:
        sides = zip(self.size, *self.window, self.more, strict=True)
        return [(n + 2 * before - d * (k - 1) - 1) // s + 1 + more for n, k, s, before, d, more in sides]


CASES = {
    "1 x 1": Case(3, 8, 5, (4, 5), (1, 1)),
    "1 x 1, stride 2": Case(2, 20, 17, (6, 7), (1, 1), (2, 2)),
    "3 x 3": Case(3, 5, 18, (6, 5), (3, 3), padding=(1, 1)),
    "three channels, 7 x 7, stride 2": Case(2, 3, 10, (11, 9), (7, 7), (2, 2), (3, 3)),
    "stride 3, no padding": Case(2, 4, 3, (10, 11), (3, 3), (3, 3)),
    "1 x 5": Case(2, 6, 7, (4, 8), (1, 5), padding=(0, 2)),
    "strides, paddings, dilations apart": Case(2, 3, 4, (9, 12), (2, 3), (2, 1), (1, 0), (3, 2)),
    "dilation 2": Case(2, 4, 6, (7, 8), (3, 3), padding=(2, 2), dilation=(2, 2)),
    "padding above half the kernel": Case(2, 3, 5, (4, 3), (3, 3), (2, 2), (3, 3)),
    "padding that leaves outputs of nothing": Case(1, 2, 3, (2, 2), (1, 1), padding=(3, 3)),
    "more outputs than both sides padded": Case(2, 3, 4, (5, 6), (2, 4), padding=(0, 1), more=(1, 2)),
    "fewer outputs": Case(2, 3, 4, (6, 6), (3, 3), padding=(1, 1), more=(-2, -1)),
    "one sample": Case(1, 16, 33, (5, 4), (3, 3), padding=(1, 1)),
    "one position": Case(3, 4, 5, (3, 3), (3, 3)),
    "one channel": Case(2, 1, 1, (5, 6), (3, 3), padding=(1, 1)),
    "one tap a tile": Case(2, 32, 16, (3, 4), (2, 2), padding=(1, 1)),
}
# What a number may lose in the last rounding, to the dtype of the gradients.
LAST = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def problem(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(case.size) + case.C)
    return torch.randn(case.B, case.C, *case.size).to(dtype), torch.randn(case.B, case.p, *case.out).to(dtype)


def loop(case: Case, x: Tensor, g: Tensor) -> Tensor:
    """(B, p, C, kh, kw): each sample by torch's autograd, in float64."""
    value = []
    for one, back in zip(x.double(), g.double(), strict=True):
        weight = torch.zeros(case.p, case.C, *case.kernel, dtype=torch.float64, requires_grad=True)
        (top, left), far = case.padding, 20  # beyond all that is read
        out = F.conv2d(F.pad(one, [left, far, top, far])[None], weight, None, case.stride, 0, case.dilation)
        out = out[0, :, : back.shape[1], : back.shape[2]]
        value.append(torch.autograd.grad(out, weight, back)[0])
    return torch.stack(value)


def check(case: Case, x: Tensor, g: Tensor, squares: Tensor, gradients: Tensor, total: Tensor) -> None:
    """Three answers against the loop."""
    want = loop(case, x, g)
    assert squares.dtype == total.dtype == torch.float32
    assert gradients.dtype == x.dtype
    assert gradients.shape == want.shape
    torch.testing.assert_close(squares.double(), want.square().flatten(1).sum(1), rtol=1e-5, atol=0.0)
    near = 1e-5 * float(want.abs().max())
    torch.testing.assert_close(gradients.double(), want, rtol=LAST[x.dtype], atol=near)
    assert error(total, want.sum(0)) <= 1e-5


def laid(kind: str, t: Tensor) -> Tensor:
    """The same numbers with other strides."""
    if kind == "channels_last":
        return t.contiguous(memory_format=torch.channels_last)
    if kind == "sliced":
        wide = t.new_full((t.shape[0] + 1, t.shape[1] + 2, t.shape[2] * 2, t.shape[3] + 1), float("nan"))
        wide[1:, 1:-1, ::2, 1:] = t
        return wide[1:, 1:-1, ::2, 1:]
    return t.contiguous()


@pytest.mark.parametrize("dtype", LAST, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_torchs_own_ops(name, dtype):
    case = CASES[name]
    x, g = problem(case, dtype)
    for kind in ("contiguous", "channels_last", "sliced"):
        a, b = laid(kind, x), laid(kind, g)
        check(case, x, g, *(f(a, b, *case.window) for f in ALL))


def test_no_samples():
    case = CASES["3 x 3"]
    x, g = (t[:0] for t in problem(case, torch.bfloat16))
    assert conv_squares(x, g, *case.window).shape == (0,)
    assert conv_gradients(x, g, *case.window).shape == (0, case.p, case.C, 3, 3)
    assert torch.equal(conv_sum(x, g, *case.window), torch.zeros(case.p, case.C, 3, 3))


def test_other_dtypes_are_refused():
    case = CASES["3 x 3"]
    x, g = problem(case, torch.float32)
    for a, b in ((x.double(), g.double()), (x, g.bfloat16())):
        for answer in ALL:
            with pytest.raises(TypeError, match="both must be of one of"):
                answer(a, b, *case.window)
    with pytest.raises(ValueError, match=r"must be \(B, C, H, W\)"):
        conv_squares(x[:1], g, *case.window)


@pytest.mark.parametrize("kind", ["contiguous", "channels_last"])
def test_they_are_ops(kind):
    case = CASES["3 x 3"]
    x, g = (laid(kind, t) for t in problem(case, torch.bfloat16))
    assert conv_sum(x, g, *case.window).is_contiguous()
    for op in ("conv_squares", "conv_gradients", "conv_sum"):
        torch.library.opcheck(getattr(torch.ops.eachgrad, op).default, (x, g, *case.window))


def test_tiles_fit_what_there_is():
    assert convolution.tiling(1000, 5000, 1000, torch.bfloat16)[:3] == (128, 128, 64)
    assert convolution.tiling(3, 27, 1, torch.float16)[:3] == (16, 32, 16)
    assert convolution.tiling(65, 64, 17, torch.float32)[:3] == (64, 64, 32)


# The smallest tiles, so that small cases have several, and those chosen.
TILINGS = (Tiling(16, 16, 16, 4, 1), None)


def surrounded(t: Tensor) -> Tensor:
    """t with its channels last, between numbers that nobody may read."""
    B, C, H, W = t.shape
    wide = torch.full((t.numel() + 2000,), float("nan"), dtype=t.dtype)
    value = wide[1000:-1000].view(B, H, W, C).permute(0, 3, 1, 2)
    value.copy_(t)
    assert value.contiguous(memory_format=torch.channels_last).data_ptr() == value.data_ptr()
    return value


class Poisoned:
    """In place of the memory of ops: memory full of NaN, with some around it that nobody may write."""

    def __init__(self) -> None:
        self.made, self.ordinary, self.ops = [], Tensor.new_empty, library.empty_strided_cpu

    def __enter__(self) -> Poisoned:
        Tensor.new_empty = lambda like, *size, **options: self.empty(like, *size, **options)
        library.empty_strided_cpu = lambda size, stride, dtype: self.empty(torch.empty(0, dtype=dtype), size)
        return self

    def empty(self, like: Tensor, *size, **options) -> Tensor:
        shape = torch.empty(*size, device="meta").shape
        if not like.is_floating_point():  # of the interpreter itself
            return self.ordinary(like, *size, **options)
        wide = self.ordinary(like, shape.numel() + 2000, **options).fill_(float("nan"))
        self.made.append(wide)
        return wide[1000:-1000].view(shape)

    def __exit__(self, *_) -> None:
        Tensor.new_empty, library.empty_strided_cpu = self.ordinary, self.ops
        assert self.made
        for wide in self.made:
            assert wide[:1000].isnan().all()
            assert wide[-1000:].isnan().all()


def interpreted() -> None:
    """The kernels on all cases; to be called where Triton's interpreter is on."""
    for name, case in CASES.items():
        # The interpreter multiplies bfloat16 as if the bits were whole numbers: float16 stands in for it.
        for dtype in (torch.float32, torch.float16):
            for tiles in TILINGS:
                x, g = problem(case, dtype)
                a, b = surrounded(x), surrounded(g)
                with Poisoned():
                    squares = convolution.launched_squares(a, b, *case.window, tiles).sum(1)
                    gradients = convolution.launched_gradients(a, b, *case.window, tiles)
                    total = whole(convolution.launched_sum(a, b, *case.window, tiles, programs=40))
                check(case, x, g, squares, gradients, total)
                assert error(total, whole(convolution.plain_sum(x, g, *case.window))) <= 1e-5, name
                assert gradients.permute(0, 1, 3, 4, 2).is_contiguous()
    empty_and_infinite()


def whole(parts: Tensor) -> Tensor:
    """(parts, p, kh, kw, C) as one gradient."""
    return parts.sum(0).permute(0, 3, 1, 2)


def empty_and_infinite() -> None:
    case = CASES["3 x 3"]
    x, g = problem(case, torch.float32)
    assert convolution.launched_squares(x[:0], g[:0], *case.window).shape[0] == 0
    assert len(convolution.launched_sum(x[:0], g[:0], *case.window)) == 0
    # An infinite sample is infinite, not NaN, and leaves the others alone; its tile is larger than its gradient.
    want = convolution.launched_squares(x, g.abs() + 1, *case.window).sum(1)
    x[1, 0, 2, 2] = float("inf")
    got = convolution.launched_squares(x, g.abs() + 1, *case.window).sum(1)
    assert got[1] == float("inf")
    assert torch.equal(got[::2], want[::2])


def test_by_their_kernels_without_a_gpu():
    """Everything is written, nothing beyond the ends, and nothing around the inputs is read."""
    assert_as_in_float64("import test_kernel_convolution as t; t.interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", LAST, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_by_their_kernels(name, dtype):
    case = CASES[name]
    x, g = problem(case, dtype)
    for kind in ("contiguous", "channels_last", "sliced"):
        a, b = laid(kind, x.cuda()), laid(kind, g.cuda())
        check(case, x, g, *(f(a, b, *case.window).cpu() for f in ALL))
