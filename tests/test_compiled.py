"""compile: the same answers as in eager, from one graph; never from a stale one."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import eachgrad
from cases import Net
from eachgrad import step
from eachgrad.errors import first_line
from eachgrad.kernels.signals import Slot
from oracle import assert_same

pytestmark = [
    pytest.mark.usefixtures("double", "fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
B, T, d = 4, 5, 6


class Decoder(nn.Module):
    """Tied to its embedding, with positions and a raw scale."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, d), nn.Embedding(T, d)
        self.fc, self.norm, self.scale = nn.Linear(d, d), nn.LayerNorm(d), nn.Parameter(torch.randn(d))

    def forward(self, ids):
        h = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        h = h + self.norm(torch.tanh(self.fc(h))) * self.scale
        return h @ self.tokens.weight.T


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 2, stride=2), nn.Flatten(),
        nn.Linear(54, 5),
    )  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(d, 2, 8, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def floats(*shape):
    return lambda: (torch.randn(B, *shape), torch.randn(B))


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(d, 8), nn.ReLU(), nn.Linear(8, 3)), floats(d)),
    "CNN": (convolutions, floats(3, 6, 6)),
    "encoder": (encoder, floats(T, d)),
    "tied decoder": (Decoder, lambda: (torch.randint(11, (B, T)), torch.randn(B))),
    "LSTM": (lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(d, 5, batch_first=True)), floats(T, d)),
    "weight norm": (lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(d, 4)), nn.Tanh()), floats(T, d)),
    "unused": (lambda: Net(lambda m, x: m.a(x), a=nn.Linear(d, 4), b=nn.Linear(d, 4)), floats(d)),
}


def losses(model, x, y):
    return (model(x).flatten(1).tanh() * torch.cos(torch.arange(model(x).flatten(1).shape[1]))).sum(1) * y


def questions():
    return {
        "norms": eachgrad.norms(), "each": eachgrad.norms(by="parameter"), "grad": eachgrad.clipped_sum(0.5),
        "total": eachgrad.weighted_sum(torch.linspace(-1, 1, B)), "mean": eachgrad.mean(),
    }  # fmt: skip


def assert_agree(got, want, tolerance):
    assert set(vars(got)) == set(vars(want))
    alone = {name: value for name, value in vars(want).items() if isinstance(value, torch.Tensor)}
    assert_same({name: getattr(got, name) for name in alone}, alone, tolerance)
    for name in set(vars(want)) - set(alone):
        found, wanted = getattr(got, name), getattr(want, name)
        assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in wanted.items()}
        assert_same(found, wanted, tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_in_eager(name):
    make, data = MODELS[name]
    model = make()
    ask = eachgrad.compile(model, losses, backend="aot_eager", **questions())
    for _ in range(6):
        batch = data()
        assert_agree(ask(*batch), ask.eager(batch), 1e-10)
    assert len(ask.graphs) == 1
    assert ask.reasons() == []
    assert len(ask.graphs[0].step) == 1
    assert all(p.grad is None for p in model.parameters())


def test_by_the_real_compiler():
    make, data = MODELS["tied decoder"]
    ask = eachgrad.compile(make(), losses, **questions())
    for _ in range(3):
        batch = data()
        assert_agree(ask(*batch), ask.eager(batch), 1e-9)
    assert ask.graphs[0].step


def test_other_shapes_and_another_way_through_the_model_are_other_graphs():
    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.second = nn.Linear(d, 4), nn.Linear(d, 4), False

        def forward(self, x):
            return self.b(x) if self.second else self.a(x)

    model = Switched()
    ask = eachgrad.compile(model, losses, backend="aot_eager", **questions())
    for second in (False, True, False, True):
        model.second = second
        for _ in range(3):
            batch = MODELS["MLP"][1]()
            assert_agree(ask(*batch), ask.eager(batch), 1e-10)
    assert len(ask.graphs) == 2
    smaller = torch.randn(B - 1, d), torch.randn(B - 1)
    only = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(3):
        for batch in (MODELS["MLP"][1](), smaller):
            torch.testing.assert_close(only(*batch).norms, only.eager(batch).norms, rtol=1e-10, atol=0)
    assert len(only.graphs) == 2


def test_more_batch_sizes_and_more_of_them_than_the_compiler_keeps_by_itself():
    model = nn.Linear(d, 2)
    asks = [eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms()) for _ in range(10)]
    for ask in asks:
        batch = torch.randn(3, d), torch.randn(3)
        torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)
    for n in range(2, 13):
        batch = torch.randn(n, d), torch.randn(n)
        torch.testing.assert_close(asks[0](*batch).norms, asks[0].eager(batch).norms, rtol=1e-10, atol=0)
    assert len(asks[0].graphs) == 11
    assert all(len(ask.graphs) == 1 for ask in asks[1:])


