"""Sums over positions for many layers in one launch: the eager code against float64, and the kernel against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eachgrad.kernels import many_positions
from interpreter import assert_as_in_float64

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
WIDTHS = [1, 7, 64, 65, 128, 40, 200, 63, 8]


def problem(count: int, dtype: torch.dtype, B: int = 3, T: int = 70, odd: bool = True) -> list[Tensor]:
    """So many (B, T, n), with NaN between the samples of some, and not all at a multiple of sixteen bytes."""
    torch.manual_seed(count)
    found = []
    for k in range(count):
        n = WIDTHS[k % len(WIDTHS)]
        n, gap, before = (n, (0, 3, 16)[k % 3], k % 2) if odd else (n + -n % 8, (0, 16)[k % 2], 0)
        memory = torch.full((before + B * (T * n + gap) + 9,), NAN, dtype=dtype)
        found.append(memory.as_strided((B, T, n), (T * n + gap, n, 1), before).copy_(torch.randn(B, T, n)))
    return found


def assert_right(values: list[Tensor], found: list[Tensor]) -> None:
    assert len(found) == len(values)
    for value, sums in zip(values, found, strict=True):
        wide = value.double()
        assert sums.dtype == torch.float32
        assert sums.shape == (len(value), value.shape[2])
        assert bool(((sums - wide.sum(1)).abs() <= 1e-6 * wide.abs().sum(1)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 9, 70])
def test_in_torchs_own_ops(count, dtype):
    values = problem(count, dtype)
    assert_right(values, many_positions.position_sums_of_many(values))


def test_one_percent_is_seen():
    values = problem(5, torch.float32)
    found = many_positions.position_sums_of_many(values)
    values[3][1, 69, 2] += 0.01 * values[3][1, :, 2].abs().sum()
    with pytest.raises(AssertionError):
        assert_right(values, found)


@pytest.mark.parametrize("wrong", ["positions", "dtype", "rows", "columns"])
def test_what_the_kernel_would_read_wildly_is_refused(wrong):
    one = torch.randn(2, 4, 8)
    other = {
        "positions": torch.randn(2, 5, 8), "dtype": one.double(), "rows": torch.randn(2, 4, 16)[:, :, :8],
        "columns": torch.randn(2, 8, 4).mT,
    }[wrong]  # fmt: skip
    with pytest.raises(ValueError, match="position_sums_of_many takes"):
        many_positions.position_sums_of_many([one, other])


def test_as_an_op():
    torch.library.opcheck(torch.ops.eachgrad.position_sums_of_many.default, (problem(3, torch.float32),))


@pytest.mark.parametrize("odd", [True, False], ids=["odd", "aligned"])
def test_in_the_interpreter(odd):
    assert_as_in_float64(f"""
import torch
from eachgrad.kernels import many_positions
from test_kernel_many_positions import assert_right, problem
many_positions.MOST = 16
own = many_positions.new_empty
many_positions.new_empty = lambda *given: own(*given).fill_(float("nan"))
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for count in (1, 5, 18):
        values = problem(count, dtype, odd={odd})
        found, starts = many_positions.launched(values), many_positions._first(values)
        many_positions.direct = lambda op, launched, like, *args: launched(*args)
        assert_right(values, many_positions.position_sums_of_many(values) if count <= 16 else [
            part for k in (0, 16) for part in many_positions.position_sums_of_many(values[k : k + 16])])
""")


def _there(value: Tensor) -> Tensor:
    """The same on a GPU, with all that lies around it."""
    memory = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    return memory.cuda().as_strided(value.shape, value.stride(), value.storage_offset())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("odd", [True, False], ids=["odd", "aligned"])
def test_on_a_gpu(dtype, odd):
    values = [_there(value) for value in problem(70, dtype, T=197, odd=odd)]
    assert_right(values, many_positions.position_sums_of_many(values))
