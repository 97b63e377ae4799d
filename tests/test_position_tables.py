"""Tables that are looked up once for all samples, such as those of positions: their gradients are added at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import eachgrad
from eachgrad import solve
from oracle import assert_same, loop

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
B, T, d, V = 4, 5, 3, 7


class Positions(nn.Module):
    """`taken` makes of a table what is added to the input."""

    def __init__(self, taken, **options):
        super().__init__()
        self.table, self.fc, self.taken = nn.Embedding(V, d, **options), nn.Linear(d, 2), taken

    def forward(self, x):
        return self.fc(torch.tanh(x + self.taken(self.table)))


def losses(model, x):
    return model(x).square().flatten(1).sum(1)


def hooked(table):
    h = table(torch.arange(T))
    h.register_hook(lambda g: 3 * g)
    return h


REPEATED = torch.tensor([1, 0, 1, 6, 1])
ONCE = {
    "in order": (lambda table: table(torch.arange(T)), {}),
    "one row of ids": (lambda table: table(torch.arange(T)[None]), {}),
    "repeated": (lambda table: table(REPEATED), {}),
    "padding": (lambda table: table(REPEATED), {"padding_idx": 1}),
    "first as padding": (lambda table: table(REPEATED), {"padding_idx": 0}),
    "scaled, turned, cut": (lambda table: (2 * table(torch.arange(V)).flip(0))[:T], {}),
    "expanded": (lambda table: table(torch.arange(T)).expand(1, T, d).clone(), {}),
    "hook": (hooked, {}),
}
OTHERWISE = {
    "twice": (lambda table: table(torch.arange(T)) + table(REPEATED), {}),
    "weight as well": (lambda table: table(torch.arange(T)) + table.weight.sum(0), {}),
    "no look-up": (lambda table: table.weight[:T], {}),
}


@pytest.fixture
def pulled(monkeypatch):
    """Whether each table was taken the short way."""
    found, own = [], solve._pulled_through_rows

    def noting(*args):
        value = own(*args)
        found.append(value is not None)
        return value

    monkeypatch.setattr(solve, "_pulled_through_rows", noting)
    return found


@pytest.mark.parametrize("name", [*ONCE, *OTHERWISE])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_table_for_all_samples(name, compiled, pulled):
    torch.manual_seed(0)
    torch._dynamo.reset()
    taken, options = (ONCE | OTHERWISE)[name]
    if compiled and name == "hook":
        pytest.skip("a hook made within the forward is none of a compiled graph")
    model, x = Positions(taken, **options), torch.randn(B, T, d)
    want = loop(model, losses, [(one,) for one in x.split(1)])
    if compiled:
        ask = eachgrad.compile(model, losses, backend="aot_eager", each=eachgrad.dense())
        for _ in range(3):
            got = ask(x).each
        assert ask.graphs[0].step, ask.reasons()
    else:
        with eachgrad.record(model) as tape:
            value = losses(model, x)
        got = tape.ask(value, each=eachgrad.dense()).each
    assert_same(got, want, 1e-12)
    assert set(pulled) == {name in ONCE}


def test_sixteen_bits_are_added_in_more():
    """4096 times the same row: in bfloat16 a sum of ones ends at 256."""
    model = nn.Embedding(2, 1, dtype=torch.bfloat16)
    ids = torch.zeros(4096, dtype=torch.long)
    x = torch.ones(2, 4096, 1, dtype=torch.bfloat16)
    with eachgrad.record(model, batch_size=2) as tape:
        value = (x * model(ids)).float().sum((1, 2))
    got = tape.ask(value, each=eachgrad.dense()).each
    assert got["weight"].flatten(1).tolist() == [[4096.0, 0.0]] * 2


def test_derivatives_of_it():
    torch.manual_seed(0)
    model, x = Positions(lambda table: table(REPEATED), padding_idx=0), torch.randn(B, T, d)
    with eachgrad.record(model, create_graph=True) as tape:
        value = losses(model, x)
    each = tape.ask(value, each=eachgrad.dense()).each
    squares = sum(g.square().sum() for g in each.values())
    (got,) = torch.autograd.grad(squares, model.table.weight)
    want = torch.zeros_like(got)
    for one in x.split(1):
        alone = torch.autograd.grad(losses(model, one).sum(), list(model.parameters()), create_graph=True)
        want += torch.autograd.grad(sum(g.square().sum() for g in alone), model.table.weight)[0]
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