def test_dropout_draws_anew():
    model = nn.Sequential(nn.Linear(d, 64), nn.Dropout(0.5), nn.Linear(64, 3))
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    batch = MODELS["MLP"][1]()
    found = [ask(*batch).norms for _ in range(7)]
    assert ask.graphs[0].step
    assert not torch.equal(found[4], found[5])
    model.eval()
    torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)


def test_a_sample_that_is_not_finite_is_reported_as_in_eager():
    model = MODELS["MLP"][0]()
    ask = eachgrad.compile(model, losses, backend="aot_eager", grad=eachgrad.clipped_sum(0.5))
    x, y = MODELS["MLP"][1]()
    for _ in range(3):
        ask(x, y)
    x[2] = float("nan")
    with pytest.raises(eachgrad.CaptureError, match=r"samples \[2\]"):
        ask(x, y)


def test_a_model_that_mixes_samples_is_refused():
    model = nn.Sequential(nn.Linear(d, 4), nn.BatchNorm1d(4))
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    with pytest.raises(eachgrad.UnsupportedOp, match="batch_norm"):
        ask(*MODELS["MLP"][1]())


class Breaks(nn.Module):
    """What the compiler's front end does not take in one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(d, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.fc(x)
        torch._dynamo.graph_break()
        return out.tanh()


def test_a_forward_that_the_compiler_does_not_take_is_answered_eagerly():
    ask = eachgrad.compile(Breaks(), losses, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(4):
        batch = MODELS["MLP"][1]()
        torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)
    (reason,) = ask.reasons()
    assert reason.startswith("the compiler does not take the forward as one graph: Unsupported")


def test_wrong_shapes_are_the_models_own_error():
    ask = eachgrad.compile(MODELS["MLP"][0](), losses, backend="aot_eager", norms=eachgrad.norms())
    x, y = MODELS["MLP"][1]()
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        ask(x[:, :-1], y)
    ask(x, y)
    assert not ask.reasons()


def multilabel(out, y):
    labels = torch.cat([y[:, None], torch.full_like(y[:, None], -1).expand(-1, out.shape[1] - 1)], 1)
    return F.multilabel_margin_loss(out, labels, reduction="none")


def test_a_step_that_the_compiler_gets_wrong_is_answered_eagerly(monkeypatch):
    model = MODELS["MLP"][0]()
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    run = step.Step.run
    monkeypatch.setattr(step.Step, "run", lambda self, args: tuple(1.01 * t for t in run(self, args)))
    for _ in range(4):
        batch = MODELS["MLP"][1]()
        torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)
    (reason,) = ask.reasons()
    assert reason.startswith("compiled, its answers differ from the eager ones: norms by 0.01")


def test_a_loss_whose_compiled_gradient_is_another_one():
    """torch's own: whatever the compiler makes of it, the answers are the eager ones."""
    torch.manual_seed(0)
    ask = eachgrad.compile(nn.Linear(d, 4).double(), multilabel, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(6):
        batch = torch.randn(5, d, dtype=torch.float64), torch.randint(4, (5,))
        torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)


@pytest.mark.parametrize("query", [eachgrad.noise_scale(), eachgrad.project(8, seed=0)], ids=["numbers", "out="])
def test_an_answer_that_cannot_be_traced_is_given_eagerly(query):
    ask = eachgrad.compile(MODELS["MLP"][0](), losses, backend="aot_eager", found=query)
    for _ in range(6):
        batch = MODELS["MLP"][1]()
        got, want = ask(*batch).found, ask.eager(batch).found
        if isinstance(got, torch.Tensor):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
        else:
            assert got.value == pytest.approx(want.value, rel=1e-10)
    (reason,) = ask.reasons()
    assert "cannot be traced" in reason


