"""PrivateTrainer: the losses of the model itself, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_trainers import BERT, LLAMA, VOCABULARY, T, arguments, llama, privacy, texts, trainer
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
)

from eachgrad.private import PrivacyError
from eachgrad.private.huggingface import PrivateTrainer, check_losses, per_sample_losses


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


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    used = trainer(tmp_path)
    used.optimizer = torch.optim.LBFGS([p for p in used.model.parameters() if p.requires_grad])
    with pytest.raises(PrivacyError, match="LBFGS computes the loss again within a step"):
        used.train()


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
