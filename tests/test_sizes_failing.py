"""A graph for any size that cannot be compiled: graphs of single sizes then, and the eager code only if they fail too."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import eachgrad
from eachgrad import traced
from eachgrad.padding import Sizes
from eachgrad.step import Step
from oracle import assert_same

pytestmark = [
    pytest.mark.usefixtures("double", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
d = 6
DRAWN = (9, 9, 9, 9, 13, 12, 3, 10, 9, 27, 13, 14, 1, 8, 10, 13, 13, 10, 9, 10)


def losses(model, x):
    return model(x).square().mean(1)


def mlp():
    return nn.Sequential(nn.Linear(d, 8), nn.GELU(), nn.Linear(8, 3))


def asked(loss_fn=losses, **options):
    torch.manual_seed(0)
    queries = {"grad": eachgrad.clipped_sum(0.02), "norms": eachgrad.norms()}
    options = {"dynamic": True, "backend": "aot_eager"} | options
    return eachgrad.compile(options.pop("model", None) or mlp(), loss_fn, **options, **queries)


def assert_right(ask, x, call=None):
    got, want = (call or ask)(x), ask.eager((x,))
    for name in ("norms", "losses"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-9, atol=0)
    assert_same(got.grad, want.grad, 1e-9)


class Compiler:
    """torch's, which fails for the kinds of graphs that it is told to; what it was asked for."""

    def __init__(self, monkeypatch):
        self.fails, self.late, self.asked, self._own = {"any"}, False, [], traced.compiled
        monkeypatch.setattr(traced, "compiled", self)

    def __call__(self, gm, *args):
        kind = "any" if len(args) > 5 else "one"
        self.asked.append(kind)
        if kind not in self.fails:
            return self._own(gm, *args)
        if not self.late:
            raise RuntimeError(f"no graph for {kind}")
        return replace(self._own(gm, *args), call=self._failing)

    def _failing(self, args):
        raise TypeError("unhashable")


@pytest.fixture
def compiler(monkeypatch):
    return Compiler(monkeypatch)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dynamic", [True, 4])
def test_each_size_has_a_graph_of_its_own(compiler, dynamic, late):
    compiler.late = late
    ask = asked(dynamic=dynamic)
    for n in DRAWN:
        assert_right(ask, torch.randn(n, d))
    (reason,) = ask.reasons()
    said = "TypeError: unhashable" if late else "RuntimeError: no graph for any"
    assert reason == f"each size has a graph of its own: one for any cannot be compiled: {said}"
    assert compiler.asked.count("any") == 1
    assert sum(len(graph.step) for graph in ask.graphs) == compiler.asked.count("one") >= 2
    assert not any(graph.dynamic for graph in ask.graphs)


@pytest.mark.parametrize("late", [False, True])
def test_if_none_can_be_compiled_the_eager_code_answers(compiler, late):
    """With one try for each kind: every size that is new would take the time of another."""
    compiler.fails, compiler.late = {"any", "one"}, late
    ask = asked()
    for n in DRAWN:
        assert_right(ask, torch.randn(n, d))
    (reason,) = ask.reasons()
    said = (
        ("TypeError: unhashable",) * 2 if late else ("RuntimeError: no graph for one", "RuntimeError: no graph for any")
    )
    assert reason == f"it cannot be traced: {said[0]}; one for any cannot be compiled: {said[1]}"
    assert compiler.asked == ["any", "one"]
    assert not ask.graphs


def test_one_size_that_fails_is_answered_eagerly_alone(compiler):
    ask = asked()
    for n in (9, 9, 9, 9, 9, 9):  # by graphs of ten samples
        assert_right(ask, torch.randn(n, d))
    compiler.fails = {"one"}
    for n in (13, 13, 13, 13, 9):
        assert_right(ask, torch.randn(n, d))
    apart, failed = ask.reasons()
    assert "one for any" in apart
    assert failed == "it cannot be traced: RuntimeError: no graph for one"
    assert [len(graph.step) for graph in ask.graphs] == [1, 0]


def test_the_first_of_several_sizes_that_fails_is_not_the_end(compiler):
    """Where no graph for any size was asked for, nothing is known of the other sizes."""
    compiler.fails = {"one"}
    ask = asked(dynamic=False, pad_to=(10, 16))
    for n in (9, 9, 9):
        assert_right(ask, torch.randn(n, d))
    compiler.fails = set()
    for n in (13, 13, 13, 13, 9):
        assert_right(ask, torch.randn(n, d))
    assert ask.reasons() == ["it cannot be traced: RuntimeError: no graph for one"]
    assert [len(graph.step) for graph in ask.graphs] == [0, 1]


