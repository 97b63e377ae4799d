"""Cross entropies of a recorded forward by the library's kernels: the answers stay, and what is none is left to torch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import eachgrad
import oracle
from eachgrad import eager_entropy
from eachgrad.errors import CaptureError
from eachgrad.graph import graph_nodes
from interpreter import assert_as_in_float64

B, T, d, CLASSES = 4, 5, 16, 13


class Tokens(nn.Module):
    """A table that is tied to its head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, d), nn.Linear(d, d)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.layer(self.table(ids))), self.table.weight)


class Untied(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(d, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.table(ids))))


def token_losses(model: nn.Module, ids: Tensor, target: Tensor, how: str = "folded", **options: Any) -> Tensor:
    """(B,) losses of (B, T) ids."""
    logits = model(ids)
    if how == "shifted":  # no view has its rows one after another
        logits, target = logits[:, :-1], target[:, 1:]
    if how == "folded":
        each = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none", **options).view(target.shape)
    else:
        each = F.cross_entropy(logits.movedim(-1, 1), target, reduction="none", **options)
    return each.mean(1)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    target = torch.randint(CLASSES, (B, T))
    target[0, 2], target[3] = -100, -100  # the last sample has no loss at all
    return torch.randint(CLASSES, (B, T)), target


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.fixture
def replaced(monkeypatch) -> list[bool]:
    """Every cross entropy is large; whether each that was asked about so far went by the kernels."""
    found: list[bool] = []
    original = eager_entropy.row_losses

    def noted(*args: Any, **kwargs: Any) -> Tensor | None:
        out = original(*args, **kwargs)
        found.append(out is not None)
        return out

    monkeypatch.setattr(eager_entropy, "is_large", lambda logits: True)
    monkeypatch.setattr(eager_entropy, "row_losses", noted)
    return found


def by_torch(run: Callable[[], Any]) -> Any:
    """The same with every cross entropy by torch's own op."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_entropy, "is_large", lambda logits: False)
        return run()


def half(enabled: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def answered(model: nn.Module, ids: Tensor, target: Tensor, *, low: bool = False, how: str = "folded", **options: Any):
    """Losses and answers, asked before the backward."""
    with half(low), eachgrad.record(model, **options) as tape:
        losses = token_losses(model, ids, target, how)
    queries = {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(0.05), "mean": eachgrad.mean()}
    return losses.detach(), tape.ask(losses, **queries)


def assert_close(got: Tensor, want: Tensor, slack: float) -> None:
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=slack, atol=slack * float(want.abs().max()))


def assert_same_answers(found: Any, want: Any, slack: float) -> None:
    assert_close(found[0], want[0], slack)
    assert_close(found[1].norms, want[1].norms, slack)
    for asked in ("grad", "mean"):
        for name, g in getattr(want[1], asked).items():
            assert_close(getattr(found[1], asked)[name], g, slack)


# Answers


@pytest.mark.parametrize("how", ["folded", "second", "shifted"])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Tokens, Untied])
def test_calls_that_measure_and_calls_with_a_plan(kind, low, how, replaced, visits):
    model, other = made(kind), made(kind)
    for call in range(5):
        ids, target = batch(call)
        found = answered(model, ids, target, low=low, how=how)
        assert found[0].dtype == torch.float32
        assert_same_answers(
            found, by_torch(partial(answered, other, ids, target, low=low, how=how)), 2e-3 if low else 2e-6
        )
    assert replaced == [True, False] * 5
    assert visits == [True] * 4  # the third and the fifth call of each model


def loop(kind: type[nn.Module], ids: Tensor, target: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The gradients of each sample in float64, and their norms."""
    samples = [(ids[i : i + 1], target[i : i + 1]) for i in range(B)]
    want = oracle.loop(made(kind).double(), token_losses, samples)
    return want, torch.stack([g.flatten(1).square().sum(1) for g in want.values()]).sum(0).sqrt()


