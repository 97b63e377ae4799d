"""Small gradients side by side, and large ones read by one launch: the clipped sums are those of each by itself."""

from __future__ import annotations

import copy
import dataclasses
import threading
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import eachgrad
from eachgrad import doubts
from eachgrad.blocks import Dense, Outer, arithmetic, base, outer
from eachgrad.gradient import Gradient
from eachgrad.kernels import many
from eachgrad.queries import joining, packing, sums
from eachgrad.queries.base import Over
from oracle import assert_same, loop

B = 5


class Mixed(nn.Module):
    """Biases, norms and numbers of several dtypes, a frozen one and one that the loss does not reach."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.scale, self.single = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(3, dtype=torch.float32))
        self.phase, self.unused = nn.Parameter(torch.randn(3, dtype=torch.complex128)), nn.Parameter(torch.ones(2))
        self.norm.bias.requires_grad_(False)

    def forward(self, x):
        out = self.second(self.norm(self.first(x)).tanh()) * self.scale * self.single.double()
        return out + (self.phase * out).real


def problem(seed: int = 0):
    torch.manual_seed(seed)
    model = Mixed().double()
    model.single.data = model.single.data.float()
    return model, torch.randn(B, 4, 6, dtype=torch.float64), torch.randint(3, (B, 4))


def losses(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).sum(1)


def clipped(monkeypatch, small: int, poisoned: bool = False, **options):
    monkeypatch.setattr(joining, "SMALL", small)
    monkeypatch.setattr(joining, "FEW", 1)
    model, x, y = problem()
    with eachgrad.record(model) as tape:
        found = losses(model, x, y)
        if poisoned:
            found = found * torch.tensor([1.0, 1.0, float("nan"), 1.0, 1.0], dtype=found.dtype)
    return tape.ask(found, grad=eachgrad.clipped_sum(**options), norms=eachgrad.norms())


GROUPS = {"a": ["first*", "scale"], "b": ["norm*", "second*", "single", "phase", "unused"]}
OPTIONS = {
    "flat": {"max_norm": 0.3},
    "by groups": {"max_norm": {"a": 0.2, "b": 0.5}, "groups": GROUPS},
    "by parameter": {"max_norm": 0.1, "groups": "parameter"},
    "normalised": {"max_norm": 0.3, "normalise": True},
    "wide": {"max_norm": 0.3, "wide": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_packed_and_by_themselves_are_the_same(name, monkeypatch):
    packed, alone = (clipped(monkeypatch, small, **OPTIONS[name]) for small in (joining.SMALL, 0))
    assert packed.grad.keys() == alone.grad.keys()
    for key, value in alone.grad.items():
        assert packed.grad[key].dtype == value.dtype
        assert packed.grad[key].shape == value.shape
    assert_same(packed.grad, alone.grad, 1e-6)
    torch.testing.assert_close(packed.norms, alone.norms, rtol=1e-6, atol=0)


def test_against_a_loop(monkeypatch):
    model, x, y = problem()
    given = {n: p for n, p in model.named_parameters() if p.requires_grad}
    want, rows = {n: torch.zeros_like(p) for n, p in given.items()}, []
    for i in range(B):
        loss = losses(model, x[i : i + 1], y[i : i + 1]).sum()
        found = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
        rows.append({n: torch.zeros_like(given[n]) if g is None else g for n, g in zip(given, found, strict=True)})
    for row in rows:
        size = sum(float(g.abs().square().sum()) for g in row.values()) ** 0.5
        for n in want:
            want[n] += min(1.0, 0.3 / size) * row[n]
    assert_same(clipped(monkeypatch, joining.SMALL, max_norm=0.3).grad, want, 1e-6)


def test_a_sample_that_is_not_finite_is_left_out_of_the_pack(monkeypatch):
    got, want = (clipped(monkeypatch, small, True, max_norm=0.3, nonfinite="zero") for small in (joining.SMALL, 0))
    assert all(value.isfinite().all() for value in got.grad.values())
    assert_same(got.grad, want.grad, 1e-6)


def test_small_gradients_share_their_ops(monkeypatch):
    """Fewer ops the more there are to pack."""
    counts = []
    for small in (joining.SMALL, 0):
        with torch.profiler.profile() as profile:
            clipped(monkeypatch, small, max_norm=0.3)
        counts.append(sum(event.count for event in profile.key_averages() if event.key == "aten::linalg_vector_norm"))
    assert counts[0] < counts[1]


# Large gradients, where a GPU is: each stays where it lies, and a launch reads all of them


SHAPES = {"a.w": (9, 7), "a.b": (5,), "b.w": (8, 8), "b.v": (3, 4, 6), "b.b": (7,), "c.w": (90,)}
PARTS = {"a": ["a*"], "b": ["b*", "c*"]}
LARGE_OPTIONS = {
    "flat": {"max_norm": 8.0},
    "by groups": {"max_norm": {"a": 2.0, "b": 11.0}, "groups": PARTS},
    "by parameter": {"max_norm": 5.0, "groups": "parameter"},
    "normalised": {"max_norm": 8.0, "normalise": True},
    "wide": {"max_norm": 8.0, "wide": True},
    "left out": {"max_norm": 8.0, "nonfinite": "zero"},
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(arithmetic, "on_gpu", lambda t: True)
    monkeypatch.setattr(arithmetic, "LARGE", 60)
    monkeypatch.setattr(joining, "SMALL", 8)
    monkeypatch.setattr(joining, "FEW", 1)


def many_gradients(dtype: torch.dtype, parameter: torch.dtype | None = None, poisoned: bool = False) -> list[Gradient]:
    """Two small ones and four large, with NaN between the samples of some."""
    torch.manual_seed(0)
    found = []
    for k, (name, shape) in enumerate(SHAPES.items()):
        value = torch.full((B, shape[0] + k % 2, *shape[1:]), float("nan")).to(dtype)[:, : shape[0]]
        value.copy_(torch.rand(B).view(-1, *[1] * len(shape)) * 2 * torch.randn(B, *shape))
        if poisoned and k in (2, 4):
            value[k - 1].view(-1)[1] = float("inf")
        found.append(Gradient(name, torch.zeros(shape, dtype=parameter or dtype), Dense(value), B))
    return found


def asked(gradients: list[Gradient], budget: int | None = None, **queries):
    """The answers, and how often each op of the library ran."""
    total, names = eachgrad.Accumulator(**queries), {gradient.name: gradient.parameter for gradient in gradients}

    def visit(add, wanted):
        for gradient in gradients:
            if wanted is None or gradient.name in wanted:
                add(gradient)

    with Ops() as ops:
        total.run(Over(names, {}, budget), B, {g.name: g.cost() for g in gradients}, visit)
    return total.answer(), ops.counts


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "eachgrad" or func.overloadpacket is torch.ops.aten.linalg_vector_norm:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def truth(gradients: list[Gradient], max_norm, groups=None, normalise=False, nonfinite="raise", wide=False):
    """The norms and the clipped sums in float64, group by group."""
    values = {g.name: g.block.value.double().reshape(B, -1) for g in gradients}
    squares = {name: value.square().sum(1) for name, value in values.items()}
    norms = sum(squares.values()).sqrt()
    owner = {n: n if groups == "parameter" else n[0].replace("c", "b") if groups else "" for n in values}
    each = {o: sum(squares[n] for n in values if owner[n] == o).sqrt() for o in owner.values()}
    used, answer = norms.isfinite(), {}
    for gradient in gradients:
        group = each[owner[gradient.name]]
        bound = max_norm[owner[gradient.name]] if isinstance(max_norm, dict) else max_norm
        factor = bound / (group + 0.01) if normalise else (bound / group).clamp(max=1.0)
        found = (factor[:, None] * values[gradient.name])[used].sum(0)
        answer[gradient.name] = found.view(gradient.parameter.shape)
    return norms, answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LARGE_OPTIONS)
def test_large_gradients(name, dtype, as_on_a_gpu):
    options = LARGE_OPTIONS[name]
    bad, parameter = name == "left out", torch.float32 if name != "wide" else dtype
    gradients = many_gradients(dtype, parameter, poisoned=bad)
    answer, ops = asked(gradients, grad=eachgrad.clipped_sum(**options), norms=eachgrad.norms())
    norms, want = truth(gradients, **options)
    assert all(value.dtype == torch.float32 and value.shape == want[n].shape for n, value in answer.grad.items())
    assert_same(answer.grad, want, 2e-6)
    torch.testing.assert_close(answer.norms.double(), norms, rtol=1e-6, atol=0)
    packs = {"by groups": 2, "by parameter": 4}.get(name, 1)
    assert ops["squares_of_many"] == packs
    assert ops["weighted_of_many"] == (4 if bad else packs)  # of some samples alone, one by one


@pytest.mark.parametrize("together", [1, 100])
def test_large_gradients_are_summed_some_at_a_time(together, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(packing, "TOGETHER", together)
    gradients = many_gradients(torch.bfloat16, torch.float32)
    answer, ops = asked(gradients, grad=eachgrad.clipped_sum(8.0))
    assert_same(answer.grad, truth(gradients, 8.0)[1], 2e-6)
    assert (ops["squares_of_many"], ops["weighted_of_many"]) == (1, 4 if together == 1 else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_of_large_gradients_has_the_dtype_of_its_parameter(dtype, as_on_a_gpu):
    gradients = many_gradients(torch.bfloat16, dtype)
    packed, _ = asked(gradients, grad=eachgrad.clipped_sum(8.0))
    assert {value.dtype for value in packed.grad.values()} == {dtype}
    assert_same(packed.grad, truth(gradients, 8.0)[1], 2.0**-8 if dtype == torch.bfloat16 else 2e-6)


def test_one_percent_of_one_sample_is_seen(as_on_a_gpu):
    gradients = many_gradients(torch.float32)
    answer, _ = asked(gradients, grad=eachgrad.clipped_sum(8.0))
    gradients[2].block.value[1] *= 1.01
    with pytest.raises(AssertionError):
        assert_same(answer.grad, truth(gradients, 8.0)[1], 2e-6)


def test_a_sample_that_is_not_finite_is_named(as_on_a_gpu):
    with pytest.raises(eachgrad.CaptureError, match=r"samples \[1, 3\]"):
        asked(many_gradients(torch.bfloat16, torch.float32, poisoned=True), grad=eachgrad.clipped_sum(8.0))


CLIP, EACH = eachgrad.clipped_sum(8.0), eachgrad.norms(by="parameter")
QUESTIONS = {  # and how often norms of large gradients are computed, norms of small ones, and sums of large ones
    "norms first": ({"norms": eachgrad.norms(), "grad": CLIP}, (1, 2, 1)),
    "norms of each": ({"grad": CLIP, "each": EACH}, (4, 3, 1)),
    "norms of each, and of all": ({"grad": CLIP, "each": EACH, "norms": eachgrad.norms()}, (4, 3, 1)),
    "norms of some": ({"grad": CLIP, "some": eachgrad.norms().select(["a*", "b.v"])}, (2, 2, 1)),
    "largest norms": ({"grad": CLIP, "most": eachgrad.topk_norms(2)}, (1, 2, 1)),
    "two sums": ({"grad": CLIP, "twice": eachgrad.clipped_sum(2.0)}, (4, 2, 5)),
    "norms alone": ({"norms": eachgrad.norms()}, (4, 1, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_asked_together(name, as_on_a_gpu):
    """Whatever is asked beside it, and in whichever order; no norm of a large gradient is computed more often than asked."""
    queries, counts = QUESTIONS[name]
    gradients = many_gradients(torch.float32)
    answer, ops = asked(gradients, **queries)
    squares = {g.name: g.block.value.double().reshape(B, -1).square().sum(1) for g in gradients}
    norms, want = truth(gradients, 8.0)
    if "grad" in queries:
        assert_same(answer.grad, want, 2e-6)
    if "twice" in queries:
        assert_same(answer.twice, truth(gradients, 2.0)[1], 2e-6)
    if "norms" in queries:
        torch.testing.assert_close(answer.norms.double(), norms, rtol=1e-6, atol=0)
    if "each" in queries:
        assert_same(answer.each, {n: s.sqrt() for n, s in squares.items()}, 1e-6)
    if "some" in queries:
        some = sum(squares[n] for n in ("a.w", "a.b", "b.v")).sqrt()
        torch.testing.assert_close(answer.some.double(), some, rtol=1e-6, atol=0)
    if "most" in queries:
        torch.testing.assert_close(answer.most[0].double(), norms.topk(2)[0], rtol=1e-6, atol=0)
    assert (ops["squares_of_many"], ops["linalg_vector_norm"], ops["weighted_of_many"]) == counts


def test_large_gradients_that_are_computed_again_are_not_held(as_on_a_gpu):
    gradients = many_gradients(torch.float32)
    answer, ops = asked(gradients, budget=4000, grad=CLIP, norms=eachgrad.norms())
    assert_same(answer.grad, truth(gradients, 8.0)[1], 2e-6)
    torch.testing.assert_close(answer.norms.double(), truth(gradients, 8.0)[0], rtol=1e-6, atol=0)
    # One for a pack, and one for each of the two that came a second time.
    assert ops["squares_of_many"] == ops["weighted_of_many"] == 3


def test_norms_alone_hold_no_large_gradient(as_on_a_gpu):
    """Each is free as soon as it has been added; beside a clipped sum, as soon as that is known."""
    for queries, held in ({"norms": eachgrad.norms()}, 0), ({"grad": CLIP, "norms": eachgrad.norms()}, 4):
        gradients, alive, most = many_gradients(torch.float32), [], []
        names, costs = {g.name: g.parameter for g in gradients}, {g.name: g.cost() for g in gradients}

        def visit(add, wanted, gradients=gradients, alive=alive, most=most):
            while gradients:
                if gradients[0].parameter.numel() >= 60:
                    alive.append(weakref.ref(gradients[0].block.value))
                add(gradients.pop(0))
            most.append(sum(ref() is not None for ref in alive))

        total = eachgrad.Accumulator(**queries)
        total.run(Over(names, {}), B, costs, visit)
        assert total.batch_sizes == [B]
        assert len(alive) == 4
        assert most == [held]
        assert not any(ref() is not None for ref in alive)


def test_what_is_not_packed(as_on_a_gpu, monkeypatch):
    """Float64 and complex numbers, gradients to be differentiated, samples in pieces, other blocks, no samples, no GPU."""

    def key(value, parameter=None):
        parameter = torch.zeros(value.shape[1:], dtype=value.dtype) if parameter is None else parameter
        return packing.key_of(Gradient("w", parameter, Dense(value), len(value)), holders=packing.Holders())

    value = torch.randn(B, 8, 9)
    assert key(value) == (packing.Apart, value.device, value.dtype)
    for other in (
        value.double(),
        value.to(torch.complex64),
        value.clone().requires_grad_(),
        value.mT,
        value[:0],
        value[:, :6],
    ):
        assert key(other) is None
    assert key(value, torch.zeros(8, 9, dtype=torch.float64)) is None
    assert packing.key_of(Gradient("w", value[0], Dense(value), B)) is None  # not held
    assert packing.key_of(Gradient("w", value[0], Outer(value, value), B), holders=packing.Holders()) is None
    # Eagerly whatever is not small is one of many in a launch.
    monkeypatch.setattr(packing, "is_unwatched", lambda t: True)
    assert key(value[:, :6]) == (packing.Apart, value.device, value.dtype)
    assert key(value.mT) is None
    assert key(value.double()) is None
    monkeypatch.setattr(arithmetic, "on_gpu", lambda t: False)
    assert key(value) is None


def test_the_weights_of_large_gradients_may_be_differentiated(as_on_a_gpu):
    (gradient, *_), c = many_gradients(torch.float32), torch.rand(B, requires_grad=True)
    pack = packing.Apart([gradient])
    (got,) = torch.autograd.grad(pack.sums(c, None, False)["a.w"].sum(), c)
    torch.testing.assert_close(got, gradient.block.value.sum((1, 2)))


@pytest.mark.parametrize("compiled", [False, True])
def test_large_gradients_of_a_model_are_packed(compiled, as_on_a_gpu, monkeypatch):
    torch.manual_seed(0)
    calls = []
    for name in ("squares_of_many", "weighted_of_many"):
        plain = getattr(many, name)
        monkeypatch.setattr(many, name, lambda *args, plain=plain: calls.append(len(args[-1])) or plain(*args))
    model = nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 8), nn.LayerNorm(8), nn.Linear(8, 11))
    x, y = torch.randn(B, 40, 12), torch.randint(11, (B, 40))
    queries = {"grad": eachgrad.clipped_sum(3.0), "norms": eachgrad.norms()}

    if compiled:
        ask = eachgrad.compile(model, losses, backend="aot_eager", **queries)
        ask(x, y), ask(x, y)  # measured, by the eager way
        calls.clear()
        answer = ask(x, y)
        assert not ask.reasons()
        assert len(ask.graphs[0].step) == 1
    else:
        with eachgrad.record(model) as tape:
            found = losses(model, x, y)
        answer = tape.ask(found, **queries)
    assert set(calls) == {3}  # the weights; the biases have too few numbers
    wide = copy.deepcopy(model).double()
    rows = loop(wide, losses, [(x[i : i + 1].double(), y[i : i + 1]) for i in range(B)])
    norms = torch.cat([value.flatten(1) for value in rows.values()], 1).norm(dim=1)
    torch.testing.assert_close(answer.norms.double(), norms, rtol=1e-5, atol=0)
    factors = (3.0 / norms).clamp(max=1.0)
    assert bool((factors < 0.9).any())
    assert_same(answer.grad, {name: torch.tensordot(factors, value, 1) for name, value in rows.items()}, 1e-5)


@pytest.fixture
def by_factors(monkeypatch):
    """As on a GPU, where a kernel gives the norms of gradients by their factors, and sums are of rounded terms."""
    monkeypatch.setattr(outer, "on_gpu", lambda t: True)
    monkeypatch.setattr(outer, "rounding", lambda t: 2.0**-9)


def factored(dtype: torch.dtype, cancel: bool = False, poisoned: bool = False) -> list[Gradient]:
    """Gradients of four matrices over a few positions; the terms of sample 1 cancel, if that is asked for."""
    torch.manual_seed(0)
    found = []
    for name, (T, p, d) in {"a.w": (3, 40, 50), "b.w": (3, 64, 16), "b.v": (5, 33, 47), "c.w": (2, 20, 20)}.items():
        left, right = torch.randn(B, T, p), torch.randn(B, T, d)
        if cancel:
            left[1], right[1] = 0.0, right[1, :1]
            left[1, 0], left[1, 1] = 1.0, -1.0 + 2.0**-6
        if poisoned and name == "b.v":
            right[3, 1, 2] = float("nan")
        found.append(Gradient(name, torch.zeros(p, d), Outer(left.to(dtype), right.to(dtype)), B))
    return found


CROSSED = {
    "flat": {"max_norm": 30.0},
    "by groups": {"max_norm": {"a": 20.0, "b": 40.0}, "groups": PARTS},
    "by parameter": {"max_norm": 20.0, "groups": "parameter"},
    "normalised": {"max_norm": 30.0, "normalise": True},
    "left out": {"max_norm": 30.0, "nonfinite": "zero"},
}


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CROSSED)
def test_norms_by_factors_are_added_up_at_once(name, dtype, cancel, watched, by_factors, monkeypatch):
    monkeypatch.setattr(packing, "is_unwatched", lambda t: not watched)

    def ask():
        gradients = factored(dtype, cancel, poisoned=name == "left out")
        answer, ops = asked(gradients, grad=eachgrad.clipped_sum(**CROSSED[name]), norms=eachgrad.norms())
        dense = torch.cat([g.block.dense().double().flatten(1) for g in gradients], 1)
        return answer, ops, dense.norm(dim=1)

    packed, ops, want = ask()
    if watched:
        assert ops["joined"] == {"by groups": 2, "by parameter": 4}.get(name, 1)
        assert ops["gram_norms"] == 4
    else:  # all that have as many positions together
        assert (ops["joined"], ops["gram_norms"]) == (0, 0)
        assert ops["gram_norms_of_many"] == {"by groups": 4, "by parameter": 4}.get(name, 3)
    # Sixteen bits multiplied exactly, but for sums of gradients in them: the truth itself is rounded.
    torch.testing.assert_close(
        packed.norms.double(), want, rtol=2e-3 if dtype == torch.bfloat16 else 3e-4, atol=0, equal_nan=True
    )
    monkeypatch.setattr(packing, "_crossed", lambda gradient, block: None)
    alone, ops, _ = ask()
    assert ops["joined"] == 0
    torch.testing.assert_close(packed.norms, alone.norms, rtol=1e-5, atol=0, equal_nan=True)
    assert_same(packed.grad, alone.grad, 1e-5)


@pytest.mark.parametrize("watched", [False, True])
def test_some_norms_by_factors(watched, by_factors, monkeypatch):
    monkeypatch.setattr(packing, "is_unwatched", lambda t: not watched)
    queries = {"grad": eachgrad.clipped_sum(30.0), "some": eachgrad.norms().select("b*")}
    gradients = factored(torch.bfloat16)
    answer, _ = asked(gradients, **queries)
    want = torch.cat([g.block.dense().double().flatten(1) for g in gradients[1:3]], 1).norm(dim=1)
    torch.testing.assert_close(answer.some.double(), want, rtol=2e-3, atol=0)


def test_factors_are_free_when_their_sum_is_there(by_factors):
    """Neither the pack nor the question holds what it has summed."""
    gradients = factored(torch.bfloat16)
    pack = packing.Crossed()
    seen = [weakref.ref(g.block.left) for g in gradients]
    for gradient in gradients:
        pack.add(gradient)
    del gradient
    gradients.clear()
    pack.squares()
    assert all(ref() is not None for ref in seen)
    pack.sums(torch.ones(B), None, wide=False)
    assert all(ref() is None for ref in seen)


@pytest.mark.parametrize("count", [3, 8])
def test_few_small_gradients_are_not_copied(count):
    torch.manual_seed(0)
    values = [torch.randn(B, 4 + k) for k in range(count)]
    pack = joining.Joined()
    for k, value in enumerate(values):
        pack.add(Gradient(str(k), torch.zeros(value.shape[1]), Dense(value), B))
    squares = torch.cat(values, 1).double().square().sum(1)
    torch.testing.assert_close(pack.squares().double(), squares, rtol=1e-6, atol=0)
    c = torch.rand(B)
    want = {str(k): c.double() @ value.double() for k, value in enumerate(values)}
    assert_same(pack.sums(c, None, wide=False), want, 2e-6)
    assert (pack.value is None) == (count < joining.FEW)


def test_a_pack_is_found_by_the_gradients_that_it_has_and_no_others():
    """Where one has been freed, another comes to lie; and questions that are asked elsewhere have packs of their own."""
    holders, pack = packing.Holders(), packing.Crossed()
    for _ in range(200):
        gradient = factored(torch.bfloat16)[0]
        assert holders.of(gradient) is None
        holders.note(gradient, pack)
        assert holders.of(gradient) is pack
        assert packing.Holders().of(gradient) is None


def test_what_was_measured_before_all_had_come_is_measured_again(as_on_a_gpu):
    gradients = [g for g in many_gradients(torch.float32) if g.parameter.numel() > 8]
    pack = packing.Apart()
    for gradient in gradients[:2]:
        pack.add(gradient)
    pack.squares()
    for gradient in gradients[2:]:
        pack.add(gradient)
    want = torch.cat([g.block.value.double().reshape(B, -1) for g in gradients], 1).square().sum(1)
    torch.testing.assert_close(pack.squares().double(), want, rtol=1e-6, atol=0)


def test_threads_do_not_see_each_others_packs(by_factors):
    """One thread sums, another asks for norms alone: both have their own numbers, every time."""
    gradients = factored(torch.bfloat16)
    want = torch.cat([g.block.dense().double().flatten(1) for g in gradients], 1).norm(dim=1)
    stop, found = threading.Event(), []

    def summing():
        while not stop.is_set():
            other = [
                dataclasses.replace(g, block=Outer(30 * g.block.left, g.block.right)) for g in factored(torch.bfloat16)
            ]
            asked(other, grad=eachgrad.clipped_sum(30.0))

    thread = threading.Thread(target=summing)
    thread.start()
    try:
        for _ in range(100):
            found.append(asked([dataclasses.replace(g) for g in gradients], norms=eachgrad.norms())[0].norms)
    finally:
        stop.set()
        thread.join()
    for norms in found:
        torch.testing.assert_close(norms.double(), want, rtol=2e-3, atol=0)


TOGETHER = {
    "alone": {"grad": eachgrad.clipped_sum(8.0)},
    "with norms": {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(8.0), "mean": eachgrad.mean()},
    "with norms of some": {"grad": eachgrad.clipped_sum(8.0), "some": eachgrad.norms().select("b*")},
    "two sums": {
        "grad": eachgrad.clipped_sum(8.0, nonfinite="zero"),
        "twice": eachgrad.clipped_sum(2.0, nonfinite="zero", groups="parameter", wide=True),
        "norms": eachgrad.norms(),
    },
    "by parameter": {"grad": eachgrad.clipped_sum(5.0, groups="parameter"), "each": eachgrad.norms(by="parameter")},
    "normalised": {"grad": eachgrad.clipped_sum(8.0, normalise=True, nonfinite="zero")},
}
HELD = {  # how they come to be packed, and whether a norm is in doubt
    "large": ("as_on_a_gpu", lambda: many_gradients(torch.float32), False),
    "large, some not finite": (
        "as_on_a_gpu", lambda: many_gradients(torch.bfloat16, torch.float32, poisoned=True), True
    ),
    "factors": ("by_factors", lambda: factored(torch.bfloat16), False),
    "factors that cancel": ("by_factors", lambda: factored(torch.float16, cancel=True), True),
    "factors, one not finite": ("by_factors", lambda: factored(torch.bfloat16, poisoned=True), True),
}  # fmt: skip


@pytest.fixture
def waits(monkeypatch) -> list[bool]:
    """Whether each sum so far that was begun early had a doubt."""
    found: list[bool] = []
    original = doubts.Postponed.wait
    monkeypatch.setattr(doubts.Postponed, "wait", lambda self: found.append(original(self)) or found[-1])
    return found


@pytest.mark.parametrize("questions", TOGETHER)
@pytest.mark.parametrize("held", HELD)
def test_a_sum_that_is_begun_early_is_the_same(held, questions, request, waits, monkeypatch):
    """To the last bit, and so is the error; after a doubt nothing is left of what was begun."""
    fixture, make, doubtful = HELD[held]
    request.getfixturevalue(fixture)

    def ask(early: bool):
        monkeypatch.setattr(sums, "on_gpu", lambda t: early)
        gradients = make()
        try:
            answer = vars(asked(gradients, **TOGETHER[questions])[0])
        except eachgrad.CaptureError as error:
            return str(error)
        return answer | {f"squares of {gradient.name}": gradient.squared_norms() for gradient in gradients}

    want = ask(False)
    assert not waits
    found = ask(True)
    assert waits
    assert any(waits) == doubtful
    if isinstance(want, str):
        assert "have a NaN or infinite norm" in want
        assert found == want
    else:
        torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "rest"), [(torch.float32, 0.4), (torch.float64, 1e-3)])
def test_a_norm_that_loses_digits_is_computed_again_also_by_a_sum_that_is_begun_early(dtype, rest, waits, monkeypatch):
    """Of its terms a share is left that a compiled step takes as it is, and eager code never."""
    monkeypatch.setattr(sums, "on_gpu", lambda t: True)
    torch.manual_seed(0)
    left, right = torch.randn(B, 2, 300, dtype=dtype), torch.randn(B, 1, 300, dtype=dtype).expand(B, 2, 300).clone()
    left[:, 1] = -left[:, 0] + rest * torch.randn(B, 300, dtype=dtype)
    gradient = Gradient("w", torch.zeros(300, 300, dtype=dtype), Outer(left, right), B)
    rough = gradient.block.roughly()
    assert base._DOUBTFUL[dtype] < float((rough.total / rough.bound).min()) < base._share(rough.total)
    asked([gradient], grad=eachgrad.clipped_sum(1.0))
    assert waits == [True]
    assert torch.equal(gradient.squared_norms(), rough.settled()[0])


def test_after_a_doubt_the_next_sums_are_formed_in_order(waits, monkeypatch):
    monkeypatch.setattr(sums, "on_gpu", lambda t: True)
    parameter = torch.zeros(3, 2)

    def ask(value: float) -> None:
        block = Dense(torch.full((B, 3, 2), value))
        asked([Gradient("w", parameter, block, B)], grad=eachgrad.clipped_sum(1.0, nonfinite="zero"))

    ask(float("nan"))
    for _ in range(sums._IN_ORDER):
        ask(1.0)
    assert waits == [True]
    ask(1.0)
    assert waits == [True, False]
