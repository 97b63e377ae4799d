"""`noisy`: Philox against its known answers, its normals against their distribution, the kernel against float64.

Every statistical test has a fixed seed; over seeds it would give a false alarm once in a million runs.
"""

from __future__ import annotations

import math
import os

import pytest
import torch
from scipy import stats
from torch import Tensor

from eachgrad.kernels import noise
from interpreter import assert_as_in_float64

FALSE_ALARM = 1e-6
SEED, OFFSET = 0xFEDCBA9876543210, 0x123456789ABCDEF0  # every half of every word is in use
SIZES = [1, 3, 1023, 0, 4097, 4, 2048]
FACTORS = (0.7, 3.0, 12.0)  # unit, deviation, divisor

MOST = 0xFFFFFFFF
KNOWN = {  # of the authors of Philox (Random123): counter, key, output
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((MOST,) * 4, (MOST,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}


def inputs(sizes: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, generator=generator) for n in sizes]


def truth(values: list[Tensor | None], sizes: list[int], seed: int = SEED, offset: int = OFFSET) -> list[Tensor]:
    """What comes out, in float64, by the words of the module's docstring."""
    unit, deviation, divisor = FACTORS
    found, first = [], 0
    for value, n in zip(values, sizes, strict=True):
        z = noise.normals(seed, offset, first, -(-n // 4))[:n]
        found.append(((0.0 if value is None else unit * value.double()) + deviation * z) / divisor)
        first += -(-n // 4)
    return found


def word(c: tuple[int, ...], k: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 in whole numbers of any size."""
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = (b >> 32) ^ c[1] ^ k[0], b & MOST, (a >> 32) ^ c[3] ^ k[1], a & MOST
        k = (k[0] + 0x9E3779B9) & MOST, (k[1] + 0xBB67AE85) & MOST
    return c


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_its_known_answers(name):
    counter, key, want = KNOWN[name]
    assert word(counter, key) == want
    found = noise.philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(w) for w in found) == want


@pytest.mark.parametrize("first", [0, (1 << 32) - 2, (1 << 33) + 5])
def test_each_group_is_of_its_own_counter(first):
    """Group, offset and seed are there with both their words."""
    found = noise.normals(SEED, OFFSET, first, 4).reshape(4, 4)
    for group, four in enumerate(found.tolist(), start=first):
        counter = (group & MOST, group >> 32, OFFSET & MOST, OFFSET >> 32)
        x0, y0, x1, y1 = word(counter, (SEED & MOST, SEED >> 32))
        want = []
        for x, y in ((x0, y0), (x1, y1)):
            radius, angle = math.sqrt(-2 * math.log((x + 0.5) / 2**32)), 2 * math.pi * y / 2**32
            want += [radius * math.cos(angle), radius * math.sin(angle)]
        assert four == pytest.approx(want, rel=1e-12, abs=1e-12)


def test_the_normals_are_distributed_as_they_should_be():
    lanes = noise.normals(SEED, 0, 0, 400_000).reshape(-1, 4)
    k = len(lanes)
    for lane in lanes.T:
        squares = float(lane.square().sum())
        assert stats.chi2.ppf(FALSE_ALARM / 2, k) <= squares <= stats.chi2.isf(FALSE_ALARM / 2, k)
        assert stats.kstest(lane.numpy(), "norm").pvalue > FALSE_ALARM
    every = lanes.flatten()
    share = 2 * stats.norm.sf(4)
    beyond = int((every.abs() > 4).sum())  # the tails are there
    assert stats.binom.ppf(FALSE_ALARM / 2, len(every), share) <= beyond
    assert beyond <= stats.binom.isf(FALSE_ALARM / 2, len(every), share)


def test_the_normals_do_not_go_together():
    """Neither the four of a group, nor neighbours, nor offsets or seeds that follow each other: nor their squares."""
    lanes = noise.normals(SEED, 7, 0, 100_000).reshape(-1, 4)
    others = [noise.normals(SEED, 8, 0, 100_000), noise.normals(SEED + 1, 7, 0, 100_000)]
    pairs = [(lanes[:, i], lanes[:, j]) for i in range(4) for j in range(i)]
    pairs += [(lanes[1:].flatten(), lanes[:-1].flatten()), *[(lanes.flatten(), other) for other in others]]
    limit = stats.norm.isf(FALSE_ALARM / 2 / (2 * len(pairs)))
    for a, b in pairs:
        assert abs(float((a * b).mean())) * math.sqrt(len(a)) <= limit
        assert abs(float(((a.square() - 1) * (b.square() - 1) / 2).mean())) * math.sqrt(len(a)) <= limit


def test_no_normal_comes_twice():
    """Over tensors, offsets that differ in a low or a high word, and seeds that do."""
    found = []
    for seed, offset in ((0, 0), (0, 1), (0, 1 << 32), (1, 0), (1 << 32, 0)):
        out = [torch.empty(n) for n in SIZES]
        noise.noisy([None] * len(out), out, 1.0, 1.0, 1.0, seed, offset)
        wide = truth([None] * len(out), SIZES, seed, offset)
        for got, want in zip(out, wide, strict=True):
            torch.testing.assert_close(got.double(), want * FACTORS[2] / FACTORS[1], rtol=1e-6, atol=0)
        found += wide
    every = torch.cat(found)
    assert len(every.unique()) == len(every) == 5 * sum(SIZES)


def test_plain_is_the_formula():
    values: list[Tensor | None] = [*inputs(SIZES)]
    values[2] = None
    out = [torch.full((n,), float("nan")) for n in SIZES]
    noise.noisy(values, out, *FACTORS, SEED, OFFSET)
    for got, want in zip(out, truth(values, SIZES), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-7)


def test_of_nothing_comes_nothing():
    noise.noisy([], [], *FACTORS, 0, 0)
    noise.launched([], [], *FACTORS, 0, 0)
    noise.launched([torch.empty(0), None], [torch.empty(0), torch.empty(3, 0)], *FACTORS, 0, 0)


def test_one_address_that_is_odd_is_seen():
    """On a GPU sixteen bytes at a time from such an address are an error."""
    cpu = torch.device("cpu")
    for where, aligned in (((0, 32, 48), True), ((16, 36), False), ((8, 16), False)):
        table, found = noise._addresses(where, cpu, 0)
        assert (tuple(table.tolist()), found) == (where, aligned)


@pytest.mark.parametrize(
    ("values", "out", "seed", "message"),
    [
        ([torch.zeros(3)], [], 0, "1 values do not go into 0"),
        ([torch.zeros(3)], [torch.zeros(4)], 0, "as many numbers"),
        ([None, torch.zeros(3)], [torch.zeros(3), torch.zeros(4)], 0, "as many numbers"),
        ([None], [torch.zeros(3, dtype=torch.float64)], 0, "float32"),
        ([torch.zeros(3, dtype=torch.bfloat16)], [torch.zeros(3)], 0, "float32"),
        ([None], [torch.zeros(3)], -1, "seed and offset"),
        ([None], [torch.zeros(3)], 1 << 64, "seed and offset"),
    ],
)
def test_what_the_kernel_could_not_address_is_refused(values, out, seed, message):
    with pytest.raises((TypeError, ValueError), match=message):
        noise.noisy(values, out, *FACTORS, seed, 0)


def in_a_field(values: list[Tensor], shift: int) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of the values `shift` numbers after an aligned address, and the fields of NaN that they lie in."""
    fields = [torch.full((value.numel() + 64,), float("nan")) for value in values]
    begins = [16 + shift - (field.data_ptr() // 4) % 4 for field in fields]
    views = [field[k : k + value.numel()] for field, k, value in zip(fields, begins, values, strict=True)]
    for view, value in zip(views, values, strict=True):
        view.copy_(value.flatten())
    return views, fields


def kernel_is_right(block: int, shift: int) -> None:
    noise.BLOCK = block
    values = inputs(SIZES)
    given: list[Tensor | None] = [None if k == 2 else value for k, value in enumerate(in_a_field(values, shift)[0])]
    want = truth([None if k == 2 else value for k, value in enumerate(values)], SIZES)
    out, fields = in_a_field([torch.zeros(n) for n in SIZES], shift)
    assert all(t.data_ptr() % 16 == 4 * shift for t in out if t.numel())
    noise.launched(given, out, *FACTORS, SEED, OFFSET)
    for got, wide, field in zip(out, want, fields, strict=True):
        torch.testing.assert_close(got.double(), wide, rtol=1e-6, atol=1e-6 * FACTORS[1] / FACTORS[2])
        assert int(field.isnan().sum()) == 64, "beyond the end"
    assert noise._addresses.cache_info().currsize <= 8


def kernel_takes_any_strides() -> None:
    noise.BLOCK = 1024
    values = [v.view(5, 9) for v in inputs([45] * 4)]
    given = [values[0].T.contiguous().T, values[1], torch._neg_view(-values[2]), None]
    out = [torch.empty(5, 9), torch.empty(9, 5).T, torch.empty(5, 9), torch.empty(5, 18)[:, ::2]]
    noise.launched(given, out, *FACTORS, 5, 0)
    for got, want in zip(out, truth([*[v.flatten() for v in values[:3]], None], [45] * 4, 5, 0), strict=True):
        torch.testing.assert_close(got.double().flatten(), want, rtol=1e-6, atol=1e-6)
    same = [value.clone() for value in values]
    noise.launched(same, same, *FACTORS, 5, 0)
    for got, want in zip(same, truth([v.flatten() for v in values], [45] * 4, 5, 0), strict=True):
        torch.testing.assert_close(got.double().flatten(), want, rtol=1e-6, atol=1e-6)


def kernel_takes_many_tensors() -> None:
    noise.BLOCK = 512
    sizes = [1 + (37 * k) % 600 for k in range(60)]
    values = inputs(sizes)
    for _ in range(2):
        out = [torch.empty(n) for n in sizes]
        noise.launched(values, out, *FACTORS, 1, 1)
        torch.testing.assert_close(
            torch.cat(out).double(), torch.cat(truth([*values], sizes, 1, 1)), rtol=1e-6, atol=1e-6
        )


def kernel_counts_beyond_32_bits() -> None:
    from eachgrad.kernels.triton_noise import noisy_kernel

    first = (1 << 32) - 3
    out = torch.full((45,), float("nan"))
    layout = torch.tensor([[41], [first], [0]])
    addresses = torch.tensor([[0], [out.data_ptr()]])
    owner = torch.zeros(3, dtype=torch.int32)
    noisy_kernel[(3,)](owner, layout, addresses, 1, 1.0, 1.0, SEED, OFFSET, BLOCK=16, ALIGNED=False)
    want = noise.normals(SEED, OFFSET, first, 11)[:41]
    torch.testing.assert_close(out[:41].double(), want, rtol=1e-6, atol=1e-6)
    assert out[41:].isnan().all()


if os.environ.get("TRITON_INTERPRET") == "1":  # a kernel's source is looked for in a file
    import triton
    import triton.language as tl

    from eachgrad.kernels.triton_noise import normals

    @triton.jit
    def apply(x, y, out, n: tl.constexpr):
        k = tl.arange(0, n)
        a, b = normals(tl.load(x + k).to(tl.uint32), tl.load(y + k).to(tl.uint32))
        tl.store(out + k, a)
        tl.store(out + n + k, b)


def kernel_is_right_at_the_ends() -> None:
    """Words of all zeros, of all ones, and on either side of where one series takes over from another."""
    turns = [q * (1 << 29) + d for q in range(8) for d in (-1, 0, 1, 12345)]
    seams = [15 * (1 << 28) + d for d in (-(1 << 12), -1, 0, 1, 1 << 12)]
    ends = [w % (1 << 32) for w in [*turns, *seams, *range(9), *range(-9, 0)]]
    x, y = (t.flatten() for t in torch.meshgrid(torch.tensor(ends), torch.tensor(ends), indexing="ij"))
    more = torch.randint(1 << 32, (2, 4096 - len(x) % 4096), generator=torch.Generator().manual_seed(0))
    x, y = torch.cat([x, more[0]]), torch.cat([y, more[1]])
    n = 4096
    for k in range(0, len(x), n):
        out = torch.empty(2, n)
        apply[(1,)](x[k : k + n], y[k : k + n], out, n)
        want = torch.stack(noise._box_muller(x[k : k + n], y[k : k + n]))
        assert float(want.abs().max()) <= 6.7638
        # float32 leaves of a cosine near its zero what rounding its angle does: the error is one of the radius.
        radius = want.square().sum(0).sqrt()
        assert float(((out - want).abs() / radius).max()) <= 2.5e-7


INTERPRETED = """
import test_kernel_noise as t
for block, shift in ((128, 0), (1024, 0), (1024, 1), (2048, 2)):
    t.kernel_is_right(block, shift)
t.kernel_takes_any_strides()
t.kernel_takes_many_tensors()
t.kernel_counts_beyond_32_bits()
t.kernel_is_right_at_the_ends()
"""


def test_noisy_by_its_kernel_without_a_gpu():
    assert_as_in_float64(INTERPRETED)
