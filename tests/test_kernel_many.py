"""Norms and weighted sums of many gradients in one launch: the eager code against float64, and the kernels against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eachgrad.kernels import library, many
from interpreter import assert_as_in_float64

NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Smaller than a block, a block, a run, and on either side of them, with blocks of 16 and runs of 64 in the interpreter.
SIZES = [1, 7, 16, 17, 63, 64, 65, 128, 200]
TILES, RUN = many.Tiles(16, 4, 2), 64


def lying(value: Tensor, gap: int, before: int) -> Tensor:
    """The same numbers with NaN before, between and after the samples."""
    B, n = len(value), value[:1].numel()
    memory = torch.full((before + B * (n + gap) + 9,), NAN, dtype=value.dtype)
    found = memory.as_strided(value.shape, (n + gap, *value.stride()[1:]), before)
    return found.copy_(value)


def problem(count: int, dtype: torch.dtype, B: int = 3, sizes=SIZES, odd: bool = True) -> tuple[Tensor, list[Tensor]]:
    """Weights, and so many gradients, close together and apart, aligned and not, or all of them aligned."""
    torch.manual_seed(count)
    sizes = sizes if odd else [n + -n % 8 for n in sizes]
    values = [torch.randn(B, sizes[k % len(sizes)]).to(dtype) for k in range(count)]
    places = [(0, 0), (8, 0), (0, 8), (3, 0), (5, 1)] if odd else [(0, 0), (8, 8)]
    return torch.rand(B) - 0.3, [lying(value, *places[k % len(places)]) for k, value in enumerate(values)]


def assert_right(c: Tensor, values: list[Tensor], squares: Tensor, sums: list[Tensor]) -> None:
    want = sum(value.double().reshape(len(value), -1).square().sum(1) for value in values)
    torch.testing.assert_close(squares.double(), want, rtol=1e-6, atol=0)
    assert squares.dtype == torch.float32
    assert len(sums) == len(values)
    for value, found in zip(values, sums, strict=True):
        wide = value.double()
        want, size = torch.tensordot(c.double(), wide, 1), torch.tensordot(c.double().abs(), wide.abs(), 1)
        assert found.dtype == torch.float32
        assert found.is_contiguous()
        assert found.shape == value.shape[1:]
        assert bool(((found - want).abs() <= 1e-6 * size).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 130])
def test_in_torchs_own_ops(count, dtype):
    c, values = problem(count, dtype, sizes=[*SIZES, many.RUN - 1, many.RUN, many.RUN + 1])
    assert_right(c, values, many.squares_of_many(values), many.weighted_of_many(c, values))


@pytest.mark.parametrize("place", [0, 5, -1])
def test_one_percent_is_seen(place):
    """One number of one sample of one tensor: what was found before is wrong then, norms and sums each by itself."""
    c, values = problem(7, torch.float32)
    before = many.squares_of_many(values), many.weighted_of_many(c, values)
    values[place][1, 0] *= 1.01
    after = many.squares_of_many(values), many.weighted_of_many(c, values)
    assert_right(c, values, *after)
    for found in ((before[0], after[1]), (after[0], before[1])):
        with pytest.raises(AssertionError):
            assert_right(c, values, *found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", [0.1, 0.0123])
def test_a_long_sum_loses_nothing(number, dtype):
    """In one float32 after another, 4 million equal numbers add up to 7e-5 too little."""
    value = torch.full((2, 1 << 22), number, dtype=dtype)
    want = value[:, 0].double().square() * (1 << 22)
    torch.testing.assert_close(many.squares_of_many([value]).double(), want, rtol=3e-7, atol=0)


def test_matrices_that_lie_otherwise():
    """Transposed ones, cut ones, one sample for all; a number and three dimensions."""
    torch.manual_seed(0)
    wide = torch.full((4, 9, 6), NAN)
    wide[:, :5] = torch.randn(4, 5, 6)
    values = [wide[:, :5], wide[:, :5].mT, torch.randn(4), torch.randn(4, 2, 3, 5), torch.randn(1, 7).expand(4, 7)]
    c = torch.rand(4)
    assert_right(c, values, many.squares_of_many(values), many.weighted_of_many(c, values))


def test_nothing_to_add():
    c, empty = torch.rand(3), torch.zeros(3, 0)
    assert many.weighted_of_many(c, []) == []
    with pytest.raises(ValueError, match="no samples"):
        many.squares_of_many([])
    assert torch.equal(many.squares_of_many([empty]), torch.zeros(3))
    assert [value.shape for value in many.weighted_of_many(c, [empty, torch.zeros(3, 2, 0)])] == [(0,), (2, 0)]
    assert many.squares_of_many([torch.zeros(0, 5), torch.zeros(0, 2)]).shape == (0,)
    (found,) = many.weighted_of_many(torch.zeros(0), [torch.zeros(0, 5)])
    assert torch.equal(found, torch.zeros(5))


def test_a_sample_that_is_not_finite_stays_alone():
    _, values = problem(5, torch.bfloat16)
    values[1][1, 3], values[3][2, 0] = NAN, float("inf")
    squares = many.squares_of_many(values)
    assert squares.isfinite().tolist() == [True, False, False]
    assert squares[1].isnan()
    assert squares[2].isinf()


@pytest.mark.parametrize("wrong", [
    lambda c, values: many.weighted_of_many(c, [values[0], values[1].double()]),
    lambda c, values: many.weighted_of_many(c, [values[0], values[1].half()]),
    lambda c, values: many.weighted_of_many(c.double(), values),
    lambda c, values: many.weighted_of_many(c, [values[0], values[1].to("meta")]),
    lambda c, values: many.weighted_of_many(c.to("meta"), values),
    lambda c, values: many.squares_of_many([values[0], values[1].bfloat16()]),
    lambda c, values: many.squares_of_many([values[0].double()]),
])  # fmt: skip
def test_dtypes_and_devices_that_do_not_go_together(wrong):
    with pytest.raises(TypeError, match=r"float32|device|is on"):
        wrong(*problem(2, torch.float32))


def test_batches_that_do_not_go_together():
    c, values = problem(2, torch.float32)
    for given in ([values[0], values[1][:2]], [values[0], torch.tensor(1.0)]):
        with pytest.raises(ValueError, match="each value is"):
            many.squares_of_many(given)
        with pytest.raises(ValueError, match="each value is"):
            many.weighted_of_many(c, given)
    with pytest.raises(ValueError, match="each value is"):
        many.weighted_of_many(c[:2], values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_ops(dtype):
    c, values = problem(6, dtype)
    torch.library.opcheck(torch.ops.eachgrad.squares_of_many.default, (values,))
    torch.library.opcheck(torch.ops.eachgrad.weighted_of_many.default, (c, values))
    torch.library.opcheck(torch.ops.eachgrad.weighted_of_many.default, (c, [torch.rand(3, 5, 4).to(dtype).mT]))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_graph_holds_them(dynamic):
    def step(c, values):
        squares = many.squares_of_many(values)
        return squares, many.weighted_of_many(c / squares.sqrt().clamp(min=1.0), values)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for B in (3, 5) if dynamic else (3,):
        c, values = problem(5, torch.bfloat16, B)
        squares, sums = compiled(c, values)
        assert_right(c / squares.sqrt().clamp(min=1.0), values, squares, sums)
    torch._dynamo.reset()


# The kernels, in a process with the interpreter on


def guarded() -> list[Tensor]:
    """From now on new tensors are full of NaN, with NaN behind them; the memory of all of them."""
    made: list[Tensor] = []
    plain = torch.Tensor.new_empty

    def room(self, size, dtype=None, **options):
        if options:  # the interpreter's own
            return plain(self, size, dtype=dtype, **options)
        n = torch.Size(size).numel()
        made.append(torch.full((n + 7,), NAN, dtype=dtype or self.dtype))
        return made[-1][:n].view(size)

    torch.Tensor.new_empty = room  # type: ignore[method-assign]
    library.empty_strided_cpu = lambda size, stride, dtype: room(torch.empty(0, dtype=dtype), size)
    return made


def kernels_are_right(counts, odd: bool) -> None:
    made = guarded()
    for count, dtype in [(count, dtype) for count in counts for dtype in (torch.float32, torch.bfloat16)]:
        c, values = problem(count, dtype, odd=odd)
        squares = many.launched_squares(values, TILES, RUN)
        assert squares.shape == (3, sum(-(-value.shape[1] // RUN) for value in values))
        assert_right(c, values, squares.sum(1), many.launched_sums(c, values, TILES))
        assert len(made) == 1 + count
        assert all(bool(memory[-7:].isnan().all()) for memory in made)
        made.clear()


def kernels_take_what_lies_otherwise() -> None:
    torch.manual_seed(0)
    wide = torch.full((4, 9, 6), NAN)
    wide[:, :5] = torch.randn(4, 5, 6)
    empty, c = torch.zeros(4, 0, 3), torch.rand(4)
    values = [wide[:, :5], wide[:, :5].mT, empty, torch.randn(4, 2, 3, 5), torch.randn(1, 7).expand(4, 7)]
    assert_right(c, values, many.launched_squares(values, TILES, RUN).sum(1), many.launched_sums(c, values, TILES))
    assert_right(c, values, many.launched_squares(values).sum(1), many.launched_sums(c, values))  # as on a GPU
    assert many.launched_squares([empty]).shape == (4, 0)
    assert many.launched_sums(c, [empty])[0].shape == (0, 3)
    none = [torch.zeros(0, 5), torch.zeros(0, 70)]
    assert many.launched_squares(none, TILES, RUN).shape == (0, 3)
    assert all(torch.equal(found, torch.zeros_like(found)) for found in many.launched_sums(torch.zeros(0), none))


def kernels_lose_nothing_in_a_long_sum() -> None:
    for number in (0.1, 0.0123):
        value = torch.full((2, (1 << 18) + 5), number)
        want = value[:, 0].double().square() * value.shape[1]
        torch.testing.assert_close(many.launched_squares([value]).sum(1).double(), want, rtol=3e-7, atol=0)


def kernels_count_beyond_32_bits() -> None:
    """Samples so far apart that the third begins beyond 2^31 numbers. What lies between is never touched."""
    stride = (1 << 30) + 64
    memory = torch.empty(2 * stride + 32, dtype=torch.bfloat16)
    value, c = memory.as_strided((3, 20), (stride, 1)), torch.rand(3)
    value.copy_(torch.randn(3, 20))
    assert_right(c, [value], many.launched_squares([value], TILES, RUN).sum(1), many.launched_sums(c, [value], TILES))


@pytest.mark.parametrize("call", [
    "kernels_are_right([1, 2, 9], True)",
    "kernels_are_right([64, 65], False)",
    "kernels_are_right([130], True)",
    "kernels_take_what_lies_otherwise()",
    "kernels_lose_nothing_in_a_long_sum()",
    "kernels_count_beyond_32_bits()",
])  # fmt: skip
def test_by_their_kernels_without_a_gpu(call):
    """Every number is read once, every answer written, and nothing beyond the ends of either."""
    assert_as_in_float64(f"import test_kernel_many as test\ntest.{call}")


def test_a_launch_has_no_more_tensors_than_it_may():
    _, values = problem(130, torch.float32, odd=False)
    parts = list(many._launches(values))
    assert [len(part.values) for part in parts] == [64, 64, 2]
    assert [k for part in parts for k in part.which] == list(range(130))
    # Those that are not aligned, by where they begin or by how far apart they lie, leave the others as they are.
    values[3], values[5] = lying(torch.randn(3, 64), 0, 1), lying(torch.randn(3, 64), 1, 0)
    parts = list(many._launches(values[:8]))
    assert [(part.which, part.aligned) for part in parts] == [([0, 1, 2, 4, 6, 7], True), ([3, 5], False)]
