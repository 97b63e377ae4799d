"""Kernels against the eager code that says what they compute, and that against float64."""

from __future__ import annotations

import pytest
import torch

from eachgrad.kernels import signals, weighted
from interpreter import assert_as_in_float64

SIZES = [(1, 1), (3, 7), (5, weighted.BLOCK), (2, weighted.BLOCK + 1), (4, 3 * weighted.BLOCK - 5)]


def problem(B: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(B * n)
    return torch.rand(B), torch.randn(B, n).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_weighted_in_torchs_own_ops(size, dtype):
    c, value = problem(*size, dtype)
    want = c.double() @ value.double()
    torch.testing.assert_close(weighted.weighted(c, value).double(), want, rtol=1e-5, atol=1e-5)
    assert weighted.weighted(c, value).dtype == torch.float32


def test_weighted_is_an_op():
    c, value = problem(3, 7, torch.bfloat16)
    torch.library.opcheck(torch.ops.eachgrad.weighted.default, (c, value))
    torch.library.opcheck(torch.ops.eachgrad.signal.default, (torch.tensor(True), [value, c], 0))


INTERPRETED = """
import torch, triton
from eachgrad.kernels.triton_weighted import weighted_kernel
from eachgrad.kernels.weighted import launched
from test_kernels import SIZES, problem
for dtype in (torch.float32, torch.bfloat16):
    for B, n in SIZES:
        c, value = problem(B, n, dtype)
        apart = torch.full((B, n + 3), float("nan"), dtype=dtype)
        apart[:, :n] = value
        for given in (value, apart[:, :n]):
            for block in (16, 2048):
                out = torch.full((n + 4,), float("nan"))
                weighted_kernel[(-(-n // block),)](c, given, out, B, n, given.stride(0), BLOCK=block)
                torch.testing.assert_close(out[:n].double(), c.double() @ value.double(), rtol=1e-5, atol=1e-5)
                assert out[n:].isnan().all()
c, value = problem(3, 5 * 7, torch.bfloat16)
wide = torch.full((3, 6, 7), float("nan"), dtype=torch.bfloat16)
wide[:, :5] = value.view(3, 5, 7)
found = launched(c, wide[:, :5])  # samples lie apart
torch.testing.assert_close(found.double(), (c.double() @ value.double()).view(5, 7), rtol=1e-5, atol=1e-5)
torch.testing.assert_close(launched(c, wide[:, :5].mT), found.mT)
"""


def test_weighted_by_its_kernel_without_a_gpu():
    """Every number is written, and none beyond the end; rows may lie apart."""
    assert_as_in_float64(INTERPRETED)


def test_flags_reach_the_host():
    slots = [signals.Slot() for _ in range(3)]
    for flags in ((True, False, True), (False, False, True)):
        for slot in slots:
            slot.clear()
        for flag, slot in zip(flags, slots, strict=True):
            through = torch.randn(3)
            settled, (passed,) = signals.signal(torch.tensor(flag), [through], slot)
            assert bool(settled) is flag
            assert torch.equal(passed, through)
        assert [slot.wait() for slot in slots] == list(flags)


def test_a_flag_that_does_not_come_counts_as_raised():
    slot = signals.Slot()
    slot.clear()
    signals.signal(torch.tensor(False), [], slot)
    assert slot.wait() is False
    slot.clear()
    assert slot.wait() is True
    torch.ops.eachgrad.signal(torch.tensor(False), [], 10**9)  # nobody listens
