"""The sums for the weight and bias of a norm of channels: torch's own ops against float64, and the kernel against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eachgrad.kernels import channel_sums as kernel
from interpreter import assert_as_in_float64

# B, C, S, groups
SIZES = [
    (1, 1, 1, 1),
    (3, 6, 7, 2),
    (2, 4, 1030, 1),
    (2, 33, 5, 11),
    (1, 130, 3, 65),
    (2, 8, 64, 8),
    (0, 4, 5, 2),
    (2, 4, 0, 2),
]
DTYPES = [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
LAYOUTS = {
    "one after another": lambda t: t,
    "channels last": lambda t: t.mT.contiguous().mT,
    "apart": lambda t: torch.cat([t, t], 2)[:, :, : t.shape[2]],
}


def problem(size, dtypes):
    torch.manual_seed(sum(size))
    B, C, S, groups = size
    g, x = (torch.randn(B, C, S).add(shift).to(dtype) for dtype, shift in zip(dtypes, (0.3, 5.0), strict=True))
    return g, x, torch.randn(B, groups) + 5.0, torch.rand(B, groups) + 0.5


def check(g: Tensor, x: Tensor, mean: Tensor, scale: Tensor, found: Tensor) -> None:
    mean, scale = (t.double().repeat_interleave(g.shape[1] // t.shape[1], 1)[..., None] for t in (mean, scale))
    wide = g.double()
    want = torch.stack([wide.sum(2), (wide * (x.double() - mean) * scale).sum(2)])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, rtol=1e-6, atol=4e-6 * max(1.0, float(g.shape[2]) ** 0.5))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchs_own_ops(size, dtypes):
    g, x, mean, scale = problem(size, dtypes)
    for laid in LAYOUTS.values():
        check(g, x, mean, scale, torch.stack(kernel.channel_sums(laid(g), laid(x), mean, scale)))


def test_it_is_an_op():
    torch.library.opcheck(torch.ops.eachgrad.channel_sums.default, problem((2, 6, 5, 3), DTYPES[1]))


def test_others_are_refused():
    g, x, mean, scale = problem((2, 6, 5, 3), DTYPES[0])
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        kernel.channel_sums(g.double(), x, mean, scale)
    with pytest.raises(ValueError, match=r"must be \(B, C, S\)"):
        kernel.channel_sums(g, x[:, :, :2], mean, scale)
    with pytest.raises(ValueError, match=r"statistics are \(B, groups\) in float32"):
        kernel.channel_sums(g, x, mean, scale[:, :2])
    with pytest.raises(ValueError, match="6 channels are not 4 groups"):
        kernel.channel_sums(g, x, mean[:, :1].expand(2, 4), scale[:, :1].expand(2, 4))


def test_tiles_hold_as_many_numbers_as_are_said():
    for C, S in [(64, 1024), (512, 16), (1, 1), (2048, 49), (3, 12544)]:
        for by_channels in (True, False):
            channels, positions = kernel.tile(C, S, by_channels)
            assert channels * positions <= kernel.NUMBERS
    assert kernel.tile(64, 1024, False) == (2, 1024)
    assert kernel.tile(512, 16, False) == (128, 16)
    assert kernel.tile(512, 16, True) == (64, 16)


def interpreted() -> None:
    """The kernel on all cases; to be called where Triton's interpreter is on."""
    from test_kernel_convolution import Poisoned

    for size in SIZES:
        for dtypes in DTYPES:
            g, x, mean, scale = problem(size, dtypes)
            for laid in LAYOUTS.values():
                with Poisoned():
                    found = kernel.launched(laid(g), laid(x), mean, scale)
                check(g, x, mean, scale, found)
                assert not found.isnan().any()


def test_the_kernel_without_a_gpu():
    assert_as_in_float64("from test_kernel_channel_sums import interpreted; interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_on_a_gpu(size, dtypes):
    given = problem(size, dtypes)
    for laid in LAYOUTS.values():
        g, x, mean, scale = (t.cuda() for t in given)
        check(*given, torch.stack(kernel.channel_sums(laid(g), laid(x), mean, scale)).cpu())
