"""Hugging Face's Trainer with private steps: its loop, logs, schedules and checkpoints, our samples and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import get_last_checkpoint, unwrap_peft_model

from eachgrad.private import checkpoint
from eachgrad.private.errors import PrivacyError
from eachgrad.private.guest import Epochs, Meter, Privacy, Training, take_step
from eachgrad.private.run import Run
from eachgrad.private.sampling import to_device

__all__ = ["Privacy", "PrivateTrainer", "per_sample_losses"]

STATE = "private_run.pt"  # in every checkpoint
JOURNAL = "private_run"  # beside the checkpoints, and ".journal"


class PrivateTrainer(Trainer):
    """A Trainer whose steps are private; `per_device_train_batch_size` is the expected batch of a whole step.

    `loss_fn(model, inputs)` gives one loss for each sample, (B,). All other arguments are the Trainer's.
    """

    def __init__(self, *args: Any, privacy: Privacy, loss_fn: Any = None, **kwargs: Any):
        self.privacy, self.loss_fn = privacy, loss_fn
        self.run: Run | None = None  # of the last call of train
        self._folder: Path | None = None  # the checkpoint that train resumes from
        self._meter = Meter()
        super().__init__(*args, **kwargs)
        check_arguments(self)

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train as the Trainer does; `self.run` has the epsilon and the receipt."""
        check_arguments(self)
        folder = resume_from_checkpoint
        folder = get_last_checkpoint(str(self.args.output_dir)) if folder is True else folder
        self._folder = Path(folder) if folder else None
        if self._folder is not None and not self.args.ignore_data_skip:
            raise PrivacyError(
                "TrainingArguments(ignore_data_skip=False) skips batches in an order of the data, and samples are drawn "
                "without one: pass ignore_data_skip=True to resume"
            )
        return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)

    def get_train_dataloader(self) -> Any:
        """The run's Poisson batches; a run begins with each call of `train`."""
        if not self.is_in_train:
            raise PrivacyError(
                "the samples of a private step are drawn while train() runs: there is no loader outside it"
            )
        dataset, collate = self._data()
        model, loss_fn = self.model, self.loss_fn
        assert isinstance(model, nn.Module)
        if loss_fn is None:
            check_losses(model, dataset, collate)
            loss_fn = _losses_of(model)
        training = Training(
            model, self.create_optimizer(), dataset, loss_fn, self.args.per_device_train_batch_size,
            self._steps(dataset), collate, self.args.dataloader_num_workers,
        )  # fmt: skip
        state = None if self._folder is None else _state_in(self._folder)
        self.run = training.run(self._privacy(model), self.run, self._journal(), state)
        return Epochs(self.run)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list, None]:
        """The next batch; nothing is counted over its samples, since a loss is a sample's own."""
        drawn = next(epoch_iterator, None)
        return ([] if drawn is None else [drawn]), None

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Set the noisy gradients; the Trainer takes the optimizer's step."""
        if self.run is not None and model is not self.run.model:
            raise PrivacyError(f"the model is wrapped in {type(model).__name__}: train in one process, on one device")
        model.train()
        optimizer: Any = self.optimizer
        if hasattr(optimizer, "train"):  # those without a schedule have two modes
            optimizer.train()
        return take_step(self.run, inputs)

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: the number of samples that a step has drawn is not for the logs."""
        return 0

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log epsilon beside the training loss, as often as it is cheap, and at the end."""
        if self.run is not None and ("loss" in logs or "train_loss" in logs):
            logs |= self._meter.read(self.run)
        super().log(logs, start_time)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, and with it what the run has spent."""
        super().save_model(output_dir, _internal_call)
        if self.run is not None:
            checkpoint.save(Path(output_dir or str(self.args.output_dir)) / STATE, self.run.state_dict())

    def _data(self) -> tuple[Any, Any]:
        """The training data and its collate function, less the columns that the model does not take."""
        dataset, collate = self.train_dataset, self.data_collator
        if dataset is None:
            raise ValueError("train_dataset is missing: pass the samples to train on")
        if hasattr(dataset, "remove_columns"):  # of the datasets package
            return self._remove_unused_columns(dataset, "training"), collate  # pyright: ignore[reportArgumentType]
        return dataset, self._get_collator_with_removed_columns(collate, "training")

    def _privacy(self, model: nn.Module) -> Privacy:
        """The guarantee, with steps that are not compiled where a checkpoint is run again in the backward."""
        if not (self.args.gradient_checkpointing or getattr(model, "is_gradient_checkpointing", False)):
            return self.privacy
        if self.privacy.compile:
            raise PrivacyError(
                "Privacy(compile=True) and gradient checkpointing: a forward that is run again in the backward is not "
                "compiled; leave one of them out"
            )
        return replace(self.privacy, compile=False)

    def _steps(self, dataset: Any) -> int:
        """As many steps as the Trainer will want."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * -(-len(dataset) // self.args.per_device_train_batch_size))

    def _journal(self) -> Path | None:
        if self._folder is not None:
            return self._folder.parent / JOURNAL
        return Path(str(self.args.output_dir)) / JOURNAL if self.args.save_strategy != "no" else None


def per_sample_losses(model: nn.Module, inputs: Any) -> Tensor:
    """(B,) losses, each what the model's own loss is for a batch of that sample alone: a mean over its positions."""
    return _losses_of(model)(model, inputs)


