"""Gradients in the memory of a graph: written over by the next step, unless somebody has kept one."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from private_runs import fixed, make
from torch import Tensor, nn

import eachgrad
from eachgrad.arena import placed
from eachgrad.private import lending, noise
from eachgrad.private.gathering import Engine
from eachgrad.receipt import call_loss

STEPS = 12


class Graph:
    """Stands in for a CUDA graph: its sums lie at the same places every time, until it is captured again."""

    def __init__(self, like: dict[str, Tensor]):
        self.memory = {name: torch.full_like(t, float("nan")) for name, t in like.items()}

    def lent(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in sums.items():
            mine = self.memory[name].copy_(value)
            found[name] = placed(mine.data_ptr(), mine.nbytes, mine, mine.shape, mine.stride())
            found[name].eachgrad_held = self  # type: ignore[attr-defined]
        return found

    def has(self, t: Tensor) -> bool:
        return any(t.data_ptr() == mine.data_ptr() for mine in self.memory.values())


class Graphs:
    """The graphs of the runs of a test, one after another."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.old: list[weakref.ref[Graph]] = []

    def release(self) -> None:
        assert self.graph is not None
        self.old.append(weakref.ref(self.graph))
        self.graph = None

    def answer(self, found):
        if self.graph is None:
            self.graph = Graph(found.grad)
        found.grad = self.graph.lent(found.grad)
        return found


@pytest.fixture
def graphs(monkeypatch):
    """Compiled answers lie in the memory of a stand-in, and noise is written as on a GPU."""
    found, compiled = Graphs(), Engine._compiled
    monkeypatch.setattr(eachgrad, "compile", partial(eachgrad.compile, backend="aot_eager"))
    monkeypatch.setattr(noise, "goes_together", lambda p: noise._wide(p.dtype) == torch.float32)
    monkeypatch.setattr(eachgrad.compiled.Compiled, "release", lambda ask: found.release())

    def answered(engine, ask, args, filled):
        answer, losses = compiled(engine, ask, args, filled)
        return found.answer(answer), losses

    monkeypatch.setattr(Engine, "_compiled", answered)
    yield found
    lending._LEFT.clear()


def made(**options):
    torch.manual_seed(0)
    given = {"steps": STEPS, "compile": True, "batch_size": 12, "max_physical_batch": 64, "generator": fixed()}
    return make(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), **given | options)


def trained(run, after=lambda run: None) -> list[Tensor]:
    for batch in run.loader:
        run.step(batch)
        after(run)
    return [p.detach().clone() for p in run.model.parameters()]


@pytest.fixture
def want():
    """The parameters of the same run without a graph."""
    return trained(made(compile=False))


def assert_alike(found, want) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_gradients_are_lent(graphs):
    """They are those of a run that lends nothing, to the bit."""

    def gradients(run) -> tuple[list[list[Tensor]], list[bool]]:
        found: list[list[Tensor]] = []
        lent: list[bool] = []

        def note(run) -> None:
            found.append([p.grad.clone() for p in run.model.parameters()])
            lent.append(graphs.graph is not None and all(graphs.graph.has(p.grad) for p in run.model.parameters()))

        trained(run, note)
        return found, lent

    other = made()
    other.lending.allowed = False
    want, lent = gradients(other)
    assert not any(lent)
    found, lent = gradients(made())
    assert lent.count(True) >= STEPS - 4  # those of the eager code are not
    for some, others in zip(found, want, strict=True):
        assert all(map(torch.equal, some, others))
    assert not graphs.old


KEPT = {
    "itself": lambda g: g,
    "detached": torch.Tensor.detach,
    "a part": lambda g: g.flatten()[1:],
    "as an array": lambda g: torch.from_numpy(g.detach().numpy()),
}


@pytest.mark.parametrize("how", KEPT)
def test_who_keeps_a_gradient_keeps_its_numbers(how, graphs, want):
    run, kept = made(), []

    def keep(run) -> None:
        if run.taken == 5:
            (p, *_) = run.model.parameters()
            assert graphs.graph.has(p.grad)
            kept.append((KEPT[how](p.grad), KEPT[how](p.grad.clone())))

    assert_alike(trained(run, keep), want)
    ((mine, copy),) = kept
    assert torch.equal(mine, copy)
    assert not run.lending.allowed
    (old,) = graphs.old
    assert old() is not None  # as long as somebody has a part of its memory
    kept.clear()
    del mine
    run.lending.take_back()
    gc.collect()
    assert old() is None


def test_nothing_is_left_of_a_run_that_is_gone(graphs):
    run = made()
    trained(run)
    model, graph = run.model, weakref.ref(graphs.graph)
    assert all(graphs.graph.has(p.grad) for p in model.parameters())
    want = [p.grad.clone() for p in model.parameters()]
    graphs.graph = None
    del run
    gc.collect()
    assert graph() is None
    for p, g in zip(model.parameters(), want, strict=True):
        assert torch.equal(p.grad, g)
    assert not lending._LEFT


def test_sums_that_share_their_memory_are_not_written_over(graphs):
    parameters = {name: nn.Parameter(torch.zeros(6)) for name in ("one", "other")}
    like = {name: torch.zeros(6) for name in parameters}
    graph = Graph(like)
    assert lending.Lending().over(graph.lent(like), parameters) is not None
    for part in (slice(0, 6), slice(4, 10)):
        whole = torch.zeros(10)
        graph.memory = {"one": whole[:6], "other": whole[part]}
        assert lending.Lending().over(graph.lent(like), parameters) is None
    graph.memory["other"] = torch.zeros(6)
    assert lending.Lending().over(graph.lent(like), parameters) is not None


def test_what_is_no_graphs_is_not_lent(graphs):
    run = made()
    like = {name: torch.zeros_like(p) for name, p in run.parameters.items()}
    assert run.lending.over(like, run.parameters) is None
    one, other = Graph(like), Graph(like)
    assert run.lending.over(one.lent(like), run.parameters) is not None
    mixed = one.lent(like)
    mixed["2.bias"] = other.lent(like)["2.bias"]
    assert run.lending.over(mixed, run.parameters) is None
    assert run.lending.over({k: t for k, t in one.lent(like).items() if k != "2.bias"}, run.parameters) is None
    wide = Graph({name: t.double() for name, t in like.items()}).lent({name: t.double() for name, t in like.items()})
    assert run.lending.over(wide, run.parameters) is None


def test_a_step_in_doubt_is_answered_anew(graphs, want, monkeypatch):
    """The noise was written over the sums: they are computed again, by the eager code, from the same samples."""
    doubted = iter([False, False, True, False, False, True, False, False, False, False, False, False, False])
    monkeypatch.setattr(Engine, "doubted", lambda engine: next(doubted))
    again = []
    monkeypatch.setattr(
        Engine, "again", lambda engine, batch, filled: again.append(filled) or eagerly(engine, batch, filled)
    )
    assert_alike(trained(made()), want)
    assert again


def eagerly(engine, batch, filled):
    with engine.record() as tape:
        losses = call_loss(engine.model, engine.loss_fn, batch)
    return engine.answer_by(tape, losses), losses.detach()
