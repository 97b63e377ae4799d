"""Cross entropies of a traced graph, rewritten: the numbers stay, and what is none is left alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import eachgrad
from eachgrad import laying
from eachgrad import step as step_module
from eachgrad import traced as traced_module
from eachgrad.alignment import align
from eachgrad.entropy import entropies, is_large, write_over
from eachgrad.tidy import merge

B, T, d, CLASSES = 3, 5, 16, 13


def losses_of(how: str, logits: Tensor, target: Tensor) -> Tensor:
    """One loss for each row of (B T, classes), by cross entropies and by what only looks like one."""
    match how:
        case "ignore_index":
            return F.cross_entropy(logits, target.where(target >= 0, 4), reduction="none", ignore_index=4)
        case "smoothed":
            return F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
        case "weighted":
            return F.cross_entropy(logits, target, reduction="none", weight=torch.linspace(0.5, 2.0, CLASSES))
        case "mean":
            return F.cross_entropy(logits, target).expand(len(logits))
        case "chances beside":
            logs = F.log_softmax(logits, 1)
            return F.nll_loss(logs, target, reduction="none") + 0.1 * logs.exp().square().sum(1)
        case "columns":
            return F.nll_loss(F.log_softmax(logits, 0), target, reduction="none")
        case "twice":
            return F.cross_entropy(logits, target, reduction="none") + F.cross_entropy(
                2 * logits, target, reduction="none"
            )
        case "read later":
            return 0.1 * logits.logsumexp(1).square() + F.cross_entropy(logits, target, reduction="none")
        case "squared":
            return F.cross_entropy(logits, target, reduction="none").square()
    return F.cross_entropy(logits, target, reduction="none")


REWRITTEN = {"plain": 1, "ignore_index": 1, "twice": 2, "read later": 1, "squared": 1}
LEFT = ["smoothed", "weighted", "mean", "chances beside", "columns"]


def step(how: str, dtype: torch.dtype, x: Tensor, w: Tensor, target: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """The losses of samples, and the gradients of their weighted sum."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    logits = (x @ w.t()).view(-1, CLASSES).to(dtype)
    losses = losses_of(how, logits, target.view(-1)).view(B, T).mean(1)
    return losses.detach(), *torch.autograd.grad(losses, [x, w], c)


def problem(dtype: torch.dtype) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    target = torch.randint(CLASSES, (B, T))
    target[0, 1], target[2] = -100, 4
    return torch.randn(B, T, d).to(dtype), torch.randn(CLASSES, d).to(dtype), target, torch.rand(B) + 0.5


def traced(how: str, dtype: torch.dtype, args: tuple[Tensor, ...]) -> GraphModule:
    found = make_fx(partial(step, how, dtype), tracing_mode="fake")(*args)
    merge(found.graph)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [*REWRITTEN, *LEFT])
