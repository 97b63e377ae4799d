"""Squared norms by Grams: torch's own ops against gradients in float64, and the kernel against both."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from eachgrad.kernels import gram
from eachgrad.kernels.gram import Tiling, gram_norms
from interpreter import assert_as_in_float64
from test_kernel_convolution import Poisoned

# B, T, p, d
SIZES = [
    (3, 1, 5, 7),
    (2, 2, 33, 1),
    (1, 17, 24, 40),
    (3, 17, 19, 70),
    (2, 64, 64, 128),
    (2, 65, 72, 31),
    (2, 65, 88, 16),
    (1, 130, 65, 130),
    (2, 197, 96, 64),
    (2, 300, 8, 64),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(size: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    B, T, p, d = size
    torch.manual_seed(T + p)
    # A part common to all positions, so that norms are not what rows alone would give.
    left, right = (torch.randn(B, T, n) + torch.randn(B, 1, n) for n in (p, d))
    return left.to(dtype), right.to(dtype)


def check(left: Tensor, right: Tensor, total: Tensor, bound: Tensor, far: float = 1e-6) -> None:
    """Two answers against gradients and Grams in float64."""
    a, b = left.double(), right.double()
    want = (a.mT @ b).square().sum((1, 2))
    sizes = ((a @ a.mT) * (b @ b.mT)).abs().sum((1, 2))
    assert total.dtype == bound.dtype == torch.float32
    assert total.shape == bound.shape == want.shape
    # Terms of this size are added: what is left of them where they cancel is no more exact than they are.
    assert ((total.double() - want).abs() <= far * sizes).all()
    torch.testing.assert_close(bound.double(), sizes, rtol=1e-5, atol=0.0)
    assert (bound >= total.abs() * (1 - 1e-6)).all()


def laid(kind: str, t: Tensor) -> Tensor:
    """The same numbers with other strides, between others that nobody may read; "apart" and "positions first" have
    rows at multiples of sixteen bytes."""
    B, T, n = t.shape
    wide = 8 + n + -n % 8
    if kind == "apart":
        room = t.new_full((B + 1, T + 3, wide), float("nan"))[:B, :T, :n]
    elif kind == "positions first":
        room = t.new_full((T + 1, B + 1, wide), float("nan"))[1:, 1:, :n].transpose(0, 1)
    elif kind == "odd":
        room = t.new_full((B + 1, T + 1, n + 3), float("nan"))[1:, 1:, 1 : n + 1]
    else:
        room = t.new_full((B, n + 1, T + 1), float("nan"))[:, 1:, 1:].mT
    return room.copy_(t)


KINDS = ("apart", "positions first", "odd", "columns in a row")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchs_own_ops(size, dtype):
    left, right = problem(size, dtype)
    check(left, right, *gram_norms(left, right))
    for kind in KINDS:
        check(left, right, *gram_norms(laid(kind, left), laid(kind, right)))


def cancelling() -> tuple[Tensor, Tensor]:
    """Three samples: gradients that cancel all, but for a little, and not at all."""
    torch.manual_seed(0)
    left, right = (torch.randn(3, 70, n, dtype=torch.float16) for n in (24, 40))
    left[:, 35:] = left[:, :35]
    right[:2, 35:] = -right[:2, :35]
    right[1, 0] *= 1.5
    return left, right


def check_cancelling(total: Tensor, bound: Tensor) -> None:
    left, right = cancelling()
    check(left, right, total, bound)
    assert (total[:2] < 1e-3 * bound[:2]).all()
    assert total[2] > 0.02 * bound[2]
    assert (bound > 0).all()


def test_cancelling_gradients():
    check_cancelling(*gram_norms(*cancelling()))


def test_nothing():
    """No samples, no positions, no outputs."""
    left, right = problem((3, 17, 19, 70), torch.bfloat16)
    for a, b, shape in ((left[:0], right[:0], (0,)), (left[:, :0], right[:, :0], (3,)), (left[..., :0], right, (3,))):
        for answer in gram_norms(a, b):
            assert torch.equal(answer, torch.zeros(shape))


def test_others_are_refused():
    left, right = problem((3, 17, 19, 70), torch.float32)
    for a, b in ((left.double(), right.double()), (left, right.bfloat16())):
        with pytest.raises(TypeError, match="both must be of one of"):
            gram_norms(a, b)
    for a, b in ((left[:1], right), (left[:, :3], right), (left[0], right[0])):
        with pytest.raises(ValueError, match=r"must be \(B, T, p\)"):
            gram_norms(a, b)


def test_it_is_an_op():
    for size in ((3, 17, 19, 70), (2, 197, 96, 64)):
        left, right = problem(size, torch.bfloat16)
        torch.library.opcheck(torch.ops.eachgrad.gram_norms.default, (left, right))
        torch.library.opcheck(torch.ops.eachgrad.gram_norms.default, (laid("positions first", left), right))


def test_tiles_fit_what_there_is():
    assert gram.tiling(197, 3072, torch.bfloat16)[:3] == (128, 128, 8)
    assert gram.tiling(50, 20, torch.float16)[:3] == (64, 32, 4)
    assert gram.tiling(1, 1, torch.bfloat16)[:3] == (16, 16, 4)
    assert gram.tiling(197, 3072, torch.float32)[:3] == (64, 32, 4)


@pytest.mark.parametrize("side", range(7))
def test_every_tile_up_to_the_diagonal_comes_once(side):
    assert sorted(gram.order(side)) == [(i, j) for i in range(side) for j in range(i, side)]


# Small tiles, so that small cases have several, and those chosen; copied by threads, and whole where rows allow it.
SMALL = (Tiling(16, 16, 4, 1, bulk=False), Tiling(16, 16, 4, 1, bulk=True), None)
LARGE = (Tiling(64, 64, 4, 1, bulk=False), None)


def interpreted() -> None:
    """The kernel on all sizes; to be called where Triton's interpreter is on."""
    bulk = []
    for size in SIZES:
        # The interpreter multiplies bfloat16 as if the bits were whole numbers: float16 stands in for it.
        for dtype in (torch.float32, torch.float16):
            left, right = problem(size, dtype)
            for tiles in LARGE if size[1] > 17 else SMALL:
                want = gram.plain(left, right, tiles)
                for kind in KINDS:
                    a, b = laid(kind, left), laid(kind, right)
                    bulk.append(gram._is_bulk(a) and gram._is_bulk(b))
                    with Poisoned():
                        parts = gram.launched(a, b, tiles)
                    # Tile by tile, the sizes in parts[1]: a total may cancel.
                    assert parts.shape == want.shape
                    assert ((parts - want).abs() <= 1e-5 * want[1]).all(), (size, dtype, tiles, kind)
                    check(left, right, *parts.sum(2).unbind())
    assert 0 < sum(bulk) < len(bulk)
    check_cancelling(*gram.launched(*cancelling()).sum(2).unbind())
    nothing_read_beyond_the_end()
    empty_and_infinite()