def check_gradients(kind: type[nn.Module]) -> None:
    model, (ids, target) = made(kind), batch()
    with eachgrad.record(model, check=True) as tape:
        losses = token_losses(model, ids, target)
    grads = tape.backward(losses)
    want, norms = loop(kind, ids, target)
    oracle.assert_same({name: grads[name].dense() for name in want}, want, 1e-5)
    torch.testing.assert_close(grads.norms().double(), norms, rtol=1e-5, atol=1e-7)
    assert grads.norms()[3] == 0  # all of its targets are ignored
    assert grads.receipt().deviation < 1e-5


def check_norms_under_autocast() -> None:
    torch.manual_seed(0)
    ids, target = torch.randint(CLASSES, (B, 64)), torch.randint(CLASSES, (B, 64))
    _, answer = answered(made(Untied), ids, target, low=True)
    torch.testing.assert_close(answer.norms.double(), loop(Untied, ids, target)[1], rtol=5e-3, atol=0.0)


@pytest.mark.parametrize("kind", [Tokens, Untied])
def test_gradients_are_those_of_a_loop(kind, replaced):
    check_gradients(kind)
    assert replaced == [True]


def test_norms_under_autocast_are_those_of_a_loop(replaced):
    check_norms_under_autocast()
    assert replaced == [True]


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_an_error_of_one_percent_is_seen(low, replaced, monkeypatch):
    original = eager_entropy._gradient
    monkeypatch.setattr(eager_entropy, "_gradient", lambda *args: original(*args) * 1.01)
    ids, target = batch()
    found = answered(made(Untied), ids, target, low=low)
    want = by_torch(partial(answered, made(Untied), ids, target, low=low))
    with pytest.raises(AssertionError, match="not close"):
        assert_same_answers(found, want, 2e-3 if low else 2e-6)
    with pytest.raises(AssertionError, match="not close" if low else "relative errors"):
        check_norms_under_autocast() if low else check_gradients(Untied)


