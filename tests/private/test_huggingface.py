"""PrivateTrainer: the same parameters as a loop of run.step, compiled too, and resuming."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from private_runs import fixed
from private_trainers import N, T, arguments, llama, privacy, texts, trainer
from torch import Tensor, nn
from transformers import TrainerCallback

import eachgrad
from eachgrad.private import PrivacyError, make_private
from eachgrad.private.huggingface import Privacy, PrivateTrainer, per_sample_losses


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("more", [{}, {"max_physical_batch": 4}], ids=["whole", "pieces"])
def test_the_trainer_takes_the_steps_of_a_plain_loop(tmp_path, lora, more):
    used = trainer(tmp_path, llama(lora), privacy(generator=fixed(), **more))
    output = used.train()
    assert output.global_step == used.run.spent == 8

    model = llama(lora)
    before = values(model)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    run = make_private(
        model, sgd, texts(), loss_fn=per_sample_losses, batch_size=6, steps=8, noise_multiplier=1.0, target_delta=1e-3,
        max_grad_norm=0.5, generator=fixed(), accountant="rdp", progress=False, **more,
    )  # fmt: skip
    losses = []
    for batch in run.loader:
        losses.append(run.step(batch).loss)

    for name, p in model.named_parameters():
        torch.testing.assert_close(used.model.get_parameter(name), p, rtol=1e-6, atol=1e-7)
        assert torch.equal(p, before[name]) != p.requires_grad
    assert used.run.epsilon() == run.epsilon()
    assert output.training_loss == pytest.approx(sum(losses) / 8, rel=1e-5)
    first, *_, last = used.state.log_history
    assert first["epsilon"] < last["epsilon"] == output.metrics["epsilon"] == run.epsilon()


@pytest.fixture
def _quick_compiler(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(eachgrad, "compile", partial(eachgrad.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_quick_compiler")
@pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning")
@pytest.mark.parametrize("more", [{}, {"bf16": True}], ids=["float32", "bf16"])
@pytest.mark.parametrize("lora", [True, False])
def test_compiled_and_eager_steps_are_the_same(tmp_path, lora, more):
    eager, compiled = (
        trainer(tmp_path, llama(lora), privacy(generator=fixed(), compile=way), **more) for way in (False, True)
    )
    for used in (eager, compiled):
        used.train()
    ask = compiled.run.engine.ask
    assert ask.reasons() == []
    assert [bool(graph.step) for graph in ask.graphs] == [True]
    for name, p in eager.model.named_parameters():
        torch.testing.assert_close(compiled.model.get_parameter(name), p, rtol=1e-5, atol=1e-6)
        assert torch.equal(p, llama(lora).get_parameter(name)) != p.requires_grad


@pytest.mark.parametrize("enable", [True, False], ids=["by the model", "by the arguments"])
@pytest.mark.parametrize("lora", [True, False])
def test_checkpoints_inside_the_model_are_not_compiled(tmp_path, lora, enable):
    model = llama(lora)
    if enable:
        model.gradient_checkpointing_enable()
    more: dict[str, Any] = {"max_steps": 1} if enable else {"max_steps": 1, "gradient_checkpointing": True}
    with pytest.raises(
        PrivacyError, match=r"Privacy\(compile=True\) and gradient checkpointing.*leave one of them out"
    ):
        trainer(tmp_path, model, privacy(compile=True), **more).train()
    used = trainer(tmp_path, model, privacy(), **more)
    used.train()
    assert used.run.spent == 1
    assert used.run.engine.pieces is None


def test_samples_are_drawn_one_by_one_and_nobody_at_times(tmp_path):
    used = trainer(tmp_path, per_device_train_batch_size=1, max_steps=60, logging_steps=1)
    sizes = []

    class Sizes(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            sizes.append(used.run.last.samples)

    used.add_callback(Sizes)
    used.train()
    # Each is Binomial(24, 1/24): one of these fails by chance less than once in a million runs.
    assert used.run.spent == len(sizes) == 60
    assert sizes.count(0) >= 1
    assert max(sizes) >= 2
    assert 15 <= sum(sizes) <= 110
    assert all(entry["loss"] == entry["loss"] for entry in used.state.log_history if "loss" in entry)


def test_epochs_a_target_bf16_and_adam(tmp_path):
    model = llama()
    used = PrivateTrainer(
        model=model, args=arguments(tmp_path, max_steps=-1, num_train_epochs=1.5, bf16=True, gradient_checkpointing=True),
        train_dataset=texts(), privacy=Privacy(target_delta=1e-3, target_epsilon=3.0),
    )  # fmt: skip
    before = values(model)
    assert used.train().global_step == used.run.settings.steps == 6
    assert 2.95 < used.run.epsilon() <= 3.0
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}


def test_a_second_call_counts_the_first(tmp_path):
    used = trainer(tmp_path)
    used.train()
    once = used.run.epsilon()
    used.train()
    assert sum(some.steps for some in used.run.history) == 16
    assert used.run.epsilon() > 1.2 * once


def test_a_module_with_losses_of_its_own(tmp_path):
    class Line(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(T, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

    x = torch.randn(N, T, generator=fixed())
    rows = [{"x": row, "y": row.sum()} for row in x]
    used = trainer(
        tmp_path, Line(), privacy(noise_multiplier=0.0), train_dataset=rows, max_steps=60, remove_unused_columns=False,
        loss_fn=lambda model, inputs: (model(inputs["x"])[:, 0] - inputs["y"]).square(),
    )  # fmt: skip
    used.train()
    assert used.run.last.loss < 0.5  # 8 for a line of zeros
    assert used.run.epsilon() == float("inf")

    mean = trainer(
        tmp_path, Line(), train_dataset=rows, remove_unused_columns=False,
        loss_fn=lambda model, inputs: (model(inputs["x"])[:, 0] - inputs["y"]).square().mean(),
    )  # fmt: skip
    with pytest.raises(PrivacyError, match="one loss for each sample"):
        mean.train()


class Crash(TrainerCallback):
    """The process dies, as far as a test can die, after so many steps."""

    def __init__(self, after: int):
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            raise KeyboardInterrupt


def crashed(folder: Path) -> PrivateTrainer:
    """A trainer that was to take 12 steps, saved after 4 and crashed after 6."""
    used = trainer(folder, callbacks=[Crash(6)], max_steps=12, save_strategy="steps", save_steps=4)
    with pytest.raises(KeyboardInterrupt):
        used.train()
    assert used.run.spent == 6
    used.run.close()  # as the end of a process does
    return used


def test_a_resumed_run_counts_the_steps_that_were_lost(tmp_path):
    first = crashed(tmp_path)
    saved = torch.load(tmp_path / "checkpoint-4" / "private_run.pt", weights_only=True)
    later = trainer(tmp_path, max_steps=12, save_strategy="steps", save_steps=4, ignore_data_skip=True)
    output = later.train(resume_from_checkpoint=True)
    receipt = later.run.receipt()
    # 4 steps of the checkpoint, 2 lost, and the 6 that are left.
    assert (later.run.spent, receipt.lost, output.global_step) == (12, 2, 10)
    assert later.run.epsilon() > first.run.epsilon()
    assert receipt.samples > saved["totals"]["samples"]
    assert later.run.id == first.run.id


def test_resuming_in_the_same_process(tmp_path):
    used = crashed(tmp_path)
    used.args.ignore_data_skip = True
    used.pop_callback(Crash)
    used.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert (used.run.spent, used.run.lost) == (12, 2)


def test_what_cannot_be_resumed(tmp_path):
    crashed(tmp_path)
    again: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 4}
    with pytest.raises(PrivacyError, match="is of another run, which has counted 6 steps"):
        trainer(tmp_path, **again).train()
    with pytest.raises(PrivacyError, match="pass ignore_data_skip=True"):
        trainer(tmp_path, **again).train(resume_from_checkpoint=True)
    other = trainer(tmp_path, **(again | {"ignore_data_skip": True}))
    (tmp_path / "private_run.journal").rename(tmp_path / "away")
    with pytest.raises(PrivacyError, match=r"private_run\.journal is not there: steps taken after it was saved"):
        other.train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-4" / "private_run.pt").unlink()
    with pytest.raises(PrivacyError, match=r"checkpoint-4 has no private_run\.pt"):
        other.train(resume_from_checkpoint=True)


def test_the_package_alone_imports_no_trainer():
    code = "import sys, eachgrad.private; print(sorted({'transformers', 'lightning', 'peft'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
