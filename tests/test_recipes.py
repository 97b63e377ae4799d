"""What a rule is given, found once for a plan: it says what is found anew; and modules in torch's own order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import eachgrad
from cases import CASES, Case
from eachgrad import uses
from eachgrad.graph import modules_of, named_trainable

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def asked(case: Case, model: nn.Module, batch: tuple[torch.Tensor, ...]) -> None:
    with eachgrad.record(model, batch_size=case.batch_size, batch_dim=case.batch_dim) as tape:
        losses = case.losses(model, *batch)
    tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1.0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_recipe_says_what_the_rule_says(case: Case, monkeypatch):
    model, batch = case.build()
    original = uses.blocks

    def both(use: Any, g: Any, layout: Any, B: int, create_graph: bool = False, recipe: Any = None) -> Any:
        found = original(use, g, layout, B, create_graph, recipe)
        if recipe is not None:
            want = original(use, g, layout, B, create_graph)
            assert [type(block) for block in found] == [type(block) for block in want]
            for a, b in zip(found, want, strict=True):
                assert torch.equal(a.dense(), b.dense())
                assert a.dense().dtype == b.dense().dtype
        return found

    monkeypatch.setattr(uses, "blocks", both)
    for _ in range(3):
        asked(case, model, batch)


def test_most_uses_have_recipes(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2, bias=False))
    made, original = [], uses.Recipe.blocks
    monkeypatch.setattr(uses.Recipe, "blocks", lambda self, use, g: made.append(use.name) or original(self, use, g))
    for _ in range(3):
        with eachgrad.record(model) as tape:
            losses = model(torch.randn(5, 6, 3)).square().sum((1, 2))
        tape.ask(losses, norms=eachgrad.norms())
    assert made == [f"torch.nn.functional.{name}" for name in ("linear", "layer_norm", "linear")]


def test_a_rule_that_has_changed_is_asked_and_not_its_recipe(monkeypatch):
    from eachgrad.rules import RULES

    model, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)

    def norms() -> torch.Tensor:
        with eachgrad.record(model) as tape:
            losses = model(x).square().sum(1)
        return tape.ask(losses, norms=eachgrad.norms()).norms

    for _ in range(5):
        before = norms()

    def doubled(g: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> Any:
        return {"weight": eachgrad.Outer(2 * g.unsqueeze(1), input.unsqueeze(1))}

    monkeypatch.setitem(RULES, nn.functional.linear, RULES[nn.functional.linear])
    eachgrad.rule(nn.functional.linear)(doubled)
    torch.testing.assert_close(norms(), 2 * before)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), None
        self.second = self.first[0]
        self.scale = nn.Parameter(torch.ones(2))
        self.same = self.scale
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.missing: nn.Module | None = None
        self.register_module("absent", None)
        self.register_parameter("none", None)


def test_modules_and_parameters_are_torchs_own():
    inner = Shared()
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner, nn.LSTM(2, 2)]), "c": nn.BatchNorm1d(2)})
    assert list(modules_of(model).items()) == list(model.named_modules())
    want = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = named_trainable(model)
    assert list(found) == list(want)
    assert all(found[name] is want[name] for name in want)


def test_a_model_that_names_its_own_parameters_is_asked():
    class Named(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
            return ((f"my.{name}", p) for name, p in super().named_parameters(*args, **kwargs))

    assert list(named_trainable(Named(2, 2))) == ["my.weight", "my.bias"]