def test_layouts_that_are_measured_anew_are_not_answered_by_the_old_step():
    model = MODELS["MLP"][0]()
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(3):
        ask(*MODELS["MLP"][1]())
    (graph,) = ask.graphs
    assert graph.step
    graph.plan = dataclasses.replace(graph.plan, wanted=[set() for _ in graph.plan.wanted])
    ask(*MODELS["MLP"][1]())  # the fourth call measures, and finds other layouts
    assert not graph.step
    batch = MODELS["MLP"][1]()
    torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)
    assert graph.step


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return 2 * x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * g * w, (2 * g * x).sum(0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_what_cannot_be_compiled_is_answered_eagerly_and_said():
    model = Net(lambda m, x: Doubled.apply(m.fc(x), m.w), w=torch.randn(4), fc=nn.Linear(d, 4))
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(4):
        batch = MODELS["MLP"][1]()
        torch.testing.assert_close(ask(*batch).norms, ask.eager(batch).norms, rtol=1e-10, atol=0)
    (reason,) = ask.reasons()
    assert "'w'" in reason


@pytest.mark.parametrize("name", ["MLP", "encoder", "CNN"])
def test_under_autocast(name):
    make, data = MODELS[name]
    model, (x, y) = make().float(), data()
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms(), grad=eachgrad.clipped_sum(0.5))
    for precise in (False, True, False):
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
                got, want = ask(x.float(), y.float()), ask.eager((x.float(), y.float()))
            # The same sixteen bit numbers, and the same sums of them in float32.
            assert_agree(got, want, 1e-5)
    assert not ask.reasons()


def test_names_and_questions_are_checked():
    with pytest.raises(ValueError, match="losses"):
        eachgrad.compile(nn.Linear(d, d), losses, losses=eachgrad.norms())
    with pytest.raises(ValueError, match="nothing is asked"):
        eachgrad.compile(nn.Linear(d, d), losses)


@pytest.mark.parametrize("name", ["MLP", "encoder", "tied decoder"])
def test_batches_of_any_size_in_one_graph(name):
    make, data = MODELS[name]
    model, (x, y) = make(), data()
    direction = {n: torch.randn_like(p) for n, p in model.named_parameters()}
    asked = {
        "norms": eachgrad.norms(), "each": eachgrad.norms(by="parameter"), "grad": eachgrad.clipped_sum(0.5),
        "dot": eachgrad.dot(direction), "mean": eachgrad.mean(), "second": eachgrad.second_moment(),
        "dense": eachgrad.dense(), "normed": eachgrad.clipped_sum(0.5, normalise=True),
    }  # fmt: skip
    ask = eachgrad.compile(model, losses, pad_to=B, backend="aot_eager", **asked)
    for n in (B, 3, 1, 2, 3, 1, B):
        assert_agree(ask(x[:n], y[:n]), ask.eager((x[:n], y[:n])), 1e-10)
    (graph,) = ask.graphs
    assert graph.step
    assert not ask.reasons()


def test_batches_are_filled_up_to_the_next_of_several_sizes():
    make, data = MODELS["encoder"]
    model, (x, y) = make(), data()
    ask = eachgrad.compile(model, losses, pad_to=[B, 2, B], backend="aot_eager", grad=eachgrad.clipped_sum(0.5))
    for n in (B, 3, 1, 2, 3, 1, B, 2):
        assert_agree(ask(x[:n], y[:n]), ask.eager((x[:n], y[:n])), 1e-10)
    assert [graph.calls for graph in ask.graphs] == [4, 4]
    assert all(graph.step for graph in ask.graphs)
    with pytest.raises(ValueError, match=f"pad_to={B}"):
        ask(torch.cat([x, x]), torch.cat([y, y]))


def doubtful():
    """A compiled question, warm, with a batch and one whose answer is in doubt: a sample of it is NaN."""
    ask = eachgrad.compile(
        nn.Linear(d, 3), losses, backend="aot_eager", grad=eachgrad.clipped_sum(0.5, nonfinite="zero")
    )
    x, y = torch.randn(B, d), torch.randn(B)
    spoilt = x.clone()
    spoilt[1] = float("nan")
    for _ in range(8):  # the 16th call measures again
        ask(x, y)
    return ask, x, spoilt, y


def test_answers_that_are_trusted_are_doubted_later():
    """A NaN is a doubt, which a call answers eagerly, and which `trusting` leaves for `doubted` to say, once."""
    ask, x, spoilt, y = doubtful()
    assert not ask.doubted()
    for batches, wrong in (([x, x], False), ([spoilt], True), ([spoilt, x], True), ([x, spoilt], True), ([x], False)):
        found = [ask.trusting(batch, y).grad["weight"].clone() for batch in batches]
        for batch, grad in zip(batches, found, strict=True):
            if batch is x:
                torch.testing.assert_close(grad, ask.eager((x, y)).grad["weight"])
        assert ask.doubted() == wrong
        assert not ask.doubted()
    assert_agree(ask(spoilt, y), ask.eager((spoilt, y)), 1e-10)
    assert not ask.doubted()  # a call has said it by itself
    ask.trusting(spoilt, y)
    assert_agree(ask.again(spoilt, y), ask.eager((spoilt, y)), 1e-10)
    assert_agree(ask(x, y), ask.eager((x, y)), 1e-10)
    assert ask.doubted()  # a call in between does not make it forgotten
    assert ask.graphs[0].step


