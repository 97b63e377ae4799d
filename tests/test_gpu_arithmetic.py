"""What the blocks do on a GPU, on a machine without one: sixteen bit products with sums in float32, rounded factors."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import eachgrad
from eachgrad import plan
from eachgrad.blocks import Dense, Geometry, Outer, Patches, Rows, Sum, arithmetic, outer, patches, windows
from eachgrad.rules import convolution as convolution_rule
from eachgrad.rules import norm

B = 6


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    """Every tensor counts as one on a GPU, whose products of sixteen bit numbers can be asked for in float32."""
    for module in (arithmetic, outer, patches, windows):
        if hasattr(module, "on_gpu"):
            monkeypatch.setattr(module, "on_gpu", lambda t: True)
    for name in ("mm", "bmm"):
        plain = getattr(torch, name)

        def product(a, b, out_dtype=None, plain=plain):
            return plain(a, b) if out_dtype is None else plain(a.to(out_dtype), b.to(out_dtype))

        monkeypatch.setattr(torch, name, product)
    monkeypatch.setattr(Patches, "_native", False)
    for name in ("strips", "chunk"):
        plain = getattr(plan, name)
        monkeypatch.setattr(plan, name, lambda *args, plain=plain: plain(*(a if a != "cpu" else "cuda" for a in args)))
    bounds = plan.strip_bounds
    monkeypatch.setattr(plan, "strip_bounds", lambda T, device: bounds(T, "cuda"))


def random(*shape):
    return torch.randn(*shape).bfloat16()


def tied():
    return Sum((Outer(random(B, 3, 31), random(B, 3, 7)), Rows(torch.randint(31, (B, 5)), random(B, 5, 7), 31)))


def convolution(size, channels, outputs, kernel=3, stride=1, padding=(1, 1), dilation=1, groups=1, maps=1, dims=2):
    geometry = Geometry((kernel,) * dims, (stride,) * dims, (padding,) * dims, (dilation,) * dims, groups)
    out = (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
    x, g = random(B, maps, channels, *[size] * dims), random(B, maps, outputs, *[out] * dims)
    return Patches(x, g, geometry)


BLOCKS = {
    "one position": lambda: Outer(random(B, 1, 9), random(B, 1, 12)),
    "Gram": lambda: Outer(random(B, 13, 40), random(B, 13, 33)),
    "direct": lambda: Outer(random(B, 50, 9), random(B, 50, 6)),
    "tied": tied,
    "pixels": lambda: convolution(4, 16, 16),
    "implicit": lambda: convolution(9, 2, 3),
    "implicit, strided": lambda: convolution(21, 5, 7, kernel=5, stride=2, padding=(2, 3), dilation=1),
    "implicit, dilated": lambda: convolution(11, 3, 4, padding=(2, 2), dilation=2),
    "implicit, 1 x 1": lambda: convolution(9, 6, 3, kernel=1, padding=(0, 0)),
    "unfolded, two maps": lambda: convolution(7, 2, 3, maps=2),
    "unfolded, in groups": lambda: convolution(9, 4, 6, groups=2),
    "unfolded, one dimension": lambda: convolution(70, 8, 12, dims=1),
    "dense": lambda: Dense(random(B, 5, 4)),
    # Gradients that sum to zero over the positions, inputs with a strong common direction.
    "cancelling": lambda: Outer((lambda g: g - g.float().mean(1, keepdim=True).bfloat16())(random(B, 64, 96)),
                                (20 + torch.randn(B, 64, 128)).bfloat16()),
}  # fmt: skip


def gradients(block):
    """The gradients in float64, of the same sixteen bit numbers: (B, n)."""
    if isinstance(block, Sum):
        return sum(gradients(part) for part in block.parts)
    if isinstance(block, Dense):
        return block.value.double().flatten(1)
    if isinstance(block, Outer):
        return (block.left.double().mT @ block.right.double()).flatten(1)
    if isinstance(block, Rows):
        hot = F.one_hot(block.index, block.size).double()
        return (hot.mT @ block.value.double()).flatten(1)
    g, columns = block.g.double(), block.geometry.unfold(block.x.double(), block.g.shape[3:])
    g = g.movedim(2, 1).reshape(B, block.geometry.groups, -1, columns.shape[-1])
    return (g @ columns.mT).flatten(1)


@pytest.mark.parametrize("name", BLOCKS)
def test_norms_and_sums(name):
    torch.manual_seed(0)
    block, c = BLOCKS[name](), torch.rand(B)
    want = gradients(block)
    for value in (block, block.kept()):
        torch.testing.assert_close(value.squared_norms().sqrt().double(), want.norm(dim=1), rtol=1e-3, atol=0)
        got, total = value.weighted_sum(c).double().flatten(), (c.double()[:, None] * want).sum(0)
        assert value.weighted_sum(c).dtype == torch.float32
        # Each term is rounded to 2^-9 of itself, wherever it is rounded at all.
        spread = value.measured()[1]
        slack = (c * (spread.sqrt() if spread is not None else 2.0**-9 * want.norm(dim=1).float())).norm()
        assert (got - total).norm() <= 2 * slack


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shape", [None, (9, 3, 4), (108,)])
def test_the_narrow_factor_is_scaled(shape, traced, monkeypatch):
    """In a traced graph by the transposed product: the answer lies as any other, for positions or samples first."""
    torch.manual_seed(0)
    monkeypatch.setattr(outer, "is_traced", lambda t: traced)
    wide, c = [], torch.rand(B)
    monkeypatch.setattr(outer, "scaled", lambda value, c: wide.append(value.shape[2]) or arithmetic.scaled(value, c))
    for left, right in ((random(B, 5, 9), random(B, 5, 12)), (random(5, B, 9).transpose(0, 1), random(B, 5, 12))):
        got = Outer(left, right, shape).weighted_sum(c)
        want = torch.einsum("b,btp,btd->pd", c.double(), left.double(), right.double())
        assert got.shape == (shape or (9, 12))
        assert got.is_contiguous() or not traced
        assert (got.double().flatten() - want.flatten()).norm() <= 4e-3 * want.norm()
    assert wide == [9, 9]


@pytest.mark.parametrize("name", BLOCKS)
def test_means(name):
    torch.manual_seed(0)
    block = BLOCKS[name]()
    want = gradients(block).mean(0)
    got = block.mean(torch.ones(B) / B)
    assert got.dtype == torch.float32
    # Factors are not scaled, and so not rounded; where they are, 2^-9 of each term.
    assert (got.double().flatten() - want).norm() <= 4e-3 * want.norm()


@pytest.mark.parametrize("name", BLOCKS)
def test_no_sample_adds_more_than_the_bound(name):
    """Each sample alone, so that what is added is its own contribution; clipped to a thousandth of its norm and more."""
    torch.manual_seed(0)
    block = BLOCKS[name]()
    norms = gradients(block).norm(dim=1)
    shape = block.weighted_sum(torch.ones(B)).shape
    for bound in torch.logspace(-3, 0.5, 12):
        gradient = eachgrad.grads.Gradient("w", torch.zeros(shape), block, B)
        clip = eachgrad.clipped_sum(float(bound)).start(eachgrad.queries.base.Over({"w": gradient.parameter}, {}))
        clip.begin(B, {"w": gradient.cost()})
        clip.add(gradient.kept() if clip.keeps("w") else gradient)
        clip.again()
        factors = clip.factors[0][""]
        held = gradient.kept() if clip.keeps("w") or clip.how["w"] == "gradients" else gradient
        for i in range(B):
            added = held.take(torch.tensor([i])).weighted_sum(factors[i : i + 1]).double().norm()
            assert added <= bound * (1 + 1e-3)
            # And nothing is lost: the sample is clipped no further than its rounding asks for.
            assert added >= 0.97 * min(bound, norms[i]) or name == "cancelling" or name == "direct"


def test_rows_meet_dense_gradients():
    torch.manual_seed(0)
    rows, dense = Rows(torch.randint(9, (B, 5)), random(B, 5, 7), 9), Dense(random(B, 9, 7))
    want = (gradients(rows) * gradients(dense)).sum(1)
    torch.testing.assert_close(rows.dots(dense).double(), want, rtol=1e-5, atol=1e-5)


def test_products_of_odd_sizes_are_padded():
    a, b = random(5, 16), random(16, 11)
    torch.testing.assert_close(arithmetic.wide_product(a, b), a.float() @ b.float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("room", [11, 16, 24])
def test_rows_with_room_behind_them_are_not_copied(room, monkeypatch):
    """What lies there, NaN, is read and cut off; behind the last row there must be as much of it."""
    padded: list[object] = []
    pad = arithmetic.F.pad
    monkeypatch.setattr(arithmetic.F, "pad", lambda *args: padded.append(args) or pad(*args))
    storage = torch.full((16, room), float("nan"), dtype=torch.bfloat16)
    a, b = storage[:, :11], random(16, 16)
    a.copy_(random(16, 11))
    want = a.float().mT @ b.float()
    torch.testing.assert_close(arithmetic.wide_product(a.mT, b), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(arithmetic.wide_product(b.mT, a), want.mT, rtol=1e-6, atol=1e-6)
    assert len(padded) == (2 if room == 11 else 0)
    cut = torch.empty(15 * room + 11, dtype=torch.bfloat16).as_strided((16, 11), (room, 1)).copy_(a)
    torch.testing.assert_close(arithmetic.wide_product(cut.mT, b), want, rtol=1e-6, atol=1e-6)
    assert len(padded) == (3 if room == 11 else 1)


@pytest.mark.parametrize("T", [3, 8, 9, 197, 1024, 1027])
def test_strips_cover_every_row_once(T):
    bounds = plan.strip_bounds(T, "cuda")
    assert [start for start, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == T


@pytest.mark.parametrize("shape", [(B, 5, 6), (B, 6)])
def test_norms_take_the_statistics_of_the_forward(shape, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm, "on_gpu", lambda t: True)
    x, g, weight, bias = torch.randn(shape), torch.randn(shape), torch.randn(6), torch.randn(6)
    normal = F.layer_norm(x, (6,), None, None, 1e-3)
    got = norm._layer_norm(g, x, (6,), weight, bias, 1e-3)
    torch.testing.assert_close(got["weight"].dense(), (g * normal).reshape(B, -1, 6).sum(1))
    torch.testing.assert_close(got["bias"].dense(), g.reshape(B, -1, 6).sum(1))


@pytest.mark.parametrize("shape", [(B, 6, 4, 3), (B, 6, 5), (B, 6)])
def test_group_norm_takes_the_statistics_of_the_forward(shape, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(norm, "on_gpu", lambda t: True)
    x, g, weight, bias = torch.randn(shape), torch.randn(shape), torch.randn(6), torch.randn(6)
    normal = F.group_norm(x, 3, None, None, 1e-3)
    got = norm._group_norm(g, x, 3, weight, bias, 1e-3)
    torch.testing.assert_close(got["weight"].dense(), (g * normal).reshape(B, 6, -1).sum(2))
    torch.testing.assert_close(got["bias"].dense(), g.reshape(B, 6, -1).sum(2))


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_clipped_sum_allows_for_products_in_tf32(precision):
    torch.manual_seed(0)
    block = Outer(torch.randn(B, 13, 40), torch.randn(B, 13, 33))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        squares, spread = block.measured()
    finally:
        torch.set_float32_matmul_precision(before)
    assert spread is not None
    # No less than that share of the norm, and no more than of the sum of all terms' sizes.
    unit = 2.0**-20 if precision == "highest" else 2.0**-10
    sizes = (block.left.norm(dim=2) * block.right.norm(dim=2)).sum(1)
    assert bool((spread.sqrt() >= unit * squares.sqrt() * (1 - 1e-5)).all())
    assert bool((spread.sqrt() <= unit * sizes).all())


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 3)])
@pytest.mark.parametrize("padding", [((0, 0), (0, 0)), ((1, 1), (1, 1)), ((1, 2), (0, 0)), ((4, 4), (1, 1))])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
def test_windows_by_a_pooling(kernel, stride, padding, dilation, monkeypatch):
    """Where torch's pooling has the same windows it is asked, and the sums are the same."""
    geometry, x = Geometry(kernel, stride, padding, dilation, 1), torch.randn(2, 1, 9, 10, dtype=torch.float64)
    sides = zip((9, 10), kernel, stride, padding, dilation, strict=True)
    out = torch.Size((n + sum(pair) - d * (k - 1) - 1) // s + 1 for n, k, s, pair, d in sides)
    want, asked, own = geometry.windows(x, out), [], F.avg_pool2d
    monkeypatch.setattr(windows, "is_unwatched", lambda t: True)
    monkeypatch.setattr(F, "avg_pool2d", lambda *args, **options: asked.append(1) or own(*args, **options))
    torch.testing.assert_close(geometry.windows(x, out), want, rtol=1e-12, atol=1e-12)
    even = all(a == b and 2 * a <= k for (a, b), k in zip(padding, kernel, strict=True))
    assert bool(asked) is (even and dilation == (1, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_convolutions_with_channels_last(dtype, monkeypatch):
    """Eagerly on a GPU a convolution's factors lie as its kernels read them, and the numbers are the same."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.Tanh(), torch.nn.Conv2d(8, 5, 3)).to(dtype)
    x, found = torch.randn(B, 3, 9, 11).to(dtype), []
    for unwatched in (False, True):
        for module in (convolution_rule, patches, windows):
            monkeypatch.setattr(module, "is_unwatched", lambda t, unwatched=unwatched: unwatched)
        with eachgrad.record(model) as tape:
            losses = model(x).float().square().sum((1, 2, 3))
        grads = tape.backward(losses)
        blocks = [grads[name].block for name in ("0.weight", "2.weight")]
        last = [b.g[:, 0].is_contiguous(memory_format=torch.channels_last) for b in blocks]
        assert last == [unwatched and dtype == torch.bfloat16] * 2
        found.append((grads.norms(), grads.clipped_sum(0.5)))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=0)
    for name, value in found[0][1].items():
        gap = (found[1][1][name].double() - value.double()).norm()
        assert gap <= (2e-3 if dtype == torch.bfloat16 else 1e-6) * value.double().norm()
