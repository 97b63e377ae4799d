"""Sums over positions: torch's own ops against float64, and the kernel against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import eachgrad
from eachgrad.blocks import arithmetic
from eachgrad.kernels import positions
from eachgrad.kernels.positions import position_sums
from interpreter import assert_as_in_float64
from oracle import assert_same, rows

# B, T, n
SIZES = [(1, 1, 1), (3, 7, 5), (2, 64, 128), (2, 65, 130), (3, 197, 24), (1, 300, 257), (2, 3, 0), (0, 4, 5), (2, 0, 3)]
PAIRS = [
    (torch.bfloat16, None), (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, None),
    (torch.float32, torch.float32), (torch.float32, torch.bfloat16),
]  # fmt: skip
LAYOUTS = ("contiguous", "positions first", "apart", "transposed")


def laid(kind: str, t: Tensor) -> Tensor:
    """The same numbers with other strides, between others that nobody may read."""
    B, T, n = t.shape
    nan = float("nan")
    if kind == "positions first":
        return t.new_full((T + 1, B + 1, n + 8), nan)[:T, :B, 8:].copy_(t.transpose(0, 1)).transpose(0, 1)
    if kind == "apart":
        return t.new_full((B + 1, T + 2, n + 3), nan)[1:, 1:-1, :n].copy_(t)
    if kind == "transposed":
        return t.new_full((B, n + 1, T + 1), nan)[:, :n, :T].copy_(t.mT).mT
    return t.contiguous()


def problem(size: tuple[int, int, int], dtypes) -> list[Tensor]:
    torch.manual_seed(sum(size))
    return [torch.randn(size).add(0.5).to(dtype) for dtype in dtypes if dtype is not None]


def check(values: list[Tensor], found: tuple[Tensor, ...]) -> None:
    assert len(values) == len(found)
    for value, total in zip(values, found, strict=True):
        assert total.dtype == torch.float32
        slack = 2e-6 * max(1.0, float(value.shape[1]) ** 0.5)
        torch.testing.assert_close(total.double(), value.double().sum(1), rtol=1e-6, atol=slack)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchs_own_ops(size, dtypes):
    values = problem(size, dtypes)
    for kind in LAYOUTS:
        check(values, position_sums(*(laid(kind, t) for t in values)))


def test_more_samples_than_a_grid_has_rows():
    """Programs are counted in the first dimension of a grid alone, which has room for two billion."""
    grids = []

    class Kernel:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **options: None

    from eachgrad.kernels import norm_sums, triton_norm_sums, triton_positions

    g = torch.zeros(1, 2, 32).expand(70000, 2, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_positions, "position_sums_kernel", Kernel())
        patch.setattr(triton_norm_sums, "norm_sums_kernel", Kernel())
        positions.launched([g])
        norm_sums.launched(g, [g], None, torch.ones(1, 1, 1).expand(70000, 2, 1))
    assert grids == [(70000,), (70000,)]


def test_it_is_an_op():
    g, h = problem((2, 65, 5), (torch.bfloat16, torch.float32))
    for values in ([g], [g, h], [h, g.mT.contiguous().mT]):
        torch.library.opcheck(torch.ops.eachgrad.position_sums.default, (values,))


def test_programs_are_enough_and_no_more_than_that():
    assert positions.tiling(16, 1024, 3072) == (64, 64, 4, 1)
    assert positions.tiling(16, 1024, 768) == (128, 32, 8, 1)
    assert positions.tiling(4, 2048, 2048) == (128, 32, 8, 2)
    assert positions.tiling(1, 100, 10) == (128, 32, 8, 1)
    assert positions.tiling(1, 10000, 10) == (128, 32, 8, 78)
    assert positions.tiling(0, 0, 0) == (128, 32, 8, 1)


def test_others_are_refused():
    g = torch.ones(2, 3, 4)
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        position_sums(g.double())
    with pytest.raises(ValueError, match=r"must both be \(B, T, n\)"):
        position_sums(g, g[:, :2])
    with pytest.raises(ValueError, match=r"must both be \(B, T, n\)"):
        position_sums(g[0])
    with pytest.raises(ValueError, match="one or two tensors, not 3"):
        position_sums(g, g, g)


class Layers(nn.Module):
    """A bias, norms with and without one, over one dimension and over two, and parameters that are spread over positions."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.rms = nn.Linear(6, 8), nn.LayerNorm(8), nn.RMSNorm(8)
        self.two, self.scale, self.shift = (
            nn.LayerNorm((3, 8)),
            nn.Parameter(torch.rand(8)),
            nn.Parameter(torch.rand(3, 1)),
        )

    def forward(self, x):
        x = self.rms(self.norm(self.first(x)).tanh())
        return (self.two(x.unflatten(1, (-1, 3))) * self.scale + self.shift).flatten(1).square().mean(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_by_it_are_those_of_a_loop(monkeypatch, dtype):
    """As on a GPU, for layers of any size."""
    asked = []
    monkeypatch.setattr(arithmetic, "on_gpu", lambda t: True)
    monkeypatch.setattr(arithmetic, "MANY", 0)
    monkeypatch.setattr(arithmetic, "WIDE", 0)
    monkeypatch.setattr(arithmetic, "position_sums", lambda *a: asked.append(len(a)) or position_sums(*a))
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(5, 6, 6)
    want = rows(model.double(), lambda model, x: model(x), (x.double(),))
    model.to(dtype)
    with eachgrad.record(model) as tape:
        losses = model(x.to(dtype))
    found = tape.ask(losses, each=eachgrad.dense()).each
    assert sorted(asked) == [1, 1, 1, 1, 2, 2]  # bias, an RMS norm, what is spread; norms with a bias
    # In bfloat16 the model's own numbers have three digits.
    assert_same(found, want, 5e-6 if dtype == torch.float32 else 0.05)


def interpreted() -> None:
    """The kernel on all cases; to be called where Triton's interpreter is on."""
    from test_kernel_convolution import Poisoned

    for size in SIZES:
        for dtypes in PAIRS:
            values = problem(size, dtypes)
            for kind in LAYOUTS:
                given = [laid(kind, t) for t in values]
                with Poisoned():
                    found = positions.launched(given)
                check(values, found.sum(2).unbind())
                assert not found.isnan().any()
                torch.testing.assert_close(found, positions.plain(given), rtol=1e-5, atol=1e-5)


def test_the_kernel_without_a_gpu():
    assert_as_in_float64("from test_kernel_positions import interpreted; interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_kernel_on_a_gpu(size, dtypes):
    values = problem(size, dtypes)
    for kind in LAYOUTS:
        check(values, tuple(t.cpu() for t in position_sums(*(laid(kind, t.cuda()) for t in values))))
