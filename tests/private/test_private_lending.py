"""Gradients in the memory of graphs: there while the optimizer takes its step, and nobody else's numbers afterwards."""

from __future__ import annotations

import gc
import io
from functools import partial
from itertools import pairwise

import pytest
import torch
from private_runs import fixed, losses_of, make, table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import eachgrad
from eachgrad.block import Block
from eachgrad.private import noise
from eachgrad.private.audit_canaries import Scores
from eachgrad.private.gathering import Engine
from eachgrad.private.guest import Epochs, Privacy, Training, take_step
from eachgrad.private.lending import Lending
from eachgrad.receipt import call_loss
from eachgrad.replay import Held, lent

STEPS = 24


class Graphs:
    """Stands in for CUDA graphs: sums lie at the front of the block, and whatever else a graph may write to is spoilt."""

    def __init__(self, monkeypatch):
        self.block: Block | None = None
        self.old: list[StorageWeakRef] = []
        compiled = Engine._compiled

        def answered(engine, ask, args, filled):
            answer, losses = compiled(engine, ask, args, filled)
            self.block = engine.ask.memory.block
            answer.grad = self.lent(answer.grad, len(losses))
            return answer, losses

        def release(ask):
            assert self.block is not None
            assert self.block.base is not None
            self.old.append(StorageWeakRef(self.block.base.untyped_storage()))
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


def made(model=None, **options):
    torch.manual_seed(0)
    given = {"steps": STEPS, "compile": True, "batch_size": 12, "max_physical_batch": 14, "generator": fixed()}
    return make(model or nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)), **given | options)


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
    other.lending.stop()
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
    assert not run.engine.lends
    (old,) = graphs.old
    assert not old.expired()  # as long as somebody has a part of its memory
    kept.clear()
    del mine
    gc.collect()
    assert old.expired()


def test_a_step_of_the_optimizer_that_fails_leaves_its_gradient(graphs):
    """With its numbers, whatever comes later."""
    run, kept, failing = made(), [], [False]

    def fail(*_) -> None:
        if failing[0]:
            raise ZeroDivisionError

    run.optimizer.register_step_pre_hook(fail)
    for k, batch in enumerate(run.loader):
        failing[0] = k == 6
        if failing[0]:
            with pytest.raises(ZeroDivisionError):
                run.step(batch)
            kept = [(p.grad, p.grad.clone()) for p in run.model.parameters()]
        else:
            run.step(batch)
    assert all(torch.equal(*pair) for pair in kept)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_fused_optimizer_is_lent_to(graphs, want):
    """It changes parameters without a new version of theirs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    run, places = made(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=True)), []
    found = trained(run, lambda run, pieces: places.append(all(graphs.has(p.grad) for p in model.parameters())))
    assert_alike(found, want)
    assert sum(places) >= STEPS - 4
    assert all(p.grad is None for p in model.parameters())


class Later(torch.optim.SGD):
    """Takes its step when somebody else says so."""

    def step(self, closure=None):
        pass

    def take(self) -> None:
        super().step()


def test_an_optimizer_that_steps_later_has_its_gradients(graphs, want):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = Later(model.parameters(), lr=0.1)
    run = made(model=model, optimizer=optimizer)
    for batch in run.loader:
        run.step(batch)
        optimizer.take()
    assert_alike([p.detach() for p in model.parameters()], want)
    assert not graphs.old


@pytest.mark.parametrize("several", [False, True])
def test_a_gradient_that_is_saved_holds_nothing_else(several, graphs):
    """Beside it lie activations and sums without noise."""
    sizes = []

    def save(run, pieces) -> None:
        if (pieces > 1) == several and all(graphs.has(p.grad) for p in run.model.parameters()):
            for p in run.model.parameters():
                assert p.grad.untyped_storage().nbytes() == p.grad.nbytes
                p.grad.detach_()  # as older optimizers do: it is no view
                found, alone = io.BytesIO(), io.BytesIO()
                torch.save(p.grad, found)
                torch.save(p.grad.clone(), alone)
                sizes.append((len(found.getvalue()), len(alone.getvalue())))

    trained(made(), save)
    assert sizes
    assert all(found == alone for found, alone in sizes)


def test_sums_make_way_when_memory_runs_out(graphs, want, monkeypatch):
    """At the second piece the eager code finds none, with the block there; once it is gone it does."""
    answer, failed = Engine.answer, []

    def answered(engine, *given):
        block = graphs.block
        if block is not None and block._room is not None and not block._room.expired() and len(failed) < 2:
            failed.append(block.base.nbytes)
            raise torch.OutOfMemoryError
        return answer(engine, *given)

    monkeypatch.setattr(Engine, "answer", answered)
    assert_alike(trained(made()), want)
    assert len(failed) == len(graphs.old) == 2
    assert all(old.expired() for old in graphs.old)


def test_a_trainer_takes_its_step_later(graphs):
    """The optimizer that a trainer's run has does nothing: the gradients stay for the trainer's own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(model, optimizer, table(), losses_of, 12, STEPS, None, 0)
    run = training.run(
        Privacy(noise_multiplier=1.0, target_delta=1e-3, max_grad_norm=1.0, compile=True), None, None, None
    )
    for batch in Epochs(run):
        take_step(run, batch)
        assert all(p.grad is not None for p in model.parameters())
    assert graphs.block is not None
    assert graphs.block.beside == 0
    assert not run.engine.lends


