"""explain: its FLOPs against torch's counter, its bytes against the allocator, and its table."""

from __future__ import annotations

import copy
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import eachgrad
from eachgrad import plan

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the models are those of the benchmarks")


def imported(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if BENCHMARKS.exists():
    models, memory = imported("models"), imported("memory")


class Routes(nn.Module):
    """Three linear layers, one for each route to the norms; the second one's gradients are smaller than its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow, self.last = nn.Linear(96, 80), nn.Linear(80, 6), nn.Linear(6, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.narrow(self.wide(x).tanh()).tanh().mean(1))


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def part(made: tuple[nn.Module, Tensor, Tensor], B: int, *slices: slice) -> tuple[nn.Module, Tensor, Tensor]:
    model, x, y = made
    return model, x[(slice(B), *slices)], y[:B]


SMALL = {
    "mlp": lambda: part(models.mlp(), 16),
    "cnn": lambda: part(models.cnn(), 8, slice(None), slice(16), slice(16)),
    "transformer": lambda: (models.Transformer(32, 2, 16, 50), torch.randint(50, (4, 16)), torch.randint(50, (4,))),
    "lstm": lambda: part(models.lstm(), 4, slice(12)),
    "routes": lambda: (Routes(), torch.randn(8, 24, 96), torch.randint(40, (8,))),
}
ASKED = {
    "norms": lambda B: eachgrad.norms(), "weighted_sum": lambda B: eachgrad.weighted_sum(torch.ones(B)),
    "clipped_sum": lambda B: eachgrad.clipped_sum(0.1), "dense": lambda B: eachgrad.dense(),
}  # fmt: skip
ANSWERED = {
    "norms": lambda grads: grads.norms(), "weighted_sum": lambda grads: grads.weighted_sum(torch.ones(grads.batch_size)),
    "clipped_sum": lambda grads: grads.clipped_sum(0.1), "dense": lambda grads: grads.dense(),
}  # fmt: skip
CLOSE = 0.05


def tape_of(model: nn.Module, x: Tensor, y: Tensor, limit=None) -> tuple[eachgrad.Tape, Tensor]:
    with eachgrad.record(model, memory=limit) as tape:
        losses = losses_of(model, x, y)
    return tape, losses


@pytest.mark.parametrize("limit", [None, 0, "10GiB"])
@pytest.mark.parametrize("query", ASKED)
@pytest.mark.parametrize("name", SMALL)
def test_the_flops_are_those_that_torch_counts(name: str, query: str, limit):
    torch.manual_seed(0)
    model, x, y = SMALL[name]()
    found = eachgrad.explain(model, losses_of, x, y, query=query, memory=limit)

    tape, losses = tape_of(model, x, y, limit)
    grads = tape.backward(losses)
    for gradient in grads.values():
        gradient._memo.clear()
    with FlopCounterMode(display=False) as answer:
        ANSWERED[query](grads)
    assert found.flops == pytest.approx(answer.get_total_flops(), rel=CLOSE)

    for _ in range(4):  # with explain the last is the fifth under a counter, which measures no layouts
        with FlopCounterMode(display=False) as step:
            tape, losses = tape_of(model, x, y, limit)
            tape.ask(losses, answer=ASKED[query](len(x)))
    assert found.total == pytest.approx(step.get_total_flops(), rel=CLOSE)

    if name != "lstm":  # whose fused op the counter does not know
        with FlopCounterMode(display=False) as plain:
            losses_of(model, x, y).sum().backward()
        assert found.plain == pytest.approx(plain.get_total_flops(), rel=CLOSE)


def test_each_route_occurs():
    model, x, y = SMALL["routes"]()
    norms = eachgrad.explain(model, losses_of, x, y, query="norms")
    assert [row.route for row in norms.rows[::2]] == ["Gram", "direct", "product of norms"]
    clipped = eachgrad.explain(model, losses_of, x, y)
    assert [row.route for row in clipped.rows[::2]] == [
        "Gram, then one product", "direct, kept", "product of norms, then one product",
    ]  # fmt: skip
    again = eachgrad.explain(model, losses_of, x, y, memory=0)
    assert all(row.route.endswith("then again") and row.bytes == 0 for row in again.rows)


REAL = {
    "mlp": lambda: models.mlp(), "cnn": lambda: models.cnn(), "transformer": lambda: models.transformer(8),
    "lstm": lambda: models.lstm(),
}  # fmt: skip


def measured(model: nn.Module, x: Tensor, y: Tensor, query: str, limit=None) -> int:
    """The peak of the third step, whose layouts are known; of a copy of the model, which has no calls behind it."""
    model = copy.deepcopy(model)

    def step() -> object:
        tape, losses = tape_of(model, x, y, limit)
        return tape.ask(losses, answer=ASKED[query](len(x)))

    step(), step()
    return memory.peak(step)


@pytest.mark.parametrize("query", ["norms", "clipped_sum"])
@pytest.mark.parametrize("name", REAL)
def test_the_peak_is_the_one_of_the_allocator(name: str, query: str):
    torch.manual_seed(0)
    model, x, y = REAL[name]()
    found = eachgrad.explain(model, losses_of, x, y, query=query)
    assert found.peak == pytest.approx(measured(model, x, y, query), rel=0.2)


def test_a_clipped_sum_in_no_memory_has_a_lower_peak():
    """Factors that are smaller than gradients and larger than the answer: T = 16 of 256 x 256."""
    layers = [m for _ in range(6) for m in (nn.Linear(256, 256), nn.Tanh())]
    model, x, y = (
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 256, 4)),
        torch.randn(32, 16, 256),
        torch.zeros(32),
    )
    held, none = (measured(model, x, y.long(), "clipped_sum", limit) for limit in (None, 0))
    assert none < 0.95 * held


# The table


class Everything(nn.Module):
    """Each kind of block; tied, derived and unused parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm, self.scale = nn.LayerNorm(6), nn.Parameter(torch.ones(6))
        self.derived = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6, bias=False))
        self.rnn = nn.GRU(6, 6, batch_first=True)
        self.unused = nn.Linear(2, 3, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.tokens(ids).mT).mT
        x = self.rnn(self.derived(self.norm(x)) * self.scale)[0]
        return self.head(x).mean(1)


