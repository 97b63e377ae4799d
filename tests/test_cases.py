"""Every case against the loop over samples: by every query, checked, in float32, as one number, and by laws."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import eachgrad
from cases import CASES, RANDOM, REFUSED, Case, Net, Refused, cut_first, cut_second, scored
from oracle import assert_same, loop, rows

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
each_case = pytest.mark.parametrize("case", CASES, ids=str)


@cache
def truth(case: Case, seed: int = 0) -> dict[str, Tensor]:
    model, batch = case.build(seed)
    return loop(model, case.losses, case.samples(batch))


def record(case: Case | Refused, model: nn.Module, batch: tuple[Tensor, ...], check: bool = False):
    """The tape and the losses of a case."""
    with eachgrad.record(model, batch_size=case.batch_size, batch_dim=case.batch_dim, check=check) as tape:
        losses = case.losses(model, *batch)
    return tape, losses


def record_and_answer(
    case: Case | Refused, model: nn.Module, batch: tuple[Tensor, ...], check: bool = False
) -> eachgrad.PerSampleGrads:
    tape, losses = record(case, model, batch, check)
    return tape.backward(losses)


def answer(case: Case, check: bool = False, seed: int = 0) -> eachgrad.PerSampleGrads:
    return record_and_answer(case, *case.build(seed), check)


def to_float64(model: nn.Module) -> nn.Module:
    return model._apply(lambda t: t.double() if t.is_floating_point() else t)


# Queries


def squared_norms(dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.detach().abs().double().pow(2).reshape(len(g), -1).sum(1) for name, g in dense.items()}


def norms(dense: Mapping[str, Tensor]) -> Tensor:
    return torch.stack(list(squared_norms(dense).values())).sum(0).sqrt()


def weighted(dense: Mapping[str, Tensor], c: Tensor) -> dict[str, Tensor]:
    wide = {name: g.to(torch.complex128 if g.is_complex() else torch.float64) for name, g in dense.items()}
    return {name: torch.einsum("b,b...->...", c.to(g.dtype), g) for name, g in wide.items()}


Grads = eachgrad.PerSampleGrads
Truth = Mapping[str, Tensor]


def ask_dense(grads: Grads, want: Truth, tolerance: float) -> None:
    assert_same(grads.dense(), want, tolerance)


def ask_one_by_one(grads: Grads, want: Truth, tolerance: float) -> None:
    assert_same({name: grads[name].dense() for name in grads}, want, tolerance)


def ask_norms(grads: Grads, want: Truth, tolerance: float) -> None:
    assert_same({"norms": grads.norms()}, {"norms": norms(want)}, tolerance)


def ask_norms_by_parameter(grads: Grads, want: Truth, tolerance: float) -> None:
    each = {n: q.sqrt() for n, q in squared_norms(want).items()}
    assert_same(grads.norms(by="parameter"), each, tolerance)
    assert_same({name: gradient.norms() for name, gradient in grads.items()}, each, tolerance)


def ask_weighted_sum(grads: Grads, want: Truth, tolerance: float) -> None:
    c = torch.randn(grads.batch_size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    if tolerance > 1e-4:  # what sixteen bits lose of each sample is judged by what is left of them all
        c, tolerance = c.abs(), 2 * tolerance
    assert_same(grads.weighted_sum(c), weighted(want, c), tolerance)


def ask_clipped_sum(grads: Grads, want: Truth, tolerance: float) -> None:
    size = norms(want)
    bound = float(size.mean())  # of several samples some are clipped and some are not
    clipped = weighted(want, (bound / size).clamp(max=1.0))
    assert_same(grads.clipped_sum(bound), clipped, tolerance)  # the norms are known from another question, perhaps
    for gradient in grads.values():
        gradient._memo.clear()
    assert_same(grads.clipped_sum(bound), clipped, tolerance)


QUERIES = [ask_dense, ask_one_by_one, ask_norms, ask_norms_by_parameter, ask_weighted_sum, ask_clipped_sum]


@pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.__name__[4:])
@each_case
def test_query(case: Case, query: Callable[..., None]):
    query(answer(case), truth(case), case.tolerance)


# The ordinary gradient takes the graph of the derived weight with it.
NOT_CHECKED = {"derived weight inside a checkpoint, reentrant"}


@each_case
def test_checked(case: Case):
    if case.name in NOT_CHECKED:
        with pytest.raises(eachgrad.CaptureError, match="use_reentrant=False"):
            answer(case, check=True)
        return
    assert_same(answer(case, check=True).dense(), truth(case), case.tolerance)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype == torch.float64], ids=str)
def test_float32(case: Case):
    grads = record_and_answer(case, *case.build(dtype=torch.float32))
    model, batch = case.build(dtype=torch.float32)
    wide = [t.detach().double().requires_grad_(t.requires_grad) if t.is_floating_point() else t for t in batch]
    want = loop(to_float64(model), case.losses, case.samples(tuple(wide)))
    # In float32 the rounding of a gradient that is zero is larger: judge it by a larger share of the others.
    assert_same(grads.dense(), want, 1e-5, share=2e-2)
    assert_same({"norms": grads.norms()}, {"norms": norms(want)}, 1e-4)


# One number instead of a loss per sample

# Where one number is refused although a loss per sample is answered: nothing tells the samples apart.
NEEDS_LOSSES = {
    "submodules called, never the model", "micro-batches in one recording", "several views of each sample",
    "one loss at a time, with a penalty",
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@each_case
def test_scalar(case: Case, reduction: str):
    tape, losses = record(case, *case.build())
    loss = getattr(losses, reduction)()
    if case.name in NEEDS_LOSSES:
        with pytest.raises(eachgrad.CaptureError):
            tape.backward(loss, reduction)
    else:
        # In bfloat16 dividing by B rounds every number once more.
        assert_same(
            tape.backward(loss, reduction).dense(),
            truth(case),
            case.tolerance if case.dtype == torch.float64 and case.tolerance <= 1e-10 else 3 * case.tolerance,
        )


# Laws


@settings(deadline=None, max_examples=40, derandomize=True)
@given(case=st.sampled_from(CASES), seed=st.integers(1, 10**6))
def test_samples_add_up_to_the_ordinary_gradient(case: Case, seed: int):
    if "scale_grad_by_freq" in case.hazards:
        return  # the ordinary gradient divides by the batch's frequencies: it is no sum over samples
    grads = answer(case, seed=seed)
    model, batch = case.build(seed)
    case.losses(model, *batch).sum().backward()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    ordinary = {n: torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for n, p in named.items()}
    assert_same({name: grads[name].dense().sum(0) for name in grads}, ordinary, max(case.tolerance, 1e-9))


PERMUTABLE = [
    case for case in CASES if case.cut in (cut_first, cut_second) and not {"sorted lengths", "B = 1"} & {*case.hazards}
]  # fmt: skip


@settings(deadline=None, max_examples=40, derandomize=True)
@given(case=st.sampled_from(PERMUTABLE), data=st.data())
def test_permuting_the_batch_permutes_the_answer(case: Case, data: st.DataObject):
    model, batch = case.build()
    order = torch.tensor(data.draw(st.permutations(range(batch[0].shape[case.batch_dim]))))
    moved = tuple(t.detach().index_select(case.batch_dim, order).requires_grad_(t.requires_grad) for t in batch)
    got = record_and_answer(case, model, moved).dense()
    assert_same(got, {name: g[order] for name, g in answer(case).dense().items()}, case.tolerance)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(case=st.sampled_from(CASES), seed=st.integers(1, 10**6))
def test_norms_are_those_of_the_dense_gradients(case: Case, seed: int):
    grads = answer(case, seed=seed)
    squares = torch.stack([n.square() for n in grads.norms(by="parameter").values()]).sum(0)
    want = {"squares": torch.stack(list(squared_norms(grads.dense()).values())).sum(0)}
    assert_same({"squares": squares}, want, max(case.tolerance, 1e-9))
    assert_same({"squares": grads.norms().square()}, want, max(case.tolerance, 1e-9))


# Randomness, changes after the fact, bad samples


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_random_numbers_are_those_of_the_plain_forward(case: Case):
    model, batch = case.build()
    torch.manual_seed(7)
    want = rows(model, case.losses, batch)
    torch.manual_seed(7)
    grads = answer(case, check=True)
    assert_same(grads.dense(), want, case.tolerance)
    torch.manual_seed(8)
    with pytest.raises(AssertionError):
        assert_same(answer(case).dense(), want, case.tolerance)


def right_or_refused(ask: Callable[[], None]) -> None:
    """Either the assertions in `ask` hold, or the library, or torch itself, refuses: never a wrong number."""
    try:
        ask()
    except RuntimeError as refusal:
        if not isinstance(refusal, eachgrad.CaptureError) and "inplace operation" not in str(refusal):
            raise


CHANGED = ["partly frozen", "conv2d", "ids (B, T)", "layer_norm", "mul", "matmul right", "gru", "weight_norm"]


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.__name__[4:])
@pytest.mark.parametrize("name", CHANGED)
def test_input_changed_in_place_is_noticed(name: str, query: Callable[..., None], when: str):
    case = next(case for case in CASES if case.name == name)
    model, batch = case.build()
    tape, losses = record(case, model, batch)
    turn = lambda: [t.copy_(t.flip(0)) for t in batch]  # noqa: E731

    def ask() -> None:
        if when == "before backward":
            turn()
        grads = tape.backward(losses)
        if when == "after backward":
            turn()
        query(grads, truth(case), case.tolerance)

    right_or_refused(ask)


@pytest.mark.parametrize("query", QUERIES, ids=lambda q: q.__name__[4:])
@pytest.mark.parametrize("name", CHANGED)
def test_an_optimizer_step_before_the_query_changes_nothing(name: str, query: Callable[..., None]):
    case = next(case for case in CASES if case.name == name)
    model, batch = case.build()
    grads = record_and_answer(case, model, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    query(grads, truth(case), 1e-10)


@pytest.mark.parametrize("name", ["conv2d", "lstm", "MultiheadAttention", "group_norm", "position table T = B"])
def test_a_bad_sample_stays_by_itself(name: str):
    case = next(case for case in CASES if case.name == name)
    model, batch = case.build()
    batch[0][1] = torch.nan
    want = loop(model, case.losses, case.samples(batch))
    grads = record_and_answer(case, model, batch)
    assert_same(grads.dense(), want, case.tolerance)
    assert grads.norms().isnan().tolist() == [False, True, False]
    assert_same({"norms": grads.norms()}, {"norms": norms(want)}, case.tolerance)


@pytest.mark.parametrize(("T", "p"), [(4, 64), (64, 8)], ids=["Gram", "direct"])
def test_norms_survive_cancellation(T: int, p: int):
    """Inputs that hardly differ, output gradients that add up to zero: an underestimated norm breaks a bound."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(p, p, bias=False)
    x = 1 + 1e-3 * torch.randn(3, T, p, generator=generator)
    g = torch.randn(3, T, p, generator=generator)
    g = g - g.mean(1, keepdim=True)
    with eachgrad.record(model) as tape:
        losses = (model(x) * g).sum((1, 2))
    want = torch.einsum("btp,btd->bpd", g.double(), x.double())
    grads = tape.backward(losses)
    assert_same({"norms": grads.norms()}, {"norms": norms({"weight": want})}, 1e-4)


