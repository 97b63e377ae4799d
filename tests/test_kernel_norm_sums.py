"""The sums for a norm's weight and bias: torch's own ops against float64, and the kernel against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eachgrad.kernels import norm_sums as kernel
from interpreter import assert_as_in_float64
from test_kernel_positions import LAYOUTS, laid

# B, T, n
SIZES = [(1, 1, 1), (3, 7, 5), (2, 130, 33), (3, 197, 24), (1, 300, 65), (2, 3, 0), (0, 4, 5), (2, 0, 3)]
TERMS = [
    (torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32) * 3,
]  # fmt: skip


def problem(size, dtypes, centred):
    torch.manual_seed(sum(size))
    g, *terms = (torch.randn(size).add(0.3).to(dtype) for dtype in (torch.bfloat16, *dtypes))
    statistics = [torch.randn(*size[:2], 1), torch.rand(*size[:2], 1) + 0.5]
    return g, terms, statistics[0] if centred else None, statistics[1]


def check(g: Tensor, terms: list[Tensor], mean: Tensor | None, scale: Tensor, parts: Tensor) -> None:
    x = sum(t.double() for t in terms)
    normal = (x if mean is None else x - mean.double()) * scale.double()
    assert parts.dtype == torch.float32
    slack = 4e-6 * len(terms) * max(1.0, float(g.shape[1]) ** 0.5)
    for found, want in zip(parts.sum(2).double(), (g.double().sum(1), (g.double() * normal).sum(1)), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-6, atol=slack)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("dtypes", TERMS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchs_own_ops(size, dtypes, centred):
    g, terms, mean, scale = problem(size, dtypes, centred)
    for kind in LAYOUTS:
        parts = torch.ops.eachgrad.norm_sums(laid(kind, g), [laid(kind, t) for t in terms], mean, scale)
        check(g, terms, mean, scale, parts)


def test_the_two_sums_of_one_input():
    g, (x,), mean, scale = problem((3, 197, 24), (torch.float32,), centred=True)
    of_bias, of_weight = kernel.norm_sums(g, x, mean, scale)
    assert of_bias.shape == of_weight.shape == (3, 24)
    check(g, [x], mean, scale, torch.stack([of_bias, of_weight])[:, :, None])


def test_it_is_an_op():
    for centred in (True, False):
        given = problem((2, 65, 5), (torch.float32, torch.bfloat16), centred)
        torch.library.opcheck(torch.ops.eachgrad.norm_sums.default, given)


def test_others_are_refused():
    g, terms, mean, scale = problem((2, 3, 4), (torch.float32,), centred=True)
    op = torch.ops.eachgrad.norm_sums
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        op(g.double(), terms, mean, scale)
    with pytest.raises(ValueError, match=r"must be \(B, T, n\)"):
        op(g, [terms[0][:, :2]], mean, scale)
    with pytest.raises(ValueError, match=r"statistics are \(B, T, 1\) in float32"):
        op(g, terms, mean, scale.squeeze(2))
    with pytest.raises(ValueError, match="1 to 6 terms, not 7"):
        op(g, terms * 7, mean, scale)


def interpreted() -> None:
    """The kernel on all cases; to be called where Triton's interpreter is on."""
    from test_kernel_convolution import Poisoned

    for size in SIZES:
        for dtypes in TERMS:
            for centred in (True, False):
                g, terms, mean, scale = problem(size, dtypes, centred)
                for kind in LAYOUTS:
                    given = laid(kind, g), [laid(kind, t) for t in terms], mean, scale
                    with Poisoned():
                        found = kernel.launched(*given)
                    check(g, terms, mean, scale, found)
                    assert not found.isnan().any()


def test_the_kernel_without_a_gpu():
    assert_as_in_float64("from test_kernel_norm_sums import interpreted; interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtypes", TERMS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_on_a_gpu(size, dtypes):
    g, terms, mean, scale = problem(size, dtypes, centred=True)
    given = g.cuda(), [t.cuda() for t in terms], mean.cuda(), scale.cuda()
    check(g, terms, mean, scale, torch.ops.eachgrad.norm_sums(*given).cpu())
