"""Model families of transformers and peft as data: how each is made, called and judged.

Every model is built from its own configuration, made tiny; nothing is downloaded. `python tests/families.py --write`
puts the table of the verdicts into docs/coverage.md.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coverage.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"

# Where a model computes in float32 inside (norms, softmax, rotary angles), whatever its parameters are, the batch and
# the sample alone round differently there. The largest error seen is 8e-8.
FLOAT32_INSIDE = 1e-6
EXACT = 1e-10

# Batch norm in eval, for a batch of one whose gradient comes back transposed, has a wrong backward in PyTorch 2.13.0 on
# the CPU (finite differences agree with a batch of two). Such models meet each sample with a copy of itself.
DOUBLED = True

Batch = dict[str, Tensor]
Losses = Callable[[Any, Batch], Tensor]


@cache
def library(name: str = "transformers") -> ModuleType:
    """transformers or peft, imported when first asked for: it takes seconds."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = importlib.import_module(name)
    if name == "transformers":
        found.logging.set_verbosity_error()
        found.logging.disable_progress_bar()
    return found


@dataclass(frozen=True)
class Family:
    """One model with the batch and the loss it is judged by."""

    name: str
    modality: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int, int], Batch]  # of B samples and T positions, where it has any
    losses: Losses  # from what the model returned and the batch, (B,)
    verdict: str = "exact"  # or "refused"
    words: str = ""  # of the refusal
    tolerance: float = EXACT
    attention: tuple[str, ...] = ()  # implementations to choose from
    checkpoints: bool = False  # whether it has gradient checkpointing
    train: bool = False  # judged in training mode
    random: bool = False  # draws numbers in eval too: judged by a backward for each row of the same losses
    doubled: bool = False  # alone means with a copy of itself; see DOUBLED

    def __str__(self) -> str:
        return self.name

    def build(self, dtype: torch.dtype = torch.float64, attention: str = "") -> nn.Module:
        """The model with numbers of its own: what starts at zero or one would hide errors."""
        torch.manual_seed(0)
        model = self.make()
        if attention:
            model.set_attn_implementation(attention)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
        return model.to(dtype).train(self.train)

    def samples(self, batch: Batch) -> list[tuple[Tensor, ...]]:
        """Each sample as a batch of one, or of two where that is needed."""
        B, times = len(next(iter(batch.values()))), 2 if self.doubled else 1
        return [tuple(torch.cat([t[i : i + 1]] * times) for t in batch.values()) for i in range(B)]

    def alone(self, batch: Batch) -> Callable[..., Tensor]:
        """The loss of what `samples` gives, (1,)."""
        losses = self.call(batch)
        return lambda model, *values: losses(model, *values)[:1]

    def data(self, B: int = 3, T: int = 5, dtype: torch.dtype = torch.float64) -> Batch:
        found = self.batch(torch.Generator().manual_seed(2), B, T)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in found.items()}

    def call(self, batch: Mapping[str, Tensor]) -> Callable[..., Tensor]:
        """`losses(model, *batch.values())`; what is called target is for the loss alone."""
        names = tuple(batch)

        def losses(model: nn.Module, *values: Tensor) -> Tensor:
            given = dict(zip(names, values, strict=True))
            return self.losses(model(**{k: v for k, v in given.items() if k != "target"}), given)

        return losses


