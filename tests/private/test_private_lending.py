"""Gradients in the memory of graphs: there while the optimizer takes its step, and nobody else's numbers afterwards."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from itertools import pairwise

import pytest
import torch
from private_runs import fixed, make
from torch import Tensor, nn

import eachgrad
from eachgrad.block import Block
from eachgrad.private import noise
from eachgrad.private.audit_canaries import Scores
from eachgrad.private.gathering import Engine
from eachgrad.private.lending import Lending
from eachgrad.receipt import call_loss
from eachgrad.replay import Held, lent

STEPS = 24


class Graphs:
    """Stands in for CUDA graphs: sums lie at the front of the block, and whatever else a graph may write to is spoilt."""

    def __init__(self, monkeypatch):
        self.block: Block | None = None
        self.released = 0
        self.old: list[weakref.ref[Tensor]] = []
        compiled = Engine._compiled

        def answered(engine, ask, args, filled):
            answer, losses = compiled(engine, ask, args, filled)
            self.block = engine.ask.memory.block
            answer.grad = self.lent(answer.grad, len(losses))
            return answer, losses

        def release(ask):
            assert self.block is not None
            assert self.block.base is not None
            self.old.append(weakref.ref(self.block.base))
            self.block.drop()

        monkeypatch.setattr(Engine, "_compiled", answered)
        monkeypatch.setattr(eachgrad.compiled.Compiled, "release", release)

    def lent(self, sums: dict[str, Tensor], samples: int) -> dict[str, Tensor]:
        block = self.block
        assert block is not None
        if block.base is None:
            block.base = torch.empty(2 * block.beside + 4096, dtype=torch.uint8)
        end = block.base.nbytes - (block.beside if samples <= block.several else 0)
        assert samples <= block.several or not block.is_in_use(samples)
        numbers = block.base[:end].view(torch.float32).fill_(float("nan"))
        found, start = {}, 256
        for name, value in sums.items():
            mine = numbers[start : start + value.numel()].view(value.shape).copy_(value)
            found[name] = lent_on_cpu(mine, Held(None, block.base))  # type: ignore[arg-type]
            start += value.numel()
        return found

    def has(self, t: Tensor) -> bool:
        base = self.block and self.block.base
        return base is not None and 0 <= t.data_ptr() - base.data_ptr() < base.nbytes


def lent_on_cpu(t: Tensor, held: Held) -> Tensor:
    found = lent(t, held).view(t.shape)
    found.eachgrad_held = held  # type: ignore[attr-defined]
    return found


@pytest.fixture
def graphs(monkeypatch):
    """Compiled answers lie in the memory of a stand-in, and noise is written as on a GPU."""
    monkeypatch.setattr(eachgrad, "compile", partial(eachgrad.compile, backend="aot_eager"))
    monkeypatch.setattr(noise, "goes_together", lambda p: noise._wide(p.dtype) == torch.float32)
    return Graphs(monkeypatch)


def made(**options):
    torch.manual_seed(0)
    given = {"steps": STEPS, "compile": True, "batch_size": 12, "max_physical_batch": 14, "generator": fixed()}
    return make(nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), **given | options)


def trained(run, during=lambda run, pieces: None) -> list[Tensor]:
    """The parameters at the end; `during` is called while the optimizer takes each step."""
    pieces = [0]
    run.optimizer.register_step_pre_hook(lambda *_: during(run, pieces[0]))
    for batch in run.loader:
        pieces[0] = len(batch.sizes)
        run.step(batch)
    return [p.detach().clone() for p in run.model.parameters()]


@pytest.fixture
def want():
    """The parameters of the same run without a graph."""
    return trained(made(compile=False))


def assert_alike(found, want) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 8}], ids=str)
def test_gradients_are_lent(graphs, want, options):
    """Of one piece and of several, they are those of a run that lends nothing, to the bit; after the step they are gone."""

    def gradients(run):
        found, places = [], []

        def note(run, pieces) -> None:
            found.append([p.grad.clone() for p in run.model.parameters()])
            places.append((pieces > 1, all(graphs.has(p.grad) for p in run.model.parameters())))

        return trained(run, note), found, places

    other = made(**options)
    other.lending.allowed = False
    _, expected, places = gradients(other)
    assert not any(there for _, there in places)
    assert all(p.grad is not None for p in other.model.parameters())
    run = made(**options)
    end, found, places = gradients(run)
    assert_alike(end, want)
    assert places.count((True, True)) >= 1
    assert options or places.count((False, True)) >= 4
    assert sum(there for _, there in places) >= STEPS - 4  # those of the eager code are not
    for some, others in zip(found, expected, strict=True):
        assert all(map(torch.equal, some, others))
    assert all(p.grad is None for p in run.model.parameters())
    assert not graphs.old


KEPT = {
    "itself": lambda g: g,
    "detached": torch.Tensor.detach,
    "a part": lambda g: g.flatten()[1:],
    "as an array": lambda g: torch.from_numpy(g.detach().numpy()),
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("how", KEPT)
def test_who_keeps_a_gradient_keeps_its_numbers(how, several, graphs, want):
    run, kept = made(), []

    def keep(run, pieces) -> None:
        (p, *_) = run.model.parameters()
        if not kept and (pieces > 1) == several and graphs.has(p.grad):
            kept.append((KEPT[how](p.grad), KEPT[how](p.grad.clone())))

    assert_alike(trained(run, keep), want)
    ((mine, copy),) = kept
    assert torch.equal(mine, copy)
    assert not run.lending.allowed
    (old,) = graphs.old
    assert old() is not None  # as long as somebody has a part of its memory
    kept.clear()
    del mine
    gc.collect()
    assert old() is None


def test_a_step_of_the_optimizer_that_fails_leaves_no_gradient(graphs):
    run = made()
    failing = [False]

    def fail(run, pieces) -> None:
        if failing[0]:
            raise ZeroDivisionError

    run.optimizer.register_step_pre_hook(lambda *_: fail(run, 0))
    for k, batch in enumerate(run.loader):
        failing[0] = k == 6
        if failing[0]:
            with pytest.raises(ZeroDivisionError):
                run.step(batch)
            assert all(p.grad is None for p in run.model.parameters())
        else:
            run.step(batch)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_sums_that_share_their_memory_are_not_written_over():
    parameters = {name: nn.Parameter(torch.zeros(6)) for name in ("one", "other")}
    base = torch.zeros(80, dtype=torch.uint8)
    held, numbers = Held(None, base), base.view(torch.float32)  # type: ignore[arg-type]

    def over(one: Tensor, other: Tensor) -> bool:
        sums = {"one": lent_on_cpu(one, held), "other": lent_on_cpu(other, held)}
        return Lending().over(sums, parameters) is not None

    assert over(numbers[:6], numbers[6:12])
    assert over(numbers[8:14], numbers[14:20])
    assert not over(numbers[:6], numbers[:6])
    assert not over(numbers[:6], numbers[4:10])
    assert not over(numbers[:6], torch.zeros(6))  # elsewhere
    assert not over(numbers[:12].view(6, 2)[:, 0], numbers[12:18])
    assert not over(numbers[:3], numbers[6:12])
    assert not over(numbers[:12].view(torch.float64), numbers[12:18])


def test_what_is_no_graphs_is_not_lent():
    parameters = {name: nn.Parameter(torch.zeros(6)) for name in ("one", "other")}
    bases = [torch.zeros(96, dtype=torch.uint8) for _ in range(2)]
    one, other = (Held(None, base) for base in bases)  # type: ignore[arg-type]
    sums = {"one": lent_on_cpu(bases[0].view(torch.float32)[:6], one)}
    second = lent_on_cpu(bases[0].view(torch.float32)[6:12], one)
    lending = Lending()
    assert lending.over(sums | {"other": second}, parameters) is not None
    assert lending.over(sums | {"other": torch.zeros(6)}, parameters) is None
    assert lending.over(sums | {"other": lent_on_cpu(bases[1].view(torch.float32)[6:12], other)}, parameters) is None
    assert lending.over(sums, parameters) is None
    assert lending.over({}, parameters) is None
    lending.allowed = False
    assert lending.over(sums | {"other": second}, parameters) is None


def test_sums_of_several_pieces_need_room():
    sums = {"one": torch.zeros(200), "other": torch.zeros(3, 2)}
    block, lending = Block(), Lending()
    block.keep_free(1536, several=4)
    assert lending.beside(block, sums) is None  # there is no memory yet
    block.base = torch.zeros(4096, dtype=torch.uint8)
    found = lending.beside(block, sums)
    assert found is not None
    for name, t in found.items():
        t.fill_(float("nan"))
        assert t.shape == sums[name].shape
    assert not block.base[: 4096 - 1536].any()
    assert int(block.base.view(torch.float32).isnan().sum()) == 206
    assert block.is_in_use(5)
    assert not block.is_in_use(4)
    found.clear()
    del t
    assert not block.is_in_use(5)
    assert lending.beside(block, sums | {"third": torch.zeros(1)}) is None
    assert lending.beside(block, {"one": sums["one"].double()}) is None
    assert lending.beside(block, {"one": torch.zeros(4, 5).T}) is None


def test_a_step_in_doubt_is_answered_anew(graphs, want, monkeypatch):
    """The noise was written over the sums: they are computed again, by the eager code, from the same samples."""
    doubted = iter([False, False, True, False, False, True] + 20 * [False])
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


def test_an_audit_reads_gradients_after_the_step(graphs, monkeypatch):
    """They are those that the optimizer took."""
    read, taken = [], []
    seen = Scores.seen

    def noting(scores):
        read.append([p.grad.clone() for p in scores.run.model.parameters()])
        return seen(scores)

    monkeypatch.setattr(Scores, "seen", noting)
    run = made(noise_multiplier=20.0)
    run.optimizer.register_step_pre_hook(lambda *_: taken.append([p.grad.clone() for p in run.model.parameters()]))
    eachgrad.private.audit(run, canaries=16, seed=0)
    assert len(read) == len(taken) == STEPS
    for some, others in zip(read, taken, strict=True):
        assert all(map(torch.equal, some, others))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:TensorFloat32")
@pytest.mark.parametrize("kept", [False, True])
def test_gradients_are_lent_on_a_gpu(kept):
    """Of one piece and of several, in the one piece of memory that the graphs have; they are those of an eager run."""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean((1, 2))

    def run_of(**options):
        torch.manual_seed(0)
        widths = (256, 1024, 192, 2048, 256, 768, 512)
        layers = [layer for n, m in pairwise(widths) for layer in (nn.Linear(n, m), nn.GELU())]
        model = nn.Sequential(*layers).cuda()
        data = torch.utils.data.TensorDataset(torch.randn(128, 128, 256, device="cuda"))
        given = {"batch_size": 16, "steps": 60, "max_grad_norm": 1e-2, "noise_multiplier": 1e-3, "generator": fixed()}
        optimizer = torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
        return make(model, data, optimizer=optimizer, loss_fn=losses, **given | options)

    places, mine = [], []

    def note(run, pieces) -> None:
        base = run.engine.ask.memory.block.base if run.engine.ask else None
        there = base is not None and all(
            0 <= p.grad.data_ptr() - base.data_ptr() < base.nbytes for p in run.model.parameters()
        )
        places.append((pieces > 1, there))
        if kept and there and not mine:
            mine.extend((g, g.clone()) for g in (p.grad for p in run.model.parameters()))

    found, want = trained(run_of(compile=True), note), trained(run_of(compile=False))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * float(b.abs().max()))
    if kept:
        assert mine
        assert all(torch.equal(a, b) for a, b in mine)
    else:
        assert places.count((False, True)) >= 20
        assert places.count((True, True)) >= 2
