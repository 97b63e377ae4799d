"""dynamic: batches of any size by one graph, each answer the eager one."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace
from torch.nn import functional as F

import eachgrad
from eachgrad import agreement, padding, plan, sizes
from eachgrad.blocks import arithmetic
from eachgrad.kernels import positions
from eachgrad.padding import FEWEST, Sizes
from eachgrad.queries import Answer
from oracle import assert_same, loop

pytestmark = [
    pytest.mark.usefixtures("double", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
d, T = 6, 9
DRAWN = (9, 9, 9, 13, 12, 3, 9, 27, 1, 8, 10, 13)  # T among them; the 1st, 2nd, 4th and 8th are measured


class Tied(nn.Module):
    """An embedding that is the last layer as well, positions that are counted, and a norm."""

    def __init__(self):
        super().__init__()
        self.tokens, self.norm = nn.Embedding(11, d), nn.LayerNorm(d)

    def forward(self, ids):
        h = self.norm(self.tokens(ids) + torch.arange(ids.shape[1])[:, None] / ids.shape[1])
        return F.scaled_dot_product_attention(h, h, h) @ self.tokens.weight.T


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(d, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.fc(self.lstm(x)[0])


class TimeFirst(nn.Module):
    """Samples lie along the second dimension of what its layers see, and among the rows of another."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(d, d), nn.Linear(d, 3)

    def forward(self, x):
        h = torch.tanh(self.one(x.transpose(0, 1))).transpose(0, 1)
        return self.other(h.reshape(-1, d)).view(x.shape[0], -1)


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 2, stride=2), nn.Flatten(),
        nn.Linear(54, 5),
    )  # fmt: skip


MODELS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(d, 8), nn.GELU(), nn.Linear(8, 3)), lambda n: torch.randn(n, d)),
    "positions": (lambda: nn.Sequential(nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, 3)), lambda n: torch.randn(n, T, d)),
    "tied": (Tied, lambda n: torch.randint(11, (n, T))),
    "convolutions": (convolutions, lambda n: torch.randn(n, 3, 6, 6)),
    "recurrent": (Recurrent, lambda n: torch.randn(n, T, d)),
    "time first": (TimeFirst, lambda n: torch.randn(n, T, d)),
}


def losses(model, x):
    return model(x).square().flatten(1).mean(1)


def asked(model, loss_fn=losses, **options):
    queries = {"grad": eachgrad.clipped_sum(0.02), "norms": eachgrad.norms(), "total": eachgrad.mean()}
    return eachgrad.compile(model, loss_fn, **({"dynamic": True, "backend": "aot_eager"} | options), **queries)


def assert_right(ask, x, bound=1e-10):
    got, want = ask(x), ask.eager((x,))
    for name in ("norms", "losses"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=bound, atol=0)
    assert_same(got.grad, want.grad, bound)
    assert_same(got.total, want.total, bound)


@pytest.mark.parametrize("name", MODELS)
def test_one_graph_has_the_answers_for_every_size(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    ask = asked(make())
    for n in DRAWN:
        assert_right(ask, batch(n))
    assert not ask.reasons()
    (graph,) = ask.graphs
    (step,) = graph.step.values()
    assert {size for size, _ in step.checked} == {9, 12, 8, 10, 13}  # 3 samples and 1 are filled up to 8


@pytest.mark.parametrize("name", MODELS)
def test_few_samples_are_taken_as_they_come(name):
    """In all orders of large and small ones, also where a small batch is the first that is measured."""
    torch.manual_seed(0)
    make, batch = MODELS[name]
    for drawn in ((2, 4, 3, 5, 1, 2, 6, 4, 1, 3), (5, 3, 2, 1, 2, 2, 4, 9, 1, 3)):
        ask = asked(make(), fewest=2)
        for n in drawn:
            assert_right(ask, batch(n))
        assert not ask.reasons()
        sizes = {size for graph in ask.graphs for step in graph.step.values() for size, _ in step.checked}
        assert sizes >= {2, 3}


@pytest.mark.parametrize("name", ["tied", "convolutions"])
def test_answers_are_those_of_a_loop(name):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    ask = asked(model)
    for n in (9, 9, 9, 12, 12):
        x = batch(n)
        want = loop(model, losses, [(one,) for one in x.split(1)])
        norms = sum(g.flatten(1).square().sum(1) for g in want.values()).sqrt()
        got = ask(x)
        torch.testing.assert_close(got.norms, norms, rtol=1e-10, atol=0)
        factor = (0.02 / norms).clamp(max=1.0)
        assert_same(got.grad, {name: torch.einsum("i,i...->...", factor, g) for name, g in want.items()}, 1e-6)


def test_by_inductor():
    torch.manual_seed(0)
    make, batch = MODELS["positions"]
    ask = asked(make(), backend="inductor")
    for n in DRAWN:
        assert_right(ask, batch(n), 1e-9)
    assert not ask.reasons()
    assert [len(graph.step) for graph in ask.graphs] == [1]


def test_a_unit_fills_up():
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]
    ask = asked(make(), dynamic=5)
    for n in (9, 9, 9, 13, 12, 3, 9, 27, 17):
        assert_right(ask, batch(n))
    (graph,) = ask.graphs
    (step,) = graph.step.values()
    assert {size for size, _ in step.checked} == {10, 15, 20}