@pytest.mark.parametrize("enabled", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_losses_and_gradients_have_torchs_dtypes(dtype, enabled, replaced):
    torch.manual_seed(0)
    logits, target = torch.randn(6, CLASSES).to(dtype).requires_grad_(), torch.randint(CLASSES, (6,))

    def run(op: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", enabled or torch.bfloat16, enabled=enabled is not None):
            losses = op(logits, target, reduction="none")
        return losses.detach(), torch.autograd.grad(losses.sum(), logits)[0]

    for got, want in zip(run(eager_entropy.row_losses), run(F.cross_entropy), strict=True):
        slack = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 1e-6}[dtype]
        assert_close(got, want, slack)


@pytest.mark.parametrize("ignored", [-100, 4])
def test_targets_that_are_ignored(ignored, replaced):
    model, (ids, target) = made(Tokens), batch()
    options = {"ignore_index": ignored}
    target = target.where(target >= 0, ignored)
    for given in (target, torch.full_like(target, ignored)):

        def run(given: Tensor = given) -> tuple[Tensor, Tensor]:
            with eachgrad.record(model) as tape:
                losses = token_losses(model, ids, given, **options)
            return losses.detach(), tape.backward(losses).norms()

        for got, want in zip(run(), by_torch(run), strict=True):
            assert_close(got, want, 2e-6)
    assert replaced == [True, False] * 2


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_target_that_is_no_class_is_never_left_out(wrong, replaced):
    """It would be a NaN, which a clipped sum may be asked to leave out. torch raises as well, and a GPU asserts."""
    model, (ids, target) = made(Tokens), batch()
    target = target.clamp(min=0)
    target[1, 2] = wrong
    with pytest.raises(RuntimeError, match="a target of cross_entropy is none of 13 classes"), eachgrad.record(model):
        token_losses(model, ids, target)
    with pytest.raises(IndexError):
        by_torch(lambda: token_losses(model, ids, target))
    with eachgrad.record(model) as tape:  # unless it is to be ignored
        losses = token_losses(model, ids, target, ignore_index=wrong)
    assert bool(tape.backward(losses).norms().isfinite().all())


# Ways to ask


@pytest.mark.parametrize("options", [{"check": True}, {"memory": 0}], ids=str)
def test_options_of_a_recording(options, replaced, visits):
    model, other = made(Tokens), made(Tokens)
    for call in range(3):
        ids, target = batch(call)
        found = answered(model, ids, target, **options)
        assert_same_answers(found, by_torch(partial(answered, other, ids, target)), 2e-6)
    if "memory" in options:  # two backwards over one graph, the second of which frees it, and one of the other model
        assert visits == [False, True, True]


@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_a_loss_that_is_one_number(declared, replaced):
    model, (ids, target) = made(Tokens), batch()
    target = target.clamp(min=0)
    norms = answered(model, ids, target)[1].norms

    def norms_of_number(loss: Callable[[Tensor], Tensor], reduction: str = declared) -> Tensor:
        with eachgrad.record(model) as tape:
            out = loss(model(ids))
        return tape.backward(out, reduction).norms()

    def whole(logits: Tensor, how: str) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction=how)

    replaced.clear()
    scale = 1 if declared == "mean" else T
    assert_close(norms_of_number(partial(whole, how=declared)), norms * scale, 2e-6)
    assert replaced == [False]  # torch's own
    reduce = torch.mean if declared == "mean" else torch.sum
    assert_close(norms_of_number(lambda logits: reduce(whole(logits, "none"))), norms * scale, 2e-6)
    assert replaced == [False, True]
    with pytest.raises(CaptureError, match="loss_reduction="):
        norms_of_number(lambda logits: reduce(whole(logits, "none")), "sum" if declared == "mean" else "mean")
    with pytest.raises(CaptureError, match="mixes samples"):
        norms_of_number(lambda logits: reduce(whole(logits, "none").view(B, T).softmax(0)))
    replaced.clear()
    with pytest.raises(CaptureError, match="mixes samples"):  # whose classes are the samples
        norms_of_number(
            lambda logits: F.cross_entropy(_turned(logits), torch.zeros(CLASSES).long(), reduction="none").sum()
        )
    assert replaced == [True]


def _turned(logits: Tensor) -> Tensor:
    return logits[:, 0].mT.contiguous()  # (classes, B)


def test_create_graph_goes_torchs_way(replaced):
    model, (ids, target) = made(Tokens), batch()
    with eachgrad.record(model, create_graph=True) as tape:
        losses = token_losses(model, ids, target)
    tape.backward(losses).norms()[:3].sum().backward()
    assert not replaced
    assert bool(model.layer.weight.grad.any())


class Inside(nn.Module):
    """Losses that are computed in the model, with or without a checkpoint around head and loss."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.head = how, nn.Linear(d, d), nn.Linear(d, CLASSES)

    def losses(self, h: Tensor, target: Tensor) -> Tensor:
        return (
            F.cross_entropy(self.head(h).flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        if not self.how:
            return self.losses(h, target)
        return checkpoint(self.losses, h, target, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("alone", [False, True], ids=["with the head", "alone"])
@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
def test_a_checkpoint_around_it(how, alone, replaced):
    kind = LossAlone if alone else Inside
    model, other, (_, target) = made(partial(kind, how)), made(partial(kind, "")), batch()
    for _ in range(6):  # from the third on some stream
        x = torch.randn(B, T, d)

        def run(model: nn.Module, x: Tensor = x) -> Any:
            with eachgrad.record(model) as tape:
                losses = model(x, target)
            return tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(0.1))

        found, want = run(model), by_torch(partial(run, other))
        assert_close(found.norms, want.norms, 2e-6)
        for name, g in want.grad.items():
            assert_close(found.grad[name], g, 2e-6)
    assert True in replaced


class LossAlone(Inside):
    """No parameter is in the checkpoint: it is the library's own node that is made again."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.body(x)))
        if not self.how:
            return self.of(logits, target)
        return checkpoint(self.of, logits, target, use_reentrant=self.how == "reentrant")

    def of(self, logits: Tensor, target: Tensor) -> Tensor:
        losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")
        return losses.view(target.shape).sum(1)


