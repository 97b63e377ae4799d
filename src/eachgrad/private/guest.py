"""A run inside somebody else's trainer: the trainer owns the loop, the optimizer's step and the checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

from eachgrad.private import checks
from eachgrad.private.accounting import Spent
from eachgrad.private.checkpoint import journal_of
from eachgrad.private.clipping import Clipping
from eachgrad.private.errors import PrivacyError
from eachgrad.private.loading import Batch
from eachgrad.private.make import make_private
from eachgrad.private.run import Run


@dataclass(frozen=True)
class Privacy:
    """What of `make_private` a trainer does not say itself; the fields are its arguments."""

    target_delta: float
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None  # of each sample's gradient
    clipping: str | Clipping = "flat"
    accountant: str = "pld"
    max_physical_batch: int | None = None
    nonfinite: str = "zero"
    compile: bool | None = None
    secure: bool = False
    generator: Generator | None = None
    history: Sequence[Spent] | None = None
    memory: int | str | None = None
    fallback: str = "refuse"

    def options(self) -> dict[str, Any]:
        """The fields by name, for make_private."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True)
class Training:
    """What of `make_private` the trainer says."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    loss_fn: Callable[..., Tensor]
    batch_size: int
    steps: int
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0

    def run(self, privacy: Privacy, last: Run | None, journal: Path | None, state: dict[str, Any] | None) -> Run:
        """A run whose optimizer the trainer steps: after the run `last`, or from the state in a checkpoint of the trainer.

        `journal` is the file that its steps are noted in, less the ending; without it there is nothing to resume from.
        """
        if state is not None and (journal is None or not journal_of(journal).exists()):
            found = "it was saved without one" if journal is None else f"{journal_of(journal)} is not there"
            raise PrivacyError(
                f"the checkpoint needs the journal of its run, and {found}: steps taken after it was saved "
                "would go uncounted. Bring the journal to where it was"
            )
        checks.check_closure(self.optimizer)
        options = privacy.options()
        if last is not None:
            _check_same(last, state)
            last.close()
            # The same data once more: what the last run has spent counts, by its history or by the journal.
            options["history"] = last.history if state is None else privacy.history or ()
        run = make_private(
            self.model, Deferred(self.optimizer), self.dataset, loss_fn=self.loss_fn, batch_size=self.batch_size,
            steps=self.steps, collate_fn=self.collate_fn, num_workers=self.num_workers, progress=False,
            checkpoint=journal, resume=state is not None, **options,
        )  # fmt: skip
        run.lending.stop()  # the optimizer takes the gradients when the run's step is over
        if state is not None:
            _take_up(run, state)
        return run


def _check_same(last: Run, state: dict[str, Any] | None) -> None:
    if state is not None and last.spent and last.id != state["run"]:
        raise PrivacyError(
            f"this trainer has taken {last.spent} private steps, and the checkpoint is of another run, which would forget "
            "them: resume it with a trainer of its own"
        )


def _take_up(run: Run, state: dict[str, Any]) -> None:
    """Bring a run that has read its journal to the state in a checkpoint; the steps since are counted, and lost."""
    run.load_state_dict(state)
    run.lost = run.spent - sum(steps for _, _, steps, _ in state["history"]) + state["lost"]
    run.set_totals(state["totals"])


class Deferred(torch.optim.Optimizer):
    """The optimizer as a run sees it: `step` does nothing, since the trainer steps it once the gradients are there."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer  # an Optimizer's own __init__ would make groups of its own

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        """Leave it to the trainer."""

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class Drawn:
    """A batch of a run on its way through the trainer, which would look into anything it can iterate over."""

    def __init__(self, batch: Batch):
        self.batch = batch


class Epochs:
    """The run's batches as a trainer wants them: each iteration is one epoch, of n / batch_size steps."""

    def __init__(self, run: Run):
        self.run, self.dataset = run, run.loader.samples.dataset

    def __len__(self) -> int:
        return -(-self.run.settings.n // self.run.settings.batch_size)

    def __iter__(self) -> Iterator[Drawn]:
        return map(Drawn, self.run.loader.epoch())

    def state_dict(self) -> dict[str, Any]:
        """Nothing: Poisson draws have no place to go on from, and the run is saved by itself."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


def take_step(run: Run | None, batch: Any) -> Tensor:
    """Set the noisy gradients for a batch of `Epochs`; comes back with the mean loss, NaN if no sample was drawn."""
    if run is None or not isinstance(batch, Drawn):
        raise PrivacyError(
            f"a step was to be taken with a {type(batch).__name__} that the run has not drawn: the accounting is for Poisson "
            "sampling by the run's own loader. Give the trainer the data set, and no loader or sampler"
        )
    result = run.step(batch.batch)
    loss = result.loss_sum if result.samples else torch.tensor(torch.nan)
    return loss.detach().to(run.device) / max(1, result.samples)


class Meter:
    """Epsilon for a trainer's logs, now and then: the accountant may take a second, and gets 2% of the time."""

    def __init__(self) -> None:
        self._next = 0.0

    def read(self, run: Run) -> dict[str, float]:
        """{"epsilon": value}, or nothing if it is too early; always the value once all steps are taken."""
        start = time.monotonic()
        if start < self._next and run.remaining:
            return {}
        found = {"epsilon": run.epsilon()}
        now = time.monotonic()
        self._next = now + 50 * (now - start)
        return found