def last_in_memory(t: Tensor) -> Tensor:
    """t before a page that may not be read: whoever does is ended."""
    size = t.nbytes + -t.nbytes % mmap.PAGESIZE
    room = mmap.mmap(-1, size + mmap.PAGESIZE)
    end = ctypes.addressof(ctypes.c_char.from_buffer(room)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(end), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return torch.frombuffer(room, dtype=t.dtype, count=t.numel(), offset=size - t.nbytes).view(t.shape).copy_(t)


def nothing_read_beyond_the_end() -> None:
    for size in ((3, 17, 19, 70), (2, 65, 88, 16)):
        left, right = problem(size, torch.float16)
        for tiles in SMALL:
            parts = gram.launched(last_in_memory(left), last_in_memory(right), tiles)
            check(left, right, *parts.sum(2).unbind())


def empty_and_infinite() -> None:
    left, right = problem((3, 17, 24, 40), torch.float32)
    for a, b in ((left[:0], right[:0]), (left[:, :0], right[:, :0]), (left[..., :0], right)):
        assert not gram.launched(a, b).sum(2).any()
    # An infinite sample is infinite, not NaN, and leaves the others alone; its tile is larger than its Grams.
    want = gram.launched(left.abs() + 1, right.abs() + 1)
    left[1, 3, 2] = float("inf")
    got = gram.launched(left.abs() + 1, right.abs() + 1)
    assert (got[:, 1].sum(1) == float("inf")).all()
    assert torch.equal(got[:, ::2], want[:, ::2])


def test_by_its_kernel_without_a_gpu():
    """Everything is written, nothing beyond the ends, and nothing around the factors is read."""
    assert_as_in_float64("import test_kernel_gram as t; t.interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_by_its_kernel(size, dtype):
    left, right = problem(size, dtype)
    for kind in KINDS:
        a, b = laid(kind, left.cuda()), laid(kind, right.cuda())
        check(left, right, *(t.cpu() for t in gram_norms(a, b)), far=1e-5)  # tensor cores cut sums off