class Mean(Tokens):
    """Each sample sees the mean of all, which no gradient shows, or one does."""

    detached = False

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layer(self.table(ids))
        mean = h.mean(0, keepdim=True)
        return F.linear(h - (mean.detach() if self.detached else mean), self.table.weight)


@pytest.mark.parametrize("where", ["model", "detached", "losses"])
def test_samples_that_meet_are_refused(where, replaced):
    model, (ids, target) = made(Tokens if where == "losses" else Mean), batch()
    if where == "detached":
        model.detached = True
    with eachgrad.record(model) as tape:
        losses = token_losses(model, ids, target)
        if where == "losses":
            losses = losses - losses.mean()
    assert replaced == [True]
    with pytest.raises(CaptureError, match="mixes the samples"):
        tape.ask(losses, norms=eachgrad.norms())


# What it keeps, and leaves alone


def test_nothing_wide_is_kept(replaced):
    model, (ids, target) = made(Tokens), batch()

    def saved() -> list[tuple[tuple[int, ...], torch.dtype]]:
        found = []
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda t: found.append((tuple(t.shape), t.dtype)) or t, lambda t: t
            ),
            half(True),
            eachgrad.record(model) as tape,
        ):
            losses = token_losses(model, ids, target)
        tape.ask(losses, norms=eachgrad.norms())
        return found

    def wide(kept: list[tuple[tuple[int, ...], torch.dtype]]) -> int:
        return sum(shape == (B * T, CLASSES) and dtype == torch.float32 for shape, dtype in kept)

    kept = saved()
    assert wide(kept) == 0
    assert ((B * T, CLASSES), torch.bfloat16) in kept
    assert wide(by_torch(saved)) > 0


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_the_head_gets_rows_with_room_behind_them(low, replaced):
    """With no copy on the way: products, and kernels that copy tiles, want rows at multiples of sixteen bytes."""
    model, (ids, target) = made(Untied), batch()
    with half(low), eachgrad.record(model) as tape:
        losses = token_losses(model, ids, target)
    block = tape.backward(losses)["head.weight"].block
    assert block.left.shape == (B, T, CLASSES)
    assert block.left.stride() == (T * 16, 16, 1)
    assert block.left.dtype == (torch.bfloat16 if low else torch.float32)


def test_the_model_is_left_as_it_was(replaced):
    model, (ids, target) = made(Tokens), batch()
    before = {name: (p.clone(), p.requires_grad, p._version) for name, p in model.named_parameters()}
    answered(model, ids, target)
    for name, p in model.named_parameters():
        value, trained, version = before[name]
        assert torch.equal(p, value)
        assert (p.requires_grad, p._version, p.grad, p.grad_fn) == (trained, version, None, None)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    torch.testing.assert_close(model(ids).softmax(-1).sum(-1), torch.ones(B, T))


def test_losses_may_be_written_into_and_logits_may_not(replaced):
    model, (ids, target) = made(Tokens), batch()
    for changed in ("losses", "logits"):
        with eachgrad.record(model) as tape:
            logits = model(ids).flatten(0, 1)
            each = F.cross_entropy(logits, target.flatten(), reduction="none")
            if changed == "losses":
                each[0] = 0.0
                each.mul_(2.0)
            else:
                logits.mul_(2.0)
            losses = each.view(B, T).sum(1)
        if changed == "losses":
            assert tape.backward(losses).norms().isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                tape.backward(losses)


