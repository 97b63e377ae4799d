"""A recurrence as one op: the numbers of torch's layers, and graphs that do not grow with the steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad.rules.recurrence import recurrence

T, B, H = 4, 3, 5
KINDS = {"lstm": (nn.LSTM, {}, 4), "gru": (nn.GRU, {}, 3), "rnn_tanh": (nn.RNN, {}, 1),
         "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}, 1)}  # fmt: skip


def problem(kind: str, biased: bool):
    torch.manual_seed(0)
    gates, states = KINDS[kind][2], 2 if kind == "lstm" else 1
    z = torch.randn(T * B, gates * H, dtype=torch.float64, requires_grad=True)
    w_hh, b_hh = torch.randn(gates * H, H).double() / 2, torch.randn(gates * H).double() if biased else None
    state = [torch.randn(B, H, dtype=torch.float64, requires_grad=True) for _ in range(states)]
    return z, w_hh, b_hh, state


def by_torch(kind, z, w_hh, b_hh, state):
    """The same by torch's layer with the identity in the place of the input's weight."""
    layer, options, gates = KINDS[kind]
    module = layer(gates * H, H, bias=b_hh is not None, **options).double()
    with torch.no_grad():
        module.weight_ih_l0.copy_(torch.eye(gates * H))
        module.weight_hh_l0.copy_(w_hh)
        if b_hh is not None:
            module.bias_ih_l0.zero_()
            module.bias_hh_l0.copy_(b_hh)
    states = [s[None] for s in state]
    out, final = module(z.view(T, B, -1), tuple(states) if kind == "lstm" else states[0])
    return out.flatten(0, 1), tuple(s[0] for s in (final if kind == "lstm" else (final,)))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_gradients_are_those_of_torch(kind, biased):
    z, w_hh, b_hh, state = problem(kind, biased)
    answers = []
    for out, final in (recurrence(z, w_hh, b_hh, state, kind, T), by_torch(kind, z, w_hh, b_hh, state)):
        torch.manual_seed(1)
        weighted = sum((t * torch.randn_like(t)).sum() for t in (out, *final))
        answers.append([out, *final, *torch.autograd.grad(weighted, [z, *state])])
    for got, want in zip(*answers, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_some_outputs_alone(kind):
    z, w_hh, b_hh, state = problem(kind, True)
    for k in range(1 + len(state)):
        found = []
        for out, final in (recurrence(z, w_hh, b_hh, state, kind, T), by_torch(kind, z, w_hh, b_hh, state)):
            found.append(torch.autograd.grad((out, *final)[k].square().sum(), [z, *state], allow_unused=True))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_ops(kind):
    z, w_hh, b_hh, state = problem(kind, True)
    arguments = (z, w_hh, b_hh, state, kind, T)
    torch.library.opcheck(torch.ops.eachgrad.recurrence.default, arguments)
    found = [t.detach() for t in torch.ops.eachgrad.recurrence(*arguments)]
    given = [t.detach() for t in (z, w_hh, b_hh)], [s.detach() for s in state]
    grads = [torch.randn_like(t) for t in found[: 1 + len(state)]]
    torch.library.opcheck(torch.ops.eachgrad.recurrence_backward.default, (grads, *given[0], given[1], kind, T, found))


class Tagger(nn.Module):
    """A recurrent layer over a sequence, and one loss for each of its steps."""

    def __init__(self, layer, **options):
        super().__init__()
        self.rnn = layer(6, H, batch_first=True, **options)
        self.head = nn.Linear(H * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def losses(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)


MODELS = {
    "LSTM": lambda: Tagger(nn.LSTM),
    "two layers": lambda: Tagger(nn.LSTM, num_layers=2),
    "both directions": lambda: Tagger(nn.LSTM, bidirectional=True, bias=False),
    "GRU": lambda: Tagger(nn.GRU, num_layers=2),
    "tanh": lambda: Tagger(nn.RNN),
    "relu": lambda: Tagger(nn.RNN, nonlinearity="relu", bidirectional=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_compiled_steps_are_the_eager_ones(name):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    queries = {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(0.1), "dense": eachgrad.gram()}
    ask = eachgrad.compile(model, losses, backend="aot_eager", **queries)
    for _ in range(3):
        x, y = torch.randn(B, 7, 6, dtype=torch.float64), torch.randint(3, (B, 7))
        got, want = ask(x, y), ask.eager((x, y))
        for key in queries:
            torch.testing.assert_close(getattr(got, key), getattr(want, key), rtol=1e-10, atol=1e-12)
    assert ask.reasons() == []


def test_a_graph_does_not_grow_with_the_steps(monkeypatch):
    sizes = []
    compiled = eachgrad.traced.compiled
    monkeypatch.setattr(
        eachgrad.traced, "compiled", lambda g, *rest: sizes.append(len(g.graph.nodes)) or compiled(g, *rest)
    )
    for steps in (4, 40):
        ask = eachgrad.compile(Tagger(nn.LSTM), losses, backend="eager", norms=eachgrad.norms())
        for _ in range(3):
            ask(torch.randn(B, steps, 6), torch.randint(3, (B, steps)))
    assert sizes[1] <= 1.1 * sizes[0]  # with more steps other routes are taken, with a few ops more or less


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_is_refused_by_name(name):
    ask = eachgrad.compile(MODELS[name](), losses, backend="aot_eager", norms=eachgrad.norms())
    for answer in (ask, lambda *batch: ask.eager(batch)):
        with pytest.raises(eachgrad.CaptureError, match="an empty batch has no gradients"):
            answer(torch.randn(0, 7, 6), torch.zeros(0, 7, dtype=torch.int64))


def test_sixteen_bits_are_summed_in_thirty_two():
    torch.manual_seed(0)
    model = Tagger(nn.LSTM)
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(3):
        x, y = torch.randn(B, 7, 6), torch.randint(3, (B, 7))
        with torch.autocast("cpu", torch.bfloat16):
            got, want = ask(x, y).norms, ask.eager((x, y)).norms
        torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert ask.reasons() == []


def test_tracing_holds_one_op():
    z, w_hh, b_hh, state = problem("lstm", True)
    traced = make_fx(lambda z, w: recurrence(z, w, b_hh, state, "lstm", T)[0], tracing_mode="fake",
                     _allow_non_fake_inputs=True)(z, w_hh)  # fmt: skip
    assert [n.target for n in traced.graph.nodes if "recurrence" in str(n.target)] == [
        torch.ops.eachgrad.recurrence.default
    ]
