"""Programs that a compiled step could get wrong without a word: each is right, or answered eagerly with a reason."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame

import eachgrad

d, B = 6, 4
QUERIES = {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(0.3, nonfinite="zero")}


def compiled(model: nn.Module, losses, **queries):
    return eachgrad.compile(model.double(), losses, backend="aot_eager", **(queries or QUERIES))


def check(ask, *batch) -> None:
    got, want = ask(*(t.clone() for t in batch)), ask.eager(tuple(t.clone() for t in batch))
    torch.testing.assert_close(got.norms, want.norms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-12)


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, d)), dtype=torch.float64)


def apart(model, x, y):
    return (model(x) - y.detach()).square().sum(1)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, d))


@pytest.mark.parametrize(
    "view", [Tensor.detach, lambda x: x.view(B, 2, 3).flatten(1), lambda x: x], ids=["detached", "view", "same"]
)
def test_a_target_that_was_the_input_when_it_was_traced(view):
    ask = compiled(network(), apart)
    for k in range(8):
        x = rows()
        y = view(x) if k < 4 else rows()
        got, want = ask(x, y), ask.eager((x, y))
        torch.testing.assert_close(got.norms, want.norms, rtol=1e-10, atol=1e-12)


def test_parameters_that_shared_their_memory_when_they_were_traced():
    model = nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, d))
    ask = compiled(model, apart)
    model[2].weight.data = model[0].weight.data
    for k in range(8):
        if k == 5:
            model[2].weight.data = rows(d, d)
        check(ask, rows(), rows())


class TwoDraws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.mean(x)
        return torch.randn_like(mean) - torch.randn_like(mean) + 0 * mean


def test_two_draws_are_two():
    ask = compiled(TwoDraws(), lambda out: out.square().mean(1), norms=eachgrad.norms())
    for _ in range(8):
        assert (ask(rows()).losses > 0.05).all()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(d, d)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.fc(x) * self.calls


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0].mul_(2)
        return self.fc(x)


@pytest.mark.parametrize("make", [Counting, Doubling])
def test_a_forward_that_writes_is_run_once_a_call(make):
    """Also where a sample is not finite, and the eager code answers after the compiled one."""
    model, alone = make(), make()
    alone.load_state_dict(model.state_dict())
    ask, other = compiled(model, apart), compiled(alone, apart)
    for k in range(8):
        x, y = rows(), rows()
        if k in (2, 4, 6):
            y[1] = float("nan")
        first, second = x.clone(), x.clone()
        got, want = ask(first, y), other.eager((second, y))
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-10, atol=1e-12)
        assert torch.equal(first, second)
    if make is Counting:
        assert float(model.calls) == float(alone.calls) == 8
    assert any("writes into" in reason for reason in ask.reasons())


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(d, d), None

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.fc(x)
        return self.last.tanh()


def test_a_forward_that_keeps_a_tensor():
    model = Keeping()
    ask = compiled(model, apart)
    for _ in range(5):
        x = rows()
        check(ask, x, rows())
        torch.testing.assert_close(model.last, model.fc(x))
    assert "keeps a tensor" in ask.reasons()[0]


def test_a_parameter_that_the_forward_does_not_use_is_frozen_and_thawed():
    model = nn.ModuleDict({"a": nn.Linear(d, d), "b": nn.Linear(d, d)})
    ask = compiled(model, lambda model, x, y: apart(model["a"], x, y))
    for k in range(8):
        model["b"].requires_grad_(k not in (4, 5))
        batch = rows(), rows()
        assert ask(*batch).grad.keys() == ask.eager(batch).grad.keys()


def test_an_op_that_is_no_view_whatever_its_fake_says():
    library = torch.library.Library("hazards", "DEF")
    library.define("thrice(Tensor x) -> Tensor")
    library.impl("thrice", lambda x: 3 * x, "CPU")
    torch.library.register_fake("hazards::thrice", lambda x: x.view_as(x), lib=library)
    ask = compiled(network(), lambda model, x, y: apart(model, torch.ops.hazards.thrice(x), y))
    for _ in range(5):
        check(ask, rows(), rows())


def test_recordings_in_two_threads_leave_the_compiler_on():
    """Blocks that overlap, and end in the order in which they began."""
    begun, ended = threading.Event(), threading.Event()

    def first():
        with eachgrad.record(network().double()):
            begun.set()
            assert second_is_in.wait(10)
        ended.set()

    second_is_in = threading.Event()
    thread = threading.Thread(target=first)
    thread.start()
    assert begun.wait(10)
    with eachgrad.record(network().double()):
        second_is_in.set()
        assert ended.wait(10)
    thread.join()
    assert eval_frame._stance.stance == "default"
    ask = compiled(network(), apart)
    for _ in range(3):
        check(ask, rows(), rows())
    assert len(ask.graphs) == 1


def test_a_compiler_that_is_switched_off():
    ask = compiled(network(), apart)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            check(ask, rows(), rows())
    assert not ask.graphs
