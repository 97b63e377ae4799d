"""PrivateTrainer: the same parameters as a loop of run.step, the losses of the model itself, what is refused, resuming."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from private_runs import fixed
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from eachgrad.private import PrivacyError, make_private
from eachgrad.private.huggingface import Privacy, PrivateTrainer, check_losses, per_sample_losses

VOCABULARY, T, N = 20, 8, 24
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=T,
)  # fmt: skip
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": T, "num_labels": 3,
}  # fmt: skip


def texts(n: int = N) -> list[dict[str, Tensor]]:
    """Sequences that count upwards, with some labels left out."""
    found = []
    for k in range(n):
        ids = (torch.arange(T) + k) % VOCABULARY
        found.append({"input_ids": ids, "labels": torch.where(torch.arange(T) < k % 4, -100, ids)})
    return found


def llama(lora: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA)
    if not lora:
        return model
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given: dict[str, Any] = {
        "per_device_train_batch_size": 6, "max_steps": 8, "max_grad_norm": 0, "save_strategy": "no", "report_to": "none",
        "lr_scheduler_type": "constant", "disable_tqdm": True, "use_cpu": True, "logging_steps": 2,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **(given | more))


def privacy(**more: Any) -> Privacy:
    given: dict[str, Any] = {
        "target_delta": 1e-3, "noise_multiplier": 1.0, "max_grad_norm": 0.5, "accountant": "rdp",
    }  # fmt: skip
    return Privacy(**(given | more))


def trainer(
    folder: Path, model: nn.Module | None = None, guarantee: Privacy | None = None, **more: Any
) -> PrivateTrainer:
    """A trainer with plain SGD; arguments that are not a Trainer's own go to TrainingArguments."""
    model = llama() if model is None else model
    own = {
        name: more.pop(name) for name in ("loss_fn", "callbacks", "train_dataset", "compute_loss_func") if name in more
    }
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return PrivateTrainer(
        model=model, args=arguments(folder, **more), optimizers=(sgd, None), privacy=guarantee or privacy(),
        **({"train_dataset": texts()} | own),
    )  # fmt: skip


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


def own_models() -> dict[str, tuple[nn.Module, bool]]:
    torch.manual_seed(0)
    gpt2 = GPT2Config(vocab_size=VOCABULARY, n_positions=T, n_embd=8, n_layer=1, n_head=2)
    return {
        "Llama": (LlamaForCausalLM(LLAMA), False),
        "Llama with LoRA": (llama(), False),
        "GPT-2": (GPT2LMHeadModel(gpt2), False),
        "BERT, masked": (BertForMaskedLM(BertConfig(**BERT)), False),
        "BERT, tokens": (BertForTokenClassification(BertConfig(**BERT)), False),
        "BERT, sequences": (BertForSequenceClassification(BertConfig(**BERT)), True),
    }


@pytest.mark.parametrize("name", list(own_models()))
def test_each_loss_is_the_models_own_for_that_sample(name):
    model, one_label = own_models()[name]
    model.eval()
    batch = {key: torch.stack([row[key] for row in texts(5)]) for key in ("input_ids", "labels")}
    batch["labels"] = batch["labels"] % 3 if one_label or "tokens" in name else batch["labels"]
    if one_label:
        batch["labels"] = batch["labels"][:, -1]
    elif "tokens" in name:
        batch["labels"][0, :3] = -100
    with torch.no_grad():
        ours = per_sample_losses(model, batch)
        alone = [model(**{key: value[k : k + 1] for key, value in batch.items()}).loss for k in range(5)]
    torch.testing.assert_close(ours, torch.stack(alone), rtol=1e-5, atol=1e-6)


def test_a_sample_without_labels_has_no_loss():
    row = {"input_ids": torch.zeros(1, T, dtype=torch.long), "labels": torch.full((1, T), -100)}
    assert per_sample_losses(llama(), row).tolist() == [0.0]


