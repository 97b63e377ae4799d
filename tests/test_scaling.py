"""Products that are divided by a number, divided where they are made: the numbers stay."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import eachgrad
from eachgrad import scaling, step
from eachgrad.kernels.mean_product import launched, plain
from eachgrad.scaling import divide_within
from oracle import assert_same, loop

OP = torch.ops.eachgrad.mean_product.default


def pair(dtype: torch.dtype = torch.float32, n: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(n, 5).to(dtype), torch.randn(n, 6).to(dtype)


def within(function, args: tuple[Tensor, ...]) -> tuple[GraphModule, int]:
    found = make_fx(function, tracing_mode="fake")(*args)
    count = divide_within(found.graph, lambda value: value.dtype == torch.float32)
    found.graph.lint()
    found.recompile()
    assert sum(node.target is OP for node in found.graph.nodes) == count
    return found, count


MEANS = {
    "a mean": (lambda a, b: (a.mT @ b) / 7, 1),
    "seen otherwise": (lambda a, b: ((a.mT @ b) / 7).view(5, 2, 3), 1),
    "two": (lambda a, b: (a.mT @ b) / 7 + (a.mT @ (b * 2)) / 3, 2),
    "read twice": (lambda a, b: (a.mT @ b) / 7 + (lambda m: m / 3 + m)(a.mT @ (b + 1)), 1),
    "by a part": (lambda a, b: (a.mT @ b) / 7.5, 0),
    "by a tensor": (lambda a, b: (a.mT @ b) / a[:5, :1], 0),
    "by less than nothing": (lambda a, b: (a.mT @ b) / -2, 0),
    "in whole numbers": (lambda a, b: torch.div(a.mT @ b, 2, rounding_mode="floor"), 0),
    "no product": (lambda a, b: (a[:, :5] * b[:, :5]) / 7, 0),
}


@pytest.mark.parametrize("name", MEANS)
def test_what_is_divided_within(name):
    function, want = MEANS[name]
    found, count = within(function, pair())
    assert count == want
    torch.testing.assert_close(found(*pair()), function(*pair()), rtol=1e-6, atol=1e-6)


def test_sixteen_bits_that_stay_so_are_left_alone():
    """The op adds, and answers, in float32."""
    _, count = within(lambda a, b: (a.mT @ b) / 7, pair(torch.bfloat16))
    assert count == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_op(dtype):
    a, b = pair(dtype)
    got = OP(a.mT, b, 7)
    assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(got.double(), a.double().mT @ b.double() / 7, rtol=1e-5, atol=1e-6)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got.double() * 1.01, a.double().mT @ b.double() / 7, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(7, 5, 6), (7, 1, 1), (1, 5, 6), (0, 5, 6), (7, 0, 6)])
def test_one_op_of_torch(shape):
    """What is to be added is a corner of a factor, which is not read, whatever stands there."""
    n, p, d = shape
    left, right = torch.randn(n, p).mT, torch.randn(n, d)
    torch.testing.assert_close(launched(left, right, 3), plain(left, right, 3), rtol=1e-5, atol=1e-6)
    if left.numel() and p > 1:
        left[0, 0] = float("nan")
        got = launched(left, right, 3)
        assert got[0].isnan().all()
        assert got[1:].isfinite().all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(7, 8, 16), (12608, 768, 3072), (1, 8, 8)])
def test_on_a_gpu(shape, dtype):
    n, p, d = shape
    left, right = (torch.randn(n, k, device="cuda").to(dtype) for k in (p, d))
    left[0, 0] = float("inf")
    got, want = OP(left.mT, right, 64), left.double().mT @ right.double() / 64
    assert got.dtype == torch.float32
    assert not got[0].isfinite().any()
    gap = float((got[1:].double() - want[1:]).abs().max() / want[1:].abs().max())
    assert gap < (1e-3 if dtype == torch.float32 else 1e-5)  # of which products may be of fewer bits


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum((1, 2))


@pytest.mark.parametrize("dynamic", [False, True])
def test_whole_steps(dynamic, monkeypatch):
    """For one number of samples, and for any, where the divisor is a symbol."""
    counts = []

    def noted(graph):
        counts.append(divide_within(graph, lambda value: True))

    monkeypatch.setattr(step, "takes_any_layout", lambda backend: True)
    monkeypatch.setattr(step, "divide_within", noted)
    torch.manual_seed(0)
    model = Two()
    ask = eachgrad.compile(copy.deepcopy(model), losses, backend="aot_eager", dynamic=dynamic, grad=eachgrad.mean())
    for n in (8, 8, 9, 11, 9, 16) if dynamic else (8, 8, 8):
        x = torch.randn(n, 5, 6)
        rows = loop(copy.deepcopy(model).double(), losses, [(x[i : i + 1].double(),) for i in range(n)])
        assert_same(ask(x).grad, {name: value.mean(0) for name, value in rows.items()}, 1e-5)
    assert not ask.reasons()
    assert counts
    assert set(counts) == {2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_as_a_gpu_has_them(dtype):
    """Products of sixteen bits that are float32, traced with tensors that are not there."""
    with FakeTensorMode():
        a, b = (torch.empty(64, n, dtype=dtype, device="cuda") for n in (16, 32))
        options = {} if dtype == torch.float32 else {"out_dtype": torch.float32}
        found = make_fx(lambda a, b: torch.mm(a.mT, b, **options) / 64)(a, b)
    before = next(iter(found.graph.find_nodes(op="output"))).args[0].meta["val"]  # type: ignore[union-attr]
    assert divide_within(found.graph) == 1
    (node,) = found.graph.find_nodes(op="call_function", target=OP)
    assert node.args[2] == 64
    after = node.meta["val"]
    assert (after.shape, after.dtype, after.stride()) == (before.shape, before.dtype, before.stride())


def test_not_where_there_is_no_gpu():
    found = make_fx(MEANS["a mean"][0], tracing_mode="fake")(*pair())
    assert divide_within(found.graph) == 0
    assert not scaling.is_real_on_gpu(pair()[0])
