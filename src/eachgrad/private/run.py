"""Run: a private training run, step by step, with what it has spent."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eachgrad import Tape
from eachgrad.private import accounting, checks, resuming, stepping
from eachgrad.private.accounting import History, Spent
from eachgrad.private.checkpoint import Journal
from eachgrad.private.clipping import Rule
from eachgrad.private.errors import BudgetSpent, PrivacyError
from eachgrad.private.gathering import Engine, Gathered, StepResult, check_count
from eachgrad.private.lending import Lending
from eachgrad.private.loading import Batch, Loader
from eachgrad.private.noise import Source
from eachgrad.private.receipt import Receipt, receipt_of
from eachgrad.private.sampling import Samples, to_device
from eachgrad.private.sizes import Pieces
from eachgrad.private.stepping import Open
from eachgrad.private.watching import Buffers, Watch

# What each model has spent in this process: a second run must not forget it.
SPENT: weakref.WeakKeyDictionary[nn.Module, History] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Settings:
    """The numbers that a guarantee is for."""

    n: int
    batch_size: int  # expected: samples are drawn with probability batch_size / n
    steps: int
    noise_multiplier: float
    target_delta: float
    sampling: str
    accountant: str

    def spent(self, steps: int) -> Spent:
        per_step = self.batch_size / self.n
        if self.sampling == "shuffled":
            per_step = 1 / -(-self.n // self.batch_size)  # the last batch of a pass may be smaller
        return Spent(per_step, self.noise_multiplier, steps, self.sampling)


class Run:
    """A private training run; made by `make_private`."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, settings: Settings, engine: Engine,
        source: Source, sampler: Any, samples: Samples, pieces: Pieces, before: History, progress: bool | None,
    ):  # fmt: skip
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.settings, self.engine, self.source = settings, engine, source
        self.parameters = checks.trainable(model)
        self.loader = Loader(self, sampler, samples, pieces, progress)
        self.before, self.own = before, ()
        self._known = SPENT.get(model)  # what was known of the model when this run was made, or has counted last
        self.lost, self.taken = 0, 0  # steps that a crash has lost; steps that this very object has taken
        self.id = self.token = uuid.uuid4().hex  # of the run, over several processes; of this object
        self.last: StepResult | None = None
        self.path: Path | None = None
        self.journal: Journal | None = None
        self.generators: Any = sampler.source.state()  # of the sampling, as of the last batch that was used
        self._open: Open | None = None
        self._watch = Watch(model, self.parameters)
        self.lending = Lending(engine, self.parameters)
        self.set_totals({"samples": 0, "clipped": 0, "nonfinite": 0})

    @property
    def rule(self) -> Rule:
        """How samples are clipped now."""
        return self.engine.rule

    @property
    def history(self) -> History:
        """Every step counted so far, those before this run included."""
        return self.before + self.own

    @property
    def spent(self) -> int:
        """The steps of this run that are counted, those lost in a crash included."""
        return sum(some.steps for some in self.own)

    @property
    def remaining(self) -> int:
        """The steps that are left."""
        return max(0, self.settings.steps - self.spent)

    def epsilon(self, delta: float | None = None) -> float:
        """What has been spent so far, at `target_delta` or another delta."""
        delta = self.settings.target_delta if delta is None else delta
        return accounting.epsilon(self.history, delta, self.settings.accountant)

    def receipt(self) -> Receipt:
        """What was done so far."""
        return receipt_of(self)

    def step(self, batch: Batch) -> StepResult:
        """One step of the optimizer with a batch of `run.loader`: clip, sum, add noise, divide by batch_size, step.

        Gradients in the memory of a CUDA graph are there until the optimizer has taken its step; then `p.grad` is None.
        """
        step = self._begin(batch)
        asked = stepping.ask(self, step)
        self.loader.sampler.prepare()  # for the next step, while the device is at this one
        step.buffers.check()
        self._count_step()
        gradients, result = stepping.outcome(self, step, asked)
        with self.lending.taken():
            self._finish(step, gradients, result)
            del gradients, asked
            step.gathered.sums = {}
            self.optimizer.step()
        return result

    def record(self) -> Tape:
        """The context for the forward of one physical batch by hand; `run.backward(losses)` follows it."""
        step = self._waiting("record")
        step.buffers, step.tape = Buffers(self.model), self.engine.record()
        return step.tape

    def backward(self, losses: Tensor) -> None:
        """Add the clipped gradients of one physical batch; with the last one, set `p.grad` with the noise in it.

        `losses` has one number for each sample of the piece, from inside `run.record()`.
        """
        step = self._waiting("backward")
        if step.tape is None:
            raise PrivacyError("run.backward without run.record: compute the losses inside `with run.record():`")
        assert step.waiting is not None
        check_count(losses, step.waiting)
        self._check_alone()  # another run's steps change the parameters, too
        step.buffers.check()
        answer = self.engine.answer_by(step.tape, losses)
        step.buffers.check()  # a backward can write, too
        step.gathered.add(answer, losses, step.waiting, last=step.pieces + 1 == len(step.batch.sizes))
        step.waiting, step.tape, step.pieces = None, None, step.pieces + 1
        if step.pieces == len(step.batch.sizes):
            self._finish_by_hand(step)

    def pieces(self, batch: Batch) -> Iterator[Any]:
        """The physical batches of a logical one, on the model's device, each to be used before the next."""
        step = self._begin(batch)
        for samples, size in zip(batch.samples(), batch.sizes, strict=True):
            step.waiting = size
            yield to_device(self.loader.samples.batch(samples), self.device)
            if step.waiting is not None:
                raise PrivacyError(
                    f"a piece of {size} samples had no run.backward: every sample that is drawn takes part in the step"
                )
        if not batch.sizes:
            self._finish_by_hand(step)

    def state_dict(self) -> dict[str, Any]:
        """What the run has spent and where it stands, as tensors and plain values; not the model or the optimizer."""
        return resuming.state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state; what either has spent stays spent."""
        resuming.check(self, state)
        self._check_alone()
        if self.spent and self.id != state["run"]:
            raise PrivacyError(
                f"this run has counted {self.spent} steps, which another run's state would forget: load it into a new run"
            )
        resuming.restore(self, state)

    def save(self, path: str | Path | None = None) -> None:
        """Write model, optimizer, scheduler and run to one file, whole or not at all.

        From then on a journal beside it has every step before it is taken, so that a killed run is not under-counted.
        """
        resuming.save(self, path)

    def load(self, path: str | Path | None = None, journal: bool = True) -> None:
        """Go on from a saved file, steps after it counted as the journal beside it has them.

        `journal=False` says that no step was taken after the file was saved, if the journal is not there.
        """
        resuming.load(self, path, journal)

    def close(self) -> None:
        """Let go of the journal, so that another run may load the file."""
        if self.journal is not None:
            self.journal.close()

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def totals(self) -> dict[str, int]:
        """The samples drawn, clipped and left out so far."""
        clipped, nonfinite = self._counts.tolist()
        return {"samples": self._samples, "clipped": clipped, "nonfinite": nonfinite}

    def set_totals(self, totals: dict[str, int]) -> None:
        self._samples, self._counts = totals["samples"], torch.tensor([totals["clipped"], totals["nonfinite"]])

    def begin_pass(self) -> None:
        """A pass over shuffled data begins anew, and is counted for itself; Poisson sampling has none."""
        self.loader.sampler.restart()
        if self.settings.sampling == "shuffled" and self.own and self.own[-1].steps:
            self.own = (*self.own, self.settings.spent(0))

    def count(self, steps: int) -> None:
        """Count steps as spent."""
        self.own = accounting.add(self.own, self.settings.spent(steps))
        SPENT[self.model] = self._known = self.history

    def _begin(self, batch: Any) -> Open:
        if not isinstance(batch, Batch) or not batch.is_of(self.loader):
            raise PrivacyError(
                "this is no batch of the loop over run.loader that is running: the accounting is for samples that run.loader "
                "draws. Take the batches from `for batch in run.loader`"
            )
        if batch.state != "drawn":
            raise PrivacyError("this batch has been used: the accounting is for one step with each batch that is drawn")
        if not self.remaining:
            raise BudgetSpent(
                f"all {self.settings.steps} steps are spent, epsilon {self.epsilon():.4g} at delta "
                f"{self.settings.target_delta:g}: stop here, or plan more steps with make_private(..., history=run.history)"
            )
        if self._open is not None and self._open.buffers.found:
            raise PrivacyError(
                "the forward of an earlier step has changed the model, which may still hold what it wrote of the samples: "
                "make the model anew, or load what it was before, and call make_private again, with history=run.history"
            )
        tree = self._watch.check(self.optimizer)
        for p in tree.parameters:  # frozen ones, too: what an ordinary backward left there has no noise
            p.grad = None  # so that a step of the optimizer before the noise is there does nothing
        self.lending.end()  # if the last step was interrupted
        batch.state = "begun"
        self._open = step = Open(batch, Gathered(self.rule), Buffers(self.model, tree))
        return step

    def _waiting(self, what: str) -> Open:
        step = self._open
        if step is None or step.waiting is None or not step.batch.is_of(self.loader):
            raise PrivacyError(
                f"run.{what}: no piece of a batch waits for it. It goes once with each piece: `for piece in batch` for a "
                "batch of run.loader"
            )
        return step

    def _check_alone(self) -> None:
        """Raise if another run has counted steps of this model since this one was made, or has counted its last."""
        if SPENT.get(self.model) is not self._known:
            raise PrivacyError(
                "another private run of this model has counted steps that this one does not know of: go on with that one, or "
                "call make_private again, with its run.history, or with history=() if it is on other data"
            )

    def _count_step(self) -> None:
        self._check_alone()
        if self.journal is not None:
            self.journal.add(self.spent + 1)
        self.count(1)  # before the noise is drawn: a step that fails from here on is counted
        self.taken += 1

    def _finish_by_hand(self, step: Open) -> None:
        self._count_step()
        self._finish(step, stepping.noisy(self, step), step.gathered.result())

    def _finish(self, step: Open, gradients: dict[str, Tensor], result: StepResult) -> None:
        for name, p in self.parameters.items():
            p.grad = gradients[name]
        self.last = result
        if self.rule.adaptive is not None:
            self._adapt(result, self.settings.noise_multiplier)
        if result.samples:
            self._counts = self._counts.to(result.counts.device) + result.counts
        self._samples += result.samples
        self.generators = step.batch.generators
        step.batch.state, self._open = "done", None

    def _adapt(self, result: StepResult, noise: float) -> None:
        adaptive = self.rule.adaptive
        assert adaptive is not None
        below = result.samples / 2 - float(result.clipped_sum) - result.nonfinite
        spread = adaptive.count_noise if noise else 0.0
        assert spread is not None
        drawn = self.source.normal(torch.zeros((), dtype=torch.float64), spread)
        self.rule.learn(below + float(drawn), self.settings.batch_size)
