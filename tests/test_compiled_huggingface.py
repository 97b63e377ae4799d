"""compile with Hugging Face's models: the same answers as in eager and as a loop over samples, from one graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import eachgrad
import families
from families import built, library
from oracle import assert_same, loop, rows

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
B, T = 4, 5
EXACT = 1e-10
# The step is one layer's: a second one adds nothing but seconds to compile.
ONE = families.TEXT | {"num_hidden_layers": 1}
LLAMA = ONE | {"num_key_value_heads": 1}  # one pair of keys and values for both heads
DROPOUTS = ("attn_pdrop", "resid_pdrop", "embd_pdrop")


# Batches: other ones for each call, of one shape

Batch = tuple[Tensor, ...]


def words(seed: int) -> Batch:
    return (families.ids(torch.Generator().manual_seed(seed), B, T),)


def padded(seed: int) -> Batch:
    """Words, a mask that leaves out some of them (at every third seed: none), and sentences of two kinds."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, T + 1, (B, 1), generator=generator) if seed % 3 else torch.full((B, 1), T)
    kinds = torch.randint(2, (B, T), generator=generator)
    return families.ids(generator, B, T), (torch.arange(T) < lengths).long(), kinds


def images(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, 3, 16, 16, generator=generator), torch.randint(3, (B,), generator=generator)


# Losses, (B,)