def test_what_only_speed_depends_on_is_chosen_once(monkeypatch):
    """A kernel from so many numbers on, which divides its work by how many samples there are."""
    torch.manual_seed(0)
    monkeypatch.setattr(arithmetic, "on_gpu", lambda t: True)
    monkeypatch.setattr(arithmetic, "MANY", 11 * 260 * 40)
    monkeypatch.setattr(positions, "PROGRAMS", 22)
    assert {positions.tiling(n, 260, 40).parts for n in (8, 12, 27)} == {2, 1}
    model = nn.Sequential(nn.Linear(d, 40), nn.Tanh(), nn.Linear(40, 3)).float()
    for first in (9, 12):  # without the kernel, and with it
        ask = asked(model)
        for n in (first, first, first, 13, 8, 27, 9):
            assert_right(ask, torch.randn(n, 260, d, dtype=torch.float32), 1e-5)
        assert not ask.reasons()
        ((step,),) = ([*graph.step.values()] for graph in ask.graphs)
        assert {size for size, _ in step.checked} == {first, 8, 27, 9}


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_is_made_for_the_usual_size(name):
    """Whichever comes first: what a step is traced with, and what the compiler sees first."""
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model, found = make(), []
    for first in (3, 12):
        seen = []

        def backend(gm, example, seen=seen):
            seen.append({int(a.node.hint) for a in example if isinstance(a, torch.SymInt)})
            return gm

        ask = asked(model, fewest=2, usual=7, backend=backend)
        for n in (first, first, first, 12, 7, 7, 3):
            assert_right(ask, batch(n))
        assert not ask.reasons()
        (graph,) = ask.graphs
        assert sorted(graph.traced) == [7, 8, 10]
        assert seen == [{7}], "compiled once, for the usual size"
        found.append(re.sub(r"\], \d+\);  any", "", graph.traced[7].gm.code))  # but for the slot of its flag
    assert found[0] == found[1]


def test_the_usual_size_is_filled_up():
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]
    ask = asked(make(), dynamic=4, usual=9)
    for n in (5, 5, 5, 12, 9):
        assert_right(ask, batch(n))
    (graph,) = ask.graphs
    assert sorted(graph.traced) == [12, 16, 24]


