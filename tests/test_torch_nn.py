"""Every class of torch.nn that has parameters: exact against a loop over samples, or refused by what it does."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

import eachgrad
import torch_nn
from cases import B, Case, T, d, score
from oracle import assert_same, loop, rows
from test_cases import ask_clipped_sum, ask_dense, ask_norms
from torch_nn import BASES, ENTRIES, EVAL, TRAIN, TRIALS, WITHOUT_PARAMETERS, Entry, Trial, classes

# torch's own: a transformer says that it will not take its fast path.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but self.use_nested_tensor is False")

HOW = "then write the table anew with `python tests/torch_nn.py --write`"
EXACT = [trial for trial in TRIALS if trial.mode not in trial.entry.refused]
REFUSED = [trial for trial in TRIALS if trial.mode in trial.entry.refused]
LAZY = [e for e in ENTRIES if e.kind.startswith("Lazy")]


def recorded(
    case: Case, model: nn.Module, batch: tuple[Tensor, ...], reduction: str | None = None
) -> eachgrad.PerSampleGrads:
    with eachgrad.record(model, batch_dim=case.batch_dim) as tape:
        losses = case.losses(model, *batch)
    return tape.backward(losses, reduction)


@pytest.mark.parametrize("trial", EXACT, ids=str)
def test_exact(trial: Trial):
    case = trial.case()
    random = trial.entry.random and trial.mode == TRAIN
    model, batch = case.build()
    torch.manual_seed(7)
    want = rows(model, case.losses, batch) if random else loop(model, case.losses, case.samples(batch))
    model, batch = case.build()
    torch.manual_seed(7)
    grads = recorded(case, model, batch)
    ask_dense(grads, want, case.tolerance)
    ask_norms(grads, want, case.tolerance)
    ask_clipped_sum(grads, want, case.tolerance)


@pytest.mark.parametrize("trial", [t for t in EXACT if not (t.entry.random and t.mode == TRAIN)], ids=str)
def test_verify_says_so(trial: Trial):
    case = trial.case()
    model, batch = case.build()
    found = eachgrad.verify(
        model, case.losses, *batch, batch_dim=case.batch_dim, tolerance=case.tolerance, quiet=True
    )  # fmt: skip
    assert found.ok, found
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert {name: shape for name, shape, _ in found.rows} == trained


@pytest.mark.parametrize("trial", REFUSED, ids=str)
def test_refused(trial: Trial):
    case = trial.case()
    model, batch = case.build()
    with pytest.raises(eachgrad.EachgradError) as refusal:
        recorded(case, model, batch, trial.entry.reduction)
    assert trial.entry.reason in str(refusal.value)
    with pytest.raises(eachgrad.EachgradError) as refusal:
        eachgrad.verify(model, case.losses, *batch, loss_reduction=trial.entry.reduction, quiet=True)
    assert trial.entry.reason in str(refusal.value)


@pytest.mark.parametrize("trial", [t for t in REFUSED if "Norm" in t.entry.kind], ids=str)
def test_a_norm_is_refused_by_name(trial: Trial):
    case = trial.case()
    with pytest.raises(eachgrad.UnsupportedOp, match=r"batch_norm.* at "):
        recorded(case, *case.build())


@pytest.mark.parametrize("entry", LAZY, ids=lambda e: e.kind)
def test_a_lazy_class_may_make_its_parameters_in_the_recording(entry: Entry):
    torch.manual_seed(0)
    args = (2,) if entry.kind == "LazyLinear" else () if "Norm" in entry.kind else (3, 2)
    model = getattr(nn, entry.kind)(*args, dtype=torch.float64).train("BatchNorm" not in entry.kind)
    (x,) = entry.data(torch.Generator().manual_seed(0))
    grads = recorded(Case(entry.kind, (), entry.make, entry.data), model, (x,))
    assert_same(grads.dense(), loop(model, entry.losses, list(zip(x.split(1), strict=True))), 1e-10)


# What the entries cannot say: parameters of their own, and what torch does only without gradients


def test_embedding_bag_max_of_equal_rows():
    """PyTorch gives the gradient of a maximum to the first id that attains it."""
    model = nn.EmbeddingBag(4, d, mode="max", dtype=torch.float64)
    nn.init.zeros_(model.weight)
    ids = torch.tensor([[0, 1, 2], [3, 3, 1], [2, 0, 0]])
    losses = lambda m, i: score(1.0 + m(i))  # noqa: E731
    with eachgrad.record(model) as tape:
        each = losses(model, ids)
    assert_same(tape.backward(each).dense(), loop(model, losses, list(zip(ids.split(1), strict=True))), 1e-10)


class Headed(nn.Module):
    """A layer on an encoder that does not learn."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder.requires_grad_(False), nn.Linear(6, 2)

    def forward(self, x: Tensor, pad: Tensor) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=pad))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_a_frozen_encoder_in_eval_is_recorded_as_it_runs(nested: bool):
    """Without gradients it may take a fast path of nested tensors, which sets padded positions to zero."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True)
    model = Headed(nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)).double().eval()
    x, pad = torch.randn(B, T, 6, dtype=torch.float64), torch.arange(T) >= torch.tensor([T, 2, 3])[:, None]
    losses = lambda m, x, pad: score(m(x, pad))  # noqa: E731
    plain, want = losses(model, x, pad), rows(model, losses, (x, pad))
    refusal = ""
    try:
        with eachgrad.record(model) as tape:
            each = losses(model, x, pad)
        grads = tape.backward(each)
    except eachgrad.EachgradError as error:
        refusal = str(error)
    if refusal:
        assert nested
        assert "TransformerEncoder" in refusal
    else:
        assert_same({"losses": each}, {"losses": plain}, 1e-10)
        assert_same(grads.dense(), want, 1e-10)


# The enumeration


def test_every_class_is_known():
    unknown = classes() - {e.kind for e in ENTRIES} - set(WITHOUT_PARAMETERS) - BASES
    assert not unknown, (
        f"torch.nn has {sorted(unknown)}, which tests/torch_nn.py does not know. A class that can have parameters needs "
        f"an entry with each option that changes its gradient, {HOW}; one that cannot goes to WITHOUT_PARAMETERS."
    )


def test_no_class_is_known_twice():
    kinds = {e.kind for e in ENTRIES}
    assert not kinds & set(WITHOUT_PARAMETERS)
    assert not kinds & BASES
    assert not BASES & set(WITHOUT_PARAMETERS)


@pytest.mark.filterwarnings("ignore:`NLLLoss2d` has been deprecated:FutureWarning")
@pytest.mark.parametrize("name", sorted(set(WITHOUT_PARAMETERS) & classes()))
def test_has_no_parameters(name: str):
    module = getattr(nn, name)(*WITHOUT_PARAMETERS[name])
    assert not list(module.parameters()), f"torch.nn.{name} has parameters now: give it an entry, {HOW}"


@pytest.mark.parametrize("name", sorted(BASES))
def test_is_no_layer(name: str):
    assert getattr(nn, name).forward is nn.Module.forward, f"torch.nn.{name} has a forward: give it an entry, {HOW}"


@pytest.mark.parametrize("kind", sorted({e.kind for e in ENTRIES}))
def test_every_option_is_tried(kind: str):
    shown = " ".join(e.options for e in ENTRIES if e.kind == kind)
    untried = {name for name in torch_nn.options_of(kind) if f"`{name}=" not in shown}
    assert not untried, (
        f"no entry of torch.nn.{kind} in tests/torch_nn.py has {sorted(untried)}: add some, {HOW}, or name what changes "
        "no gradient in NEUTRAL"
    )


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: str(Trial(e, EVAL)))
def test_an_entry_has_its_class_and_parameters(entry: Entry):
    model, _ = Trial(entry, EVAL).case().build()
    kind = getattr(nn, entry.kind)
    kind = getattr(kind, "cls_to_become", None) or kind
    assert any(isinstance(module, kind) for module in model.modules())
    assert any(p.requires_grad and p.numel() for p in model.parameters())


def test_names_are_unique():
    names = [str(trial) for trial in TRIALS]
    assert len(set(names)) == len(names)


def test_an_unknown_class_is_named(monkeypatch):
    monkeypatch.setattr(nn, "Newcomer", type("Newcomer", (nn.Module,), {}), raising=False)
    with pytest.raises(AssertionError, match=r"Newcomer.*--write"):
        test_every_class_is_known()


def test_an_untried_option_is_named(monkeypatch):
    class Wider(nn.Linear):
        def __init__(self, d_in: int, d_out: int, bias: bool = True, twist: float = 0.0):
            super().__init__(d_in, d_out, bias)

    assert "twist" in inspect.signature(Wider).parameters
    monkeypatch.setattr(nn, "Linear", Wider)
    with pytest.raises(AssertionError, match="twist"):
        test_every_option_is_tried("Linear")


def test_the_table_is_up_to_date():
    if f"PyTorch {torch_nn.VERSION}." not in torch_nn.written():
        pytest.skip("the table is of another PyTorch, whose classes and options differ")
    assert torch_nn.written() == torch_nn.table(), (
        "the table of docs/coverage.md is stale: run `python tests/torch_nn.py --write`"
    )
