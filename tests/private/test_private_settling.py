"""A piece that is alone gets its noise before it is known to be right: if it is not, nothing of it is left."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from private_runs import clipped_sum, fixed, make, parameters_of, table
from torch import nn
from torch.utils.data import TensorDataset

import eachgrad
from eachgrad import CaptureError
from eachgrad.private import PrivacyError, checkpoint, stepping
from eachgrad.private.checkpoint import Journal
from eachgrad.private.gathering import Engine
from oracle import assert_same

SIZE = 12
BAD = 7  # the sample that is NaN


@pytest.fixture(autouse=True)
def _graphs_without_kernels(monkeypatch):
    monkeypatch.setattr(eachgrad, "compile", partial(eachgrad.compile, backend="aot_eager"))


def spoilt() -> TensorDataset:
    x, y = (t.clone() for t in table().tensors)
    x[BAD] = float("nan")
    return TensorDataset(x, y)


def network() -> nn.Module:
    """Whose gradients neither batch nor rounding turns around: the runs are compared over many steps."""
    model = nn.Linear(5, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel()).view(p.shape) / 10)
    return model


def shuffled(**options):
    """Batches of SIZE samples, each one piece; every fifth has the one that is NaN."""
    given = {"dataset": spoilt(), "batch_size": SIZE, "sampling": "shuffled", "steps": 30, "generator": fixed()}
    return make(network(), **given | options)


def poisson(**options):
    """Pieces of at most five samples, most often several of them; no sample is NaN."""
    return make(network(), **{"max_physical_batch": 5, "steps": 30, "generator": fixed()} | options)


def gradients(run) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in run.model.named_parameters()}


def has_none(run) -> bool:
    return all(p.grad is None for p in run.model.parameters())


class Calls(list):
    """The names of what was called, in order."""

    def note(self, monkeypatch, owner, name: str, label: str) -> Calls:
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            self.append(label)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)
        return self


def distrust(monkeypatch) -> None:
    """Every compiled answer that is not waited for is in doubt from now on."""
    doubted = Engine.doubted
    monkeypatch.setattr(Engine, "doubted", lambda self: doubted(self) or self.ask is not None)


@pytest.mark.parametrize("clipping", ["flat", "adaptive", "per_group", "normalised"])
def test_a_step_in_doubt_is_that_of_the_eager_engine(clipping, tmp_path, monkeypatch):
    """Gradient, noise included, bound, counts and journal, step by step; the noise is drawn twice in those in doubt."""
    calls = Calls().note(monkeypatch, Engine, "again", "again").note(monkeypatch, stepping, "noisy_gradients", "noise")
    eager = shuffled(clipping=clipping)
    found = shuffled(clipping=clipping, compile=True, checkpoint=tmp_path / "run.pt")
    doubts = 0
    for ours, theirs in zip(found.loader, eager.loader, strict=True):
        assert len(ours.sizes) == 1
        want = eager.step(theirs)
        calls.clear()
        got = found.step(ours)
        assert calls in (["noise"], ["noise", "again", "noise"])
        doubts += "again" in calls
        assert_same(gradients(found), gradients(eager), 1e-4)
        assert (got.samples, got.nonfinite, got.clipped) == (want.samples, want.nonfinite, want.clipped)
        assert got.loss == pytest.approx(want.loss, rel=1e-4, nan_ok=True)
        assert found.last is got
        assert found.rule.bounds == pytest.approx(eager.rule.bounds, rel=1e-5)
        assert found.totals() == eager.totals()
        assert found.spent == eager.spent == checkpoint.read_journal(tmp_path / "run.pt.journal")[1]
        assert not found.engine.ask.doubted()
    assert found.totals()["nonfinite"] == 6
    assert 2 <= doubts <= 6  # where the samples lie was measured, the answer was eager anyway
    assert_same(parameters_of(found), parameters_of(eager), 1e-4)


@pytest.mark.parametrize("source", ["fixed", "of the system"])
def test_what_was_in_doubt_is_dropped_before_it_is_answered_again_and_has_other_noise(source, monkeypatch):
    run = shuffled(compile=True, dataset=table(), generator=fixed() if source == "fixed" else None)
    noisy, again = stepping.noisy_gradients, Engine.again
    drawn, copies, gone = [], [], []

    def kept(*args):
        found = noisy(*args)
        drawn.append([weakref.ref(value) for value in found.values()])
        copies.append({name: value.clone() for name, value in found.items()})
        return found

    def watched(self, *args):
        gc.collect()
        gone.append(all(ref() is None for ref in drawn[-1]))
        assert has_none(run)
        return again(self, *args)

    batches = iter(run.loader)
    run.step(next(batches))  # eager
    monkeypatch.setattr(stepping, "noisy_gradients", kept)
    monkeypatch.setattr(Engine, "again", watched)
    distrust(monkeypatch)
    for _ in range(4):
        drawn.clear(), copies.clear()
        before = parameters_of(run)
        run.step(next(batches))
        first, second = copies
        assert all(p.grad is ref() for p, ref in zip(run.parameters.values(), drawn[1], strict=True))
        assert_same(gradients(run), second, 0.0)
        same = all(torch.equal(first[name], second[name]) for name in first)
        assert same == (source == "fixed")
        assert_same(parameters_of(run), {name: p - 0.1 * second[name] for name, p in before.items()}, 1e-6)
    assert gone == [True] * 4
    assert run.spent == 5


def order(run, steps: int, monkeypatch) -> list[list[str]]:
    """What happens in each of some steps, after those that are needed to compile."""
    batches = iter(run.loader)
    for _ in range(6):
        run.step(next(batches))
    calls = Calls()
    for owner, name, label in [
        (Engine, "answer", "answer"), (Engine, "doubted", "wait"), (Journal, "add", "journal"), (run, "count", "count"),
        (stepping, "noisy_gradients", "noise"), (run.optimizer, "step", "step"),
    ]:  # fmt: skip
        calls.note(monkeypatch, owner, name, label)
    found = []
    for _ in range(steps):
        run.step(next(batches))
        found.append([*calls])
        calls.clear()
    return found


def test_one_piece_is_counted_and_has_its_noise_before_the_device_is_waited_for(tmp_path, monkeypatch):
    run = shuffled(dataset=table(), compile=True, checkpoint=tmp_path / "run.pt")
    for calls in order(run, 6, monkeypatch):
        assert calls == ["answer", "journal", "count", "noise", "wait", "step"]


def test_of_several_pieces_the_last_is_counted_before_and_has_its_noise_after(tmp_path, monkeypatch):
    run = poisson(compile=True, checkpoint=tmp_path / "run.pt")
    seen = set()
    for calls in order(run, 8, monkeypatch):
        pieces = calls.count("answer")
        seen.add(pieces)
        if pieces > 1:
            between = ["wait", "answer"] * (pieces - 1)
            assert calls == ["answer", *between, "journal", "count", "wait", "noise", "step"]
    assert max(seen) > 1


class Stopped(BaseException):
    """As an interrupt is none of Exception's."""


