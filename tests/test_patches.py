"""Every route of a convolution's block against plain autograd, sample by sample."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from eachgrad import plan
from eachgrad.blocks import Geometry, Patches

B = 3


def case(name: str, C: int, p: int, spatial: tuple[int, ...], kernel: Any, **options: Any):
    """Options as those of a convolution; m maps; `cut`: outputs left out, as the transpose of one may have it."""
    each = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "m": 1, "cut": 0} | options
    kernel, stride, padding, dilation = (
        (v,) * len(spatial) if isinstance(v, int) else v for v in (kernel, *list(each.values())[:3])
    )
    groups, m, cut = list(each.values())[3:]
    pads = tuple((v, v) if isinstance(v, int) else v for v in padding)
    where = Geometry(kernel, stride, pads, dilation, groups)
    sizes = zip(spatial, kernel, stride, pads, dilation, strict=True)
    out = [(size + sum(pad) - d * (k - 1) - 1) // s + 1 - cut for size, k, s, pad, d in sizes]
    return pytest.param(where, (B, m, C, *spatial), (B, m, p, *out), id=name)


CASES = [
    case("1d", 3, 4, (9,), 3),
    case("1d wide", 6, 40, (5,), 5, padding=2),
    case("2d", 3, 4, (5, 6), 3, padding=1),
    case("2d uneven", 4, 5, (7, 6), (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    case("3d", 2, 3, (4, 3, 5), (2, 3, 2), stride=(1, 1, 2), padding=(0, 1, 1)),
    case("stride beyond the kernel", 3, 4, (8, 7), 2, stride=3),
    case("stride and padding", 3, 4, (8, 8), 3, stride=2, padding=1),
    case("dilation", 3, 4, (9, 9), 3, dilation=2, padding=2),
    case("dilation and stride", 3, 4, (11,), 3, stride=2, dilation=3, padding=4),
    case("more padding than kernel", 2, 3, (4, 4), 2, padding=3),
    case("one side padded more", 3, 4, (6, 6), 2, padding=((0, 1), (1, 0))),
    case("groups", 4, 6, (6, 6), 3, groups=2, padding=1),
    case("wide groups", 16, 24, (4, 4), 3, groups=2, padding=1, m=2),
    case("depthwise", 4, 4, (6, 6), 3, groups=4),
    case("depthwise, several maps", 4, 8, (6,), 3, groups=4, m=2),
    case("several maps", 3, 4, (4, 4), 3, padding=1, m=3),
    case("several maps, 1d, stride", 3, 4, (7,), 2, stride=2, m=2),
    case("one pixel", 5, 4, (3, 4), 1),
    case("one pixel, stride and padding", 5, 4, (5, 4), 1, stride=2, padding=1),
    case("one pixel, groups", 4, 6, (3, 3), 1, groups=2),
    case("kernel of the whole map", 3, 4, (4, 5), (4, 5)),
    case("kernel of the whole map, several maps", 3, 4, (4, 5), (4, 5), m=2),
    case("kernel of the whole padded map", 3, 4, (2, 2), 4, padding=1),
    case("one pixel in, one out", 2, 3, (1, 1), 3, padding=1),
    case("outputs left out", 3, 4, (7, 7), 2, stride=2, cut=1),
    case("outputs left out, padding", 3, 4, (7, 7), 3, dilation=2, padding=1, cut=1),
]
every_case = pytest.mark.parametrize(("where", "x", "g"), CASES)


def draw(where, x, g, dtype=torch.float64, seed=0):
    random = torch.Generator().manual_seed(seed)
    x, g = (torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in (x, g))
    return Patches(x, g, where)


def truth(block: Patches) -> torch.Tensor:
    """The B gradients by autograd, in float64."""
    where, rows = block.geometry, []
    convolve = [F.conv1d, F.conv2d, F.conv3d][len(where.kernel) - 1]
    for x, g in zip(block.x.double(), block.g.double(), strict=True):
        weight = torch.zeros(block.shape, dtype=torch.float64, requires_grad=True)
        padded = F.pad(x, [n for pair in where.padding[::-1] for n in pair])
        out = convolve(padded, weight, None, where.stride, 0, where.dilation, where.groups)
        out = out[(..., *(slice(n) for n in g.shape[2:]))]
        (row,) = torch.autograd.grad((out * g).sum(), weight)
        rows.append(row)
    return torch.stack(rows)


def norms(value: torch.Tensor) -> torch.Tensor:
    return value.flatten(1).square().sum(1)


def same(got, want, rtol=1e-10):
    torch.testing.assert_close(got.to(want.dtype), want, rtol=rtol, atol=rtol * float(want.abs().max()))


ROUTES = {
    "chosen": lambda block: block.squared_norms(),
    "direct": lambda block: block._direct_norms(),
    "product": lambda block: block._product(block.x, block.g).squared_norms(),
    "Gram": lambda block: block._gram()[0],
}


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("route", ROUTES)
@every_case
def test_squared_norms(where, x, g, route, chunk, monkeypatch):
    if where.groups > 1 and route in ("product", "Gram"):
        pytest.skip("these two know no groups, and are not chosen for them")
    monkeypatch.setattr(plan, "CHUNK", chunk)
    block = draw(where, x, g)
    torch.testing.assert_close(ROUTES[route](block), norms(truth(block)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@every_case
def test_gradients_and_their_sums(where, x, g, chunk, monkeypatch):
    monkeypatch.setattr(plan, "CHUNK", chunk)
    block = draw(where, x, g)
    want, c = truth(block), torch.tensor([[0.5, -2.0, 0.0], [1.0, 1.0, 3.0]], dtype=torch.float64)
    same(block.dense(), want)
    same(block.kept().dense(), want)
    same(block.weighted_sum(c[0]), torch.tensordot(c[0], want, 1))
    same(block.weighted_sums(c), torch.tensordot(c, want, 1))
    same(block.slice(1, want[0].numel()), want.flatten(1)[:, 1:])


@every_case
def test_float32(where, x, g):
    block = draw(where, x, g, torch.float32)
    want = truth(block)
    torch.testing.assert_close(block.squared_norms().double(), norms(want), rtol=1e-5, atol=0)
    same(block.dense(), want, 1e-5)
    same(block.weighted_sum(torch.ones(B)), want.sum(0), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@every_case
def test_half_precision(where, x, g, dtype):
    block = draw(where, x, g, dtype)
    want, step = truth(block), torch.finfo(dtype).eps
    same(block.weighted_sum(torch.ones(B, dtype=dtype)), want.sum(0), step)
    torch.testing.assert_close(block.squared_norms().double(), norms(want), rtol=2 * step, atol=0)
    assert block.dense().dtype == dtype
    assert block.weighted_sum(torch.ones(B)).dtype == torch.float32
    assert block.squared_norms().dtype == torch.float32


@every_case
def test_complex_numbers(where, x, g):
    real, imaginary = (draw(where, x, g, seed=seed) for seed in (0, 1))
    block = Patches(torch.complex(real.x, imaginary.x), torch.complex(real.g, imaginary.g), where)
    parts = [[truth(Patches(a.x, b.g, where)) for b in (real, imaginary)] for a in (real, imaginary)]
    want = torch.complex(parts[0][0] - parts[1][1], parts[0][1] + parts[1][0])
    c = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    same(block.dense(), want)
    same(block.weighted_sum(c), torch.tensordot(c.to(want.dtype), want, 1))
    same(block.squared_norms(), norms(want.abs()))


# Maps small enough for the Gram, as wide as they are in use


def wide(dtype, C=24, p=32, side=5):
    return draw(
        Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1), (B, 1, C, side, side), (B, 1, p, side, side), dtype
    )


def test_the_gram_is_taken_where_it_is_cheaper():
    assert wide(torch.float32).cost().norms.name == "Gram of pixels"
    assert wide(torch.float32, side=40).cost().norms.name == "direct"


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("left", [1.0, 1e-1, 1e-2, 1e-3, 1e-4])
def test_positions_that_cancel(dtype, rtol, left):
    # A constant image whose gradients sum to nearly nothing over its positions.
    block = wide(dtype)
    x, g = 1 + left * block.x, block.g
    block = Patches(x, g - (1 - left) * g.mean((-2, -1), keepdim=True), block.geometry)
    torch.testing.assert_close(block.squared_norms().double(), norms(truth(block)), rtol=rtol, atol=0)


def test_a_gram_alone_would_lose_digits():
    block = wide(torch.float32)
    x = 1 + 1e-2 * block.x
    where = Geometry((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1), 1)  # padding would leave the edges
    block = Patches(x, block.g[..., :3, :3] - block.g[..., :3, :3].mean((-2, -1), keepdim=True), where)
    want = norms(truth(block))
    assert ((block._gram()[0].double() - want).abs() > 1e-5 * want).any()
    assert block.cost().norms.name == "Gram of pixels"
    torch.testing.assert_close(block.squared_norms().double(), want, rtol=1e-5, atol=0)


def test_a_sum_over_no_samples():
    block = wide(torch.float32).take(torch.tensor([], dtype=torch.long))
    assert torch.equal(block.weighted_sum(torch.ones(0)), torch.zeros(block.shape))
    assert block.dense().shape == (0, *block.shape)


def test_maps_of_any_memory_layout():
    block = wide(torch.float64, C=4, p=6)
    want = truth(block)
    x, g = (t[:, 0].contiguous(memory_format=torch.channels_last).unsqueeze(1) for t in (block.x, block.g))
    other = Patches(x, g, block.geometry)
    moved = Patches(block.x.mT.contiguous().mT, block.g.transpose(1, 2).contiguous().transpose(1, 2), block.geometry)
    for got in (other, moved):
        same(got.dense(), want)
        same(got.squared_norms(), norms(want))
        same(got._gram()[0], norms(want))
        same(got.weighted_sum(torch.ones(B)), want.sum(0))
