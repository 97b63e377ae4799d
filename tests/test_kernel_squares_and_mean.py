"""Norms and mean by one reading: torch's own ops against float64, and the kernel against both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad
from eachgrad import gradient
from eachgrad.blocks import arithmetic, base
from eachgrad.kernels import squares_and_mean as kernel
from eachgrad.kernels.squares_and_mean import squares_and_mean
from interpreter import assert_as_in_float64
from oracle import assert_same, rows

SHAPES = [
    (1, 1),
    (3, 7),
    (17, 5, 3),
    (2, 1024),
    (16, 1025),
    (33, 40, 70),
    (4, 5000),
    (8, 3000),
    (5, 3, 0),
    (0, 4),
    (4,),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def problem(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).add(0.3).to(dtype)


def apart(value: Tensor) -> Tensor:
    """The same with room between the samples, which nobody may read."""
    wide = value.new_full((len(value), value[:1].numel() + 5), float("nan"))
    n = value[:1].numel()
    wide[:, :n] = value.reshape(len(value), n)
    return wide[:, :n].view(value.shape)


def check(value: Tensor, squares: Tensor, mean: Tensor) -> None:
    wide = value.double()
    assert squares.dtype == mean.dtype == torch.float32
    torch.testing.assert_close(squares.double(), wide.square().reshape(len(value), -1).sum(1) if value.numel() else
                               wide.new_zeros(len(value)), rtol=2e-6, atol=0)  # fmt: skip
    torch.testing.assert_close(mean.double(), wide.sum(0) / max(1, len(value)), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_torchs_own_ops(shape, dtype):
    value = problem(shape, dtype)
    check(value, *squares_and_mean(value))
    if value.numel():
        check(value, *squares_and_mean(apart(value)))


def test_a_long_sum_is_exact():
    squares, _ = squares_and_mean(torch.full((2, 1 << 22), 0.1))
    torch.testing.assert_close(squares.double(), torch.full((2,), (1 << 22) * float(torch.tensor(0.1)) ** 2).double(),
                               rtol=1e-6, atol=0)  # fmt: skip


def test_it_is_an_op():
    for value in (problem((3, 5, 4), torch.bfloat16), problem((3, 5, 4), torch.float32).mT):
        torch.library.opcheck(torch.ops.eachgrad.squares_and_mean.default, (value,))
    with pytest.raises(TypeError, match=r"not torch\.float64"):
        squares_and_mean(torch.ones(2, 3, dtype=torch.float64))


def interpreted() -> None:
    """The kernel on all cases; to be called where Triton's interpreter is on."""
    from test_kernel_convolution import Poisoned

    for shape in SHAPES:
        for dtype in DTYPES:
            value = problem(shape, dtype)
            for given in (value, apart(value)) if value.numel() else (value,):
                with Poisoned():
                    parts, mean = kernel.launched(given)
                check(value, parts.sum(0), mean)
            if value.ndim == 3:
                parts, mean = kernel.launched(value.mT)
                check(value.mT, parts.sum(0), mean)


def test_the_kernel_without_a_gpu():
    assert_as_in_float64("from test_kernel_squares_and_mean import interpreted; interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_on_a_gpu(shape, dtype):
    value = problem(shape, dtype)
    check(value, *(t.cpu() for t in squares_and_mean(value.cuda())))


class Tied(nn.Module):
    """A matrix that is used twice, one that is used once, and biases."""

    def __init__(self):
        super().__init__()
        self.table, self.middle = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, ids):
        return self.middle(self.table(ids)).tanh() @ self.table.weight.T


@pytest.mark.parametrize("micro", [1, 2])
def test_norms_and_mean_asked_together_read_each_gradient_once(monkeypatch, micro):
    """As on a GPU, for gradients of any size, in one batch and in two."""
    read = []
    monkeypatch.setattr(arithmetic, "on_gpu", lambda t: True)
    monkeypatch.setattr(gradient, "on_gpu", lambda t: True)
    monkeypatch.setattr(arithmetic, "LARGE", 8)
    monkeypatch.setattr(base, "squares_and_mean", lambda value: read.append(value.shape[1:]) or squares_and_mean(value))
    torch.manual_seed(0)
    model, ids, y = Tied(), torch.randint(9, (6, 20)), torch.randint(9, (6, 20))

    def losses(model, ids, y):
        return F.cross_entropy(model(ids).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)

    total = eachgrad.Accumulator(norms=eachgrad.norms(), mean=eachgrad.mean())
    for part in range(micro):
        some = slice(4 * part, 4 * part + 4) if micro > 1 else slice(None)
        with eachgrad.record(model) as tape:
            found = losses(model, ids[some], y[some])
        tape.ask(found, into=total)
    answer = total.answer()
    want = rows(model.double(), losses, (ids, y))
    assert set(read) == {(9, 6), (6, 6)}
    assert_same(answer.mean, {name: value.mean(0) for name, value in want.items()}, 5e-6)
    norms = torch.cat([value.flatten(1) for value in want.values()], 1).norm(dim=1)
    torch.testing.assert_close(answer.norms.double(), norms, rtol=5e-6, atol=0)