@pytest.mark.parametrize("fails", [{"any"}, {"any", "one"}])
@pytest.mark.parametrize("noise", [False, True])
def test_a_loss_that_counts_its_samples_is_not_filled_up(compiler, fails, noise):
    compiler.fails = fails
    ask = asked(lambda model, x: losses(model, x) * x.shape[0] + (0 * torch.rand(1) if noise else 0))
    for n in (16, 16, 16, 13, 13, 13, 13, 5, 5, 5, 5, 24, 16, 16, 16):
        assert_right(ask, torch.randn(n, d))
    assert len(ask.reasons()) == 1
    assert ask.sizes == Sizes(unit=1, exact=True)
    assert [len(graph.step) for graph in ask.graphs] == ([1, 1, 0, 1] if fails == {"any"} else [])


def test_another_way_through_the_model_that_counts(compiler):
    """It is known to count when the first way fails, and random numbers would hide it later."""

    def two_ways(model, x):
        found = losses(model, x) + 0 * torch.rand(1)
        return found * x.shape[0] if x.shape[1] == d else found

    model = nn.Sequential(nn.Unflatten(1, (-1, 1)), nn.Linear(1, 3), nn.Flatten())
    ask = asked(two_ways, model=model)
    for width, n in ((d, 16), (5, 16), (5, 16), (5, 16), (d, 13), (d, 13), (d, 13), (d, 13)):
        assert_right(ask, torch.randn(n, width))
    assert ask.sizes == Sizes(unit=1, exact=True)


@pytest.mark.parametrize("fails", [{"any"}, {"any", "one"}])
def test_calls_that_do_not_wait(compiler, fails):
    compiler.fails = fails
    ask = asked()
    for n in DRAWN:
        assert_right(ask, torch.randn(n, d), ask.trusting)
        assert not ask.doubted()
    assert len(ask.reasons()) == 1


def test_what_was_compiled_gives_its_memory_back(compiler, monkeypatch):
    released = []
    monkeypatch.setattr(Step, "release", lambda step: released.append(step))
    compiler.fails = set()
    ask = asked(model=mlp().float())
    for n in (9, 9, 9, 10):
        ask(torch.randn(n, d).float())
    (step,) = ask.graphs[0].step.values()
    compiler.fails = {"any"}
    with torch.autocast("cpu", torch.bfloat16):  # another step of the same graph
        for n in (9, 10, 10, 10):
            ask(torch.randn(n, d).float())
    assert [one for one in released if one is step] == [step]
    assert "one for any cannot be compiled" in ask.reasons()[0]


class Writes(nn.Module):
    seen: torch.Tensor

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(d, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return self.fc(x)


def test_what_no_size_would_change_is_eager_at_once():
    ask = asked(model=Writes())
    for n in DRAWN:
        assert_right(ask, torch.randn(n, d))
    (reason,) = ask.reasons()
    assert "writes into a buffer" in reason
    assert [graph.dynamic for graph in ask.graphs] == [True]


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(d))

    def forward(self, x):
        return x * self.scale


@pytest.mark.parametrize("make", [mlp, Scaled])
@pytest.mark.parametrize("mark", [torch._dynamo.mark_dynamic, torch._dynamo.maybe_mark_dynamic])
def test_sizes_that_the_caller_has_marked(mark, make):
    """Without `dynamic` nothing knows how many samples a graph is for."""
    loss_fn = lambda model, x: losses(model, x) * (1 + len(x) // 16)  # noqa: E731
    ask = eachgrad.compile(make(), loss_fn, backend="aot_eager", mean=eachgrad.mean())
    for n in (9, 9, 9, 9, 9, 17, 33):
        x = torch.randn(n, d)
        mark(x, 0)
        assert_same(ask(x).mean, ask.eager((x,)).mean, 1e-10)
    (reason,) = ask.reasons()
    assert "marked as dynamic" in reason


@pytest.mark.parametrize("options", [{}, {"dynamic": False, "pad_to": 16}], ids=str)
@pytest.mark.parametrize("bad", [(3,), (5,), (3, 5, 6)], ids=str)
def test_a_batch_that_is_wrong_is_not_the_compilers_failure(bad, options):
    """A label that is no class, at the first compiled call or later: torch says so itself, and nothing is given up."""

    def loss_fn(model, x, y):
        return nn.functional.cross_entropy(model(x), y, reduction="none")

    ask = asked(loss_fn, **options)
    for call in range(1, 14):
        n = 9 + call % 3
        x, y = torch.randn(n, d), torch.randint(3, (n,))
        if call in bad:
            y[0] = 99
            with pytest.raises(IndexError, match="out of bounds"):
                ask(x, y)
        else:
            torch.testing.assert_close(ask(x, y).norms, ask.eager((x, y)).norms, rtol=1e-9, atol=0)
    assert not ask.reasons()
    (graph,) = ask.graphs
    assert len(graph.step) == 1