def test_a_hook_on_a_parameter_counts():
    model, x = nn.Linear(4, 2), torch.randn(3, 5, 4)
    model.weight.register_hook(lambda g: g * 0.5)
    each = lambda: model(x).pow(2).sum((1, 2))  # noqa: E731

    def ask() -> None:
        with eachgrad.record(model) as tape:
            losses = each()
        got = {name: g.dense().sum(0) for name, g in tape.backward(losses).items()}
        each().sum().backward()
        assert_same(got, {name: p.grad for name, p in model.named_parameters()}, 1e-5)

    right_or_refused(ask)


def scaled_product(x: Tensor, w: Tensor, k: Tensor) -> Tensor:
    if torch.overrides.has_torch_function((x, w, k)):
        return torch.overrides.handle_torch_function(scaled_product, (x, w, k), x, w, k)
    return torch.tanh(x @ w) * k


eachgrad.rule(scaled_product)(eachgrad.via_vmap(scaled_product))


def test_via_vmap_does_not_cut_a_constant_of_size_b():
    """x is (B, B, d) and k is (B, B), the same for every sample."""
    generator = torch.Generator().manual_seed(0)
    x, k = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 3, 5), (3, 3)))
    model = Net(lambda m, x: scaled_product(x, m.w, k), w=torch.randn(5, 3, generator=generator)).double()
    want = loop(model, scored, [(row[None],) for row in x])

    def ask() -> None:
        with eachgrad.record(model) as tape:
            losses = scored(model, x)
        assert_same(tape.backward(losses).dense(), want, 1e-10)

    right_or_refused(ask)