def test_the_usual_size_draws_no_random_numbers():
    """A step that is there for the compiler alone leaves the generator as it was."""

    def drawn(usual):
        torch.manual_seed(0)
        ask = asked(nn.Sequential(nn.Linear(d, 8), nn.Dropout(0.5), nn.Linear(8, 3)), usual=usual)
        x = torch.randn(12, d)
        return [ask(x).losses for _ in range(6)]

    for got, want in zip(drawn(9), drawn(12), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_usual_size_that_does_not_fit_in_memory(monkeypatch):
    """The batch at hand does, and is computed."""
    from eachgrad.step import Step

    run = Step.run

    def refused(self, args):
        if any(isinstance(a, torch.Tensor) and a.shape[:1] == (9,) for a in args):
            raise torch.OutOfMemoryError("too large")
        return run(self, args)

    monkeypatch.setattr(Step, "run", refused)
    torch.manual_seed(0)
    make, batch = MODELS["positions"]
    ask = asked(make(), usual=9)
    for _ in range(4):
        assert_right(ask, batch(12))
    assert not ask.reasons()
    assert [len(graph.step) for graph in ask.graphs] == [1]


@pytest.mark.parametrize(
    ("usual", "dynamic"), [(0, True), (-3, True), (True, True), (2.5, True), ("9", True), (9, False)]
)
def test_what_is_no_usual_size_is_refused(usual, dynamic):
    with pytest.raises(ValueError, match="usual is what most batches have"):
        asked(nn.Linear(d, 3), usual=usual, dynamic=dynamic)


def test_samples_along_another_dimension():
    torch.manual_seed(0)
    model = TimeFirst()

    def turned(model, x):
        return model(x.transpose(0, 1)).square().flatten(1).mean(1)

    ask = asked(model, turned, batch_dim=1)
    for n in DRAWN:
        assert_right(ask, torch.randn(7, n, d))
    assert not ask.reasons()
    assert len(ask.graphs) == 1


def test_random_numbers_are_drawn_anew():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    ask = asked(model)
    x = torch.randn(11, d)
    found = [ask(x[:n]).norms for n in (9, 9, 9, 11, 11, 11)]
    (step,) = ask.graphs[0].step.values()
    assert {size for size, _ in step.checked} == {9, 11}
    assert not torch.equal(found[4], found[5])


def test_random_numbers_hide_no_sample(monkeypatch):
    """Eight samples at a time: with 17 there is one part more, and no number can tell that it is missing."""
    torch.manual_seed(0)
    monkeypatch.setattr(plan, "CHUNK", 8 * d * 64)
    model = nn.Sequential(nn.Linear(d, 64), nn.Dropout(0.5))
    ask = eachgrad.compile(model, losses, dynamic=True, backend="aot_eager", norms=eachgrad.norms())
    for n in (9, 9, 9, 9, 10):
        assert (ask(torch.randn(n, 90, d)).norms > 0).all()
    assert not ask.reasons()
    for n in (17, 17, 17, 17, 25, 25, 25):
        assert (ask(torch.randn(n, 90, d)).norms > 0).all()
    (reason,) = ask.reasons()
    assert "each size has a graph of its own" in reason
    assert "17 samples" in reason


def test_what_the_size_decides_is_another_graph():
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]

    def decided(model, x):
        return losses(model, x) * (2.0 if x.shape[0] > 10 else 1.0)

    ask = asked(make(), decided)
    for n in (9, 9, 9, 13, 12, 12, 3, 9, 27, 8, 10, 13, 14):
        assert_right(ask, batch(n))
    assert not ask.reasons()
    assert [len(graph.step) for graph in ask.graphs] == [1, 1]


def reciprocal(model, x):
    return losses(model, x) * (1.0 / x.shape[0])


def squared(model, x):
    return losses(model, x) / x.shape[0] ** 2


def rounded(model, x):
    return losses(model, x) + (x.shape[0] // 2) * model[0].weight.sum() / 100


@pytest.mark.parametrize("loss_fn", [reciprocal, squared, rounded])
def test_numbers_that_are_not_so_much_for_each_sample(loss_fn):
    """Each size has its own graph then, of few sizes; nothing is answered from a line between two."""
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]
    ask = asked(make(), loss_fn)
    for n in (9, 9, 9, 13, 12, 12, 11, 13, 13, 5, 5, 5, 5, 11, 11, 11):
        assert_right(ask, batch(n))
    (reason,) = ask.reasons()
    assert "each size has a graph of its own" in reason
    assert " samples, " in reason
    assert any(graph.step for graph in ask.graphs)


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.parametrize("dynamic", [True, 8])
def test_a_loss_that_counts_its_samples(dynamic, noise):
    """Filled up it would be another one: such batches are answered eagerly, with random numbers too."""
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]

    def counting(model, x):
        return losses(model, x) * x.shape[0] + (0 * torch.rand(1) if noise else 0)

    ask = asked(make(), counting, dynamic=dynamic)
    for n in (16, 16, 16, 16, 16, 13, 13, 13, 13, 5, 5, 5, 24, 24, 16):
        assert_right(ask, batch(n))
    assert not ask.reasons()
    (graph,) = ask.graphs
    assert graph.counts
    (step,) = graph.step.values()
    sizes = {16, 24} if dynamic == 8 else {16, 13, 24}
    assert step.checked == {(size, False) for size in sizes}


