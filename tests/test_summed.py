"""Gradients of biases that wait for each other: as many launches as there are sizes, and nothing held that would be free."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad
from eachgrad.blocks import Summed, form, summed
from eachgrad.gradient import Gradient
from eachgrad.queries import sums
from eachgrad.rules import linear
from eachgrad.use import Arrived
from oracle import assert_same, loop

B, T, d = 4, 5, 6


class Net(nn.Module):
    """Layers with biases; `twice` uses one of them again."""

    def __init__(self, twice: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(10))
        self.norm, self.twice = nn.LayerNorm(d), twice

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.norm(self.layers[0](x) if self.twice else x)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().flatten(1).sum(1)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sums wait as they would on a GPU; how many each launch forms."""
    launches: list[int] = []
    own = summed.position_sums_of_many
    monkeypatch.setattr(linear, "can_wait", lambda g: g.shape[1] > 1 and summed.fits(g))
    monkeypatch.setattr(summed, "position_sums_of_many", lambda values: launches.append(len(values)) or own(values))
    return launches


def asked(model: nn.Module, x: Tensor, **queries: eachgrad.queries.Query) -> eachgrad.queries.Answer:
    with eachgrad.record(model) as tape:
        found = losses(model, x)
    return tape.ask(found, **queries)


def clipped(model: nn.Module, x: Tensor, bound: float) -> dict[str, Tensor]:
    dense = loop(model, losses, [(x[i : i + 1],) for i in range(B)])
    norms = torch.stack([g.flatten(1).square().sum(1) for g in dense.values()]).sum(0).sqrt()
    return {name: torch.tensordot((bound / norms).clamp(max=1), g, 1) for name, g in dense.items()}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
def test_clipped_sums_and_norms_are_right_at_every_call(waits: list[int], twice: bool):
    torch.manual_seed(0)
    model, x = Net(twice), torch.randn(B, T, d)
    want = clipped(model.double(), x.double(), 0.5)
    model.float()
    for _ in range(6):
        found = asked(model, x, grad=eachgrad.clipped_sum(0.5), norms=eachgrad.norms(), mean=eachgrad.mean())
        assert_same({n: g.double() for n, g in found.grad.items()}, want, 1e-4)
    assert waits, "nothing has waited"


def test_biases_wait_where_their_terms_are_held_anyway(waits: list[int], monkeypatch: pytest.MonkeyPatch):
    """On a CPU no pack holds factors, so that nothing may wait; told that all are held, all are formed at once."""
    model, x = Net(), torch.randn(B, T, d)
    for _ in range(3):  # the third streams
        waits.clear()
        asked(model, x, grad=eachgrad.clipped_sum(0.5))
    assert waits == []
    own = sums.RunningClip.begin

    class All(set):
        def __contains__(self, key: object) -> bool:
            return True

    def begin(self, *given) -> None:
        own(self, *given)
        self.lefts = All()

    monkeypatch.setattr(sums.RunningClip, "begin", begin)
    for _ in range(3):
        waits.clear()
        found = asked(model, x, grad=eachgrad.clipped_sum(0.5))
    assert waits == [10]
    want = clipped(model.double(), x.double(), 0.5)
    assert_same({n: g.double() for n, g in found.grad.items()}, want, 1e-4)


@pytest.mark.parametrize("query", [eachgrad.norms(), eachgrad.clipped_sum(0.5)], ids=["norms", "clipped sum"])
@pytest.mark.parametrize("trained", [True, False], ids=["weights too", "biases alone"])
def test_terms_that_nobody_else_holds_are_let_go(
    waits: list[int], query, trained: bool, monkeypatch: pytest.MonkeyPatch
):
    """A sum that nobody else holds the terms of is formed at once, and nothing that is kept of it holds them."""
    model, x = Net(), torch.randn(B, T, d)
    for layer in model.layers:
        layer.weight.requires_grad_(trained)
    terms, most = list[weakref.ref](), 0
    own = Summed.__init__

    def made(self: Summed, given: Tensor) -> None:
        nonlocal most
        terms.append(weakref.ref(given))
        own(self, given)
        most = max(most, sum(one() is not None for one in terms))

    monkeypatch.setattr(Summed, "__init__", made)
    for _ in range(3):  # the third streams
        terms.clear()
        waits.clear()
        most = 0
        asked(model, x, answer=query)
    assert waits == []
    assert len(terms) == 10
    # A clipped sum on a CPU holds the weights' factors, which the terms are.
    assert most <= (10 if trained and isinstance(query, sums.ClippedSum) else 2)


def test_what_changes_the_terms_meanwhile_is_seen():
    """A hook that writes into a gradient after it has passed a layer, and before its sum is formed."""
    terms, bias = torch.randn(B, T, d), torch.randn(d)
    block = Summed(terms)
    gradient = Gradient("bias", bias, block, B, (Arrived("a layer", block.tensors()),))  # pyright: ignore
    assert gradient.checked() is block
    terms.mul_(2)
    with pytest.raises(eachgrad.CaptureError, match="changed in place"):
        gradient.dense()


def test_a_block_that_waits_is_a_dense_one():
    terms = torch.randn(B, T, d, dtype=torch.float32)
    blocks = [Summed(terms), Summed(terms * 2), Summed(terms[:, :2].contiguous())]
    assert [block.tensors()[0].shape for block in blocks] == [(B, T, d), (B, T, d), (B, 2, d)]
    form(blocks)
    assert all(block.terms is None for block in blocks)
    torch.testing.assert_close(blocks[0].value, terms.sum(1))
    torch.testing.assert_close(blocks[1].take(torch.tensor([2])).dense(), 2 * terms[2:3].sum(1))
    torch.testing.assert_close(blocks[2].squared_norms(), terms[:, :2].sum(1).square().sum(1))
    alone = Summed(terms)
    torch.testing.assert_close(alone.weighted_sum(torch.ones(B)), terms.sum((0, 1)))
    assert F.linear(alone.value, torch.eye(d)).shape == (B, d)
