"""The audit: canaries meet the run's own clipping and noise, honest runs are cleared, broken ones are caught."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from private_runs import fixed, losses_of, make, train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import eachgrad
from eachgrad.compiled import Compiled
from eachgrad.private import Adaptive, PerGroup, PrivacyError, Run, clipping, make_private, stepping
from eachgrad.private.audit import Audit, audit
from eachgrad.private.audit_canaries import Scores, places, planted


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """The models' first parameters and dropout."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


WIDTH = 250


def wide(seed: int, **options: Any) -> Run:
    """Ten steps of 20 of 400 samples, epsilon about 2.1 at delta 3e-6, on a model with room for 50,000 canaries."""
    x = torch.randn(400, WIDTH, generator=fixed(seed))
    model = nn.Sequential(nn.Linear(WIDTH, 400), nn.Tanh(), nn.Linear(400, 2))
    given: dict[str, Any] = {
        "loss_fn": losses_of, "batch_size": 20, "steps": 10, "noise_multiplier": 0.95, "target_delta": 3e-6,
        "generator": fixed(seed), "progress": False,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return make_private(model, optimizer, TensorDataset(x, (x.sum(1) > 0).long()), **given | options)


def scale_noise(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Runs from now on add noise of another size than they say."""
    noisy = stepping.noisy_gradients

    def scaled(parameters, sums, unit, deviation, divisor, source, own):
        return noisy(parameters, sums, unit, deviation * factor, divisor, source, own)

    monkeypatch.setattr(stepping, "noisy_gradients", scaled)


def stop_clipping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs from now on add samples up as they are."""
    ask = clipping.Rule.queries

    def asked(self, nonfinite):
        return ask(self, nonfinite) | {"grad": eachgrad.clipped_sum(1e9, nonfinite=nonfinite, wide=True)}

    monkeypatch.setattr(clipping.Rule, "queries", asked)


# The claim is 2.15. Of 20 honest runs none had a bound above 1.1, and of 20 with half of the noise none had one below 2.6.
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_honest_run_is_not_accused(seed):
    found = audit(wide(seed), canaries=50_000, seed=seed)
    assert not found.violated
    assert found.epsilon < 1.5 < 2.1 < found.claimed < 2.2
    assert found.p_value > 0.5


@pytest.mark.parametrize(
    ("factor", "seed", "least"),
    [(0.0, 0, 6.0), (1 / 20, 0, 6.0), (0.5, 0, 2.5), (0.5, 1, 2.5), (0.5, 2, 2.5)],
    ids=["none", "divided by the batch size", "half", "half again", "half once more"],
)
def test_noise_that_is_left_out_or_too_small_is_caught(factor, seed, least, monkeypatch):
    scale_noise(monkeypatch, factor)
    found = audit(wide(seed), canaries=50_000, seed=seed)
    assert found.violated
    assert found.epsilon > least > found.claimed
    assert found.p_value < 0.05


def test_clipping_that_is_left_out_is_caught(monkeypatch):
    stop_clipping(monkeypatch)
    found = audit(wide(0), canaries=50_000, seed=0)
    assert found.violated
    assert found.epsilon > 6.0 > found.claimed


def small(model: nn.Module, x: Tensor, **options: Any) -> Run:
    """Five steps of 20 of 200 samples, with an epsilon of 1.4 at delta 1e-5 unless told otherwise."""
    given: dict[str, Any] = {
        "loss_fn": losses_of, "batch_size": 20, "steps": 5, "noise_multiplier": 1.3, "target_delta": 1e-5,
        "generator": fixed(), "progress": False,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    y = torch.randint(2, (len(x),), generator=fixed())
    return make_private(model, optimizer, TensorDataset(x, y), **given | options)


def mlp(dtype: torch.dtype = torch.float32, **options: Any) -> Run:
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Dropout(0.5), nn.Linear(60, 15)).to(dtype)
    return small(model, torch.randn(200, 20, generator=fixed()).to(dtype), **options)


def cnn() -> Run:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(32, 2))
    return small(model, torch.randn(200, 1, 6, 6, generator=fixed()))


class Words(nn.Module):
    """Ids (B, T), a table that is used twice, and a parameter with no dimensions."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(80, 16)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * F.linear(self.table(ids).mean(1), self.table.weight)


def words() -> Run:
    return small(Words(), torch.randint(80, (200, 7), generator=fixed()))


def dictionaries() -> Run:
    """Samples that are dicts, from a list, in batches of another form than tensors."""
    model = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 15))
    x = torch.randn(200, 20, generator=fixed())
    rows: Any = [{"x": row, "y": k % 2} for k, row in enumerate(x)]
    return make_private(
        model, torch.optim.Adam(model.parameters()), rows, loss_fn=lambda model, b: losses_of(model(b["x"]), b["y"]),
        batch_size=20, steps=5, noise_multiplier=1.3, target_delta=1e-5, generator=fixed(), progress=False,
    )  # fmt: skip


GROUPS = PerGroup({"first": ["0.*"], "rest": ["3.*"]}, {"first": 0.6, "rest": 0.8})
RUNS_OF_ALL_KINDS = {
    "dropout": mlp,
    "convolutions": cnn,
    "words, tied": words,
    "dicts, Adam": dictionaries,
    "bfloat16": lambda: mlp(torch.bfloat16),
    "small pieces": lambda: mlp(max_physical_batch=7),
    "compiled": lambda: mlp(compile=True),
    "every sample": lambda: mlp(batch_size=200, steps=2, noise_multiplier=4.0),
    "per group": lambda: mlp(clipping=GROUPS),
    "normalised": lambda: mlp(clipping="normalised"),
    "adaptive": lambda: mlp(clipping=Adaptive(max_norm=0.3)),
}


@pytest.fixture
def _graphs_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eachgrad, "compile", partial(eachgrad.compile, backend="aot_eager"))


def drawn_of(run: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which the canaries of every piece are added as it is drawn."""
    found, collate = [], run.loader.samples.batch

    def batch(samples, size=None):
        found.extend(slot for _, slot in samples if slot >= 0)
        return collate(samples, size)

    monkeypatch.setattr(run.loader.samples, "batch", batch)
    return found


@pytest.mark.parametrize("kind", RUNS_OF_ALL_KINDS)
@pytest.mark.usefixtures("_graphs_without_kernels")
def test_a_canary_adds_the_clipping_bound_where_it_lives_and_nothing_else(kind, monkeypatch):
    """Without noise, what is left of the gradient after the other samples is 1 for canaries that were drawn, else 0."""
    scale_noise(monkeypatch, 0.0)
    run, count = RUNS_OF_ALL_KINDS[kind](), 600
    engine, scores = run.engine, Scores(run, places(run, count, random.Random(0)), count)
    total, known = 0, 0.0
    with planted(run, scores, range(0, count, 3), 100 * run.rule.sensitivity):
        drawn = drawn_of(run, monkeypatch)
        for batch in run.loader:
            scores.begin()
            run.step(batch)
            want = torch.zeros(count, dtype=torch.float64)
            want[drawn] = 1.0
            for part, one in zip(scores.seen(), scores.where, strict=True):
                torch.testing.assert_close(part / one.share, want, rtol=0, atol=1e-2 if kind == "bfloat16" else 1e-3)
            total += len(drawn)
            drawn.clear()
            known = max([known, *(float(k.abs().max()) / scores.bound for k in scores.known)])
        if kind == "compiled":
            assert engine.ask.graphs
            assert not engine.ask.reasons()
    assert len(scores.where) == (2 if kind == "per group" else 1)
    assert known > 0.05  # the others were in the way, and were taken off
    rate, steps = run.settings.batch_size / run.settings.n, run.settings.steps
    mean = 200 * rate * steps
    assert abs(total - mean) <= 4 * math.sqrt(mean * (1 - rate))  # a chance of 1e-4


@pytest.mark.parametrize("kind", RUNS_OF_ALL_KINDS)
@pytest.mark.usefixtures("_graphs_without_kernels")
def test_every_kind_of_run_is_cleared_when_honest_and_caught_without_noise(kind, monkeypatch):
    honest = audit(RUNS_OF_ALL_KINDS[kind](), canaries=600, seed=1)
    assert not honest.violated
    scale_noise(monkeypatch, 0.0)
    broken = audit(RUNS_OF_ALL_KINDS[kind](), canaries=600, seed=1)
    assert broken.violated
    assert broken.claimed == honest.claimed > 0.5


def test_noise_that_one_parameter_does_not_get_is_caught(monkeypatch):
    """Canaries live in every parameter; 915 of 2,175 numbers here have no noise."""
    noisy = stepping.noisy_gradients

    def without(parameters, sums, unit, deviation, divisor, source, own):
        found = {}
        for name, p in parameters.items():
            found |= noisy({name: p}, sums, unit, 0.0 if name.startswith("3.") else deviation, divisor, source)
        return found

    monkeypatch.setattr(stepping, "noisy_gradients", without)
    assert audit(mlp(), seed=0).violated


def test_the_run_goes_on_without_canaries(monkeypatch):
    run = mlp()
    samples, engine = run.loader.samples, run.engine
    found = audit(run, canaries=600, steps=2, seed=0)
    assert (found.steps, run.spent) == (2, 2)
    assert found.claimed == run.epsilon()
    assert (run.loader.samples, run.engine, engine.loss_fn) == (samples, engine, losses_of)
    assert "answer" not in vars(engine)
    assert run.loader.sampler.n == 200
    train(run)
    assert run.last.samples < 45  # 20 are expected, and with canaries 50: a chance of 1e-6

    run = mlp()
    monkeypatch.setattr(run.optimizer, "step", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        audit(run, canaries=600, seed=0)
    assert run.loader.sampler.n == 200
    assert run.engine.loss_fn is losses_of


def test_a_seed_fixes_the_audit_and_without_one_the_operating_system_draws(monkeypatch):
    def found(**options: Any) -> Audit:
        torch.manual_seed(0)
        return audit(mlp(), canaries=600, **options)

    assert found(seed=3) == found(seed=3) != found(seed=4)
    monkeypatch.setattr(random, "SystemRandom", lambda: random.Random(3))
    assert found() == found(seed=3)


def test_the_default_is_as_many_canaries_as_there_is_room_for():
    assert audit(mlp(), seed=0).canaries == (20 * 60 + 60 + 60 * 15 + 15) // 2
    assert audit(wide(0), seed=0, steps=1).canaries == 20_000


def test_an_audit_prints_what_it_has_shown():
    found = Audit(0.512, 1.4, 1e-5, 0.95, 0.8, 600, 100, 61, 5)
    assert str(found) == (
        "epsilon is at least 0.512 at delta 1e-05, with 95% confidence; claimed: 1.4\n"
        "61 of 100 guesses were right, of 600 canaries in 5 steps; the claim allows that with a probability of 0.8 at most\n"
        "nothing was found against the claim, which does not prove it"
    )
    broken = Audit(3.0, 1.4, 1e-5, 0.95, 1e-9, 600, 100, 99, 5)
    assert broken.violated
    assert "the run gives away more than it claims" in str(broken)


REFUSED = {
    "no run": (lambda: nn.Linear(2, 2), {}, TypeError, "what make_private returns, not Linear"),
    "no loss_fn": (lambda: mlp(loss_fn=None), {}, PrivacyError, "this run has no loss_fn"),
    "begun": (lambda: train(mlp(), 2), {}, PrivacyError, "has 2 steps behind it"),
    "history": (lambda: mlp(history=train(mlp(), 1).history), {}, PrivacyError, "has 1 steps behind it"),
    "shuffled": (lambda: mlp(sampling="shuffled"), {}, PrivacyError, "shuffled batches"),
    "no noise": (lambda: mlp(noise_multiplier=0.0), {}, PrivacyError, "claims nothing, epsilon is inf"),
    "no canaries": (mlp, {"canaries": 0}, ValueError, "canaries is a positive integer, not 0"),
    "too many canaries": (mlp, {"canaries": 2000}, ValueError, "have 2175 numbers.*Pass 1087 at most"),
    "no room": (make, {}, ValueError, "17 canaries show an epsilon of"),
    "too many steps": (mlp, {"steps": 6}, ValueError, "steps=6, and the run has 5"),
    "no steps": (mlp, {"steps": 0}, ValueError, "steps is a positive integer, not 0"),
    "delta 0": (mlp, {"delta": 0.0}, ValueError, "delta is a number between 0 and 1, not 0.0"),
    "delta 1": (mlp, {"delta": 1.0}, ValueError, "delta is a number between 0 and 1, not 1.0"),
    "confidence": (mlp, {"confidence": 95}, ValueError, "confidence is a number from 0.5 to below 1, such as 0.95, not 95"),
    "norm": (mlp, {"canary_norm": 0.5}, ValueError, "canary_norm is a finite number of clipping bounds"),
    "large epsilon": (lambda: mlp(noise_multiplier=0.3), {"canaries": 600}, ValueError, "600 canaries show an epsilon of"),
    "large delta": (mlp, {"delta": 0.1}, ValueError, "2 canaries delta = 2.2e.02 is not far below 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_by_name(name):
    made, options, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        audit(made(), **options)


def test_a_run_with_a_checkpoint_is_refused(tmp_path):
    run = mlp(checkpoint=tmp_path / "run.pt")
    with pytest.raises(PrivacyError, match=r"is saved to .*run\.pt"):
        audit(run, seed=0)
    run.close()


@pytest.mark.usefixtures("_graphs_without_kernels")
def test_no_answer_is_trusted_while_canaries_are_scored(monkeypatch):
    """The scores take an answer for right as soon as it is there."""
    trusted = []
    monkeypatch.setattr(Compiled, "trusting", lambda self, *batch: trusted.append(self) or self(*batch))
    run = mlp(compile=True)
    audit(run, canaries=600, seed=1)
    assert not trusted
    assert run.engine.trusts


@pytest.mark.usefixtures("_graphs_without_kernels")
def test_a_graph_that_a_failed_step_has_left_is_not_audited(monkeypatch):
    """It would have the loss without the canaries, and nothing would be found."""

    def loss(model, *args):
        return losses_of(model(args[0]), args[1])

    run = mlp(compile=True, loss_fn=loss)
    answer = run.engine.answer

    def interrupted(*args):
        answer(*args)
        raise KeyboardInterrupt

    run.engine.answer = interrupted
    with pytest.raises(KeyboardInterrupt):
        run.step(next(iter(run.loader)))
    del run.engine.answer
    assert run.engine.ask is not None
    assert not run.spent
    scale_noise(monkeypatch, 0.0)
    assert audit(run, canaries=600, seed=1).violated
