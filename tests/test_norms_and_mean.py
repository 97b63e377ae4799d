"""Norms and means without a clipped sum: packs give the numbers of each gradient by itself, and hold few of them."""

from __future__ import annotations

import copy
import weakref
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import eachgrad
from eachgrad.blocks import Dense, Outer, arithmetic, base, outer
from eachgrad.blocks.arithmetic import cast
from eachgrad.dtypes import accumulation_dtype
from eachgrad.gradient import Gradient
from eachgrad.kernels.gram import MOST
from eachgrad.queries import joining, waiting
from eachgrad.queries.base import Over
from oracle import assert_same, loop

QUERIES = {
    "norms": {"norms": eachgrad.norms()},
    "mean": {"grad": eachgrad.mean()},
    "norms and mean": {"norms": eachgrad.norms(), "grad": eachgrad.mean()},
    "mean and norms": {"grad": eachgrad.mean(), "norms": eachgrad.norms()},
    "of each": {"grad": eachgrad.mean(), "each": eachgrad.norms(by="parameter")},
    "of modules": {"grad": eachgrad.mean(), "modules": eachgrad.norms(by="module")},
    "of all and of each": {"norms": eachgrad.norms(), "each": eachgrad.norms(by="parameter"), "grad": eachgrad.mean()},
    "largest": {"norms": eachgrad.norms(), "most": eachgrad.topk_norms(1), "grad": eachgrad.mean()},
    "of some": {"norms": eachgrad.norms(), "some": eachgrad.norms().select("*.w"), "grad": eachgrad.mean()},
    "two means": {"grad": eachgrad.mean(), "norms": eachgrad.norms(), "second": eachgrad.mean()},
    "beside a sum": {"norms": eachgrad.norms(), "grad": eachgrad.mean(), "clipped": eachgrad.clipped_sum(1.0)},
    "beside moments": {"norms": eachgrad.norms(), "noise": eachgrad.noise_scale(), "grad": eachgrad.mean()},
}


def assert_answers(answer: eachgrad.Answer, rows: dict[str, Tensor], tolerance: float) -> None:
    """The answers about gradients (B, *shape), in float64."""
    wide = {name: value.double() for name, value in rows.items()}
    squares = {name: value.reshape(len(value), -1).square().sum(1) for name, value in wide.items()}
    norms = torch.stack(list(squares.values())).sum(0).sqrt()
    means = {name: value.mean(0) for name, value in wide.items()}
    found = vars(answer)

    def near(got: Tensor, want: Tensor) -> None:
        assert got.shape == want.shape
        assert error_of(got, want) <= tolerance

    for name in found.keys() & {"grad", "second"}:
        assert_same(found[name], means, tolerance)
    if "norms" in found:
        near(answer.norms, norms)
    if "most" in found:
        near(answer.most[0], norms.topk(1)[0])
    if "some" in found:
        near(answer.some, torch.stack([s for n, s in squares.items() if n.endswith(".w")]).sum(0).sqrt())
    if "each" in found:
        assert_same(answer.each, {name: value.sqrt() for name, value in squares.items()}, tolerance)
    if "modules" in found:
        modules = dict.fromkeys(name.rpartition(".")[0] for name in rows)
        want = {m: sum(s for n, s in squares.items() if n.rpartition(".")[0] == m) for m in modules}
        assert_same(answer.modules, {m: torch.as_tensor(s).sqrt() for m, s in want.items()}, tolerance)
    if "clipped" in found:
        factors = (1.0 / norms).clamp(max=1.0)
        # Its terms are rounded to bfloat16, where they are factors.
        assert_same(answer.clipped, {n: torch.tensordot(factors, v, 1) for n, v in wide.items()}, max(tolerance, 2e-2))


def error_of(got: Tensor, want: Tensor) -> float:
    return float(((got.double() - want) / want.clamp(min=1e-30)).abs().max())


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += func.namespace == "eachgrad"
        return func(*args, **(kwargs or {}))