def test_steps_of_a_loss_in_sixteen_bits():
    """What a comparison of few bits would let pass is seen in the graphs."""
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]

    def stepped(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return losses(model, x).float() * (1 + 0.4 * (x.shape[0] // 16))

    ask = asked(make().float(), stepped)
    for n in (9, 9, 9, 9, 10, 17, 17, 17, 33, 33, 33, 33):
        x = batch(n).float()
        got, want = ask(x), ask.eager((x,))
        torch.testing.assert_close(got.norms, want.norms, rtol=0.05, atol=0)
    assert "each size has a graph of its own" in ask.reasons()[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_comparison_that_was_interrupted_is_made_again(error, monkeypatch):
    torch.manual_seed(0)
    make, batch = MODELS["mlp"]
    ask = asked(make(), lambda model, x: losses(model, x) * (1 + x.shape[0] // 16))
    for n in (9, 9, 9, 9, 10):
        ask(batch(n))
    own, failing = ask.eager, [error(), error()]

    def eager(given):
        if failing:
            raise failing.pop()
        return own(given)

    monkeypatch.setattr(ask, "eager", eager)
    with pytest.raises(error):
        ask(batch(17))
    failing.clear()
    for n in (17, 17, 17, 17):
        assert_right(ask, batch(n))


def test_the_first_tensor_is_not_the_samples():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, 3), nn.Dropout(1e-14))

    def weighted(model, w, x):
        return losses(model, x) * w[0]

    ask = asked(model, weighted)
    for _ in range(5):
        x = torch.randn(8, d)
        got, want = ask(torch.ones(3), x), ask.eager((torch.ones(3), x))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-10, atol=0)
        assert_same(got.grad, want.grad, 1e-10)
    assert "pass what holds the samples first" in ask.reasons()[0]


def test_a_batch_that_lies_apart_has_the_same_graph():
    torch.manual_seed(0)
    make, _ = MODELS["mlp"]
    ask = asked(make())
    for n in (9, 9, 9, 12):
        assert_right(ask, torch.randn(n, d))
    for _ in range(3):
        assert_right(ask, torch.randn(9, 2 * d)[:, ::2])
    assert not ask.reasons()
    assert len(ask.graphs) == 1


def test_the_batch_is_left_as_it_was():
    ask = asked(nn.Sequential(nn.Linear(d, 3)))
    x = torch.randn(9, d)
    for _ in range(3):
        ask(x)
    assert not vars(x)


def test_sizes():
    assert [Sizes((3, 8)).fit(n) for n in (1, 3, 4, 8)] == [3, 3, 8, 8]
    assert [Sizes(unit=1).fit(n) for n in (1, FEWEST, 9, 1000)] == [FEWEST, FEWEST, 9, 1000]
    assert [Sizes(unit=6).fit(n) for n in (1, 12, 13)] == [12, 12, 18]
    few = [Sizes(unit=1, few=True).fit(n) for n in range(8, 65)]
    assert sorted(set(few)) == [8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert all(size >= n for n, size in zip(range(8, 65), few, strict=True))
    assert [Sizes(unit=6, few=True).fit(n) for n in (8, 13, 70)] == [12, 18, 72]
    assert padding.sizes_of(None, False) is None
    assert padding.sizes_of(None, True) == Sizes(unit=1)


@pytest.mark.parametrize("dynamic", [-1, 2.0, "8", None, (8, 9)])
def test_what_is_no_unit_is_refused(dynamic):
    with pytest.raises(ValueError, match="dynamic is True, or a number"):
        asked(nn.Linear(d, 3), dynamic=dynamic)
    with pytest.raises(ValueError, match="at least 2"):
        asked(nn.Linear(d, 3), fewest=1)
    with pytest.raises(ValueError, match="pass one of them"):
        asked(nn.Linear(d, 3), pad_to=8)
    with pytest.raises(ValueError, match="skip an empty one"):
        asked(nn.Linear(d, 3))(torch.randn(0, d))


def traced(function):
    return symbolic_trace(function)


def test_numbers_of_graphs():
    made = lambda n: lambda x: (x * (3 * n - 4)).view(n, 2)  # noqa: E731
    found = sizes.of_any_size({n: traced(made(n)) for n in (5, 7, 12)}, (0, 0))
    for n in (5, 9):
        x = torch.randn(n, 2)
        torch.testing.assert_close(found(x), x * (3 * n - 4), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda n: lambda x: x * (n * n), "25 for 5 samples, 49 for 7 samples"),
        (lambda n: lambda x: x * (n // 2), "2 for 5 samples, 3 for 7 samples, 6 for 12"),
        (lambda n: lambda x: x * (0.5 * n), "2.5 for 5 samples"),
        (lambda n: lambda x: x.sum(0) if n > 6 else x.mean(0), "mean for 5 samples, sum for 7"),
        (lambda n: lambda x: x + x if n > 6 else x, "2 ops for 5 samples, 3 ops for 7"),
        (lambda n: lambda x, y: x * 2 - y * 2 if n > 6 else y * 2 - x * 2, "for 5 samples"),
        (lambda n: lambda x: x.sum(dim=0, keepdim=n > 6), "False for 5 samples, True for 7"),
        (lambda n: lambda x: x.sum(dim=0) if n > 6 else x.sum(axis=0), "'axis': 0"),
        (lambda n: lambda x: x.sum((0,) if n > 6 else (0, 1)), "(0, 1) for 5 samples, (0,) for 7"),
    ],
)
def test_graphs_that_are_not_one(made, said):
    with pytest.raises(sizes.NotAlike) as error:
        sizes.of_any_size({n: traced(made(n)) for n in (5, 7, 12)}, (0, 0))
    assert said in str(error.value)


def test_sizes_to_trace():
    for unit in (1, 3, 8):
        for size in range(unit * -(-FEWEST // unit), 200, unit):
            found = {size, *sizes.others(size, unit)}
            assert sorted(found) == [size, size + unit, size + 3 * unit]  # two steps of one length hide a square
            assert all(n >= size and n % unit == 0 for n in found)


class Turns(nn.Module):
    """Rows that are the samples in turns."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(d, 3)

    def forward(self, x):
        return self.fc(x.transpose(0, 1).reshape(-1, d)).view(x.shape[1], -1, 3).transpose(0, 1)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(TimeFirst, "outer"), (Turns, "inner"), (lambda: nn.Sequential(nn.Linear(d, 3)), None)],
)
def test_a_plan_for_another_size(make, kind):
    """As it is measured there."""
    torch.manual_seed(0)
    ask, plans = asked(make(), dynamic=False), {}
    for n in (10, 14, 30):
        ask(torch.randn(n, T, d))
        plans[n] = ask.graphs[-1].plan
    assert kind in {None if place.fold is None else place.fold.kind for place in plans[10].layouts}
    for n in plans:
        for m in plans:
            assert plans[n].of_size(m).same(plans[m])
            assert plans[n].alike(plans[m])
        assert n == 10 or plans[10].same(plans[n]) == (kind is None)


def test_constants_that_differ():
    def held(values):
        class Held(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("scale", torch.tensor(values))

            def forward(self, x):
                return x * self.scale

        return symbolic_trace(Held())

    same = sizes.of_any_size({n: held([1.0, 2.0]) for n in (5, 7, 12)}, (0, 0))
    assert torch.equal(same(torch.ones(3, 2)), torch.tensor([[1.0, 2.0]] * 3))
    with pytest.raises(sizes.NotAlike):
        sizes.of_any_size({n: held([1.0, float(n)]) for n in (5, 7, 12)}, (0, 0))


@pytest.mark.parametrize(
    ("size", "factor", "far"),
    [
        (1.0, 1.00102, False), (1.0, 1.00104, True), (0.1, 1.0012, False), (0.1, 1.0014, True),
        (0.01, 1.0039, False), (0.01, 1.0041, True), (1e-5, 2.0, False), (1e-5, 5.0, True),
    ],
)  # fmt: skip
def test_a_parameter_is_compared_by_its_own_size(size, factor, far):
    """In float32: by 0.1% of its part of the answer, and 0.003% of all."""
    answer = lambda f: Answer(grad={"w": torch.full((4,), 0.5 * (1 - size**2) ** 0.5), "b": torch.tensor([f * size])})  # noqa: E731
    said = agreement.difference(answer(factor), answer(1.0), rough=False)
    assert bool(said) == far
    assert not far or said.startswith(("grad['b'] by", "grad by"))
    assert not agreement.difference(answer(factor), answer(1.0), rough=True), "float32 is the judge there"


def test_other_shapes_and_other_nans_are_differences():
    answer = lambda *values: Answer(norms=torch.tensor(values), losses=torch.ones(2))  # noqa: E731
    assert not agreement.difference(answer(1.0, float("nan")), answer(1.0, float("nan")), True)
    assert "norms" in agreement.difference(answer(float("nan"), 1.0), answer(1.0, 1.0), True)
    assert "norms" in agreement.difference(answer(1.0), answer(1.0, 1.0), True)