@pytest.mark.parametrize("way", ["call", "trusting"])
def test_a_flag_that_comes_late_is_not_the_next_steps(way, monkeypatch):
    """As on a GPU, where a wait was interrupted: the device writes the flag when it has come so far."""
    late, interrupts, wait = [], [], Slot.wait
    monkeypatch.setattr(Slot, "write", lambda self, flag: late.append((self, int(flag) + 1)))

    def waiting(slot):
        if interrupts:
            raise interrupts.pop()
        while slot._seen[0] == 0 and late:
            other, value = late.pop(0)
            other._seen[0] = value
        return wait(slot)

    monkeypatch.setattr(Slot, "wait", waiting)
    ask, x, spoilt, y = doubtful()
    assert ask.graphs[0].step
    interrupts.append(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        (ask if way == "call" else lambda *batch: (ask.trusting(*batch), ask.doubted()))(x, y)
    assert not interrupts
    assert_agree(ask(spoilt, y), ask.eager((spoilt, y)), 1e-10)


def test_what_is_filled_up_by_chance_is_answered_eagerly():
    model = nn.Linear(d, 3)

    def averaged(model, x, scale):
        return (model(x) * scale.mean(0)).sum(1) / len(scale)

    ask = eachgrad.compile(model, averaged, pad_to=B, backend="aot_eager", norms=eachgrad.norms())
    x, scale = torch.randn(2, d), torch.randn(2, 3)
    for _ in range(3):
        assert_agree(ask(x, scale), ask.eager((x, scale)), 1e-10)
    assert "other losses" in ask.reasons()[0]


def test_padding_is_refused():
    model = nn.Linear(d, 3)
    for size in (0, -1, True, 2.0, (), (2, 0), (True, 2), "8", {2, 3}):
        with pytest.raises(ValueError, match="pad_to is a positive number"):
            eachgrad.compile(model, losses, pad_to=size, norms=eachgrad.norms())
    for query in (eachgrad.variance(), eachgrad.noise_scale(), eachgrad.weighted_sum(torch.ones(B)), eachgrad.gram()):
        with pytest.raises(ValueError, match="filled up: ask it without pad_to"):
            eachgrad.compile(model, losses, pad_to=B, found=query)
    ask = eachgrad.compile(model, losses, pad_to=B, backend="aot_eager", norms=eachgrad.norms())
    for n in (0, B + 1):
        with pytest.raises(ValueError, match=f"a batch of {n} samples is not between 1 and pad_to={B}"):
            ask(torch.randn(n, d), torch.randn(n))
    with pytest.raises(ValueError, match="none has that dimension"):
        ask(torch.tensor(1.0))


def _replaced(model):
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))


def _assigned(model):
    model.load_state_dict({n: torch.randn_like(p) for n, p in model.state_dict().items()}, assign=True)


def _another_layer(model):
    model[2] = nn.Linear(8, 3)


def _written_to(model):
    model[0].weight.data.mul_(3)


def _other_data(model):
    model[0].weight.data = torch.randn_like(model[0].weight)


def _frozen(model):
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize(
    "change", [_replaced, _assigned, _another_layer, _written_to, _other_data, _frozen], ids=lambda f: f.__name__[1:]
)
def test_parameters_that_change_between_calls(change):
    model, data = MODELS["MLP"][0](), MODELS["MLP"][1]
    ask = eachgrad.compile(model, losses, backend="aot_eager", **questions())
    for k in range(8):
        if k in (4, 6):  # calls 5 to 7 are by a compiled step
            change(model)
        batch = data()
        assert_agree(ask(*batch), ask.eager(batch), 1e-10)
    assert ask.graphs[-1].step


@pytest.mark.parametrize("compiled", [False, True])
def test_inside_what_the_user_compiles(compiled):
    model, (x, y) = MODELS["MLP"][0](), MODELS["MLP"][1]()
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())

    def step(x, y):
        if compiled:
            return ask(x * 2, y).norms + 1
        with eachgrad.record(model) as tape:
            found = losses(model, x * 2, y)
        return tape.ask(found, norms=eachgrad.norms()).norms + 1

    want = ask.eager((x * 2, y)).norms + 1
    around = torch.compile(step, backend="aot_eager")
    for _ in range(4):
        torch.testing.assert_close(around(x, y), want, rtol=1e-12, atol=0)