def test_the_numbers_stay(how, dtype):
    args = problem(dtype)
    graph = traced(how, torch.float32, args)
    want = graph(*args)
    assert entropies(graph.graph, large=lambda _: True) == REWRITTEN.get(how, 0)
    graph.graph.lint()
    graph.recompile()
    assert ("entropy_gradient" in graph.code) == (how in REWRITTEN)
    assert ("log_softmax" in graph.code) == (how in LEFT)
    slack = 1e-6 if dtype == torch.float32 else 2**-7
    for a, b in zip(graph(*args), want, strict=True):
        torch.testing.assert_close(a, b, rtol=slack, atol=slack * float(b.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", REWRITTEN)
def test_the_gradient_is_padded_and_lies_where_the_logits_were(how, dtype):
    args = problem(dtype)
    graph = traced(how, torch.float32, args)
    want = graph(*args)
    entropies(graph.graph, large=lambda _: True)
    laying._propagate(graph, graph.graph)
    assert align(graph.graph, slow=lambda value: value.dtype == dtype)
    laying._propagate(graph, graph.graph)
    over = write_over(graph.graph)
    graph.graph.lint()
    graph.recompile()
    # Logits that something else reads stay. Where two gradients are added, what comes out is padded anew.
    assert over == (how not in ("read later", "twice"))
    assert graph.code.count("aten.cat") == {"read later": 2, "twice": 2}.get(how, 1)  # the weight
    slack = 1e-6 if dtype == torch.float32 else 2**-7
    for a, b in zip(graph(*args), want, strict=True):
        torch.testing.assert_close(a, b, rtol=slack, atol=slack * float(b.abs().max()))


def cast_step(when: str, x: Tensor, w: Tensor, target: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    logits = (x @ w.t()).view(-1, CLASSES)
    logs = F.log_softmax(logits.float() if when == "before" else logits, 1)
    logs = logs.float() if when == "after" else logs
    losses = F.nll_loss(logs, target.view(-1), reduction="none").view(B, T).sum(1)
    return losses.detach(), *torch.autograd.grad(losses, [x, w], c.to(losses.dtype))


@pytest.mark.parametrize("when", ["before", "after", "never"])
def test_wherever_it_is_cast(when):
    """Autocast makes float32 of logits on a CPU, and of their logarithms on a GPU."""
    *args, c = problem(torch.bfloat16)
    args = (*args, c.bfloat16().float())  # or it would be rounded with the losses
    graph = make_fx(partial(cast_step, when), tracing_mode="fake")(*args)
    merge(graph.graph)
    before, wide = graph(*args), cast_step("before", *args)  # which has float32 from the logits on
    assert entropies(graph.graph, large=lambda _: True) == 1
    graph.graph.lint()
    graph.recompile()
    assert "log_softmax" not in graph.code
    for a, b, want in zip(graph(*args), before, wide, strict=True):
        assert a.dtype == b.dtype
        slack = 1e-6 if a.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(a.float(), want.float(), rtol=0.0, atol=slack * float(want.abs().max()))


def cancelled_step(x: Tensor, w: Tensor, target: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """The same loss twice, once with the other sign: nothing is left but what rounding leaves."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    logits = (x @ w.t()).view(-1, CLASSES).float()
    by_hand = logits.logsumexp(1) - logits.gather(1, target.clamp(min=0).view(-1, 1))[:, 0]
    losses = F.cross_entropy(logits, target.clamp(min=0).view(-1), reduction="none") - by_hand
    losses = losses.view(B, T).mean(1)
    return losses.detach(), *torch.autograd.grad(losses, [x, w], c)


def test_a_gradient_that_is_added_to_another_is_not_rounded_before():
    args = problem(torch.bfloat16)
    graph = make_fx(cancelled_step, tracing_mode="fake")(*args)
    merge(graph.graph)
    before = max(float(g.abs().max()) for g in graph(*args))
    assert entropies(graph.graph, large=lambda _: True) == 1
    graph.recompile()
    after = max(float(g.abs().max()) for g in graph(*args))
    assert before < 1e-5
    assert after < 1e-5  # rounded to sixteen bits before, it would be 1e-3


def test_only_where_it_pays():
    args = problem(torch.float32)
    assert entropies(traced("plain", torch.float32, args).graph) == 0
    assert not is_large(torch.empty(4, 1 << 16))  # not on a GPU


class Tokens(nn.Module):
    """Tied to its head, a table has both terms from one gradient of the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(CLASSES, d), nn.Linear(d, d)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.layer(self.table(ids)), self.table.weight)


class TwoHeads(Tokens):
    """Their gradients are parts of one, which is aligned as it is: nothing is cut off, and a part is no whole."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Linear(d, 16 - CLASSES, bias=False), nn.Linear(d, CLASSES, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.layer(self.table(ids)).flatten(0, 1)
        return torch.cat([self.few(h), self.many(h)], -1).unflatten(0, ids.shape)


class OneEach(Tokens):
    """No loss is added up: it is read where it is computed."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.layer(self.table(ids).mean(1, keepdim=True)), self.table.weight)


def token_losses(model: nn.Module, ids: Tensor, target: Tensor, half: bool, how: str = "") -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        logits = model(ids)
    wide = logits if half and how == "sixteen bits" else logits.float()
    target = target[:, -logits.shape[1] :]
    losses = F.cross_entropy(wide.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    if how == "z":  # the compiler puts off what it reads of the logits for this
        losses = 0.1 * wide.logsumexp(-1).square() + losses
    return losses[:, 0] if losses.shape[1] == 1 else losses.sum(1)


MODELS = {
    "tied": (Tokens, "", 1), "sixteen bits": (Tokens, "sixteen bits", 1), "two heads": (TwoHeads, "", None),
    "one each": (OneEach, "", 1), "z": (Tokens, "z", 0),
}  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_compiled_step(name, half, dynamic, monkeypatch, fresh_compiler):
    assert_as_eagerly(name, half, dynamic, monkeypatch)


@pytest.mark.parametrize("name", ["tied", "sixteen bits"])
def test_rows_that_a_compiler_would_leave_gaps_between(name, monkeypatch, fresh_compiler):
    """As it does on a GPU from 1024 numbers on: the gradient is written over the logits all the same."""
    with torch._inductor.config.patch(disable_padding_cpu=False, padding_stride_threshold=0):
        assert_as_eagerly(name, True, False, monkeypatch)


def assert_as_eagerly(name: str, half: bool, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made, how, wanted = MODELS[name]
    counts: list[int] = []
    over: list[int] = []

    def rewritten(graph):
        counts.append(entropies(graph, large=lambda _: True))
        return counts[-1]

    monkeypatch.setattr(laying, "entropies", rewritten)
    monkeypatch.setattr(laying, "align", partial(align, slow=lambda value: CLASSES in value.shape[-2:]))
    monkeypatch.setattr(step_module, "write_over", lambda graph: over.append(write_over(graph)) or over[-1])
    given: list[dict] = []
    own = step_module.in_order
    monkeypatch.setattr(step_module, "in_order", lambda *a, **k: given.append(own(*a, **k)) or given[-1])
    monkeypatch.setattr(traced_module, "difference", lambda *_: "")  # or what is wrong would be answered eagerly
    torch.manual_seed(0)
    model = made()
    queries = {"grad": eachgrad.clipped_sum(0.7), "norms": eachgrad.norms()}
    ask = eachgrad.compile(model, partial(token_losses, half=half, how=how), dynamic=dynamic, **queries)
    for call in range(7):
        n = 4 + call % 3 if dynamic else 4
        ids, target = torch.randint(CLASSES, (n, T)), torch.randint(CLASSES, (n, T))
        target[0, 2] = -100
        found = ask(ids, target)
        with eachgrad.record(model) as tape:
            losses = token_losses(model, ids, target, half, how)
        want = tape.ask(losses, **queries)
        slack = 2e-2 if half else 1e-5
        torch.testing.assert_close(found.losses, losses.detach(), rtol=slack, atol=slack)
        torch.testing.assert_close(found.norms, want.norms, rtol=slack, atol=slack)
        for parameter, g in want.grad.items():
            torch.testing.assert_close(found.grad[parameter], g, rtol=slack, atol=slack * float(g.abs().max()))
    assert not ask.reasons()
    assert set(counts) == {1}
    assert wanted is None or set(over) == {wanted}
    # From 1024 numbers on the compiler would leave gaps between rows that are written over.
    assert [options["options"].get("comprehensive_padding", True) for options in given] == [not n for n in over]
