"""Lightning with private steps: its Trainer, loggers, schedules and checkpoints, our samples and gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn

from eachgrad.private.errors import PrivacyError
from eachgrad.private.guest import Deferred, Drawn, Epochs, Meter, Privacy, Training, take_step
from eachgrad.private.run import Run

__all__ = ["Privacy", "PrivateModule", "TrainingSet"]

STATE = "eachgrad_private_run"  # in every checkpoint
JOURNAL = "private_run"  # in the trainer's log folder, and ".journal"


@dataclass(frozen=True)
class TrainingSet:
    """The samples to train on, and how many of them a step draws on average."""

    dataset: Any
    batch_size: int
    collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0


class PrivateModule(LightningModule):
    """A LightningModule whose steps are private: define these three and `configure_optimizers`, and no training_step."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.run: Run | None = None  # of the last fit
        self._saved: dict[str, Any] | None = None  # what the checkpoint that fit resumes from has of the run
        self._meter = Meter()

    def losses(self, *batch: Any) -> Tensor:
        """One loss for each sample, (B,); the arguments are the parts of a batch, a dict being one."""
        raise NotImplementedError(f"{type(self).__name__} needs losses(self, *batch), with one loss for each sample")

    def training_set(self) -> TrainingSet:
        """The samples to train on; called when fit begins."""
        raise NotImplementedError(f"{type(self).__name__} needs training_set(self), with the samples to train on")

    def configure_privacy(self) -> Privacy:
        """The guarantee; called when fit begins."""
        raise NotImplementedError(f"{type(self).__name__} needs configure_privacy(self), with the guarantee")

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name in ("training_step", "train_dataloader", "backward", "optimizer_zero_grad"):
            if getattr(cls, name) is not getattr(PrivateModule, name):
                raise TypeError(
                    f"{cls.__name__}.{name} takes the place of the one that makes a step private: leave it out, define "
                    "losses and training_set, and name PrivateModule before other base classes"
                )

    def train_dataloader(self) -> Epochs:
        """The run's Poisson batches; a run begins with each fit."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        last = self.run
        if last is None or not isinstance(last.optimizer, Deferred) or last.optimizer.optimizer is not optimizer:
            self.run = self._begin(optimizer, last)
        assert self.run is not None
        return Epochs(self.run)

    def _begin(self, optimizer: torch.optim.Optimizer, last: Run | None) -> Run:
        trainer, data = self.trainer, self.training_set()
        check_trainer(trainer)
        saved, self._saved = self._saved, None
        if trainer.ckpt_path and saved is None:
            raise PrivacyError(f"{trainer.ckpt_path} has no private run in it: what its training has spent is unknown")
        training = Training(
            self, optimizer, data.dataset, _losses, data.batch_size, planned_steps(trainer, data), data.collate_fn,
            data.num_workers,
        )  # fmt: skip
        if saved is None:
            return training.run(self.configure_privacy(), last, _journal(trainer), None)
        return training.run(self.configure_privacy(), last, saved["journal"] and Path(saved["journal"]), saved["run"])

    def training_step(self, batch: Drawn, batch_idx: int) -> Tensor:
        """Set the noisy gradients, which the trainer's optimizer step takes; comes back with the mean loss."""
        check_trainer(self.trainer)
        loss = take_step(self.run, batch)
        assert self.run is not None
        assert self.run.last is not None
        if samples := self.run.last.samples:
            self.log("train_loss", loss, prog_bar=True, batch_size=1)
            self.log("clipped", self.run.last.clipped_sum / samples, prog_bar=True, batch_size=1)
        if self.trainer.is_last_batch or not self.run.remaining:
            self.log_dict(self._meter.read(self.run), prog_bar=True, batch_size=1)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Nothing: the gradients are there."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        """Nothing: the gradients of this step are there, and they replaced the last ones."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save what the run has spent with the checkpoint."""
        if self.run is not None:
            journal = None if self.run.path is None else str(self.run.path)
            checkpoint[STATE] = {"run": self.run.state_dict(), "journal": journal}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep what the run has spent until fit begins."""
        self._saved = checkpoint.get(STATE)


def _losses(model: nn.Module, *batch: Any) -> Tensor:
    assert isinstance(model, PrivateModule)
    return model.losses(*batch)


def planned_steps(trainer: Trainer, data: TrainingSet) -> int:
    """The most steps that fit will take."""
    epoch = -(-len(data.dataset) // data.batch_size)
    limit = trainer.limit_train_batches
    epoch = min(epoch, limit) if isinstance(limit, int) else int(epoch * (1.0 if limit is None else limit))
    epochs = trainer.max_epochs
    planned = [trainer.max_steps, epochs * epoch if epochs is not None else -1]
    steps = min((steps for steps in planned if steps >= 0), default=0)
    if not steps:
        raise PrivacyError("the noise is for a number of steps: pass max_epochs or max_steps to the Trainer")
    return steps


def check_trainer(trainer: Trainer) -> None:
    """Raise for whatever of the Trainer would break the guarantee, or change the gradients once more."""
    if trainer.world_size > 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise PrivacyError(
            f"Trainer(strategy={type(trainer.strategy).__name__}), {trainer.world_size} devices: the accounting is for one "
            "process; pass devices=1"
        )
    if trainer.accumulate_grad_batches != 1:
        raise PrivacyError(
            f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) takes several batches for one step, each "
            "with its own noise: make batch_size larger; Privacy(max_physical_batch=...) bounds what is computed at a time"
        )
    if trainer.gradient_clip_val:
        raise PrivacyError(
            f"Trainer(gradient_clip_val={trainer.gradient_clip_val}) scales down the sum, noise and all: leave it out; "
            "Privacy(max_grad_norm=...) bounds each sample's gradient"
        )
    if trainer.precision == "16-mixed":
        raise PrivacyError(
            'Trainer(precision="16-mixed") divides the gradients by a scale that they do not have: use "bf16-mixed"'
        )


def _journal(trainer: Trainer) -> Path | None:
    """Where the steps are noted, if there are checkpoints to resume from."""
    if not trainer.checkpoint_callbacks:
        return None
    folder = Path(trainer.log_dir or trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / JOURNAL
