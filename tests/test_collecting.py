"""Python's garbage collector rests while a forward is recorded and a backward streams, and is left as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import eachgrad
from eachgrad import foreign
from eachgrad.functions import uncollected


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = gc.isenabled()
    yield
    (gc.enable if before else gc.disable)()


class Net(nn.Module):
    """Notes whether the collector is on in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = nn.Linear(3, 2), list[bool]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(gc.isenabled())
        out = self.layer(x)
        out.register_hook(lambda g: self.seen.append(gc.isenabled()))
        return out


@pytest.mark.parametrize("on", [True, False])
def test_it_rests_and_is_left_as_it_was(on: bool):
    (gc.enable if on else gc.disable)()
    model, x = Net(), torch.randn(4, 3)
    for _ in range(3):  # the third has a plan, and streams
        model.seen.clear()
        with eachgrad.record(model) as tape:
            losses = model(x).square().sum(1)
        assert gc.isenabled() is on
        tape.ask(losses, norms=eachgrad.norms())
        assert gc.isenabled() is on
    assert model.seen == [False, False]


def test_it_is_left_as_it_was_where_something_fails():
    gc.enable()
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(eachgrad.UnsupportedOp), eachgrad.record(model):
        model(torch.randn(4, 3))
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), eachgrad.record(model):
        raise ZeroDivisionError
    assert gc.isenabled()
    tape = eachgrad.record(model)
    with pytest.raises(eachgrad.CaptureError, match="inside another"), eachgrad.record(nn.Linear(1, 1)), tape:
        pass
    assert gc.isenabled()


def test_of_two_threads_the_last_one_puts_it_back():
    gc.enable()
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with uncollected:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with uncollected:
        thread.start()
        inside.wait()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_it_is_left_as_it_was_where_a_recording_cannot_begin(monkeypatch: pytest.MonkeyPatch):
    gc.enable()
    model = nn.Linear(3, 2)
    monkeypatch.setattr(foreign, "modules_watched", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), eachgrad.record(model):
        pass
    assert gc.isenabled()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    monkeypatch.undo()
    with eachgrad.record(model):
        model(torch.randn(4, 3))