def in_float32(left: Tensor, right: Tensor) -> Tensor:
    """A product in float32 or better, of whatever dtype; on a CPU there is none of sixteen bits that is."""
    return cast(left, accumulation_dtype(left.dtype)) @ cast(right, accumulation_dtype(right.dtype))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    for module in (arithmetic, outer):
        monkeypatch.setattr(module, "on_gpu", lambda t: True)
    monkeypatch.setattr(arithmetic, "wide_product", in_float32)
    for module in (arithmetic, outer, base):
        monkeypatch.setattr(module, "products", in_float32)
    monkeypatch.setattr(arithmetic, "LARGE", 60)
    monkeypatch.setattr(joining, "SMALL", 40)
    monkeypatch.setattr(joining, "FEW", 2)


# Gradients that are made by hand: factors of sixteen bits, small ones side by side, a large one, and one that is none


SIZES = {f"layer{k}": (3 + k // 4 % 2, 24 + k, 40 - k) for k in range(10)}  # T, p, d: two numbers of positions


def by_hand(B: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0, cancel: tuple[str, ...] = ()) -> list[Gradient]:
    torch.manual_seed(seed)
    found = []
    for name, (T, p, d) in SIZES.items():
        left, right = torch.randn(B, T, p) / 8, torch.randn(B, T, d) / 8
        if name in cancel:  # to 2^-6 of the terms' size
            left[0], right[0] = 0.0, right[0, :1]
            left[0, 0], left[0, 1] = 1.0, -1.0 + 2.0**-6
        found.append(Gradient(f"{name}.w", torch.zeros(p, d), Outer(left.to(dtype), right.to(dtype)), B))
        found.append(Gradient(f"{name}.b", torch.zeros(p), Dense(torch.randn(B, p) / 8), B))
    found.append(Gradient("table.w", torch.zeros(9, 8), Dense(torch.randn(B, 9, 8) / 8), B))
    found.append(Gradient("unused.w", torch.zeros(4, 3), None, B))
    return found


def rows_of(gradients: list[Gradient]) -> dict[str, Tensor]:
    """(B, *shape) of each in float64: the products of sixteen bits are exact, and not rounded to them."""
    found = {}
    for gradient in gradients:
        block = gradient.block
        if isinstance(block, Outer):
            found[gradient.name] = block.left.double().mT @ block.right.double()
        else:
            found[gradient.name] = gradient.dense().double()
    return found


def run(total: eachgrad.Accumulator, gradients: list[Gradient], costs: bool = False) -> Counter[str]:
    """Hand the gradients over, and say how often each op of the library ran."""
    names = {gradient.name: gradient.parameter for gradient in gradients}
    some = [gradient.name for gradient in gradients]
    held = any(query.holds for query in total.queries.values())

    def visit(add, wanted):
        for gradient in gradients:
            if wanted is None or gradient.name in wanted:
                add(gradient)

    with Ops() as ops:
        given = {g.name: g.cost() for g in gradients} if costs or held else {}
        total.run(Over(names, {}), gradients[0].batch_size, given, visit)
    assert len(some) == len(names)
    return ops.counts


@pytest.mark.parametrize("costs", [False, True])
@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", QUERIES)
def test_by_hand(name, dtype, B, costs, as_on_a_gpu):
    if name == "beside moments" and B == 1:
        pytest.skip("a noise scale needs two samples")
    gradients = by_hand(B, dtype)
    total = eachgrad.Accumulator(**QUERIES[name])
    run(total, gradients, costs)
    assert_answers(total.answer(), rows_of(gradients), 1e-5)


@pytest.mark.parametrize("name", [name for name in QUERIES if name != "beside moments"])
def test_over_micro_batches(name, as_on_a_gpu):
    total, rows = eachgrad.Accumulator(**QUERIES[name]), []
    for seed, B in enumerate((3, 1, 4)):
        gradients = by_hand(B, seed=seed)
        run(total, gradients)
        rows.append(rows_of(gradients))
    assert_answers(total.answer(), {n: torch.cat([some[n] for some in rows]) for n in rows[0]}, 1e-5)


def test_two_means_are_two_tensors(as_on_a_gpu):
    """Neither is changed with the other."""
    total = eachgrad.Accumulator(**QUERIES["two means"])
    run(total, by_hand(5))
    answer = total.answer()
    before = {name: value.clone() for name, value in answer.second.items()}
    for value in answer.grad.values():
        value.zero_()
    assert all(torch.equal(answer.second[name], value) for name, value in before.items())


def test_one_percent_is_seen(as_on_a_gpu):
    for name in ("layer3.w", "layer4.b", "table.w"):
        gradients, total = by_hand(5), eachgrad.Accumulator(**QUERIES["norms and mean"])
        run(total, gradients)
        rows = rows_of(gradients)
        rows[name] *= 1.01
        with pytest.raises(AssertionError):
            assert_answers(total.answer(), rows, 1e-5)


CANCEL = {"one": ("layer2",), "two of a group": ("layer0", "layer1"), "all": tuple(SIZES)}


@pytest.mark.parametrize("name", CANCEL)
@pytest.mark.parametrize("some", ["norms", "of all and of each", "largest", "beside a sum"])
def test_norms_that_cancel(name, some, as_on_a_gpu, monkeypatch):
    """A group whose terms cancel is computed again; one layer of it that does is small beside the others, or is too."""
    again = []
    exact = Outer.exact
    monkeypatch.setattr(Outer, "exact", lambda self, index: again.append(len(index)) or exact(self, index))
    monkeypatch.setattr(outer, "squared_norms", lambda t: t.double().flatten(1).square().sum(1).float())
    monkeypatch.setattr(outer, "products", lambda left, right: left.double() @ right.double())
    gradients, total = by_hand(3, cancel=CANCEL[name]), eachgrad.Accumulator(**QUERIES[some])
    run(total, gradients)
    assert_answers(total.answer(), rows_of(gradients), 1e-5)
    if name == "all":
        assert again
        assert set(again) == {1}  # the sample that cancels, and no other


def test_a_layer_alone_that_cancels(as_on_a_gpu, monkeypatch):
    """Asked for alone, its bound is its own."""
    monkeypatch.setattr(outer, "products", lambda left, right: left.double() @ right.double())
    gradients = by_hand(3, cancel=("layer2",))
    total = eachgrad.Accumulator(one=eachgrad.norms().select("layer2.w"), norms=eachgrad.norms())
    run(total, gradients)
    want = rows_of(gradients)["layer2.w"].flatten(1).norm(dim=1)
    assert error_of(total.answer().one, want) <= 1e-5


def test_launches_of_few(as_on_a_gpu):
    """Ten layers, of three and four positions: four at a time, whichever they are; norms and mean are read off together."""
    gradients, total = by_hand(5), eachgrad.Accumulator(**QUERIES["norms and mean"])
    ops = run(total, gradients)
    # Four of three positions, four of four, and the last two.
    assert (ops["gram_norms"], ops["gram_norms_of_many"]) == (0, 3)
    assert ops["joined"] == 1
    assert ops["squares_and_mean"] == 1  # of the small ones
    ops = run(eachgrad.Accumulator(**QUERIES["largest"]), by_hand(5))
    assert (ops["gram_norms"], ops["gram_norms_of_many"]) == (0, 3)  # for both questions


def test_few_are_held(as_on_a_gpu):
    """Of ten layers at most four, and at most an eighth of all bytes if these are known."""
    for costs, most in (False, MOST), (True, 1):
        gradients, alive, counts = by_hand(5), [], []
        names, given = {g.name: g.parameter for g in gradients}, {g.name: g.cost() for g in gradients}

        def visit(add, wanted, gradients=gradients, alive=alive, counts=counts):
            while gradients:
                gradient = gradients.pop(0)
                if isinstance(gradient.block, Outer):
                    alive.append(weakref.ref(gradient.block.left))
                add(gradient)
                del gradient
                counts.append(sum(ref() is not None for ref in alive))

        total = eachgrad.Accumulator(**QUERIES["norms and mean"])
        total.run(Over(names, {}), 5, given if costs else {}, visit)
        assert len(alive) == 10
        assert max(counts) == most - 1  # the fourth is let go as it comes
        assert not any(ref() is not None for ref in alive)


@pytest.mark.parametrize("room", [0, 1000, 10_000, None])
def test_room(room, as_on_a_gpu):
    gradients = [g for g in by_hand(5) if isinstance(g.block, Outer)]
    pack = waiting.Passing(room)
    for gradient in gradients:
        pack.add(gradient)
        assert len(pack.waiting) < MOST
        assert room is None or pack.bytes <= room
    want = torch.stack([v.flatten(1).square().sum(1) for v in rows_of(gradients).values()]).sum(0)
    assert error_of(pack.squares(), want) <= 1e-5
    assert not pack.waiting


def test_a_budget_is_kept():
    cost = Gradient("w", torch.zeros(4, 4), Outer(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4)), 2).cost()
    assert waiting.room_of({"a": cost, "b": cost}, None) == 2 * cost.factors // waiting.SHARE
    assert waiting.room_of({"a": cost}, 5) == 5
    assert waiting.room_of({}, None) is None


# Models: in float32 and float64 against the loop, and in bfloat16 against each norm by itself


class Shared(nn.Module):
    """A tied table and head, a layer that is used twice, a parameter that is unused, one that is frozen, norms and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.head.weight = self.table.weight
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(8) for _ in range(4)])
        self.unused, self.scale = nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(1.5))
        self.norms[1].bias.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + torch.tanh(layer(norm(x))) * self.scale
        return self.head(self.layers[0](x))


def losses(model: nn.Module, ids: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).sum(1)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("B", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["norms", "mean", "mean and norms", "of each", "of modules", "two means"])
def test_models(name, dtype, B, compiled, as_on_a_gpu):
    torch.manual_seed(0)
    model = Shared().to(dtype)
    ask = eachgrad.compile(copy.deepcopy(model), losses, backend="aot_eager", **QUERIES[name]) if compiled else None
    for _ in range(4):  # measured, and then streamed or compiled
        ids, y = torch.randint(11, (B, 6)), torch.randint(11, (B, 6))
        if ask is not None:
            answer = ask(ids, y)
        else:
            with eachgrad.record(model) as tape:
                found = losses(model, ids, y)
            answer = tape.ask(found, **QUERIES[name])
        rows = loop(copy.deepcopy(model).double(), losses, [(ids[i : i + 1], y[i : i + 1]) for i in range(B)])
        if ask is not None:
            del answer.losses
        assert_answers(answer, rows, 1e-5 if dtype == torch.float32 else 1e-12)
        assert all(value.dtype == dtype for value in getattr(answer, "grad", {}).values())
    assert ask is None or not ask.reasons()


class Deep(nn.Module):
    def __init__(self, layers: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.mean(1)


def deep_losses(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return out.float().square().sum(1)


def test_a_stream_holds_few(as_on_a_gpu, monkeypatch):
    """While the backward runs: the gradients of at most four layers' outputs are there, and the numbers are the same."""
    torch.manual_seed(0)
    model, alive, most = Deep(), list[weakref.ref](), list[int]()
    add = waiting.Passing.add

    def noted(self, gradient):
        assert isinstance(gradient.block, Outer)
        alive.append(weakref.ref(gradient.block.left))
        add(self, gradient)
        most.append(sum(ref() is not None for ref in alive))

    monkeypatch.setattr(waiting.Passing, "add", noted)
    other = copy.deepcopy(model)  # whose plans are its own
    for k in range(3):
        x = torch.randn(5, 6, 24)
        alive.clear(), most.clear()
        with eachgrad.record(model) as tape:
            found = deep_losses(model, x)
        answer = tape.ask(found, **QUERIES["norms and mean"])
        held = max(most)
        with eachgrad.record(other) as tape:
            found = deep_losses(other, x)
        grads = tape.backward(found)
        want = torch.stack(list(grads.norms(by="parameter").values())).double().norm(dim=0)
        assert error_of(answer.norms, want) <= 1e-5
        assert_same(answer.grad, {n: g.mean() for n, g in grads.items()}, 1e-5)
        assert len(alive) == 40
        if k == 2:  # the first has all of them, as it measures
            assert held < MOST + 2  # those that wait, and the one that autograd works on