def test_a_loss_that_is_another_is_refused():
    model = LlamaForCausalLM(LLAMA)
    rows = [{"input_ids": row["input_ids"][None], "labels": row["labels"][None]} for row in texts()]
    model.train()
    check_losses(model, rows, lambda samples: samples[0])
    assert model.training
    model.loss_function = lambda logits, labels, **_: 1.05 * F.cross_entropy(logits[0, :-1], labels[0, 1:])
    with pytest.raises(PrivacyError, match=r"the loss of LlamaForCausalLM for one sample is .*pass loss_fn"):
        check_losses(model, rows, lambda samples: samples[0])
    with pytest.raises(PrivacyError, match="no sample of train_dataset has a finite loss"):
        check_losses(llama(), [{**rows[0], "labels": torch.full((1, T), -100)}], lambda samples: samples[0])


@pytest.mark.parametrize(
    "model",
    [
        T5ForConditionalGeneration(T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)),
        BertForSequenceClassification(BertConfig(**BERT, problem_type="multi_label_classification")),
        nn.Linear(3, 2),
    ],
    ids=lambda model: type(model).__name__,
)
def test_losses_that_are_not_known_are_refused(model):
    with pytest.raises(PrivacyError, match=f"{type(model).__name__} returns one loss for a batch"):
        per_sample_losses(model, texts(1)[0])


REFUSED = {
    "accumulation": ({"gradient_accumulation_steps": 2}, r"gradient_accumulation_steps=2.*max_physical_batch"),
    "clipping": ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0\) scales down the sum.*pass max_grad_norm=0"),
    "smoothing": ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1.*one loss for each sample"),
    "torch_compile": ({"torch_compile": True}, r"torch_compile=True.*Privacy\(compile=True\)"),
    "batch finder": ({"auto_find_batch_size": True}, "auto_find_batch_size=True.*max_physical_batch"),
    "sampler": ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
    "tokens": ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen='all'.*without noise"),
    "loss function": ({"compute_loss_func": lambda *_, **__: None}, "compute_loss_func give one loss for a batch"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(tmp_path, case):
    given, message = REFUSED[case]
    with pytest.raises(PrivacyError, match=message):
        trainer(tmp_path, **given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fp16", True, r"fp16=True\) divides the gradients"),
        ("deepspeed", {}, "deepspeed={}.*over processes"),
        ("fsdp", "full_shard", "fsdp='full_shard'.*over processes"),
        ("_n_gpu", 2, "2 devices are in use"),
    ],
)
def test_refused_where_this_machine_would_not_let_them_be(tmp_path, name, value, message):
    used = trainer(tmp_path)
    setattr(used.args, name, value)
    with pytest.raises(PrivacyError, match=message):
        used.train()


def test_an_overridden_loss_is_refused(tmp_path):
    class Other(PrivateTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(PrivacyError, match="compute_loss and compute_loss_func"):
        Other(model=llama(), args=arguments(tmp_path), train_dataset=texts(), privacy=privacy())


def test_other_batches_and_wrapped_models_are_refused(tmp_path):
    used = trainer(tmp_path)
    with pytest.raises(PrivacyError, match="no loader outside"):
        used.get_train_dataloader()
    with pytest.raises(PrivacyError, match="a dict that the run has not drawn"):
        used.training_step(used.model, texts()[0])

    class Wrapping(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            used.training_step(nn.DataParallel(used.model), None)

    used.add_callback(Wrapping)
    with pytest.raises(PrivacyError, match="wrapped in DataParallel"):
        used.train()

    class Ordinary(PrivateTrainer):
        def get_train_dataloader(self) -> Any:
            return Trainer.get_train_dataloader(self)

    with pytest.raises(PrivacyError, match="that the run has not drawn"):
        Ordinary(model=llama(), args=arguments(tmp_path), train_dataset=texts(), privacy=privacy()).train()


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
