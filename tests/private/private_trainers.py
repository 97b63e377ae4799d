"""Small models and PrivateTrainers for the tests, with whatever options a test is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from eachgrad.private.huggingface import Privacy, PrivateTrainer

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
