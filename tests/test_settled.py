"""Norms that are looked at together, and what else a streamed question does once for all parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import eachgrad
from eachgrad import stream
from eachgrad.blocks import Dense, Rows, Sum
from eachgrad.blocks.base import Rough, settled
from eachgrad.blocks.outer import Outer
from eachgrad.queries import Answer
from eachgrad.rules.registry import RULES, Rule


def rough(total: list[float], bound: list[float], dtype: torch.dtype = torch.float32, unit: float = 0.5) -> Rough:
    made = torch.tensor(total, dtype=dtype), torch.tensor(bound, dtype=dtype)
    return Rough(*made, lambda index: 100.0 + index.to(dtype), unit)


@pytest.mark.parametrize("unit", [0.0, 0.5])
def test_many_are_settled_as_each_alone(unit):
    some = [
        rough([5.0, 6.0, 7.0], [5.0, 7.0, 7.0], unit=unit),
        rough([5.0, 0.1, 0.2], [5.0, 9.0, 9.0], unit=unit),  # two samples cancel, of this one alone
        rough([1.0, 0.1, 7.0], [1.0, 9.0, 7.0], torch.float64, unit),  # in float64 this is none that does
        rough([1.0, 1e-9, 7.0], [1.0, 9.0, 7.0], torch.float64, unit),
        rough([0.0, 2.0], [3.0, 2.0], unit=unit),
    ]
    found, each = settled(some), [one.settled() for one in some]
    assert [squares.tolist() for squares, _ in found] == [squares.tolist() for squares, _ in each]
    assert found[1][0].tolist() == [5.0, 101.0, 102.0]
    assert found[2][0].tolist() == [1.0, 0.1, 7.0]
    assert [None if s is None else s.tolist() for _, s in found] == [None if s is None else s.tolist() for _, s in each]
    assert all((spread is None) == (unit == 0.0) for _, spread in found)


def test_what_does_not_cancel_is_not_computed_again():
    def never(index: Tensor) -> Tensor:
        raise AssertionError("computed again")

    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    found = settled([Rough(one, one, never, 0.0), Rough(other, other, never, 0.0)])
    assert [squares.tolist() for squares, _ in found] == [[1.0, 2.0], [3.0, 4.0]]


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(32, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(torch.tanh(self.first(x))))


def asked(model: nn.Module, x: Tensor, weight: Tensor, **queries: Any) -> Answer:
    with eachgrad.record(model) as tape:
        losses = (model(x) * weight).sum((1, 2))
    return tape.ask(losses, **queries)


@pytest.mark.parametrize("others", [{}, {"norms": eachgrad.norms()}, {"twice": eachgrad.clipped_sum(0.5)}], ids=str)
def test_terms_that_cancel_are_computed_again_in_a_streamed_sum(others, monkeypatch):
    torch.manual_seed(0)
    model, x, weight = Layers(), torch.randn(4, 6, 32), torch.randn(4, 6, 32)
    # The positions of samples 1 and 3 come in pairs of the same input, with gradients that take each other away.
    x[1::2, 3:], weight[1::2, 3:] = x[1::2, :3], 1e-4 * torch.randn(2, 3, 32) - weight[1::2, :3]
    exact: list[tuple[int, ...]] = []
    kept = Outer.exact
    monkeypatch.setattr(Outer, "exact", lambda self, index: exact.append(tuple(index.tolist())) or kept(self, index))
    answers = [asked(model, x, weight, grad=eachgrad.clipped_sum(1e-3), **others) for _ in range(3)]
    answer = answers[-1]  # which was streamed
    assert exact.count((1, 3)) >= 6
    with eachgrad.record(model.double()) as tape:
        losses = (model(x.double()) * weight.double()).sum((1, 2))
    want = tape.backward(losses).clipped_sum(1e-3)
    for name, value in want.items():
        torch.testing.assert_close(answer.grad[name].double(), value, rtol=1e-4, atol=1e-5)


def test_parameters_arrive_in_the_order_of_the_sources(monkeypatch):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 6, 32)
    arrived, visit = [], stream.visit

    def noted(passes: Any, losses: Any, counted: Any, parameters: Any, add: Any, *rest: Any, **options: Any) -> None:
        visit(passes, losses, counted, parameters, lambda g: arrived.append(g.name) or add(g), *rest, **options)

    monkeypatch.setattr(stream, "visit", noted)
    for _ in range(3):
        asked(model, x, torch.ones(4, 6, 32), norms=eachgrad.norms())
    layers = ["norm", "second", "first"]
    assert arrived == [f"{layer}.{name}" for layer in layers for name in ("weight", "bias")]


class Casts(TorchFunctionMode):
    """Counts casts that have nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.needless = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.needless += func is Tensor.to and out is args[0] and isinstance(args[1], torch.dtype)
        return out


@pytest.mark.parametrize("query", [eachgrad.clipped_sum(1.0), eachgrad.norms(), eachgrad.mean()], ids=str)
def test_nothing_is_cast_to_what_it_is(query):
    torch.manual_seed(0)
    model, x = Layers(), torch.randn(4, 6, 32)
    for _ in range(2):
        asked(model, x, torch.ones(4, 6, 32), answer=query)
    with eachgrad.record(model) as tape:
        losses = model(x).sum((1, 2))
    with Casts() as casts:
        tape.ask(losses, answer=query)
    assert casts.needless == 0


def test_arguments_of_a_rule_by_position_and_by_name():
    def only_by_position(g: Tensor, a: Any, b: Any = 2, /, *, c: Any = 3) -> Any:
        return {"a": (a, b, c)}

    def several(g: Tensor, a: Any, *rest: Any, c: Any = 3) -> Any:
        return {"a": (a, *rest, c)}

    def plain(g: Tensor, a: Any, b: Any = 2, *, c: Any = 3) -> Any:
        return {"a": (a, b, c)}

    for function in (only_by_position, several, plain):
        rule = Rule(function, ("a",), lambda g, arguments: 1)
        assert rule.answer(torch.zeros(1), rule.bind((1, 5), {"c": 7})) == {"a": (1, 5, 7)}


def test_a_default_of_batch_dim_does_not_stand_for_the_dimension(monkeypatch):
    seen = []

    def doubled(g: Tensor, input: Tensor, weight: Tensor, bias: Any = None, *, batch_dim: int = 0) -> Any:
        seen.append(batch_dim)
        return {"weight": Outer(g.transpose(0, 1), input.transpose(0, 1))}

    monkeypatch.setitem(RULES, F.linear, Rule(doubled, ("input",), lambda g, arguments: 1, False))
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2, bias=False), torch.randn(5, 4, 3)
    with eachgrad.record(model, batch_dim=1) as tape:
        losses = model(x).square().sum((0, 2))
    grads = tape.backward(losses)
    assert seen == [1]
    out = x @ model.weight.detach().T
    torch.testing.assert_close(grads["weight"].dense(), 2 * torch.einsum("tbp,tbd->bpd", out, x))


def test_all_that_a_block_is_computed_from():
    left, right, value, index = (
        torch.zeros(2, 3, 4),
        torch.zeros(2, 3, 5),
        torch.zeros(2, 4, 5),
        torch.zeros(2, 3).long(),
    )
    rows = Rows(index, torch.zeros(2, 3, 5), 4)
    parts = (Outer(left, right), Dense(value), Sum((rows,)))
    assert [id(t) for t in Sum(parts).tensors()] == [id(t) for t in (left, right, value, index, rows.value)]