def lending(**parameters: Tensor) -> Lending:
    engine = Engine(nn.Linear(1, 1), None, None, "zero", {})  # type: ignore[arg-type]
    return Lending(engine, {name: nn.Parameter(t) for name, t in parameters.items()})


def test_sums_that_share_their_memory_are_not_written_over():
    base = torch.zeros(80, dtype=torch.uint8)
    held, numbers = Held(None, base), base.view(torch.float32)  # type: ignore[arg-type]

    def over(one: Tensor, other: Tensor) -> bool:
        sums = {"one": lent_on_cpu(one, held), "other": lent_on_cpu(other, held)}
        return lending(one=torch.zeros(6), other=torch.zeros(6)).over(sums) is not None

    assert over(numbers[:6], numbers[6:12])
    assert over(numbers[8:14], numbers[14:20])
    assert not over(numbers[:6], numbers[:6])
    assert not over(numbers[:6], numbers[4:10])
    assert not over(numbers[:6], torch.zeros(6))  # elsewhere
    assert not over(numbers[:12].view(6, 2)[:, 0], numbers[12:18])
    assert not over(numbers[:3], numbers[6:12])
    assert not over(numbers[:12].view(torch.float64), numbers[12:18])


def test_what_is_no_graphs_is_not_lent():
    bases = [torch.zeros(96, dtype=torch.uint8) for _ in range(2)]
    one, other = (Held(None, base) for base in bases)  # type: ignore[arg-type]
    sums = {"one": lent_on_cpu(bases[0].view(torch.float32)[:6], one)}
    second = lent_on_cpu(bases[0].view(torch.float32)[6:12], one)
    found = lending(one=torch.zeros(6), other=torch.zeros(6))
    assert found.over(sums | {"other": second}) is not None
    assert found.over(sums | {"other": torch.zeros(6)}) is None
    assert found.over(sums | {"other": lent_on_cpu(bases[1].view(torch.float32)[6:12], other)}) is None
    assert found.over(sums) is None
    assert found.over({}) is None
    found.stop()
    assert found.over(sums | {"other": second}) is None


def test_sums_of_several_pieces_need_room():
    sums = {"one": torch.zeros(200), "other": torch.zeros(3, 2)}
    block, lent = Block(), lending()
    block.keep_free(1536, several=4)
    assert lent.beside(block, sums) is None  # there is no memory yet
    block.base = torch.zeros(4096, dtype=torch.uint8)
    found = lent.beside(block, sums)
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
    assert lent.beside(block, sums | {"third": torch.zeros(1)}) is None
    assert lent.beside(block, {"one": sums["one"].double()}) is None
    assert lent.beside(block, {"one": torch.zeros(4, 5).T}) is None
    block.several = 0  # graphs of one size each use all of it
    assert lent.beside(block, sums) is None


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