def _losses_of(model: nn.Module) -> Callable[[nn.Module, Any], Tensor]:
    """`per_sample_losses` for one model, whose kind is looked up here and not in what is compiled."""
    shifted = _kind(model) == "ForCausalLM"

    def losses(model: nn.Module, inputs: Any) -> Tensor:
        labels = inputs["labels"]
        logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits.float()
        if shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        each = F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none", ignore_index=-100)
        counted = (labels != -100).reshape(len(labels), -1).sum(1)
        return each.reshape(len(labels), -1).sum(1) / counted.clamp(min=1)

    return losses


def check_losses(model: nn.Module, dataset: Any, collate: Any) -> None:
    """Raise unless `per_sample_losses` is the model's own loss, on the first sample that has one."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        own, ours = _first_loss(model, dataset, collate)
    finally:
        for module, mode in modes:
            module.training = mode
    if not math.isclose(own, ours, rel_tol=1e-2, abs_tol=1e-3):
        raise PrivacyError(
            f"the loss of {type(unwrap_peft_model(model)).__name__} for one sample is {own:.4g}, and its cross-entropy is "
            f"{ours:.4g}: pass loss_fn(model, inputs), with one loss for each sample, (B,)"
        )


@torch.no_grad()
def _first_loss(model: nn.Module, dataset: Any, collate: Any) -> tuple[float, float]:
    """The loss of one sample, by the model itself and by `per_sample_losses`."""
    device = next(model.parameters()).device
    for k in range(len(dataset)):
        one = to_device(collate([dataset[k]]), device)
        ours = float(per_sample_losses(model, one))
        own = float(model(**one).loss)
        if math.isfinite(own):
            return own, ours
    raise PrivacyError("no sample of train_dataset has a finite loss: see whether there are labels other than -100")


def _kind(model: nn.Module) -> str:
    """The kind of loss, of those that are a cross-entropy for each sample; others are refused."""
    base: Any = unwrap_peft_model(model)
    if isinstance(base, PreTrainedModel) and not base.config.is_encoder_decoder:
        # Transformers itself takes a model without a kind for a language model; check_losses finds those that are not.
        kind = base.loss_type or "ForCausalLM"
        if kind in ("ForCausalLM", "ForMaskedLM", "ForTokenClassification"):
            return kind
        config: Any = base.config
        several = config.num_labels > 1 and config.problem_type in (None, "single_label_classification")
        if kind.endswith("Classification") and several:
            return kind
    raise PrivacyError(
        f"{type(base).__name__} returns one loss for a batch, and what each sample's own is, is not known here: pass "
        "loss_fn(model, inputs), with one loss for each sample, (B,)"
    )


def check_arguments(trainer: Trainer) -> None:
    """Raise for whatever of the Trainer would break the guarantee, or change the gradients once more."""
    args = trainer.args
    for name, wanted, why in _FIXED:
        value = getattr(args, name)
        if value not in wanted:
            raise PrivacyError(f"TrainingArguments({name}={value!r}) {why}")
    devices = max(args.n_gpu, args.world_size, trainer.accelerator.num_processes)
    if devices > 1:
        raise PrivacyError(
            f"{devices} devices are in use, and the accounting is for one: train in one process, with one device visible"
        )
    if trainer.compute_loss_func is not None or type(trainer).compute_loss is not Trainer.compute_loss:
        raise PrivacyError(
            "compute_loss and compute_loss_func give one loss for a batch, and each sample needs its own: pass "
            "loss_fn(model, inputs), with one loss for each sample, (B,)"
        )


_ONE_PROCESS = "spreads the training over processes, and the accounting is for one: leave it out"
# Argument, values that may stay, and what is wrong with others.
_FIXED: tuple[tuple[str, tuple, str], ...] = (
    (
        "gradient_accumulation_steps", (1,),
        "takes several batches for one step, each with its own noise: per_device_train_batch_size is the expected batch "
        "of a whole step, and Privacy(max_physical_batch=...) bounds what is computed at a time",
    ),
    (
        "max_grad_norm", (0,),
        "scales down the sum, noise and all: pass max_grad_norm=0 here; Privacy(max_grad_norm=...) bounds each sample's "
        "gradient",
    ),
    ("fp16", (False,), "divides the gradients by a scale that they do not have: use bf16=True"),
    (
        "label_smoothing_factor", (0,),
        "takes the mean over the batch: smooth in loss_fn(model, inputs), with one loss for each sample, (B,)",
    ),
    ("torch_compile", (False,), "compiles the model alone: pass Privacy(compile=True), which compiles the whole step"),
    (
        "auto_find_batch_size", (False,),
        "begins anew with another batch size after steps were taken: pass Privacy(max_physical_batch=...)",
    ),
    ("train_sampling_strategy", ("random",), "draws samples in a way that the accounting is not for: leave it out"),
    ("include_num_input_tokens_seen", ("no",), "logs a count of the samples' tokens without noise: leave it out"),
    ("deepspeed", (None,), _ONE_PROCESS),
    ("fsdp", (None, "", []), _ONE_PROCESS),
)  # fmt: skip


def _state_in(folder: Path) -> dict[str, Any]:
    path = folder / STATE
    if not path.exists():
        raise PrivacyError(
            f"{folder} has no {STATE}: it is no whole checkpoint of a private run, and what it has spent is unknown. Resume "
            "from another one"
        )
    return checkpoint.load(path)
