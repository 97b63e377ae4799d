"""Squared norms by Grams: torch's own ops against gradients in float64, and the kernel against both."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from unittest import mock

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
MANY = torch.ops.eachgrad.gram_norms_of_many


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


# Widths of pairs: alike, one wider than a step of the other, not aligned, one alone that has other tiles.
WIDTHS = [(24, 40), (16, 88), (8, 16), (19, 70), (40, 24), (200, 33), (1, 1)]


def problems(B: int, T: int, dtype: torch.dtype, widths=WIDTHS) -> tuple[list[Tensor], list[Tensor]]:
    given = [problem((B, T, p, d), dtype) for p, d in widths]
    return [left for left, _ in given], [right for _, right in given]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [1, 17, 130])
def test_many_in_torchs_own_ops(T, dtype):
    lefts, rights = problems(3, T, dtype)
    found = MANY(lefts, rights)
    for left, right, parts in zip(lefts, rights, found, strict=True):
        assert torch.equal(parts, gram.gram_parts(left, right))
        check(left, right, *parts.sum(2).unbind())


def test_many_of_nothing():
    lefts, rights = problems(3, 17, torch.bfloat16)
    assert MANY([t[:0] for t in lefts], [t[:0] for t in rights]).shape == (len(WIDTHS), 2, 0, 1)
    assert MANY([t[:, :0] for t in lefts], [t[:, :0] for t in rights]).shape == (len(WIDTHS), 2, 3, 0)
    assert not MANY([t[..., :0] for t in lefts], rights).any()


def test_pairs_that_are_not_alike_are_refused():
    lefts, rights = problems(3, 17, torch.bfloat16, WIDTHS[:2])
    with pytest.raises(ValueError, match="no pairs"):
        gram.plain_of_many([], [])
    with pytest.raises(ValueError, match="no pairs"):
        MANY(lefts, rights[:1])
    for change in (lambda t: t[:2], lambda t: t[:, :16], lambda t: t.half()):
        with pytest.raises(ValueError, match="one B, T, dtype and device"):
            MANY([lefts[0], change(lefts[1])], [rights[0], change(rights[1])])
    with pytest.raises(TypeError, match="both must be of one of"):
        MANY([t.double() for t in lefts], [t.double() for t in rights])


def test_many_is_an_op():
    for B, T in ((3, 17), (2, 130)):
        lefts, rights = problems(B, T, torch.bfloat16, WIDTHS[:5])
        torch.library.opcheck(MANY.default, (lefts, rights))
        torch.library.opcheck(MANY.default, ([laid("positions first", t) for t in lefts], rights))


def test_many_of_any_number_of_samples():
    """The number of samples is left open, and no guard is made of it."""
    given = problems(5, 17, torch.bfloat16, WIDTHS[:3])
    run = torch.compile(lambda lefts, rights: MANY(lefts, rights).sum(3), backend="aot_eager", fullgraph=True)
    for t in (*given[0], *given[1]):
        torch._dynamo.mark_dynamic(t, 0)
    for B in (5, 3, 9):
        some = problems(B, 17, torch.bfloat16, WIDTHS[:3])
        lefts, rights = given if B == 5 else some
        with torch.compiler.set_stance("default" if B == 5 else "fail_on_recompile"):
            assert torch.equal(run(lefts, rights), MANY(lefts, rights).sum(3))


def test_tiles_fit_what_there_is():
    assert gram.tiling(1024, 3072, torch.bfloat16)[:3] == (128, 128, 8)
    assert gram.tiling(50, 20, torch.float16)[:3] == (64, 32, 4)
    assert gram.tiling(1, 1, torch.bfloat16)[:3] == (16, 16, 4)
    assert gram.tiling(197, 3072, torch.float32)[:3] == (64, 32, 4)
    parts = {T: gram.tiling(T, 768, torch.float16).parts for T in (64, 65, 80, 81, 128, 129, 197, 208, 209, 256)}
    assert parts == {64: 0, 65: 1, 80: 1, 81: 0, 128: 0, 129: 2, 197: 2, 208: 2, 209: 0, 256: 0}
    assert not gram.tiling(197, 768, torch.float32).parts


def test_blocks_of_few_positions():
    found = [gram.blocks(T) for T in (64, 65, 80, 128, 129, 144, 145, 192, 193, 208)]
    assert found == [(1, 0), (1, 16), (1, 16), (2, 0), (2, 16), (2, 16), (3, 0), (3, 0), (3, 16), (3, 16)]


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


# Positions and in how many parts: one block to three, with a tail and without, at its edges.
SHORT = [(65, 1), (80, 1), (128, 2), (129, 2), (144, 2), (145, 2), (192, 2), (193, 2), (197, 2), (208, 2)]


def interpreted_short() -> None:
    """Samples of few positions in as many parts as there may be."""
    for (T, parts), bulk in itertools.product(SHORT, (False, True)):
        tiles = Tiling(64, 16, 4, 1, bulk, parts)
        # The wider on either side: the kernel takes it first.
        for B, p, d, dtype, kind in ((1, 24, 40, torch.float16, "apart"), (2, 33, 17, torch.float32, "odd")):
            left, right = problem((B, T, p, d), dtype)
            want = gram.plain(left, right, tiles)
            with Poisoned():
                found = gram.launched(laid(kind, left), laid(kind, right), tiles)
            assert found.shape == want.shape == (2, B, parts)
            assert ((found - want).abs() <= 1e-5 * want[1]).all(), (T, tiles, p, kind)
            check(left, right, *found.sum(2).unbind())
    for T, parts, bulk in ((65, 1, True), (129, 2, True), (197, 2, False), (197, 2, True)):
        infinite_at_the_edge(T, Tiling(64, 16, 4, 1, bulk, parts))
    lefts, rights = problems(2, 197, torch.float16, [(24, 8), (16, 8), (19, 20), (33, 1), (8, 24), (8, 16)])
    tiles = Tiling(64, 16, 4, 1, bulk=True, parts=2)
    a, b = ([laid(KINDS[k % 3], t) for k, t in enumerate(ts)] for ts in (lefts, rights))
    with Poisoned():
        found = gram.launched_of_many(a, b, tiles)
    assert torch.equal(found, torch.stack([gram.launched(x, y, tiles) for x, y in zip(a, b, strict=True)]))
    last = [[last_in_memory(t) for t in ts] for ts in (lefts, rights)]
    assert torch.equal(gram.launched_of_many(*last, tiles), gram.launched_of_many(lefts, rights, tiles))


def infinite_at_the_edge(T: int, tiles: Tiling) -> None:
    """An infinite sample is infinite, not NaN, and leaves the others alone: rows that are not there are zeros."""
    left, right = (t.abs() + 1 for t in problem((3, T, 8, 16), torch.float16))
    want = gram.launched(left, right, tiles)
    for row in (0, T - 1):
        other = left.clone()
        other[1, row, 2] = float("inf")
        got = gram.launched(other, right, tiles)
        assert (got[:, 1].sum(1) == float("inf")).all()
        assert torch.equal(got[:, ::2], want[:, ::2])


def interpreted_many() -> None:
    """Several pairs of one launch, or of several: to the last bit what each of them is by itself."""
    # Widths small, as the interpreter is slow; with three tiles a side more than one turn of samples.
    widths = [(24, 40), (16, 8), (19, 20), (33, 1), (8, 48), (40, 24)]
    for B, T, dtype, some in (
        (1, 1, torch.float16, SMALL),
        (3, 17, torch.float32, SMALL[:1]),
        (10, 33, torch.float16, SMALL[1:2]),
        (3, 50, torch.float16, SMALL[2:]),
    ):
        lefts, rights = problems(B, T, dtype, widths)
        for tiles, kinds in itertools.product(some, (("apart",), KINDS) if B == 1 else (KINDS[:3],)):
            a, b = ([laid(kinds[k % len(kinds)], t) for k, t in enumerate(ts)] for ts in (lefts, rights))
            with Poisoned():
                found = gram.launched_of_many(a, b, tiles)
            alone = torch.stack([gram.launched(x, y, tiles) for x, y in zip(a, b, strict=True)])
            assert torch.equal(found, alone), (B, T, dtype, tiles, kinds)
            for left, right, parts in zip(lefts, rights, found, strict=True):
                check(left, right, *parts.sum(2).unbind())
    many_at_the_edge(*problems(2, 17, torch.float16, widths))


def many_at_the_edge(lefts: list[Tensor], rights: list[Tensor]) -> None:
    """Nothing is read beyond the end, and there may be nothing."""
    last = [[last_in_memory(t) for t in ts] for ts in (lefts, rights)]
    for tiles in SMALL[:2]:
        assert torch.equal(gram.launched_of_many(*last, tiles), gram.launched_of_many(lefts, rights, tiles))
    for cut in ((slice(0), slice(None)), (slice(None), slice(0))):
        assert not gram.launched_of_many([t[cut] for t in lefts], [t[cut] for t in rights]).numel()
    assert not gram.launched_of_many([t[..., :0] for t in lefts], rights).any()


def launches(lefts: list[Tensor], rights: list[Tensor], tiles: Tiling | None = None) -> list[list[int]]:
    """Which pairs each launch has."""
    found = []
    with mock.patch.object(gram, "_launch", lambda pairs, out: found.append([pair.place for pair in pairs])):
        gram.launched_of_many(lefts, rights, tiles)
    return found


def test_the_widest_pairs_of_a_kind_go_first():
    widths = [(64, 128), (128, 512), (128, 128), (512, 128), (384, 128), (130, 128), (32, 16), (130, 130), (128, 131)]
    lefts, rights = problems(2, 65, torch.bfloat16, widths)
    # Four at a time; what cannot be copied in bulk is by itself, and so is what has other tiles.
    assert launches(lefts, rights) == [[1, 3, 4, 2], [0], [7, 8, 5], [6]]
    # Of what has to be copied first, one copy is there at a time.
    lefts[3], lefts[7] = (laid("columns in a row", lefts[k]) for k in (3, 7))
    assert launches(lefts, rights) == [[3], [7], [1, 4, 2, 0], [8, 5], [6]]


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


def test_few_positions_by_their_kernels_without_a_gpu():
    assert_as_in_float64("import test_kernel_gram as t; t.interpreted_short()")


def test_many_by_their_kernel_without_a_gpu():
    assert_as_in_float64("import test_kernel_gram as t; t.interpreted_many()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("T", [1, 50, 197, 300])
def test_many_by_their_kernel(T, dtype):
    lefts, rights = problems(5, T, dtype, [*WIDTHS, (256, 128), (128, 384), (512, 128), (128, 128), (96, 64)])
    for kinds in (("apart",), KINDS):
        a, b = ([laid(kinds[k % len(kinds)], t.cuda()) for k, t in enumerate(ts)] for ts in (lefts, rights))
        found = MANY(a, b)
        assert torch.equal(found, torch.stack([gram.gram_parts(x, y) for x, y in zip(a, b, strict=True)]))
        for left, right, parts in zip(lefts, rights, found.cpu(), strict=True):
            check(left, right, *parts.sum(2).unbind(), far=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_by_its_kernel(size, dtype):
    left, right = problem(size, dtype)
    for kind in KINDS:
        a, b = laid(kind, left.cuda()), laid(kind, right.cuda())
        check(left, right, *(t.cpu() for t in gram_norms(a, b)), far=1e-5)  # tensor cores cut sums off