def built(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = library()
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return make


# Batches

VOCABULARY = 50


def ids(generator: torch.Generator, *shape: int) -> Tensor:
    """Words that are none of the special ones."""
    return torch.randint(5, VOCABULARY - 2, shape, generator=generator)


def padded(B: int, T: int, side: str) -> Tensor:
    """A mask that leaves out up to two words of a sample, at one side."""
    mask = torch.ones(B, T, dtype=torch.long)
    for i in range(B):
        n = min(i % 3, T - 2)
        mask[i, T - n :] = 0
    return mask.flip(1) if side == "left" else mask


def text(generator: torch.Generator, B: int, T: int) -> Batch:
    return {"input_ids": ids(generator, B, T), "attention_mask": padded(B, T, "right")}


def sequences(generator: torch.Generator, B: int, T: int) -> Batch:
    """For an encoder and a decoder, of unequal lengths."""
    return text(generator, B, T) | {"labels": ids(generator, B, T + 1)}


def image(size: int = 16, channels: int = 3) -> Callable[[torch.Generator, int, int], Batch]:
    def make(generator: torch.Generator, B: int, T: int) -> Batch:
        return {
            "pixel_values": torch.randn(B, channels, size, size, generator=generator),
            "target": torch.randint(0, 3, (B,), generator=generator),
        }

    return make


def numbers(**shapes: tuple[int, ...]) -> Callable[[torch.Generator, int, int], Batch]:
    """Normal numbers; of these shapes for each sample."""
    return lambda generator, B, T: {k: torch.randn(B, *shape, generator=generator) for k, shape in shapes.items()}


# Losses


def next_word(output: Any, batch: Batch) -> Tensor:
    """The mean over a sample's own words of the cross entropy of the next one."""
    each = F.cross_entropy(output.logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
    mask = batch["attention_mask"][:, 1:].to(each)
    return (each * mask).sum(1) / mask.sum(1)


def every_word(output: Any, batch: Batch) -> Tensor:
    each = F.cross_entropy(output.logits.transpose(1, 2), batch["input_ids"], reduction="none")
    mask = batch["attention_mask"].to(each)
    return (each * mask).sum(1) / mask.sum(1)


def translation(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits.transpose(1, 2), batch["labels"], reduction="none").mean(1)


def classes(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.logits, batch["target"], reduction="none")


def classes_of_logits(output: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(output, batch["target"], reduction="none")


def score(found: Tensor) -> Tensor:
    """Something of every number of a sample that no normalisation makes constant."""
    flat = found.flatten(1)
    weights = torch.arange(flat.shape[1], device=flat.device, dtype=flat.dtype).cos()
    return (flat.tanh() * weights).mean(1)


def scored(*names: str) -> Losses:
    """The score of an output, or of several."""
    return lambda output, batch: torch.stack([score(getattr(output, name)) for name in names]).sum(0)


# Named families

SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = SIZE | {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
GROUPED = TEXT | {"num_key_value_heads": 1}
PATCHES = SIZE | {"image_size": 16, "patch_size": 4}
IMAGE = PATCHES | {"num_labels": 3}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32}
CLIP_TEXT = TEXT | {"projection_dim": 8, "eos_token_id": VOCABULARY - 1}
CLIP = {"text_config": CLIP_TEXT, "vision_config": PATCHES, "projection_dim": 8}
BOTH = ("sdpa", "eager")


def named(
    name: str, model: str, losses: Losses = next_word, batch=text, modality: str = "text", **options: Any
) -> Family:
    """A family by its model's class; `options` of the family and of its configuration."""
    own = {k: options.pop(k) for k in ("tolerance", "attention", "checkpoints") if k in options}
    config = options.pop("config")
    own = {"attention": BOTH, "checkpoints": True} | own
    return Family(name, modality, built(model, config, **options), batch, losses, **own)


def text_classes(output: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(output.text_embeds, batch["input_ids"][:, 0] % 8, reduction="none")


NAMED = [
    named("GPT-2", "GPT2LMHeadModel", config="GPT2Config", **GPT2),
    named("BERT", "BertForMaskedLM", every_word, config="BertConfig", **TEXT),
    named("RoBERTa", "RobertaForMaskedLM", every_word, config="RobertaConfig", **TEXT),
    named(
        "DistilBERT", "DistilBertForMaskedLM", every_word, config="DistilBertConfig",
        dim=16, n_layers=2, n_heads=2, hidden_dim=32, vocab_size=VOCABULARY, max_position_embeddings=32,
    ),
    named("ALBERT", "AlbertForMaskedLM", every_word, config="AlbertConfig", checkpoints=False, embedding_size=8, **TEXT),
    named("Llama", "LlamaForCausalLM", config="LlamaConfig", **GROUPED),
    named("Mistral", "MistralForCausalLM", config="MistralConfig", sliding_window=3, **GROUPED),
    named("Qwen3", "Qwen3ForCausalLM", config="Qwen3Config", head_dim=8, **GROUPED),
    named("Gemma", "GemmaForCausalLM", config="GemmaConfig", head_dim=8, **GROUPED),
    named(
        "T5", "T5ForConditionalGeneration", translation, sequences, config="T5Config",
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCABULARY, decoder_start_token_id=0,
    ),
    named(
        "OPT", "OPTForCausalLM", config="OPTConfig", hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        ffn_dim=32, vocab_size=VOCABULARY, max_position_embeddings=32, word_embed_proj_dim=16,
    ),
    named("GPT-NeoX", "GPTNeoXForCausalLM", config="GPTNeoXConfig", **TEXT),
    named("ViT", "ViTForImageClassification", classes, image(), "image", config="ViTConfig", **IMAGE),
    named(
        "Swin", "SwinForImageClassification", classes, image(), "image", config="SwinConfig", num_labels=3,
        image_size=16, patch_size=2, embed_dim=8, depths=[2, 2], num_heads=[2, 2], window_size=4,
    ),
    named(
        "ConvNeXt", "ConvNextForImageClassification", classes, image(), "image", config="ConvNextConfig", attention=(),
        checkpoints=False, hidden_sizes=[8, 8], depths=[1, 1], num_stages=2, image_size=16, num_labels=3,
    ),
    named(
        "CLIP, image head", "CLIPForImageClassification", classes, image(), "image", config="CLIPConfig",
        num_labels=3, **CLIP,
    ),
    named("CLIP, text head", "CLIPTextModelWithProjection", text_classes, config="CLIPTextConfig", **CLIP_TEXT),
    named(
        "Mamba", "MambaForCausalLM", config="MambaConfig", attention=(), tolerance=FLOAT32_INSIDE,
        hidden_size=16, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4,
    ),
    # The default way to run the experts takes no float64.
    named(
        "Mixtral", "MixtralForCausalLM", config="MixtralConfig", num_local_experts=4, experts_implementation="eager",
        **GROUPED,
    ),
]  # fmt: skip


# Families that nobody asked for by name


def other(
    name: str, model: str, batch=text, losses: Losses = next_word, modality: str = "text", **options: Any
) -> Family:
    """A family whose configuration is named after its model."""
    keys = ("tolerance", "verdict", "words", "train", "random", "doubled")
    own = {k: options.pop(k) for k in keys if k in options}
    stem = next(model.removesuffix(end) for end in HEADS if model.endswith(end))
    return Family(name, modality, built(model, options.pop("config", f"{stem}Config"), **options), batch, losses, **own)


HEADS = (
    "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration", "LMHeadModel", "WithLMHeadModel", "MTModel",
    "ForImageClassification", "ForSemanticSegmentation", "ForDepthEstimation", "ForObjectDetection", "ForPreTraining",
    "ForSequenceClassification", "ForTokenClassification", "ForCTC", "ForSpeechToText", "ForAudioClassification",
    "ForVideoClassification", "ForPrediction", "ModelWithProjection", "Model",
)  # fmt: skip


# More batches


def whole_text(generator: torch.Generator, B: int, T: int) -> Batch:
    """Eight words and no padding."""
    return {"input_ids": ids(generator, B, 8), "attention_mask": torch.ones(B, 8, dtype=torch.long)}


def only_ids(generator: torch.Generator, B: int, T: int) -> Batch:
    return {"input_ids": ids(generator, B, T)}


def inputs(generator: torch.Generator, B: int, T: int) -> Batch:
    return {"inputs": ids(generator, B, 5), "attention_mask": torch.ones(B, 5, dtype=torch.long)}


def boxes(generator: torch.Generator, B: int, T: int) -> Batch:
    corner, size = (torch.randint(1, 20, (B, T, 2), generator=generator) for _ in range(2))
    return text(generator, B, T) | {"bbox": torch.cat([corner, corner + size], -1)}


def pairs(generator: torch.Generator, B: int, T: int) -> Batch:
    return text(generator, B, T) | {"pixel_values": torch.randn(B, 3, 16, 16, generator=generator)}


def picture_words(generator: torch.Generator, B: int, T: int) -> Batch:
    """Four of the words stand for the patches of an image."""
    found = ids(generator, B, T + 4)
    found[:, 1:5] = VOCABULARY - 1
    pixels = torch.randn(B, 3, 8, 8, generator=generator)
    return {"input_ids": found, "attention_mask": torch.ones_like(found), "pixel_values": pixels}


def text_and(**shapes: tuple[int, ...]) -> Callable[[torch.Generator, int, int], Batch]:
    return lambda generator, B, T: text(generator, B, T) | numbers(**shapes)(generator, B, T)


def wave(generator: torch.Generator, B: int, T: int) -> Batch:
    """Sound of unequal lengths."""
    lengths = 200 - 30 * (torch.arange(B) % 3)
    return {
        "input_values": torch.randn(B, 200, generator=generator),
        "attention_mask": (torch.arange(200) < lengths[:, None]).long(),
        "target": torch.randint(0, 3, (B,), generator=generator),
    }


def labelled(labels: str = "target", **shapes: tuple[int, ...]) -> Callable[[torch.Generator, int, int], Batch]:
    """Numbers with a class for each sample, or with words."""

    def make(generator: torch.Generator, B: int, T: int) -> Batch:
        y = ids(generator, B, T) if labels == "labels" else torch.randint(0, 3, (B,), generator=generator)
        return numbers(**shapes)(generator, B, T) | {labels: y}

    return make


def decibels(generator: torch.Generator, B: int, T: int) -> Batch:
    sound = torch.randn(B, 1, 64, 16, generator=generator)
    return {"input_features": sound, "is_longer": torch.zeros(B, 1, dtype=torch.bool)}


def codes(generator: torch.Generator, B: int, T: int) -> Batch:
    return {"input_ids": torch.randint(0, 20, (B, 2, T), generator=generator)}


def series(generator: torch.Generator, B: int, T: int) -> Batch:
    shapes = {"past_time_features": (8, 1), "future_time_features": (3, 1)}
    return {
        "past_values": 0.5 + torch.rand(B, 8, generator=generator),
        "past_observed_mask": torch.ones(B, 8),
        "future_values": torch.rand(B, 3, generator=generator),
    } | numbers(**shapes)(generator, B, T)


def decisions(generator: torch.Generator, B: int, T: int) -> Batch:
    shapes = {"states": (T, 4), "actions": (T, 2), "rewards": (T, 1), "returns_to_go": (T, 1)}
    steps = {"timesteps": torch.arange(T).repeat(B, 1), "attention_mask": torch.ones(B, T)}
    return numbers(**shapes)(generator, B, T) | steps


def code_scores(output: Any, batch: Batch) -> Tensor:
    """Two codebooks for each sample, which the model folds into the batch."""
    return score(output.logits.unflatten(0, (-1, 2)))


def distribution(output: Any, batch: Batch) -> Tensor:
    return torch.stack([score(p) for p in output.params]).sum(0)


PIXELS = numbers(pixel_values=(3, 16, 16))
VIDEO = labelled(pixel_values=(4, 3, 8, 8))
FRAMES = SIZE | {"image_size": 8, "patch_size": 4, "num_frames": 4, "num_labels": 3}
DECODER = {
    "vocab_size": VOCABULARY, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
TRANSLATOR = DECODER | {"max_position_embeddings": 32}
CONVOLUTIONS = {
    "conv_dim": [8, 8], "conv_stride": [4, 2], "conv_kernel": [8, 3], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0,
}  # fmt: skip
SOUND = SIZE | CONVOLUTIONS | {"vocab_size": 20, "num_labels": 3, "classifier_proj_size": 8}
PYRAMID = {
    "depths": [1, 1], "hidden_sizes": [8, 16], "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2],
    "num_encoder_blocks": 2, "num_labels": 3,
}  # fmt: skip
STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "num_labels": 3}
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
FORECAST = {
    "prediction_length": 3, "context_length": 6, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "scaling": "std",
}  # fmt: skip
SERIES_PATCHES = {
    "num_input_channels": 2, "context_length": 12, "patch_length": 3, "patch_stride": 3, "prediction_length": 4,
}  # fmt: skip


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in names}


def detr() -> nn.Module:
    transformers = library()
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    options = without(DECODER, "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id")
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, num_queries=4,
        num_labels=3, **options,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


UNNAMED = [
    # text, encoder and decoder
    other("BART", "BartForConditionalGeneration", sequences, translation, **TRANSLATOR),
    other("mBART", "MBartForConditionalGeneration", sequences, translation, **TRANSLATOR),
    other("Pegasus", "PegasusForConditionalGeneration", sequences, translation, **TRANSLATOR),
    other("Marian", "MarianMTModel", sequences, translation, **TRANSLATOR),
    other(
        "mT5", "MT5ForConditionalGeneration", sequences, translation, d_model=16, d_kv=8, d_ff=32, num_layers=1,
        num_heads=2, vocab_size=VOCABULARY, decoder_start_token_id=0,
    ),
    # text, masked words
    other("ELECTRA", "ElectraForMaskedLM", losses=every_word, embedding_size=8, **TEXT),
    other(
        "DeBERTa-v2", "DebertaV2ForMaskedLM", losses=every_word, relative_attention=True, pos_att_type=["c2p", "p2c"],
        position_buckets=4, share_att_key=True, conv_kernel_size=3, **TEXT,
    ),
    other("XLNet", "XLNetLMHeadModel", losses=every_word, vocab_size=VOCABULARY, d_model=16, n_layer=2, n_head=2, d_inner=32),
    other(
        "Longformer", "LongformerForMaskedLM", whole_text, every_word, attention_window=[4, 4],
        **TEXT | {"max_position_embeddings": 64},
    ),
    other("BigBird", "BigBirdForMaskedLM", losses=every_word, attention_type="original_full", **TEXT),
    other("FNet", "FNetForMaskedLM", only_ids, scored("logits"), **without(TEXT, "num_attention_heads")),
    other(
        "Funnel", "FunnelForMaskedLM", losses=every_word, vocab_size=VOCABULARY, block_sizes=[1, 1], d_model=16, n_head=2,
        d_head=8, d_inner=32, num_decoder_layers=1,
    ),
    other("MPNet", "MPNetForMaskedLM", losses=every_word, **TEXT),
    other("ConvBERT", "ConvBertForMaskedLM", losses=every_word, embedding_size=16, conv_kernel_size=3, head_ratio=1, **TEXT),
    other("ModernBERT", "ModernBertForMaskedLM", losses=every_word, pad_token_id=0, bos_token_id=1, eos_token_id=2, **TEXT),
    other(
        "XLM", "XLMWithLMHeadModel", losses=every_word, config="XLMConfig", vocab_size=VOCABULARY, emb_dim=16, n_layers=2,
        n_heads=2, max_position_embeddings=32,
    ),
    # text, next word
    other("Bloom", "BloomForCausalLM", vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2),
    other(
        "Falcon", "FalconForCausalLM", vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    ),
    other("Phi", "PhiForCausalLM", **TEXT),
    other("MPT", "MptForCausalLM", d_model=16, n_heads=2, n_layers=2, max_seq_len=32, vocab_size=VOCABULARY),
    other("GPT-J", "GPTJForCausalLM", rotary_dim=4, **GPT2),
    other("CodeGen", "CodeGenForCausalLM", rotary_dim=4, **GPT2 | {"n_head": 4}),
    other("Gemma 2", "Gemma2ForCausalLM", head_dim=8, **GROUPED),
    other("Gemma 3", "Gemma3ForCausalLM", config="Gemma3TextConfig", head_dim=8, **GROUPED),
    other("Cohere", "CohereForCausalLM", **GROUPED),
    other("OLMo", "OlmoForCausalLM", **GROUPED),
    other("OLMoE", "OlmoeForCausalLM", num_experts=4, pad_token_id=0, **EXPERTS, **GROUPED),
    other(
        "Qwen2-MoE", "Qwen2MoeForCausalLM", num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        **EXPERTS, **GROUPED,
    ),
    other(
        "DeepSeek-V3", "DeepseekV3ForCausalLM", tolerance=FLOAT32_INSIDE, n_routed_experts=4, n_group=2, topk_group=1,
        moe_intermediate_size=8, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, num_key_value_heads=2, **EXPERTS, **TEXT,
    ),
    other("GPT-OSS", "GptOssForCausalLM", num_local_experts=4, head_dim=8, sliding_window=3, **EXPERTS, **GROUPED),
    other(
        "Jamba", "JambaForCausalLM", tolerance=FLOAT32_INSIDE, num_experts=4, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
        **EXPERTS, **GROUPED,
    ),
    other(
        "Mamba-2", "Mamba2ForCausalLM", hidden_size=16, num_hidden_layers=2, vocab_size=VOCABULARY, state_size=4,
        num_heads=4, head_dim=8, n_groups=1, chunk_size=4,
    ),
    other(
        "RecurrentGemma", "RecurrentGemmaForCausalLM", lru_width=16, attention_window_size=4,
        block_types=["recurrent", "attention"], **without(GROUPED, "max_position_embeddings"),
    ),
    other("ESM", "EsmForMaskedLM", losses=every_word, modality="protein", pad_token_id=1, mask_token_id=4,
          position_embedding_type="rotary", **TEXT),
    # image
    other("DeiT", "DeiTForImageClassification", image(), classes, "image", **IMAGE),
    other("BEiT", "BeitForImageClassification", image(), classes, "image", use_relative_position_bias=True, **IMAGE),
    other("DINOv2", "Dinov2ForImageClassification", image(), classes, "image", mlp_ratio=2, **IMAGE),
    other("DINOv3", "DINOv3ViTModel", PIXELS, scored("last_hidden_state"), "image", num_register_tokens=2, **PATCHES),
    other(
        "ViT-MAE", "ViTMAEForPreTraining", numbers(pixel_values=(3, 16, 16), noise=(16,)), scored("logits"), "image",
        decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32,
        **PATCHES,
    ),
    other(
        "SegFormer", "SegformerForSemanticSegmentation", numbers(pixel_values=(3, 32, 32)), scored("logits"), "image",
        sr_ratios=[2, 1], patch_sizes=[7, 3], decoder_hidden_size=8, **PYRAMID,
    ),
    other(
        "PVT", "PvtForImageClassification", image(32), classes, "image", image_size=32, patch_sizes=[4, 2],
        sequence_reduction_ratios=[2, 1], **PYRAMID,
    ),
    other(
        "Swin v2", "Swinv2ForImageClassification", image(), classes, "image", image_size=16, patch_size=2, embed_dim=8,
        depths=[2, 1], num_heads=[2, 2], window_size=4, num_labels=3,
    ),
    other(
        "LeViT", "LevitForImageClassification", image(32), classes, "image", doubled=DOUBLED, image_size=32,
        hidden_sizes=[8, 8, 8], num_attention_heads=[2, 2, 2], depths=[1, 1, 1], key_dim=[4, 4, 4], mlp_ratio=[2, 2, 2],
        attention_ratio=[2, 2, 2], num_labels=3,
    ),
    other(
        "MobileViT", "MobileViTForImageClassification", image(32), classes, "image", image_size=32,
        hidden_sizes=[8, 8, 8], neck_hidden_sizes=[4, 4, 8, 8, 8, 8, 16], num_attention_heads=2, num_labels=3,
    ),
    other("ResNet", "ResNetForImageClassification", image(), classes, "image", layer_type="basic", **STAGES),
    other(
        "ResNet in training", "ResNetForImageClassification", image(), classes, "image", layer_type="basic", train=True,
        verdict="refused", words="batch_norm", **STAGES,
    ),
    other("RegNet", "RegNetForImageClassification", image(), classes, "image", groups_width=4, **STAGES),
    other(
        "BiT", "BitForImageClassification", image(), classes, "image", layer_type="preactivation", num_groups=2, **STAGES,
    ),
    other(
        "MobileNetV2", "MobileNetV2ForImageClassification", image(32), classes, "image", image_size=32,
        depth_multiplier=0.125, num_labels=3,
    ),
    Family("DETR", "image", detr, numbers(pixel_values=(3, 32, 32)), scored("logits", "pred_boxes")),
    other(
        "YOLOS", "YolosForObjectDetection", PIXELS, scored("logits", "pred_boxes"), "image", num_detection_tokens=4,
        **PATCHES | {"image_size": [16, 16]},
    ),
    other(
        "DPT", "DPTForDepthEstimation", PIXELS, scored("predicted_depth"), "image", backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8], fusion_hidden_size=8, is_hybrid=False, **PATCHES | {"num_hidden_layers": 4},
    ),
    other(
        "SigLIP", "SiglipForImageClassification", image(), classes, "image", text_config=TEXT, vision_config=PATCHES,
        num_labels=3,
    ),
    # image and text, documents
    other(
        "BLIP", "BlipForConditionalGeneration", pairs, next_word, "image + text", vision_config=PATCHES, projection_dim=8,
        text_config=TEXT | {"encoder_hidden_size": 16, "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 2,
                            "sep_token_id": 2, "is_decoder": True}, image_text_hidden_size=8,
    ),
    other("GIT", "GitForCausalLM", pairs, scored("logits"), "image + text", vision_config=PATCHES, **TEXT),
    other(
        "ViLT", "ViltModel", pairs, scored("last_hidden_state"), "image + text", random=True, image_size=16, patch_size=4,
        **TEXT,
    ),
    other(
        "VisualBERT", "VisualBertModel", text_and(visual_embeds=(4, 8)), scored("last_hidden_state"), "image + text",
        visual_embedding_dim=8, **TEXT,
    ),
    other(
        "LLaVA", "LlavaForConditionalGeneration", picture_words, next_word, "image + text",
        vision_config={"model_type": "clip_vision_model"} | PATCHES | {"image_size": 8},
        text_config={"model_type": "llama"} | GROUPED, image_token_index=VOCABULARY - 1, vision_feature_layer=-1,
    ),
    other(
        "LayoutLM", "LayoutLMForTokenClassification", boxes, scored("logits"), "document", max_2d_position_embeddings=64,
        num_labels=3, **TEXT,
    ),
    other(
        "Perceiver", "PerceiverForMaskedLM", inputs, scored("logits"), "bytes", num_latents=4, d_latents=16, d_model=16,
        num_blocks=1, num_self_attends_per_block=2, num_self_attention_heads=2, num_cross_attention_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=5, qk_channels=8, v_channels=16,
    ),
    # audio
    other("Wav2Vec2", "Wav2Vec2ForSequenceClassification", wave, classes, "audio", **SOUND),
    other(
        "Wav2Vec2 with layer norm", "Wav2Vec2ForCTC", wave, scored("logits"), "audio", feat_extract_norm="layer",
        do_stable_layer_norm=True, **SOUND,
    ),
    other("HuBERT", "HubertForSequenceClassification", wave, classes, "audio", **SOUND),
    other("WavLM", "WavLMForSequenceClassification", wave, classes, "audio", **SOUND),
    other("SEW", "SEWForSequenceClassification", labelled(input_values=(200,)), classes, "audio", squeeze_factor=2, **SOUND),
    other(
        "Whisper", "WhisperForConditionalGeneration", labelled("labels", input_features=(8, 20)), translation,
        "audio + text", num_mel_bins=8, max_source_positions=10, max_target_positions=16, **DECODER,
    ),
    other(
        "SpeechT5", "SpeechT5ForSpeechToText", labelled("labels", input_values=(200,)), translation, "audio + text",
        hidden_size=16, apply_spec_augment=False, **without(DECODER, "d_model"), **CONVOLUTIONS,
    ),
    other(
        "Encodec", "EncodecModel", numbers(input_values=(1, 64)), scored("audio_values"), "audio", num_filters=4,
        hidden_size=8, upsampling_ratios=[2, 2], codebook_size=8, codebook_dim=8, num_lstm_layers=1, kernel_size=3,
        last_kernel_size=3, residual_kernel_size=3,
    ),
    other(
        "AST", "ASTForAudioClassification", labelled(input_values=(24, 16)), classes, "audio", patch_size=8, max_length=24,
        num_mel_bins=16, frequency_stride=4, time_stride=4, num_labels=3, **SIZE,
    ),
    other(
        "CLAP", "ClapAudioModelWithProjection", decibels, scored("audio_embeds"), "audio", config="ClapAudioConfig",
        window_size=4, num_mel_bins=16, spec_size=32, patch_size=4, patch_stride=[4, 4], patch_embeds_hidden_size=8,
        depths=[1, 1], num_attention_heads=[2, 2], hidden_size=16, projection_dim=8, num_hidden_layers=2,
    ),
    other(
        "MusicGen", "MusicgenForCausalLM", codes, code_scores, "audio", config="MusicgenDecoderConfig", vocab_size=20,
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, ffn_dim=32, num_codebooks=2,
        max_position_embeddings=32, pad_token_id=20,
    ),
    # time series, decisions, video
    other("TimeSeriesTransformer", "TimeSeriesTransformerForPrediction", series, distribution, "time series", **FORECAST),
    # What has no observed value is scaled by the mean of the other samples.
    other(
        "TimeSeriesTransformer with mean scaling", "TimeSeriesTransformerForPrediction", series, distribution, "time series",
        verdict="refused", words="statistic over the batch", **FORECAST | {"scaling": "mean"},
    ),
    other(
        "Informer", "InformerForPrediction", series, distribution, "time series", random=True, attention_type="prob",
        sampling_factor=1, **FORECAST,
    ),
    other(
        "PatchTST", "PatchTSTForPrediction", numbers(past_values=(12, 2)), scored("prediction_outputs"), "time series",
        num_hidden_layers=1, d_model=16, num_attention_heads=2, ffn_dim=16, norm_type="layernorm", **SERIES_PATCHES,
    ),
    other(
        "PatchTSMixer", "PatchTSMixerForPrediction", numbers(past_values=(12, 2)), scored("prediction_outputs"),
        "time series", num_layers=1, **SERIES_PATCHES | {"d_model": 8},
    ),
    other(
        "DecisionTransformer", "DecisionTransformerModel", decisions, scored("action_preds", "state_preds"), "decisions",
        state_dim=4, act_dim=2, hidden_size=16, n_layer=2, n_head=2, n_positions=32, max_ep_len=16,
    ),
    other("VideoMAE", "VideoMAEForVideoClassification", VIDEO, classes, "video", **FRAMES),
    other("TimeSformer", "TimesformerForVideoClassification", VIDEO, classes, "video", **FRAMES),
    other("ViViT", "VivitForVideoClassification", VIDEO, classes, "video", tubelet_size=[2, 4, 4], **FRAMES),
]  # fmt: skip


# The table


def verdict(family: Family) -> str:
    """What the tests hold the family to, in words."""
    if family.verdict == "refused":
        return f"refused: {family.words}"
    measure = ", same draws" if family.random else ""
    return f"exact{measure}" if family.tolerance <= EXACT else f"exact{measure}, to {family.tolerance:.0e}"


def table_rows() -> list[tuple[str, str, str]]:
    """(family, modality, verdict) of every family, the named ones first."""
    return [(family.name, family.modality, verdict(family)) for family in (*NAMED, *UNNAMED)]


def table() -> str:
    lines = [f"{len(NAMED) + len(UNNAMED)} families.", "", "| family | modality | verdict |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in table_rows())])


def written(page: str) -> str:
    """The page with the table between its markers."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(table())
