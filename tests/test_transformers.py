"""Hugging Face models, called as in their documentation, against the loop over samples; and PEFT's adapters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eachgrad
import families
from families import NAMED, UNNAMED, Family, library
from oracle import assert_same, loop, rows

pytestmark = [
    # A reentrant checkpoint inside another one says this of its first forward, without eachgrad too.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning"),
    # Of DeBERTa's and WavLM's own code.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask:UserWarning"),
]
each_named = pytest.mark.parametrize("family", NAMED, ids=str)
PADDED = [family for family in NAMED if family.batch in (families.text, families.sequences)]
# The gradient of a derived weight, here a table of relative positions, needs a graph that such a checkpoint frees.
NEEDS_GRAPH = {"T5", "Swin"}


def truth(family: Family, model: nn.Module, batch: families.Batch) -> dict[str, Tensor]:
    want = loop(model, family.alone(batch), family.samples(batch))
    assert all(g.isfinite().all() for g in want.values())  # NaN on both sides would pass for equal
    assert any(g.any() for g in want.values())
    return want


def record(family: Family, model: nn.Module, batch: families.Batch, **options: Any):
    with eachgrad.record(model, **options) as tape:
        losses = family.call(batch)(model, *batch.values())
    return tape, losses


def answered(family: Family, model: nn.Module, batch: families.Batch) -> dict[str, Tensor]:
    tape, losses = record(family, model, batch)
    return tape.backward(losses).dense()


def variants(chosen: list[Family]) -> list[Any]:
    return [pytest.param(f, a, id=f"{f}-{a or 'plain'}") for f in chosen for a in f.attention or ("",)]


@pytest.mark.parametrize(("family", "attention"), variants(NAMED))
def test_named(family: Family, attention: str):
    for B, T in ((3, 5), (4, 4)):
        model, batch = family.build(attention=attention), family.data(B, T)
        assert_same(answered(family, model, batch), truth(family, model, batch), family.tolerance)


@pytest.mark.parametrize(("family", "attention"), variants(PADDED))
def test_padded_on_the_left(family: Family, attention: str):
    # In float64 the mask's smallest number is -inf for a softmax in float32: the padding, which sees no word, is NaN.
    dtype, tolerance = (torch.float32, 1e-4) if attention == "eager" else (torch.float64, family.tolerance)
    for B, T in ((3, 5), (4, 4)):
        model, batch = family.build(dtype, attention), family.data(B, T, dtype)
        batch["attention_mask"] = families.padded(B, T, "left")
        assert not batch["attention_mask"].all()
        assert_same(answered(family, model, batch), truth(family, model, batch), tolerance)


CHECKPOINTS = {"none": None, "reentrant": True, "not reentrant": False}


@pytest.mark.parametrize("checkpoints", CHECKPOINTS)
@pytest.mark.parametrize(("family", "attention"), variants(NAMED))
def test_in_training_with_dropout(family: Family, attention: str, checkpoints: str):
    if checkpoints != "none" and not family.checkpoints:
        with pytest.raises(ValueError, match="does not support gradient checkpointing"):
            family.build().gradient_checkpointing_enable()
        return
    model, batch = family.build(attention=attention).train(), family.data(4, 4)
    twin = copy.deepcopy(model)
    if checkpoints != "none":
        model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTS[checkpoints]})
    torch.manual_seed(5)
    want = rows(twin, family.call(batch), tuple(batch.values()))
    torch.manual_seed(5)
    tape, losses = record(family, model, batch)
    if checkpoints == "reentrant" and family.name in NEEDS_GRAPH:
        with pytest.raises(eachgrad.CaptureError, match="use_reentrant=False"):
            tape.backward(losses)
    else:
        assert_same(tape.backward(losses).dense(), want, family.tolerance)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed in training"])
@each_named
def test_asked_three_times(family: Family, checkpointed: bool):
    """The third call streams what the first two measured."""
    model, batch = family.build(), family.data()
    if checkpointed:
        model.train()
        torch.manual_seed(5)
        want = rows(copy.deepcopy(model), family.call(batch), tuple(batch.values()))
        if family.checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        want = truth(family, model, batch)
    size = torch.stack([g.flatten(1).square().sum(1) for g in want.values()]).sum(0).sqrt()
    bound = float(size.mean())
    clipped = {name: torch.einsum("b,b...->...", (bound / size).clamp(max=1), g) for name, g in want.items()}
    for _ in range(3):
        torch.manual_seed(5)
        tape, losses = record(family, model, batch)
        answer = tape.ask(losses, norms=eachgrad.norms(), clipped=eachgrad.clipped_sum(bound))
        assert_same({"norms": answer.norms}, {"norms": size}, family.tolerance)
        assert_same(answer.clipped, clipped, family.tolerance)


@each_named
def test_verify_says_the_same(family: Family):
    model, batch = family.build(), family.data()
    found = eachgrad.verify(model, family.call(batch), *batch.values(), tolerance=family.tolerance, quiet=True)
    assert {name for name, *_ in found.rows} == {n for n, p in model.named_parameters() if p.requires_grad}
    assert found.ok, str(found)


# The model's own loss, one number


def labelled(family: Family, batch: families.Batch) -> families.Batch:
    if "target" in batch:
        return {"pixel_values": batch["pixel_values"], "labels": batch["target"]}
    return {"labels": batch["input_ids"]} | batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}


def own_loss(model: nn.Module, names: tuple[str, ...], *values: Tensor) -> Tensor:
    return model(**dict(zip(names, values, strict=True))).loss


WITH_LABELS = [family for family in NAMED if family.name != "CLIP, text head"]


@pytest.mark.parametrize("family", WITH_LABELS, ids=str)
def test_own_loss(family: Family):
    for B, T in ((3, 5), (4, 4)):
        model, batch = family.build(), labelled(family, family.data(B, T))
        names = tuple(batch)
        want = loop(model, lambda m, *v, names=names: own_loss(m, names, *v)[None], family.samples(batch))
        with eachgrad.record(model) as tape:
            loss = own_loss(model, names, *batch.values())
        # The models' losses are computed in float32.
        assert_same(tape.backward(loss, "mean").dense(), want, families.FLOAT32_INSIDE)


@pytest.mark.parametrize("family", [f for f in WITH_LABELS if f in PADDED], ids=str)
def test_own_loss_over_unequal_numbers_of_words_is_refused(family: Family):
    """Its mean is over the words of all samples, which is no mean over samples."""
    model, batch = family.build(), family.data(3, 6)
    labels = batch.get("labels", batch["input_ids"]).clone()
    labels[0, -2:] = -100
    batch["labels"] = labels
    with eachgrad.record(model) as tape:
        loss = own_loss(model, tuple(batch), *batch.values())
    with pytest.raises(eachgrad.CaptureError, match="ignored"):
        tape.backward(loss, "mean")


# Losses that mix samples


def clip_pairs() -> tuple[nn.Module, families.Batch]:
    torch.manual_seed(0)
    model = families.built("CLIPModel", "CLIPConfig", **families.CLIP)().double().eval()
    batch = families.pairs(torch.Generator().manual_seed(2), 3, 5)
    return model, batch | {"pixel_values": batch["pixel_values"].double()}


def test_contrastive_loss_of_clip_is_refused():
    model, batch = clip_pairs()
    with eachgrad.record(model) as tape:
        loss = model(**batch, return_loss=True).loss
    with pytest.raises(eachgrad.CaptureError, match="mix"):
        tape.backward(loss, "mean")


def test_contrastive_losses_of_clip_are_refused_one_by_one():
    model, batch = clip_pairs()
    with eachgrad.record(model) as tape:
        losses = nn.functional.cross_entropy(model(**batch).logits_per_text, torch.arange(3), reduction="none")
    with pytest.raises(eachgrad.CaptureError, match="mixes the samples"):
        tape.backward(losses)


def mixtral(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = families.GROUPED | {"num_local_experts": 4} | options
    return families.built("MixtralForCausalLM", "MixtralConfig", **sizes)().eval()


def test_load_balancing_loss_of_mixtral_is_refused():
    """It is a product of means over the words of the batch."""
    model = mixtral(output_router_logits=True, router_aux_loss_coef=1.0)
    batch = families.text(torch.Generator().manual_seed(2), 3, 5)
    batch |= {"labels": batch["input_ids"], "attention_mask": torch.ones_like(batch["attention_mask"])}
    with eachgrad.record(model) as tape:
        loss = model(**batch).loss
    with pytest.raises(eachgrad.CaptureError):
        tape.backward(loss, "mean")


@pytest.mark.parametrize("how", ["grouped_mm", "batched_mm", "eager"])
def test_every_way_to_run_experts(how: str):
    family = next(f for f in NAMED if f.name == "Mixtral")
    model, batch = mixtral(experts_implementation=how), family.data(4, 4, torch.float32)
    want = truth(family, model, batch)
    for _ in range(3):
        tape, losses = record(family, model, batch)
        assert_same(tape.ask(losses, dense=eachgrad.dense()).dense, want, 1e-5)


# PEFT

TARGETS = {"GPT-2": ["c_attn", "c_fc"], "Llama": ["q_proj", "v_proj", "down_proj"], "ViT": ["q_proj", "v_proj"]}
HEAD = {"GPT-2": "lm_head", "Llama": "lm_head", "ViT": "classifier"}
ADAPTERS = {
    "LoRA": {}, "DoRA": {"use_dora": True}, "rank-stabilised": {"use_rslora": True}, "lora_only": {"bias": "lora_only"},
    "all biases": {"bias": "all"}, "modules_to_save": {"modules_to_save": None},
}  # fmt: skip


def adapted(family: Family, options: dict[str, Any]) -> nn.Module:
    peft = library("peft")
    if "modules_to_save" in options:
        options = {"modules_to_save": [HEAD[family.name]]}
    config = peft.LoraConfig(
        r=2, lora_dropout=0.1, target_modules=TARGETS[family.name], fan_in_fan_out=family.name == "GPT-2", **options
    )
    model = peft.get_peft_model(family.build(), config).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # half of each adapter starts at zero, and would have the other's gradient vanish
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.requires_grad)
    return model.eval()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", TARGETS)
def test_adapters(name: str, adapter: str):
    family = next(f for f in NAMED if f.name == name)
    model, batch = adapted(family, ADAPTERS[adapter]), family.data(4, 4)
    want = truth(family, model, batch)
    assert 0 < len(want) < len(list(model.parameters()))
    assert any("lora_A" in key for key in want)
    for _ in range(3):
        tape, losses = record(family, model, batch)
        assert_same(tape.ask(losses, dense=eachgrad.dense()).dense, want, family.tolerance)
    model.train()
    torch.manual_seed(5)
    drawn = rows(model, family.call(batch), tuple(batch.values()))
    torch.manual_seed(5)
    tape, losses = record(family, model, batch)
    assert_same(tape.backward(losses).dense(), drawn, family.tolerance)


# All the others


@pytest.mark.parametrize("family", UNNAMED, ids=str)
def test_unnamed(family: Family):
    for B, T in ((3, 5), (4, 4)):
        model, batch = family.build(), family.data(B, T)
        if family.verdict == "refused":
            with pytest.raises(eachgrad.CaptureError, match=family.words):
                answered(family, model, batch)
            continue
        if family.random:
            torch.manual_seed(5)
            want = rows(model, family.call(batch), tuple(batch.values()))
            assert all(g.isfinite().all() for g in want.values())
            torch.manual_seed(5)
        else:
            want = truth(family, model, batch)
        assert_same(answered(family, model, batch), want, family.tolerance)


# Not those that draw random numbers in eval, nor those for which PyTorch's own batch of one is wrong.
PLAIN = [family for family in UNNAMED if family.verdict == "exact" and not family.random and not family.doubled]


@pytest.mark.parametrize("family", PLAIN, ids=str)
def test_verify_says_the_same_of_unnamed_families(family: Family):
    model, batch = family.build(), family.data(4, 4)
    found = eachgrad.verify(model, family.call(batch), *batch.values(), tolerance=family.tolerance, quiet=True)
    assert found.ok, str(found)


def test_the_table_is_broad_and_mostly_right():
    other = [family for family in UNNAMED if family.modality != "text"]
    exact = [family for family in UNNAMED if family.verdict == "exact"]
    assert len(UNNAMED) >= 30
    assert len(other) >= 15
    assert len(exact) >= 0.9 * len(UNNAMED)
    names = [family.name for family in (*NAMED, *UNNAMED)]
    assert len(set(names)) == len(names)


def test_the_page_has_the_table():
    page = families.PAGE.read_text(encoding="utf-8")
    assert families.written(page) == page, "run python tests/families.py --write"


@each_named
def test_an_error_of_one_percent_is_seen(family: Family):
    model, batch = family.build(), family.data()
    want = truth(family, model, batch)
    name = max(want, key=lambda key: float(want[key].abs().max()))
    wrong = want | {name: want[name] * 1.01}
    with pytest.raises(AssertionError):
        assert_same(wrong, want, family.tolerance)