def stops(error: type[BaseException], at: int):
    """Fails at the call of this number, counted from 1; before, every answer is in doubt."""
    calls = []

    def stop(*args):
        calls.append(args)
        if len(calls) == at:
            raise error
        return True

    return stop


@pytest.mark.parametrize("kind", ["one piece", "the first of several", "the last of several"])
@pytest.mark.parametrize("error", [Stopped, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["wait", "again"])
def test_what_fails_before_the_answer_is_known_leaves_no_gradient(kind, error, where, tmp_path, monkeypatch):
    """Where noise was due it is counted, nothing of it is in the run's figures, and the next step is right."""
    options = {"compile": True, "noise_multiplier": 0.0, "checkpoint": tmp_path / "run.pt"}
    run = shuffled(dataset=table(), **options) if kind == "one piece" else poisson(**options)
    for batch in run.loader.take(6):
        run.step(batch)
    before, last, totals, state = parameters_of(run), run.last, run.totals(), run.generators["root"].clone()
    batches = iter(run.loader)
    batch = next(batches)
    assert (len(batch.sizes) == 1) == (kind == "one piece")
    with monkeypatch.context() as patched:
        fails = stops(error, len(batch.sizes) if kind == "the last of several" else 1)
        if where == "again":
            distrust(patched)
            again = Engine.again
            patched.setattr(Engine, "again", lambda *args: fails() and again(*args))
        else:
            patched.setattr(Engine, "doubted", fails)
        with pytest.raises(error):
            run.step(batch)
    assert has_none(run)
    run.optimizer.step()
    assert_same(parameters_of(run), before, 0.0)
    counted = checkpoint.read_journal(tmp_path / "run.pt.journal")[1]
    assert run.spent == counted == (6 if kind == "the first of several" else 7)
    assert (run.last, run.totals(), batch.state) == (last, totals, "begun")
    assert torch.equal(run.generators["root"], state)
    with pytest.raises(PrivacyError, match="was drawn and not used"):
        next(batches)
    batch = next(iter(run.loader))
    index = [i for piece in batch._pieces for i in piece]
    want = clipped_sum(run.model, *(t[index] for t in table().tensors), 1.0)
    assert run.step(batch).samples == len(index) > 0
    assert_same(gradients(run), {name: value / SIZE for name, value in want.items()}, 1e-5)
    assert run.spent == counted + 1
    assert not run.engine.ask.doubted()


def test_an_error_for_samples_that_are_not_finite_comes_after_the_count_and_leaves_no_gradient():
    run = shuffled(compile=True, nonfinite="raise")
    eager = failed = 0
    for _ in range(25):
        batch = next(iter(run.loader))
        spent, before = run.spent, parameters_of(run)
        if BAD not in batch._pieces[0]:
            run.step(batch)
            assert not has_none(run)
            continue
        with pytest.raises(CaptureError, match="NaN or infinite"):
            run.step(batch)
        failed += 1
        eager += run.spent == spent  # it was measured where the samples lie: no noise was due yet
        assert run.spent - spent in (0, 1)
        assert has_none(run)
        run.optimizer.step()
        assert_same(parameters_of(run), before, 0.0)
        assert not run.engine.ask.doubted()
    assert failed > eager
    assert run.spent == 25 - eager


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = network()
        self.register_buffer("kept", torch.zeros(2))

    def forward(self, x):
        return self.fc(x)


@pytest.mark.parametrize("options", [{"sampling": "shuffled"}, {"max_physical_batch": 5}], ids=["one", "several"])
def test_what_the_last_eager_answer_writes_into_a_buffer_is_refused(options, monkeypatch):
    run = make(Keeps(), compile=True, generator=fixed(), **options)
    batches = iter(run.loader)
    run.step(next(batches))
    batch, answers, again = next(batches), [], Engine.again

    def writes(self, *args):
        answers.append(again(self, *args))
        if len(answers) == len(batch.sizes):
            self.model.kept.add_(1.0)
        return answers[-1]

    distrust(monkeypatch)
    monkeypatch.setattr(Engine, "again", writes)
    with pytest.raises(PrivacyError, match="the forward changed the buffer 'kept'"):
        run.step(batch)
    assert len(answers) == len(batch.sizes)
    assert has_none(run)
    assert run.spent == 2