@pytest.mark.parametrize("shapes", [((4, 4), (4,)), ((1, 3, 2), (1, 3, 2))], ids=["masks", "states"])
def test_other_inputs_do_not_outvote_the_batch(shapes: tuple[tuple[int, ...], ...]):
    """Three samples, and two more inputs whose first size is not 3."""
    model = Net(lambda m, x, a, b: m.fc(x), fc=nn.Linear(5, 2))
    x = torch.randn(3, 4, 5)
    others = [torch.randn(shape) for shape in shapes]
    want = loop(model, lambda m, x: m(x, *others).pow(2).sum((1, 2)), [(row[None],) for row in x])

    def ask() -> None:
        with eachgrad.record(model) as tape:
            loss = model(x, *others).pow(2).sum()
        assert_same(tape.backward(loss, "sum").dense(), want, 1e-5)

    right_or_refused(ask)


# What a recording leaves behind


def trace(model: nn.Module) -> dict[str, Any]:
    """Everything of a model that a recording could have touched, except the numbers."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path} names"] = sorted(vars(module))
        found[f"{path} training"] = module.training
        found |= {f"{path} {k}": len(v) for k, v in vars(module).items() if "hooks" in k and v is not None}
    for name, p in model.named_parameters():
        kept = (sorted(vars(p)), p.requires_grad, p.grad, p.is_leaf, p.grad_fn, type(p), p._backward_hooks)
        found[f"{name} tensor"] = kept
    return found


def assert_untouched(model: nn.Module, twin: nn.Module) -> None:
    """`model` is as its twin, which went through the same forward without a recording."""
    assert trace(model) == trace(twin)
    mine, theirs = model.state_dict(), twin.state_dict()
    assert list(mine) == list(theirs)
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name
    assert not torch.overrides._get_current_function_mode_stack()


@each_case
def test_leaves_the_model_as_it_was(case: Case):
    model, batch = case.build()
    twin, same = case.build()
    torch.manual_seed(3)
    want = case.losses(twin, *same)
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    tape, losses = record(case, model, batch)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert_untouched(model, twin)
    assert_same({"losses": losses}, {"losses": want}, case.tolerance)
    grads = tape.backward(losses)
    grads.clipped_sum(1.0), grads.norms(), grads.dense()
    assert_untouched(model, twin)
    assert [t.grad for t in batch if t.is_leaf] == [None] * sum(t.is_leaf for t in batch)


@each_case
def test_an_exception_leaves_the_model_as_it_was(case: Case):
    model, batch = case.build()
    twin, same = case.build()
    case.losses(twin, *same)
    with contextlib.suppress(ZeroDivisionError), eachgrad.record(model, batch_size=case.batch_size):
        case.losses(model, *batch)
        raise ZeroDivisionError
    assert_untouched(model, twin)


@each_case
def test_receipt(case: Case):
    model, batch = case.build()
    twin, same = case.build()
    case.losses(twin, *same)
    receipt = record_and_answer(case, model, batch).receipt()
    sizes = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    assert receipt.total == receipt.covered == sum(sizes.values())
    assert receipt.deviation <= max(case.tolerance, 1e-9)
    assert all(not truth(case)[name].any() for name in receipt.unused)
    assert_untouched(model, twin)


# Refusals


@pytest.mark.parametrize("check", [False, True], ids=["plain", "checked"])
@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case: Refused, check: bool):
    model, batch = case.build()
    with pytest.raises(case.error) as refusal:
        record_and_answer(case, model, batch, check).dense()
    for word in case.words:
        assert word in str(refusal.value)


# Tests of the tests


def test_names_are_unique():
    names = [case.name for case in (*CASES, *RANDOM, *REFUSED)]
    assert len(set(names)) == len(names)


@each_case
def test_an_error_of_one_percent_is_seen(case: Case):
    want = truth(case)
    largest = max(float(g.abs().max()) for g in want.values())
    seen = 0
    for name, g in want.items():
        if float(g.abs().max()) <= 1e-3 * largest:
            continue
        sample = int(g.abs().reshape(len(g), -1).amax(1).argmax())
        wrong = {n: t.cdouble() if t.is_complex() else t.double() for n, t in want.items()}
        wrong[name] = wrong[name].clone()
        wrong[name][sample] *= 1.01
        with pytest.raises(AssertionError):
            assert_same(wrong, want, case.tolerance)
        seen += 1
    assert seen


@pytest.mark.parametrize(
    "wrong",
    [{}, {"w": torch.ones(2)}, {"w": torch.tensor([1.0, 2.0, torch.nan])}, {"w": torch.ones(3), "v": torch.ones(1)}],
    ids=["missing", "shape", "nan", "superfluous"],
)
def test_other_errors_are_seen(wrong: dict[str, Tensor]):
    with pytest.raises(AssertionError):
        assert_same(wrong, {"w": torch.ones(3)}, 0.5)


@each_case
def test_a_deleted_use_is_seen(case: Case):
    """The check of a recording raises when a use is lost, unless nothing depended on it."""
    model, batch = case.build()
    uses = len(record(case, model, batch, check=True)[0].recorder.uses)
    for k in range(min(uses, 4)):
        tape, losses = record(case, *case.build(), check=True)
        del tape.recorder.uses[k]
        right_or_refused(
            lambda tape=tape, losses=losses: assert_same(tape.backward(losses).dense(), truth(case), case.tolerance)
        )
