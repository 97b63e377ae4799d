"""A tiny Llama learns a writer's style without giving any passage away: LoRA in Hugging Face's Trainer, epsilon = 8.

The model is first trained on public text, Python's own documentation, without noise. Then adapters are trained privately
on scikit-learn's descriptions of data sets. A sample is a passage of 64 characters, so that the guarantee is for a passage.
"""

import pydoc_data.topics
import tempfile
from importlib.resources import files

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from eachgrad.private.huggingface import Privacy, PrivateTrainer

EPSILON, DELTA = 8.0, 1e-4
T = 64  # characters of a passage
Passages = list[dict[str, Tensor]]


def passages(text: str) -> Passages:
    """The text in pieces of T characters, each a sample of ids (T,) below 128."""
    ids = torch.tensor(list(text.encode("ascii", "replace")))
    rows = ids[: len(ids) // T * T].view(-1, T)
    return [{"input_ids": row, "labels": row} for row in rows]


def public() -> Passages:
    return passages("".join(pydoc_data.topics.topics.values()))


def private() -> tuple[Passages, Passages]:
    """Every passage of the descriptions: nine in ten to train on, the others to test."""
    folder = files("sklearn.datasets.descr")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".rst"))
    rows = passages("".join((folder / name).read_text() for name in names))
    return [row for k, row in enumerate(rows) if k % 10], rows[::10]


def build() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=T,
        )
    )


def arguments(folder: str, **more: float) -> TrainingArguments:
    return TrainingArguments(
        folder, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, logging_steps=50, **more
    )


@torch.no_grad()
def loss_of(model: torch.nn.Module, rows: Passages) -> float:
    """The mean loss for a character, in nats."""
    ids = torch.stack([row["input_ids"] for row in rows])
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def main() -> None:
    torch.manual_seed(0)
    train, test = private()
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        plain = arguments(folder, per_device_train_batch_size=32, max_steps=400, learning_rate=3e-3)
        Trainer(model, plain, train_dataset=public()).train()
        before = loss_of(model, test)

        adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear"))
        # Clipping is for each passage, and is part of the guarantee: the Trainer's own, of the whole sum, is off.
        quiet = arguments(
            folder, per_device_train_batch_size=128, num_train_epochs=12, learning_rate=3e-3, max_grad_norm=0
        )
        privacy = Privacy(target_epsilon=EPSILON, target_delta=DELTA, max_grad_norm=0.5, max_physical_batch=160)
        trainer = PrivateTrainer(adapted, quiet, train_dataset=train, privacy=privacy)
        trainer.train()
    after = loss_of(adapted, test)
    print(trainer.run.receipt())
    print(f"{len(test)} passages that were held out: loss {before:.3f} before, {after:.3f} after")
    assert after < before - 0.1
    assert trainer.run.epsilon() <= EPSILON


if __name__ == "__main__":
    main()