def test_buffers_are_left_alone():
    """Not even their version changes: others look at it to see whether a forward wrote to them."""
    model = Net(lambda m, x: m.fc(x) * m.scale, fc=nn.Linear(d, 3))
    model.register_buffer("scale", torch.randn(3))
    ask = eachgrad.compile(model, losses, backend="aot_eager", norms=eachgrad.norms())
    version = model.scale._version
    for _ in range(5):
        ask(torch.randn(B, d), torch.randn(B))
    assert model.scale._version == version


def test_with_the_modes_of_the_compiler():
    model, data = MODELS["MLP"][0](), MODELS["MLP"][1]
    ask = eachgrad.compile(
        model, losses, mode="reduce-overhead", norms=eachgrad.norms(), grad=eachgrad.clipped_sum(0.5)
    )
    for _ in range(3):
        batch = data()
        assert_agree(ask(*batch), ask.eager(batch), 1e-9)
    assert ask.graphs[0].step


def test_a_sample_that_is_not_finite_in_a_batch_that_is_filled_up():
    model = nn.Linear(d, 3)
    asked = {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(0.5, nonfinite="zero")}
    ask = eachgrad.compile(model, losses, pad_to=B, backend="aot_eager", **asked)
    for k in range(5):
        x, y = torch.randn(3, d), torch.randn(3)
        x[k % 3] = float("nan") if k % 2 else float("inf")
        found, without = ask(x, y), [i for i in range(3) if i != k % 3]
        want = ask.eager((x[without], y[without]))
        assert_same(found.grad, want.grad, 1e-10)
        assert not bool(found.norms[k % 3].isfinite())
        assert_same({"norms": found.norms[without]}, {"norms": want.norms}, 1e-10)


def test_autocast_in_the_loss_function_alone():
    """Compiled, the logarithms are not rounded in between: half a percent from the eager numbers, and none of it wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(41, 16), nn.Linear(16, 41)).float()

    def losses(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x).flatten(0, 1)
        return F.nll_loss(F.log_softmax(logits, 1), y.flatten(), reduction="none").view(x.shape).mean(1)

    ask = eachgrad.compile(model, losses, grad=eachgrad.clipped_sum(1.0))
    for _ in range(4):
        x, y = torch.randint(41, (6, 8)), torch.randint(41, (6, 8))
        found = ask(x, y).grad
    assert ask.reasons() == []
    assert ask.graphs[0].step
    exact = copy.deepcopy(model).double()
    with eachgrad.record(exact) as tape:
        wide = F.cross_entropy(exact(x).flatten(0, 1), y.flatten(), reduction="none").view(x.shape).mean(1)
    for name, want in tape.backward(wide).clipped_sum(1.0).items():
        torch.testing.assert_close(found[name].double(), want, rtol=0.0, atol=8e-3 * float(want.abs().max()))


def test_why_the_compiler_has_failed_names_the_op():
    """Torch's first line is the same for all of them."""
    text = (
        "RuntimeError when making fake tensor call\n  Explanation: Dynamo failed to run FX node with fake tensors: "
        "call_function aten.bmm.dtype(*(FakeTensor(..., size=(3,)),), **{}): got RuntimeError('no such size')\n  Hint: none"
    )
    said = first_line(RuntimeError(text))
    assert (
        said == "RuntimeError: RuntimeError when making fake tensor call, aten.bmm.dtype, RuntimeError('no such size')"
    )
    assert first_line(ValueError("a tensor: got Foo(1)")) == "ValueError: a tensor: got Foo(1)"


def test_a_forward_that_the_front_end_takes_for_the_same(monkeypatch):
    """Torch 2.11 has one graph of it, whichever parameters are trained: each has a step of its own here."""
    made, backend = [], eachgrad.compiled.Compiled._backend

    def noting(ask, gm, example):
        run = backend(ask, gm, example)
        made.append(run)
        return lambda *args: made.append(args) or run(*args)

    monkeypatch.setattr(eachgrad.compiled.Compiled, "_backend", noting)
    model, data = MODELS["MLP"][0](), MODELS["MLP"][1]
    ask = eachgrad.compile(model, losses, backend="aot_eager", **questions())
    for _ in range(4):
        last = data()
        assert_agree(ask(*last), ask.eager(last), 1e-10)
    run, args, batch = made[0], made[-1], last
    for trained in (False, False, False, False, True, True):
        model[0].weight.requires_grad_(trained)
        batch = data()
        new = {id(old): t for old, t in zip(last, batch, strict=True)}
        ask._front = lambda *_, new=new: run(*[new.get(id(a), a) for a in args])
        assert_agree(ask(*batch), ask.eager(batch), 1e-10)
    assert [len(graph.step) for graph in ask.graphs] == [1, 1]