def next_word(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def classes(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    pixels = pixels.to(next(model.parameters()).dtype)
    return F.cross_entropy(model(pixel_values=pixels).logits, labels, reduction="none")


def masked_words(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    return _masked(model(input_ids=ids, attention_mask=mask), ids, mask)


def masked_words_of_kinds(model: nn.Module, ids: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
    return _masked(model(input_ids=ids, attention_mask=mask, token_type_ids=kinds), ids, mask)


def _masked(output: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return families.every_word(output, {"input_ids": ids, "attention_mask": mask})


# Models


def gpt2(dropout: float) -> Callable[[], nn.Module]:
    options = families.GPT2 | {"n_layer": 1} | dict.fromkeys(DROPOUTS, dropout)
    return lambda: built("GPT2LMHeadModel", "GPT2Config", **options)().train()


def lora() -> nn.Module:
    peft = library("peft")
    targets = ["q_proj", "v_proj", "down_proj"]
    return peft.get_peft_model(CASES["Llama"].make(), peft.LoraConfig(r=2, target_modules=targets))


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    losses: Callable[..., Tensor]
    data: Callable[[int], Batch]
    random: bool = False  # draws numbers: judged by a backward for each row of the same losses

    def build(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The model with numbers of its own: what starts at zero or one would hide errors."""
        torch.manual_seed(0)
        model, generator = self.make(), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn(p.shape, generator=generator) * p.requires_grad)
        return model.to(dtype)

    def truth(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if self.random:
            return rows(model, self.losses, batch)
        return loop(model, self.losses, [tuple(t[i : i + 1] for t in batch) for i in range(B)])


CASES = {
    "GPT-2": Case(gpt2(0.0), next_word, words),
    "GPT-2 with dropout": Case(gpt2(0.1), next_word, words, random=True),
    "Llama": Case(built("LlamaForCausalLM", "LlamaConfig", **LLAMA), next_word, words),
    "ViT": Case(
        built("ViTForImageClassification", "ViTConfig", **(families.IMAGE | {"num_hidden_layers": 1})), classes, images
    ),
    "BERT": Case(lambda: built("BertForMaskedLM", "BertConfig", **ONE)().eval(), masked_words_of_kinds, padded),
    "Llama with LoRA": Case(lora, next_word, words),
}


def questions(bound: float = 0.5) -> dict[str, Any]:
    return {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(bound), "mean": eachgrad.mean()}


def norms_of(dense: dict[str, Tensor]) -> Tensor:
    return torch.stack([g.flatten(1).square().sum(1) for g in dense.values()]).sum(0).sqrt()


def answers(dense: dict[str, Tensor], bound: float) -> dict[str, Any]:
    """The truth for `questions`, from each sample's gradient."""
    size = norms_of(dense)
    factor = (bound / size).clamp(max=1)
    clipped = {name: torch.einsum("b,b...->...", factor, g) for name, g in dense.items()}
    return {"norms": size, "grad": clipped, "mean": {name: g.mean(0) for name, g in dense.items()}}


def assert_agree(got: Any, want: dict[str, Any], tolerance: float) -> None:
    assert_same({"norms": got.norms}, {"norms": want["norms"]}, tolerance)
    assert_same(got.grad, want["grad"], tolerance)
    assert_same(got.mean, want["mean"], tolerance)


def assert_compiled(ask: Any) -> None:
    """One graph has answered, and nothing was left to the eager code."""
    assert ask.reasons() == []
    (graph,) = ask.graphs
    assert graph.step


@pytest.mark.parametrize("name", CASES)
def test_the_same_as_in_eager_and_as_a_loop(name: str):
    case = CASES[name]
    model = case.build()
    bound = float(norms_of(case.truth(model, case.data(0))).mean())  # some are clipped, and some are not
    ask = eachgrad.compile(model, case.losses, backend="aot_eager", **questions(bound))
    for k in range(6):  # the third, fifth and sixth by the compiled step
        batch = case.data(k)
        found = []
        for answer in (ask, lambda *batch: ask.eager(batch), lambda *batch: case.truth(model, batch)):
            torch.manual_seed(k)  # the same masks for all, where there are any
            found.append(answer(*batch))
        got, eager, dense = found
        assert_agree(got, vars(eager), EXACT)
        assert_same({"losses": got.losses}, {"losses": eager.losses}, EXACT)
        assert_agree(got, answers(dense, bound), EXACT)
    assert_compiled(ask)
    assert len(ask.graphs[0].step) == 1
    assert all(p.grad is None for p in model.parameters())
    assert set(got.grad) == {n for n, p in model.named_parameters() if p.requires_grad}


def test_masks_are_drawn_anew_at_each_call():
    case = CASES["GPT-2 with dropout"]
    model, batch = case.build(), case.data(0)
    ask = eachgrad.compile(model, case.losses, backend="aot_eager", norms=eachgrad.norms())
    found = [ask(*batch).norms for _ in range(7)]
    for k in range(7):
        for j in range(k):
            assert not torch.equal(found[j], found[k])
    assert_compiled(ask)
    model.eval()  # another way through the model, and another graph
    still = [ask(*batch).norms for _ in range(3)]
    assert torch.equal(still[0], still[1])
    assert_same({"norms": still[2]}, {"norms": still[0]}, EXACT)
    assert len(ask.graphs) == 2
    assert ask.reasons() == []


def test_by_the_real_compiler():
    case = CASES["GPT-2"]
    ask = eachgrad.compile(case.build(), case.losses, **questions())
    for k in range(3):
        batch = case.data(k)
        assert_agree(ask(*batch), vars(ask.eager(batch)), EXACT)
    assert_compiled(ask)


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "ViT", "BERT"])
def test_under_autocast(name: str):
    case = CASES[name]
    ask = eachgrad.compile(case.build(torch.float32), case.losses, backend="aot_eager", **questions())
    for k in range(3):
        batch = case.data(k)
        with torch.autocast("cpu", torch.bfloat16):
            got, want = ask(*batch), ask.eager(batch)
        # The same sixteen bit numbers, and the same sums of them in float32.
        assert_agree(got, vars(want), 1e-5)
    assert_compiled(ask)


def test_kinds_of_sentences_that_are_not_given():
    """Ids of zeros (B, T), made from a buffer: they are none of the batch."""
    case = replace(CASES["BERT"], losses=masked_words, data=lambda seed: padded(seed)[:2])
    model = case.build()
    ask = eachgrad.compile(model, case.losses, backend="aot_eager", norms=eachgrad.norms())
    for k in range(3):
        batch = case.data(k)
        assert_same({"norms": ask(*batch).norms}, {"norms": norms_of(case.truth(model, batch))}, EXACT)
    assert_compiled(ask)


def test_another_shape_is_another_graph():
    case = CASES["Llama"]
    ask = eachgrad.compile(case.build(), case.losses, backend="aot_eager", norms=eachgrad.norms())
    for k in range(3):
        for length in (T, T - 2):
            batch = (case.data(k)[0][:, :length],)
            assert_same({"norms": ask(*batch).norms}, {"norms": ask.eager(batch).norms}, EXACT)
    assert [bool(graph.step) for graph in ask.graphs] == [True, True]
    assert ask.reasons() == []


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.random])
def test_one_graph_for_batches_of_any_size(name):
    case = CASES[name]
    model = case.build()
    ask = eachgrad.compile(model, case.losses, dynamic=True, backend="aot_eager", **questions())
    drawn = {n: [case.data(seed) for seed in range(5)] for n in (9, 12, 17)}
    for n in (9, 9, 9, 12, 12, 17, 9):
        batch = tuple(torch.cat(some)[:n] for some in zip(*drawn[n], strict=True))
        got, want = ask(*batch), ask.eager(batch)
        assert_agree(got, vars(want), EXACT)
    assert not ask.reasons()
    assert_compiled(ask)
    (step,) = ask.graphs[0].step.values()
    assert {size for size, _ in step.checked} == {9, 12, 17}
