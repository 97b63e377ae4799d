"""The input of a norm, term by term: the sums are those of the whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad import step
from eachgrad.blocks import arithmetic
from eachgrad.chains import spread
from eachgrad.rules import norm
from eachgrad.tidy import merge, narrow
from oracle import assert_same, rows

OP = torch.ops.eachgrad.norm_sums
B, T, n = 2, 5, 8


def sums(g: Tensor, x: Tensor, *terms: Tensor) -> tuple[Tensor, ...]:
    """The sums for a norm of each partial sum of the terms; what is added is partly of sixteen bits."""
    found, scale = [], x.new_ones(B, T, 1)
    for term in terms:
        found.append(OP(g, [x], x.mean(2, keepdim=True), scale))
        x = term + x if len(found) % 2 else x + term.float()
    return *found, OP(g, [x], None, scale)


def given() -> list[Tensor]:
    return [torch.randn(B, T, n), torch.randn(B, T, n), *(torch.randn(B, T, n).bfloat16() for _ in range(9))]


def traced(function, *args: Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def test_terms():
    found = traced(sums, *given())
    assert spread(found.graph) == 7  # all but the first, and those of which a sum is taken as written
    found.graph.lint()
    found.recompile()
    args = given()
    for got, want in zip(found(*args), sums(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    terms = [node.args[1] for node in found.graph.find_nodes(op="call_function", target=OP.default)]
    assert [len(some) for some in terms] == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert all([t.meta["val"].dtype for t in some].count(torch.float32) == 1 for some in terms)  # where it begins


OTHERS = {
    "another factor": lambda g, x, t: torch.add(x, t, alpha=2),
    "sixteen bits": lambda g, x, t: (x.bfloat16() + t.bfloat16()).float(),
    "broadcast": lambda g, x, t: x + t[:, :1],
    "a number": lambda g, x, t: x + 1.0,
    "a difference": lambda g, x, t: x - t,
    "float64": lambda g, x, t: (x.double() + t.double()).float(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_sums_stay(name):
    """What they are depends on more than their terms in float32."""

    def run(g: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return OP(g, [OTHERS[name](g, x, t)], None, x.new_ones(B, T, 1))

    args = [torch.randn(B, T, n) for _ in range(3)]
    found = traced(run, *args)
    assert spread(found.graph) == 0
    found.recompile()
    assert torch.equal(found(*args), run(*args))


class Stack(nn.Module):
    """A residual stream with a norm before each layer, of both kinds and over one dimension and two."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, n)
        self.norms = nn.ModuleList(
            [nn.LayerNorm(n), nn.RMSNorm(n, eps=1e-5), nn.LayerNorm(n), nn.RMSNorm(n, eps=1e-6)] * 1
        )
        self.layers = nn.ModuleList(nn.Linear(n, n) for _ in range(4))
        self.last, self.bare = nn.LayerNorm((3, n)), nn.LayerNorm(n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm_ in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm_(x)).tanh()
        x = self.bare(x)
        return self.last(x.unflatten(1, (-1, 3))).flatten(1)


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :5], y, reduction="none")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Every norm by the kernel; what was asked of it."""
    asked = []
    for module in (arithmetic, norm):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)
    monkeypatch.setattr(arithmetic, "MANY", 0)
    monkeypatch.setattr(arithmetic, "WIDE", 0)
    own = norm.norm_sums
    monkeypatch.setattr(
        norm, "norm_sums", lambda g, x, mean, scale: asked.append(mean is None) or own(g, x, mean, scale)
    )
    return asked


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Stack(), torch.randn(5, 6, 6), torch.randint(5, (5,))


def test_gradients_by_the_kernel_are_those_of_a_loop(as_on_a_gpu):
    model, x, y = problem()
    want = rows(model.double(), losses, (x.double(), y))
    with eachgrad.record(model.float()) as tape:
        found = losses(model, x, y)
    answer = tape.ask(found, each=eachgrad.dense())
    assert sorted(as_on_a_gpu) == [False, False, False, False, True, True]
    assert_same(answer.each, want, 5e-6)


def test_compiled_steps_read_terms(as_on_a_gpu, monkeypatch):
    seen = []
    monkeypatch.setattr(step, "spread", lambda graph: seen.append(spread(graph)) or seen[-1])
    model, x, y = problem()
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms(), grad=eachgrad.clipped_sum(0.5))
    for _ in range(3):
        x, y = torch.randn(5, 6, 6), torch.randint(5, (5,))
        answer = ask(x, y)
    assert not ask.reasons()
    assert seen
    assert seen[-1] >= 3
    each = rows(model.double(), losses, (x.double(), y))
    norms = torch.cat([value.flatten(1) for value in each.values()], 1).norm(dim=1)
    torch.testing.assert_close(answer.norms.double(), norms, rtol=1e-5, atol=0)
    factor = (0.5 / norms).clamp(max=1.0)
    assert_same(answer.grad, {name: torch.tensordot(factor, value, 1) for name, value in each.items()}, 1e-5)


def test_what_was_widened_for_a_norm_is_read_as_it_was():
    def run(g: Tensor, x: Tensor, t: Tensor) -> Tensor:
        return OP(g.float(), [x + t.float()], None, x.new_ones(B, T, 1))

    args = torch.randn(B, T, n).bfloat16(), torch.randn(B, T, n), torch.randn(B, T, n).bfloat16()
    found = traced(run, *args)
    merge(found.graph)
    assert narrow(found.graph) == 1
    assert spread(found.graph) == 1
    found.recompile()
    (node,) = found.graph.find_nodes(op="call_function", target=OP.default)
    assert [a.op for a in (node.args[0], *node.args[1])] == ["placeholder"] * 3
    torch.testing.assert_close(found(*args), run(*args), rtol=1e-6, atol=1e-5)
