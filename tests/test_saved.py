"""A norm's rule takes the statistics that autograd keeps of the forward, where they are at hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import eachgrad
from eachgrad.rules import norm
from oracle import assert_same, loop

B = 4


class Model(nn.Module):
    """Two norms; the first one's samples may lie along dimension 1, the second runs in a checkpoint if that is asked for."""

    def __init__(self, turned: bool = False, checkpointed: bool = False):
        super().__init__()
        self.first, self.norm, self.again = nn.Linear(6, 8), nn.LayerNorm(8), nn.LayerNorm(8)
        self.turned, self.checkpointed = turned, checkpointed
        for layer in (self.norm, self.again):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = self.norm(h.transpose(0, 1)).transpose(0, 1) if self.turned else self.norm(h)
        return checkpoint(self.again, h.tanh(), use_reentrant=False) if self.checkpointed else self.again(h.tanh())


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a GPU, where a kernel adds up what a norm's parameters get; how often statistics were computed for it."""
    monkeypatch.setattr(norm, "on_gpu", lambda t: True)
    monkeypatch.setattr(norm, "are_many", lambda *values: True)
    calls, own = [], torch.native_layer_norm
    monkeypatch.setattr(torch, "native_layer_norm", lambda *args: calls.append(1) or own(*args))
    return calls


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) * torch.arange(8.0).to(x.dtype)).square().sum((1, 2))


@pytest.mark.parametrize("asked", ["backward", "ask"])
@pytest.mark.parametrize(("options", "anew"), [({}, 0), ({"turned": True}, 1), ({"checkpointed": True}, 1)])
def test_statistics_are_those_of_the_forward(options: dict[str, bool], anew: int, asked: str, computed: list[int]):
    torch.manual_seed(0)
    model, x = Model(**options), torch.randn(B, 5, 6)
    x[1] += 100.0  # a mean that is far from zero
    for _ in range(3):
        computed.clear()
        with eachgrad.record(model) as tape:
            found = losses(model, x)
        if asked == "ask":
            answer = tape.ask(found, grad=eachgrad.weighted_sum(torch.arange(1.0, B + 1))).grad
        else:
            answer = tape.backward(found).weighted_sum(torch.arange(1.0, B + 1))
        assert len(computed) == anew
    wide = Model(**options).double()
    wide.load_state_dict(model.state_dict())
    rows = loop(wide, losses, [(x[i : i + 1].double(),) for i in range(B)])
    c = torch.arange(1.0, B + 1).double()
    assert_same(answer, {name: torch.tensordot(c, value, 1) for name, value in rows.items()}, 1e-5)


class Maps(nn.Module):
    def __init__(self, checkpointed: bool = False):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.Linear(6, 8)
        self.flat = nn.GroupNorm(1, 8)  # of no positions
        self.checkpointed = checkpointed
        for layer in (self.norm, self.flat):
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = checkpoint(self.norm, h, use_reentrant=False) if self.checkpointed else self.norm(h)
        return self.flat(self.last(h.tanh().mean((2, 3))))


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_groups_of_channels(checkpointed: bool, channels_last: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    calls, own = [], norm.channel_sums
    monkeypatch.setattr(norm, "is_unwatched", lambda t: True)
    monkeypatch.setattr(norm, "channel_sums", lambda *args: calls.append(1) or own(*args))
    model, x = Maps(checkpointed), torch.randn(B, 3, 7, 6)
    x[1] += 3.0
    x = x.contiguous(memory_format=torch.channels_last) if channels_last else x

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return (model(x) * torch.arange(8.0).to(x.dtype)).square().sum(1)

    c = torch.arange(1.0, B + 1)
    for _ in range(3):
        calls.clear()
        with eachgrad.record(model) as tape:
            found = losses(model, x)
        answer = tape.ask(found, grad=eachgrad.weighted_sum(c)).grad
        assert len(calls) == (not checkpointed)
    wide = Maps(checkpointed).double()
    wide.load_state_dict(model.state_dict())
    rows = loop(wide, losses, [(x[i : i + 1].double(),) for i in range(B)])
    assert_same(answer, {name: torch.tensordot(c.double(), value, 1) for name, value in rows.items()}, 1e-5)


def test_an_answer_keeps_no_graph():
    """Statistics of the forward come from a node of it."""
    model, x = Model(), torch.randn(B, 5, 6)
    with eachgrad.record(model) as tape:
        losses(model, x)
    assert any(use.saved is not None for use in tape.recorder.uses)
    assert all(t.grad_fn is None for use in tape.recorder.uses for t in use.saved or ())


def test_statistics_in_sixteen_bits_are_not_taken():
    """A mean that is rounded may be far from the one that the samples have."""
    model = Maps().bfloat16()
    with eachgrad.record(model) as tape:
        model(torch.randn(B, 3, 7, 6).bfloat16())
    norms = [use for use in tape.recorder.uses if use.rule.saved]
    assert len(norms) == 2
    assert all(use.saved is None or use.saved[0].dtype == torch.float32 for use in norms)