B, T = 4, 5


@pytest.fixture
def everything() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Everything(), torch.randint(7, (B, T)), torch.randint(7, (B,))


def test_one_row_for_each_use(everything):
    found = eachgrad.explain(everything[0], losses_of, *everything[1:])
    rows: dict[str, list[eachgrad.explanation.Row]] = {}
    for row in found.rows:
        rows.setdefault(row.parameter, []).append(row)
    assert set(rows) == set(dict(everything[0].named_parameters()))
    assert {name for name, some in rows.items() if len(some) != 1} == {"tokens.weight"}
    tied = {row.representation: row for row in rows["tokens.weight"]}
    assert set(tied) == {"Rows", "Outer"}
    assert tied["Rows"].op.endswith("embedding")
    assert tied["Outer"].op.endswith("linear")
    assert (tied["Rows"].B, tied["Rows"].T, tied["Rows"].d, tied["Rows"].p) == (B, T, 6, 7)
    assert (tied["Outer"].B, tied["Outer"].T, tied["Outer"].d, tied["Outer"].p) == (B, T, 6, 7)
    assert all("2 uses" in row.reason for row in tied.values())
    (conv,), (scale,), (unused,) = rows["conv.weight"], rows["scale"], rows["unused.weight"]
    assert (conv.representation, conv.B, conv.T, conv.d, conv.p) == ("Patches", B, T, 18, 6)
    assert (conv.op.rpartition(".")[2], scale.representation) == ("conv1d", "Dense")
    assert (unused.op, unused.route, unused.flops, unused.bytes) == ("none", "zero", 0, 0)
    assert "does not use" in unused.reason
    derived = [row for name, some in rows.items() if name.startswith("derived.") for row in some]
    assert len(derived) == 2
    assert all("derived" in row.representation for row in derived)
    assert {len(rows[f"rnn.{n}_l0"]) for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")} == {1}
    assert all(Path(__file__).name in row.where or ".py:" in row.where for row in found.rows if row.op != "none")


@pytest.mark.parametrize("query", ASKED)
@pytest.mark.parametrize("limit", [None, 0, "1GiB"])
def test_the_table_is_plain_text_with_totals(everything, query: str, limit):
    model, x, y = everything
    found = eachgrad.explain(model, losses_of, x, y, query=query, memory=limit)
    text = str(found)
    assert text.isascii()
    lines = text.splitlines()
    assert lines[0].split()[:6] == ["parameter", "op", "B", "T", "d", "p"]
    assert len(lines) >= 1 + len(found.rows) + 3
    for row, line in zip(found.rows, lines[1:], strict=False):
        assert line.startswith(row.parameter)
        assert row.route in line
        assert line == line.rstrip()
    assert f"{query}: {found.flops / 1e6:,.1f} MFLOP" in text
    assert "times a plain forward and backward" in text
    assert "peak memory above the model" in text
    assert found.flops == sum(row.flops for row in found.rows)
    assert found.total is not None
    assert found.passes is not None
    assert found.total == found.passes + found.second + found.flops


def test_of_gradients_that_are_there(everything):
    model, x, y = everything
    tape, losses = tape_of(model, x, y)
    grads = tape.backward(losses)
    found = grads.explain()
    assert (found.passes, found.total, found.peak) == (None, None, None)
    assert found.rows == eachgrad.explain(model, losses_of, x, y).rows
    assert {row.parameter for row in grads.select("conv.*").explain().rows} == {"conv.weight", "conv.bias"}
    assert "peak" not in str(found)


def test_a_query_that_it_does_not_know(everything):
    with pytest.raises(ValueError, match="explain knows norms"):
        eachgrad.explain(everything[0], losses_of, *everything[1:], query="gram")


def test_explain_leaves_nothing_behind(everything):
    model, x, y = everything
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    eachgrad.explain(model, losses_of, x, y)
    assert all(p.grad is None and p.equal(before[n]) for n, p in model.named_parameters())


# The schedule

COSTS = {
    "T = 1": plan.product(8, 1, 64, 32, 4), "Gram": plan.product(8, 16, 64, 64, 4),
    "direct": plan.product(8, 200, 10, 12, 4), "long": plan.product(8, 50, 64, 64, 4),
    "bias": plan.dense(8, 64, 1, 4), "table": plan.rows(8, 12, 100, 16, 4), "unused": plan.dense(8, 0, 0, 4),
}  # fmt: skip
LEAST = {name: min(cost.dense, cost.factors) for name, cost in COSTS.items()}


def held(how: dict[str, str]) -> int:
    sizes = {"gradients": lambda c: c.dense, "factors": lambda c: c.factors, "again": lambda c: 0}
    return sum(sizes[how[name]](cost) for name, cost in COSTS.items())


def test_without_a_budget_nothing_is_held_beyond_the_factors():
    how = plan.schedule(COSTS, None)
    assert set(how) == set(COSTS)
    assert "again" not in how.values()
    assert held(how) == sum(LEAST.values())


BUDGETS = sorted({0, 1, *itertools.accumulate(LEAST.values()), sum(LEAST.values()) - 1, 10**6, 10**7, 10**10})


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_more_than_the_budget_is_held(budget: int):
    how = plan.schedule(COSTS, budget)
    assert set(how) == set(COSTS)
    assert held(how) <= budget
    twice = [name for name, value in how.items() if value == "again"]
    if budget >= sum(LEAST.values()):
        assert not twice
    elif twice:  # none of them would fit beside the others
        kept = sum(LEAST[name] for name in COSTS if name not in twice)
        assert all(kept + LEAST[name] > budget for name in twice if LEAST[name])


def test_a_large_budget_keeps_gradients_only_where_that_spares_time():
    how, least = plan.schedule(COSTS, 10**12), plan.schedule(COSTS, None)
    for name, value in how.items():
        cost = COSTS[name]
        if value != least[name]:
            assert value == "gradients"
            spared = cost.norms.flops + cost.total.flops - cost.direct.flops
            assert spared > 0
    assert plan.schedule({"w": plan.product(4, 200, 512, 512, 4)}, None) == {"w": "factors"}
    assert plan.schedule({"w": plan.product(4, 200, 512, 512, 4)}, 10**12) == {"w": "gradients"}
    assert plan.schedule({"w": COSTS["T = 1"]}, 10**12) == {"w": "factors"}