def test_a_backward_of_the_users_own(replaced):
    """Once, twice over the same graph, and differentiated again."""
    model, (_, target) = made(partial(Inside, "")), batch()
    x = torch.randn(B, T, d)

    def run() -> list[Tensor]:
        given = x.clone().requires_grad_()
        with eachgrad.record(model):
            losses = model(given, target)
        (losses.sum()).backward(retain_graph=True)
        (again,) = torch.autograd.grad(losses.square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(again.square().sum(), given)
        return [given.grad, again.detach(), second]

    for got, want in zip(run(), by_torch(run), strict=True):
        assert_close(got, want, 1e-5)
    assert replaced == [True, False]


# What goes torch's way


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LEFT: dict[str, tuple[dict[str, Any], Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], Callable[[], Any]]] = {
    "weight": ({"weight": torch.ones(CLASSES)}, lambda x, y: (x, y), nullcontext),
    "smoothed": ({"label_smoothing": 0.1}, lambda x, y: (x, y), nullcontext),
    "mean": ({"reduction": "mean"}, lambda x, y: (x, y), nullcontext),
    "sum": ({"reduction": "sum"}, lambda x, y: (x, y), nullcontext),
    "chances": ({}, lambda x, y: (x, F.one_hot(y, CLASSES).to(x.dtype)), nullcontext),
    "one row": ({}, lambda x, y: (x[0], y[0]), nullcontext),
    "float64": ({}, lambda x, y: (x.double(), y), nullcontext),
    "no rows": ({}, lambda x, y: (x[:0], y[:0]), nullcontext),
    "columns": ({}, lambda x, y: (x.mT.contiguous().mT, y), nullcontext),
    "no gradient": ({}, lambda x, y: (x.detach(), y), nullcontext),
    "no_grad": ({}, lambda x, y: (x, y), torch.no_grad),
    "a function mode": ({}, lambda x, y: (x, y), Watching),
    "a dispatch mode": ({}, lambda x, y: (x, y), Dispatching),
    "forward derivatives": ({}, lambda x, y: (x, y), forward_ad.dual_level),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch(name, replaced):
    options, given, around = LEFT[name]
    x, y = given(torch.randn(6, CLASSES).requires_grad_(), torch.randint(CLASSES, (6,)))
    with around():
        assert eager_entropy.row_losses(x, y, **{"reduction": "none", **options}) is None
    assert (
        eager_entropy.row_losses(
            torch.randn(6, CLASSES).requires_grad_(), torch.randint(CLASSES, (6,)), reduction="none"
        )
        is not None
    )


def test_a_default_device_and_a_count_of_flops_do_not_matter(replaced):
    x, y = torch.randn(6, CLASSES).requires_grad_(), torch.randint(CLASSES, (6,))
    with torch.device("cpu"):
        assert eager_entropy.row_losses(x, y, reduction="none") is not None
    model, (ids, target) = made(Tokens), batch()
    replaced.clear()
    eachgrad.explain(
        model, lambda out, y: F.cross_entropy(out.movedim(-1, 1), y, reduction="none").mean(1), ids, target
    )
    assert replaced == [True]


def test_only_on_a_gpu_and_for_many_classes():
    assert not eager_entropy.is_large(torch.empty(4, 1 << 16))
    x, y = torch.randn(2, 1 << 13).requires_grad_(), torch.randint(CLASSES, (2,))
    assert eager_entropy.row_losses(x, y, reduction="none") is None


def test_a_parameter_among_the_arguments_goes_torchs_way(replaced):
    """Its use is recorded, and not what is computed from it alone."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logits = nn.Parameter(torch.randn(T, CLASSES))

        def forward(self, x: Tensor) -> Tensor:
            fixed = F.cross_entropy(self.logits, torch.arange(T), reduction="none")
            return (x * fixed).sum(1)

    model = Scaled()
    with eachgrad.record(model) as tape:
        losses = model(torch.randn(B, T))
    assert tape.backward(losses).norms().shape == (B,)
    assert not replaced


def test_what_judges_a_compiled_step_goes_torchs_way(replaced, fresh_compiler):
    """Or an error of a kernel would be in both."""
    model = made(Tokens)
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)  # noqa: E731
    ask = eachgrad.compile(model, loss, norms=eachgrad.norms(), backend="aot_eager")
    for call in range(4):
        ask(*batch(call))
    assert not ask.reasons()
    assert not replaced


def test_nothing_is_left_behind(replaced):
    """A tape with it is gone when nobody has it any more, and is in no cycle."""
    model, (ids, target) = made(Tokens), batch()
    gc.collect()
    gc.disable()
    try:
        with eachgrad.record(model) as tape:
            losses = token_losses(model, ids, target)
        tape.ask(losses, norms=eachgrad.norms())
        gone = ref(tape.recorder)
        del tape, losses
        assert gone() is None
    finally:
        gc.enable()


# The kernels


def scaled_exactly(losses: Callable[..., Tensor], gradient: Callable[..., Tensor]) -> None:
    """Samples are told apart by powers of two, which no rounding may see."""
    torch.manual_seed(0)
    for dtype, powers in ((torch.float32, (1, 61)), (torch.bfloat16, (1, 61)), (torch.float16, (1, 4))):
        logits, target, g = (4 * torch.randn(6, 300)).to(dtype), torch.randint(300, (6,)), torch.rand(6) / 5
        sums = losses(logits, target, -100)
        plain = gradient(logits, sums, g, target, -100)
        for k in powers:
            marked = gradient(logits, sums, g * 2.0**k, target, -100)
            exact = plain.double() * 2.0**k
            # float16 has numbers that are too small for all of its digits.
            clear = (plain.double().abs() >= torch.finfo(dtype).tiny) | (plain == 0)
            assert bool(plain.any())
            assert dtype == torch.float16 or bool(clear.all())
            assert torch.equal(marked.double()[clear & (plain != 0)], exact[clear & (plain != 0)]), (dtype, k)


def test_powers_of_two_pass_torchs_own_ops():
    scaled_exactly(eager_entropy._losses, eager_entropy._gradient)


def interpreted() -> None:
    """Recordings by the kernels; to be called where Triton's interpreter is on."""
    from eachgrad.kernels import entropy as kernel

    scaled_exactly(kernel.launched, kernel.launched_gradient)
    eager_entropy.direct = lambda op, launched, like, *args: launched(*args)
    model, other = made(Tokens), made(Tokens)
    for call in range(3):
        for how in ("folded", "shifted"):
            ids, target = batch(call)
            eager_entropy.is_large = lambda logits: True
            found = answered(model, ids, target, how=how)
            eager_entropy.is_large = lambda logits: False
            assert_same_answers(found, answered(other, ids, target, how=how), 2e-6)


def test_the_kernels_without_a_gpu():
    assert_as_in_float64("from test_entropy_eager import interpreted; interpreted()")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("how", ["folded", "second"])
@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_on_a_gpu(low, how):
    """Ten thousand classes, as `is_large` has it, by the kernels and by torch's own ops."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10_001)).cuda()
    x, target = torch.randn(8, 32, 64, device="cuda"), torch.randint(10_001, (8, 32), device="cuda")
    target[0, 1] = -100

    def run(wanted: bool) -> tuple[Tensor, Any]:
        with torch.autocast("cuda", torch.bfloat16, enabled=low), eachgrad.record(model) as tape:
            losses = token_losses(model, x, target, how)
        assert ("RowEntropiesBackward" in {node.name() for node in graph_nodes([losses.grad_fn])}) is wanted
        queries = {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(0.1), "mean": eachgrad.mean()}
        return losses.detach(), tape.ask(losses, **queries)

    for _ in range(3):
        # torch rounds the logarithms to bfloat16 before they become float32.
        assert_same_answers(run(True), by_torch(partial(run, False)), 2e-2 if low else 1e-5)
