"""Every refusal, by a program that meets it: what its message says is wrong, where, and what to do next.

A refusal about an op inside the model names the parameter, the op, `file:line` of the user's code and the path of the
module. One about the loss or about an argument says which, and what was found. Each says the next step.
`test_every_refusal_has_a_row` reads the source, and fails for a refusal that no program here meets.
"""

from __future__ import annotations

import ast
import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from pathlib import Path
from traceback import walk_tb
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import eachgrad
from cases.base import Net, linear, made, net, score, weight
from eachgrad import Accumulator, CaptureError, PerSampleGrads, Tape, UnsupportedOp, call_for_per_sample_grads, record
from eachgrad.queries import Query
from eachgrad.rules import RULES
from eachgrad.testing import check_rule

pytestmark = [
    pytest.mark.usefixtures("double"),
    pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning"),
]
B, T, d = 3, 4, 5
SOURCE = Path(eachgrad.__file__).parent
KINDS = {"CaptureError", "UnsupportedOp", "Unclear", "Halved", "ValueError", "TypeError", "RuntimeError"}
# PyTorch's own names and wording, which tests/test_expanded_weight_tensor.py holds; tests/private has its own list; what
# kernels refuse no user's program can meet, and tests/test_kernel_*.py do.
APART = {SOURCE / "expanded_weights", SOURCE / "private", SOURCE / "kernels"}


@dataclass(frozen=True)
class Refusal:
    """A program that is refused, and the words of its message."""

    name: str
    error: type[Exception]
    program: Callable[[], object]
    found: tuple[str, ...]  # what is wrong: the parameter, the op and the place, or the argument and its value
    then: str  # what to do next
    lacks: tuple[str, ...] = ()  # words of these that the message ought to have and has not

    def __str__(self) -> str:
        return self.name.replace(" ", "_")


# Programs


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


X, TOKENS, IDS = numbers(B, d), numbers(B, T, d), partial(torch.randint, 4, (B, T))


def with_nan(*shape: int) -> Callable[[], Tensor]:
    """Numbers of which those of sample 1 are NaN."""
    return lambda: torch.randn(shape).index_fill(0, torch.tensor([1]), torch.nan)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(n, d) for n in (2, 4, 3)], layout=torch.jagged)


def nested(make: Callable[[], nn.Module]) -> nn.Module:
    """`make()` at encoder.block, so that names and paths say something."""
    inner = Net(lambda m, *x: m.block(*x), block=make())
    return Net(lambda m, *x: m.encoder(*x), encoder=inner)


def layer() -> nn.Module:
    return nested(net(lambda m, x: m.fc(x), fc=linear(d, d)))


def padded_to(size: int | None, query: eachgrad.queries.Query | None = None, **options: int) -> Callable:
    found = query or eachgrad.norms()
    return eachgrad.compile(layer(), lambda m, x: score(m(x)), pad_to=size, found=found, **options)


def recorded(model: nn.Module, *batch: Tensor, losses: Callable = score, **options: object) -> tuple[Tape, Tensor]:
    with record(model, **options) as tape:
        values = losses(model(*batch))
    return tape, values


def answer(model: nn.Module, *batch: Tensor, losses: Callable = score, **options: object) -> PerSampleGrads:
    tape, values = recorded(model, *batch, losses=losses, **options)
    return tape.backward(values)


def of_losses(losses: Callable, **options: object) -> Callable[[], object]:
    return lambda: answer(layer(), TOKENS(), losses=losses, **options)


def of_number(loss: Callable, reduction: str | None = "sum", make: Callable = layer, x: Callable = X) -> Callable:
    """The same for a loss that is one number."""

    def program() -> object:
        tape, value = recorded(make(), x(), losses=loss)
        return tape.backward(value, reduction)

    return program


def called(
    loss: Callable = torch.sum, make: Callable = layer, x: Callable = X, backward: Callable = Tensor.backward,
    **options: object,
) -> Callable[[], object]:  # fmt: skip
    """call_for_per_sample_grads, and the backward of the caller."""
    return lambda: backward(loss(call_for_per_sample_grads(make(), **options)(x())))


def asked(question: Callable[[PerSampleGrads], object], x: Callable = TOKENS) -> Callable[[], object]:
    return lambda: question(answer(layer(), x()))


def gathered(query: Query, *batches: tuple[nn.Module, Tensor]) -> Accumulator:
    total = Accumulator(found=query)
    for model, x in batches:
        tape, losses = recorded(model, x)
        tape.ask(losses, into=total)
    return total


def in_the_block(then: Callable[[Tape, Tensor], object]) -> Callable[[], object]:
    def program() -> object:
        model = layer()
        with record(model) as tape:
            return then(tape, score(model(X())))

    return program


def afterwards(then: Callable[[Tape, Tensor], object], **options: object) -> Callable[[], object]:
    return lambda: then(*recorded(layer(), X(), **options))


def with_hook(register: Callable, run: Callable) -> Callable[[], object]:
    def program() -> object:
        model = layer()
        register(model.encoder.block.fc.weight, lambda _: None)
        return run(model)

    return program


# Ops of which nothing is known, and things that hide their ops


@torch.library.custom_op("eachgrad_messages::scale", mutates_args=())
def scale(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def _scale_backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    if float(g.abs().max()) == 0.0:  # what vmap cannot decide for all samples
        return g, torch.zeros_like(w)
    return g * w, (g * x).reshape(-1, x.shape[-1]).sum(0)


scale.register_autograd(_scale_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
SCALE = "torch.ops.eachgrad_messages.scale.default"


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g * w, (g * x).reshape(-1, x.shape[-1]).sum(0)


class ByHand(torch.autograd.Function):
    """A layer whose backward sets the gradient of its weight itself."""

    @staticmethod
    def forward(ctx, x: Tensor, inner: nn.Linear) -> Tensor:
        ctx.save_for_backward(x)
        ctx.inner = inner
        return inner(x)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        ctx.inner.weight.grad = g.flatten(0, -2).mT @ x.flatten(0, -2)
        return g @ ctx.inner.weight, None


class ByBackward(ByHand):
    """A checkpoint made by hand: its backward runs a backward."""

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.inner(x), g)  # here
        assert x.grad is not None
        return x.grad, None


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w


class Centred(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.w


class Named(Plain):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"out": x * self.w}


def plus(x: Tensor, w: Tensor) -> Tensor:
    return x + w


def scripted(value):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are deprecated, and still there
        return torch.jit.script(value)


def encoder() -> nn.Module:
    """An encoder that does not learn, before a layer that does."""
    frozen = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1).requires_grad_(False)
    padded = torch.arange(T).expand(B, T) >= 3
    return nested(
        lambda: Net(lambda m, x: m.fc(m.inner(x, src_key_padding_mask=padded)), fc=nn.Linear(4, 2), inner=frozen.eval())
    )


# Forwards of more than one line; the one that is refused is marked


def changed_later(m: nn.Module, x: Tensor) -> Tensor:
    h = x.clone()
    out = m.fc(h)  # here
    h.mul_(2)
    return out


def penalised(m: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    (g,) = torch.autograd.grad(m.fc(x).sum(), x, create_graph=True)  # here
    return g


def kept_apart(m: nn.Module, x: Tensor) -> Tensor:
    """A weight that is derived inside a reentrant checkpoint."""
    return checkpoint(
        lambda h: h * m.w.exp(),  # here
        x.requires_grad_(),
        use_reentrant=True,
    )


def half_and_half(m: nn.Module, x: Tensor) -> Tensor:
    rows = m.table(torch.arange(B * T).view(B, T) % 7)
    return x * scale(rows, m.w)  # here


# What is done with a model after it was built


def stepped_before(model: nn.Module, x: Tensor) -> object:
    tape, losses = recorded(model, x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return tape.backward(losses)


def without_a_call(model: nn.Module, x: Tensor) -> object:
    with record(model) as tape:
        pass
    return tape.backward(score(model(x)))


def penalty_outside(model: nn.Module, x: Tensor) -> object:
    tape, losses = recorded(model, x)
    return tape.backward(losses + Product.apply(torch.ones(d), model.encoder.block.w).sum())


def slope_outside(model: nn.Module, x: Tensor) -> object:
    with record(model) as tape:
        out = model(x.requires_grad_())
    (g,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return tape.backward(g.square().sum(1))


def doubled_in_place(out: Tensor) -> Tensor:
    out.register_hook(lambda g: g.mul_(2))
    return out


def by_a_wrong_rule(model: nn.Module, x: Tensor) -> object:
    rule = RULES[F.linear]
    twice = replace(rule, function=wraps(rule.function)(lambda g, *args: rule.function(2 * g, *args)))
    with mock.patch.dict(RULES, {F.linear: twice}):
        return answer(model, x, check=True)


def two_sizes() -> object:
    model = Net(lambda m, x, y: (m.fc(x).sum((0, 1)) + m.fc(y)).sum(1).expand(7, 7), fc=nn.Linear(d, d))
    tape, out = recorded(model, TOKENS(), torch.randn(7, d), losses=torch.sum)
    return tape.backward(out, "sum")


def part_alone() -> object:
    model = nn.ModuleDict({"part": nn.Linear(d, d)})
    with record(model) as tape:
        loss = model["part"](X()).sum()
    return tape.backward(loss, "sum")


def two_backwards(retain: bool) -> Callable[[], object]:
    def program() -> object:
        model = layer()
        run = call_for_per_sample_grads(model)
        first, second = (run(X()), run(X())) if retain else [run(X())] * 2
        first.sum().backward()
        return second.square().sum().backward()

    return program


def called_twice() -> object:
    run = call_for_per_sample_grads(layer())
    run(X()).sum().backward()
    return run(X())


class Peeking(torch.autograd.Function):
    """A backward that does something else if the first sample has a gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        total = (g * x).sum(0)
        return g * w, total if bool(g[0].any()) else 3 * total


def observed(m: nn.Module, x: Tensor) -> Tensor:
    """Quantisation aware training: the scale is a moving average over what comes in."""
    on, number, limit = torch.tensor([1]), torch.tensor([1.0]), torch.tensor([1.0])
    h = m.fc(x).float()
    return torch.fused_moving_avg_obs_fake_quant(  # here
        h, on, on, -limit, limit, number.clone(), torch.tensor([0], dtype=torch.int32), 0.01, 0, 255, 0
    )  # fmt: skip


def in_your_own_backward() -> None:
    model = Net(lambda m, x: checkpoint(lambda h: Product.apply(h, m.w), m.fc(x), use_reentrant=False),
                w=torch.randn(d), fc=nn.Linear(d, d))  # fmt: skip
    score(eachgrad.call_for_per_sample_grads(model, loss_reduction="sum")(X())).sum().backward()


# The rows


def line_of(body: Callable) -> int:
    """The line of a lambda, or the one marked `# here` in a function."""
    lines, first = inspect.getsourcelines(body)
    marked = [k for k, line in enumerate(lines) if "# here" in line]
    return first + marked[0] if marked and body.__name__ != "<lambda>" else body.__code__.co_firstlineno


def inside(
    name: str, error: type[Exception], body: Callable, parameter: str, op: str, *found: str, then: str,
    module: str = "'encoder.block' (Net)", at: str | None = None, x: Callable = TOKENS, run: Callable = answer,
    lacks: str = "", parts: dict[str, Callable] | None = None, **options: object,
) -> Refusal:  # fmt: skip
    """About `op` on `parameter` (if it is about one) of the module at encoder.block, whose forward is `body`.

    `module` is "" where the place lies in none: the backward of an autograd.Function.

    `lacks` names those of parameter, op, place, module that the message has not, and ought to have.
    """
    parts = {"fc": linear(d, d), "w": weight(d)} | (parts or {})

    def program() -> object:
        return run(nested(net(body, **parts)), x(), **options)

    words = {
        "parameter": f"'encoder.block.{parameter}'" if parameter else "",
        "op": op,
        "place": at or f"at {__file__}:{line_of(body)}",
        "module": f"in module {module}" if module else "",
    }
    missing = tuple(words[kind] for kind in lacks.split())
    return Refusal(name, error, program, (*words.values(), *found), then, missing)


def about(name: str, error: type[Exception], program: Callable, *found: str, then: str, lacks: str = "") -> Refusal:
    """About the loss, or an argument."""
    return Refusal(name, error, program, found, then, (lacks,) if lacks else ())


LINEAR = "torch.nn.functional.linear"
IN_FUNCTION = f"at {__file__}:{Product.forward.__code__.co_firstlineno}"
IN_SCRIPT = "'encoder.block.script' (RecursiveScriptModule)"
IN_FC = "'encoder.block.fc' (Linear)"
# fmt: off
IN_THE_MODEL = [
    inside(
        "op without a rule", UnsupportedOp,
        lambda m, x: scale(m.fc(x), m.w),
        "w", SCALE, "(5,)", "no rule", then='record(fallback="vmap")',
    ),
    inside(
        "op that vmap cannot batch", UnsupportedOp,
        lambda m, x: scale(m.fc(x), m.w),
        "w", SCALE, "cannot be batched", then='record(fallback="loop")', fallback="vmap",
    ),
    inside(
        "batch norm in training", UnsupportedOp,
        lambda m, x: m.norm(m.fc(x)),
        "norm.weight", "batch_norm", "training mode", then="Call eval() on it, or use GroupNorm",
        module="'encoder.block.norm' (BatchNorm1d)", x=X, parts={"norm": made(nn.BatchNorm1d, d)},
    ),
    inside(
        "batch norm without running statistics", UnsupportedOp,
        lambda m, x: m.norm.eval()(m.fc(x)),
        "norm.weight", "batch_norm", "keeps no running statistics", then="Build it with track_running_stats=True",
        module="'encoder.block.norm' (BatchNorm1d)", x=X,
        parts={"norm": made(nn.BatchNorm1d, d, track_running_stats=False)},
    ),
    inside(
        "embedding bag scaled by frequencies", UnsupportedOp,
        lambda m, x: m.table(x),
        "table.weight", "embedding_bag", "scale_grad_by_freq", then="Use Embedding",
        module="'encoder.block.table' (EmbeddingBag)", x=IDS,
        parts={"table": made(nn.EmbeddingBag, 4, d, scale_grad_by_freq=True)},
    ),
    inside(
        "derivative in the forward", CaptureError, penalised,
        "fc.weight", "torch.autograd.grad", "takes a derivative", then="Leave derivatives out of the loss",
    ),
    inside(
        "torch.func.grad in the forward", UnsupportedOp,
        lambda m, x: torch.func.grad(lambda v: (v * m.w).sum().square())(x),
        "w", "torch.func.grad", then="leave derivatives out of the model, or freeze it",
    ),
    inside(
        "scripted function", UnsupportedOp,
        lambda m, x: x * scripted(plus)(x, m.w),
        "w", "Add", "hides its ops", then="call the Python function it was made from",
    ),
    inside(
        "scripted module that mixes samples", CaptureError,
        lambda m, x: m.script(x),
        "script.w", "scripted module 'encoder.block.script'", "for a sample alone",
        then="record the nn.Module it was made from", x=X, module=IN_SCRIPT,
        parts={"script": lambda: scripted(Centred())},
    ),
    inside(
        "scripted module that returns a dict", CaptureError,
        lambda m, x: m.script(x)["out"],
        "script.w", "scripted module 'encoder.block.script'", "returns a dict",
        then="return tensors, or record the nn.Module", x=X, module=IN_SCRIPT,
        parts={"script": lambda: scripted(Named())},
    ),
    inside(
        "scripted module of a parameter", CaptureError,
        lambda m, x: x * m.script(m.w[None]),
        "w", "scripted module 'encoder.block.script'", then="record the nn.Module it was made from",
        module=IN_SCRIPT, x=X, parts={"script": lambda: scripted(Plain())},
    ),
    inside(
        "scripted module differentiated again", CaptureError,
        lambda m, x: m.script(x),
        "script.w", "scripted module 'encoder.block.script'", "create_graph=True",
        then="record the nn.Module it was made from", module=IN_SCRIPT, x=X,
        parts={"script": lambda: scripted(Plain())}, create_graph=True,
    ),
    inside(
        "gradient set by hand in a backward", CaptureError,
        lambda m, x: m.last(ByHand.apply(m.first(x), m.fc)),
        "fc.weight", "ByHand", "inside another op's backward", then="use torch.utils.checkpoint",
        at=f"at {__file__}:{ByHand.forward.__code__.co_firstlineno}", module="",
        parts={"first": linear(d, d), "last": linear(d, d)},
    ),
    inside(
        "backward in a backward", CaptureError,
        lambda m, x: m.last(ByBackward.apply(m.first(x), m.fc)),
        "", "torch.autograd.backward", "in the backward of another op",
        at=f"at {__file__}:{line_of(ByBackward.backward)}", module="", then="use torch.utils.checkpoint",
        parts={"first": linear(d, d), "last": linear(d, d)},
    ),
    inside(
        "backward in a backward below every layer", CaptureError,
        lambda m, x: m.last(ByBackward.apply(x.requires_grad_(), m.fc)),
        "", "torch.autograd.backward", "in the backward of another op",
        at=f"at {__file__}:{line_of(ByBackward.backward)}", module="", then="use torch.utils.checkpoint",
        parts={"last": linear(d, d)},
    ),
    inside(
        "gradient set by hand below every layer", CaptureError,
        lambda m, x: ByHand.apply(x.requires_grad_(), m.fc),
        "fc.weight", "ByHand", "inside another op's backward", then="use torch.utils.checkpoint",
        at=f"at {__file__}:{ByHand.forward.__code__.co_firstlineno}", module="",
    ),
    inside(
        "input changed in place", CaptureError, changed_later,
        "fc.weight", LINEAR, "changed in place", then="or clone the tensor first", module=IN_FC,
    ),
    inside(
        "parameter changed in place", CaptureError,
        lambda m, x: torch.cdist(x, m.k),
        "k", "torch.functional.cdist", "changed in place", then="Update parameters after the gradients",
        parts={"k": weight(2, d)}, run=stepped_before,
    ),
    inside(
        "mean over the batch", CaptureError,
        lambda m, x: (h := m.fc(x)) - h.mean(0),
        "fc.weight", LINEAR, "mixes the samples", "ops right after it: mean, sub",
        then="leave them out of the recorded loss", module=IN_FC,
    ),
    inside(
        "mean over the batch after an autograd.Function", CaptureError,
        lambda m, x: (h := Product.apply(x, m.w)) - h.mean(0),
        "w", "Product", "mixes the samples", "ops right after it: mean, sub", at=IN_FUNCTION,
        then="leave them out of the recorded loss",
    ),
    inside(
        "autograd.Function outside the block", CaptureError,
        lambda m, x: m.fc(x),
        "w", "Product", "autograd.Function", at=IN_FUNCTION, then="out of the recorded loss", module="", x=X,
        run=penalty_outside,
    ),
    inside(
        "statistic of the input", CaptureError,
        lambda m, x: m.fc(x - x.mean(0)),
        "", "torch.Tensor.mean", "statistic over the batch", "dimension 0",
        then="Take statistics per sample, or use fixed ones",
    ),
    inside(
        "samples in another order", CaptureError,
        lambda m, x: m.fc(x).roll(1, 0),
        "fc.weight", LINEAR, "input of another one", then="shuffle before the recording", module=IN_FC,
    ),
    inside(
        "derived before and after the batch came in", CaptureError, half_and_half,
        "w", "torch.Tensor.expand", "(3, 4, 5)", then="Compute the two parts separately",
        parts={"table": made(nn.Embedding, 7, d)},
    ),
    inside(
        "derived in a reentrant checkpoint", CaptureError, kept_apart,
        "w", "torch.Tensor.expand", "reentrant checkpoint", module="", then="Pass use_reentrant=False",
        check=True,
    ),
    inside(
        "autograd.Function in a reentrant checkpoint", CaptureError,
        lambda m, x: checkpoint(lambda h: Product.apply(h, m.w), x.requires_grad_(), use_reentrant=True),
        "w", "Product", "reentrant checkpoint", then="pass use_reentrant=False", lacks="op place module",
    ),
    inside(
        "vmap in a reentrant checkpoint", CaptureError,
        lambda m, x: checkpoint(lambda h: torch.vmap(lambda r: r * m.w)(h), x.requires_grad_(), use_reentrant=True),
        "w", "torch.Tensor.mul", "reentrant checkpoint", then="Pass use_reentrant=False", module="",
    ),
    inside(
        "frequencies under vmap", UnsupportedOp,
        lambda m, x: torch.vmap(lambda row: F.embedding(row, m.table, scale_grad_by_freq=True))(x),
        "table", "torch.nn.functional.embedding", "counts are those of the whole batch", then="outside of vmap", x=IDS,
        parts={"table": weight(4, d)},
    ),
    inside(
        "observer of the batch", UnsupportedOp,
        observed,
        "", "fused_moving_avg_obs_fake_quant", "takes its scale from the batch", then="disable_observer", x=X,
    ),
    inside(
        "backward that looks at one sample", CaptureError,
        lambda m, x: Peeking.apply(x, m.w),
        "w", "Peeking", "not the sum of those for each sample", then="for each sample apart", x=X,
        at=f"at {__file__}:{Peeking.forward.__code__.co_firstlineno}", module="",
    ),
    inside(
        "nested tensor", UnsupportedOp,
        lambda m, x: m.fc(x),
        "fc.weight", LINEAR, "a nested tensor", then="or pad it", module=IN_FC, x=jagged,
    ),
    inside(
        "checkpoint differentiated again", CaptureError,
        lambda m, x: checkpoint(lambda h: m.fc(h.tanh()), x.requires_grad_(), use_reentrant=True),
        "fc.weight", LINEAR, "create_graph=True", "checkpoint", then="or ask without create_graph", module=IN_FC,
        lacks="parameter op place module", create_graph=True,
    ),
    inside(
        "zeros differentiated again", CaptureError,
        lambda m, x: m.last(m.fc(x).tanh()),
        "fc.weight", LINEAR, "create_graph=True", "exactly zero", then="Move the parameters a little", module=IN_FC,
        x=numbers(B, B, d), parts={"last": lambda: nn.Linear(d, 2).apply(lambda m: nn.init.zeros_(m.weight))},
        create_graph=True,
    ),
    inside(
        "frequencies differentiated again", CaptureError,
        lambda m, x: m.table(x),
        "table.weight", "torch.nn.functional.embedding", "scale_grad_by_freq", then="or ask without create_graph",
        module="'encoder.block.table' (Embedding)", x=IDS,
        parts={"table": made(nn.Embedding, 4, d, scale_grad_by_freq=True)}, create_graph=True,
    ),
    inside(
        "sample that is not finite in a loop", CaptureError,
        lambda m, x: torch.cdist(x, m.k),
        "k", "torch.functional.cdist", "not finite", then="leave such samples out", x=with_nan(B, T, d),
        parts={"k": weight(2, d)},
    ),
    inside(
        "sample that is not finite in an autograd.Function", CaptureError,
        lambda m, x: Product.apply(x, m.w).tanh(),
        "w", "Product", "not finite", at=IN_FUNCTION, then="leave such samples out",
        x=with_nan(B, T, d),
    ),
    inside(
        "sample that is not finite in no regular order", CaptureError,
        lambda m, x: m.fc(x.flip(0)).flip(0),
        "fc.weight", LINEAR, "no finite gradient", then="leave such samples out", module=IN_FC, x=with_nan(B, T, d),
    ),
    inside(
        "sample that is not finite among zeros", CaptureError,
        lambda m, x: m.fc(x),
        "fc.weight", LINEAR, "not finite", then="leave such samples out", module=IN_FC, x=numbers(B, B, d),
        losses=lambda out: out.sum((1, 2)) * torch.tensor([0.0, torch.inf, 0.0]),
    ),
    inside(
        "gradients too small", CaptureError,
        lambda m, x: m.fc(x),
        "fc.weight", LINEAR, "e-321 are too small for torch.float64", then="scale the losses up", module=IN_FC,
        losses=lambda out: score(out) * 1e-321,
    ),
    inside(
        "gradients too large", CaptureError,
        lambda m, x: m.fc(x),
        "fc.weight", LINEAR, "2e+308 leave no room in torch.float64", then="scale the losses down", module=IN_FC,
        losses=lambda out: out.sum((1, 2)) * 1.5e308,
    ),
    inside(
        "gradients too small for call_for_per_sample_grads", CaptureError,
        lambda m, x: m.fc(x),
        "fc.weight", LINEAR, "e-321 are too small for torch.float64", then="scale the losses up", module=IN_FC,
        run=lambda model, x: (call_for_per_sample_grads(model)(x).square().sum() * 1e-321).backward(),
    ),
    inside(
        "a gradient that a hook changes in place", CaptureError,
        lambda m, x: doubled_in_place(m.other(x)) + m.fc(x),
        "fc.weight", LINEAR, "changed in place while the backward went on", then="return a new tensor", module=IN_FC,
        parts={"other": linear(d, d)},
    ),
    inside(
        "answers that do not add up", CaptureError,
        lambda m, x: m.fc(x),
        "fc.weight", LINEAR, "off the ordinary gradient by", then="please report it", module=IN_FC,
        run=by_a_wrong_rule,
    ),
    about(
        "encoder on its fast path", CaptureError, lambda: answer(encoder(), torch.randn(B, T, 4)),
        "TransformerEncoder", "src_key_padding_mask", "'encoder.block.inner'", then="enable_nested_tensor=False",
    ),
]
THE_LOSS = [
    about("losses that are no tensor", TypeError, of_losses(lambda out: score(out).tolist()), "losses", "list",
          then="losses is a tensor"),
    about("losses per token", CaptureError, of_losses(lambda out: out.sum(-1)), "losses has shape (3, 4)",
          then="reduce it to one loss per sample"),
    about("losses of folded tokens", CaptureError, of_losses(lambda out: out.sum(-1).flatten()), "12 losses", "(3, 4)",
          then="reduce the losses to one per sample, or say record(model, batch_size=12)"),
    about("no losses", CaptureError, of_losses(lambda out: score(out)[:0]), "no losses: an empty batch",
          then="skip it"),
    about("complex losses", CaptureError, of_losses(lambda out: score(out) * 1j), "losses are real numbers",
          then="take the absolute value or the real part"),
    about("losses without a gradient", CaptureError, of_losses(lambda out: score(out).detach()),
          "depend on no trainable parameter", then="was the forward run under no_grad, or outside the record block?"),
    about("another number of losses than was said", CaptureError, of_losses(score, batch_size=4),
          "3 losses, but batch_size=4", then="pass one loss per sample"),
    about("losses that are differentiated", CaptureError, lambda: slope_outside(layer(), X()),
          "a derivative of the recorded forward was taken with create_graph", then="Leave derivatives out of the loss"),
    about("losses of a forward outside the block", CaptureError, lambda: without_a_call(layer(), X()),
          "'encoder.block.fc.weight'", "TBackward0 in the autograd graph", "outside the record block",
          then="Run the forward inside the record block"),
    about("losses with a reduction", ValueError, afterwards(lambda tape, losses: tape.backward(losses, "sum")),
          "loss_reduction", "one per sample", then="leave it out"),
    about("number without a reduction", ValueError, of_number(torch.sum, None), "a loss that is one number",
          then='loss_reduction="sum" or "mean"'),
    about("number with an unknown reduction", ValueError, of_number(torch.sum, "none"), "'none'",
          then='loss_reduction is "sum" or "mean"'),
    about("number without a call of the model", CaptureError, part_alone, "the batch size is not known",
          then="pass record(model, batch_size=...), or one loss per sample"),
    about("number of inputs that differ in size", CaptureError, two_sizes, "sizes [3, 7] along dimension 0",
          then="pass record(model, batch_size=...), or one loss per sample"),
    about("number that the model returns alone", CaptureError,
          of_number(lambda out: out, make=lambda: nested(net(lambda m, x: m.fc(x).sum(), fc=linear(d, d)))),
          "depends on none of them", then="call the recorded model itself, or pass one loss per sample"),
    about("number of outputs with the samples elsewhere", CaptureError,
          of_number(torch.sum, make=lambda: nested(net(lambda m, x: m.fc(x).mT.transpose(0, 2), fc=linear(d, B))),
                    x=numbers(B, B, d)),
          "an output (3, 3, 3) lie along dimension 2, not 0", then="or pass one loss per sample"),
    about("number of outputs without samples", CaptureError,
          of_number(torch.sum, make=lambda: nested(net(lambda m, x: m.fc(x).sum(0)[:2], fc=linear(d, d))), x=TOKENS),
          "outputs (2, 5) for a batch of 3", then="or use eachgrad.record and pass one loss per sample"),
    about("number that compares samples", CaptureError, of_number(lambda out: (out @ out.T).logsumexp(1).sum()),
          "the loss mixes samples", "contrastive", then="Leave that part out of the recorded loss"),
    about("number that compares samples by an op that cannot be read", CaptureError,
          of_number(lambda out: torch.linalg.svdvals(out).sum()),
          "the loss mixes samples", "gradient at one sample's outputs", then="Leave that part out of the recorded loss"),
    about("mean that is said to be a sum", CaptureError, of_number(torch.mean), 'loss_reduction="sum", but',
          "takes a mean over the batch", then='pass loss_reduction="mean", or one loss per sample'),
    about("sum that is said to be a mean", CaptureError, of_number(torch.sum, "mean"), 'loss_reduction="mean", but',
          "nothing in the loss divides", then='pass loss_reduction="sum", or one loss per sample'),
    about("mean that ignores targets", CaptureError,
          of_number(lambda out: F.cross_entropy(out, torch.tensor([0, 1, 2]), ignore_index=1), "mean"),
          "leaves out ignored targets or weighs classes", then='Use reduction="sum" with loss_reduction="sum"'),
    about("loss of a call that cannot be read", CaptureError, called(lambda out: torch.linalg.svdvals(out).sum()),
          "the loss passes LinalgSvd", then="compute one loss per sample and use eachgrad.record"),
]
RECORDING = [
    about("no module", TypeError, lambda: record(score), "not function", then="record takes an nn.Module"),
    about("unknown fallback", ValueError, lambda: record(layer(), fallback="always"), "'always'",
          then='fallback is "refuse", "vmap" or "loop"'),
    about("batch size that is none", ValueError, lambda: record(layer(), batch_size=0), "not 0",
          then="batch_size is a positive integer"),
    about("memory that is no size", ValueError, lambda: record(layer(), memory=1.5), "1.5",
          then="memory is a number of bytes or a text such as '2GiB'"),
    about("memory without a number", ValueError, lambda: record(layer(), memory="much"), "'much'",
          then="memory is a number of bytes or a text such as '2GiB'"),
    about("memory in an unknown unit", ValueError, lambda: record(layer(), memory="2GiBi"), "'2GiBi'",
          then="memory is a number of bytes or a text such as '2GiB'"),
    about("memory below nothing", ValueError, lambda: record(layer(), memory=-1), "-1", then="memory is not negative"),
    about("scripted model", CaptureError, lambda: record(scripted(Plain())).__enter__(), "a scripted model",
          then="record the nn.Module it was made from"),
    about("parameter with a hook", CaptureError, with_hook(Tensor.register_hook, lambda m: answer(m, X())),
          "'encoder.block.fc.weight' has a gradient hook", then="remove it, and apply it to the answer"),
    about("tape entered again", CaptureError, afterwards(lambda tape, _: tape.__enter__()), "has been used",
          then="call eachgrad.record again"),
    about("record in a record", CaptureError, in_the_block(lambda *_: record(layer()).__enter__()),
          "inside another record", then="end the outer one first"),
    about("backward in the block", CaptureError, in_the_block(lambda tape, losses: tape.backward(losses)),
          "tape.backward", then="leave the record block"),
    about("second backward", CaptureError,
          afterwards(lambda tape, losses: [tape.backward(losses) for _ in range(2)]), "a tape answers one backward",
          then="record the forward again"),
    about("answer without gradients", CaptureError,
          afterwards(torch.no_grad()(lambda tape, losses: tape.backward(losses)), create_graph=True),
          "create_graph=True, but gradients are off", then="call tape.backward outside of torch.no_grad"),
    about("verify without a batch", ValueError, lambda: eachgrad.verify(layer(), lambda m: score(m(X()))),
          "no tensor with samples along dimension 0", then="pass the inputs of the model after loss_fn"),
    about("explain an unknown query", ValueError, asked(lambda grads: grads.explain("norm")), "not 'norm'",
          then="explain knows norms"),
    about("Function in a checkpoint, in your own backward", CaptureError, in_your_own_backward,
          "'w'", "Product", "lies inside a checkpoint", then="use eachgrad.record"),
    about("a question named losses", ValueError,
          lambda: eachgrad.compile(layer(), lambda m, x: score(m(x)), losses=eachgrad.norms()), "losses",
          then="ask under another name"),
    about("more than all computed again", ValueError,
          lambda: eachgrad.compile(layer(), lambda m, x: score(m(x)), recompute=1.1, norms=eachgrad.norms()), "not 1.1",
          then="recompute is a share, from 0.0 to 1.0"),
    about("padding to no samples", ValueError, lambda: padded_to(0), "not 0", then="pad_to is a positive number of samples"),
    about("padding a variance", ValueError, lambda: padded_to(4, eachgrad.variance()), "found", "Variance",
          then="ask it without pad_to"),
    about("padding a larger batch", ValueError, lambda: padded_to(2)(X()), f"a batch of {B} samples", "pad_to=2",
          then="split a larger one"),
    about("any multiple of less than nothing", ValueError, lambda: padded_to(None, dynamic=-2), "not -2",
          then="dynamic is True, or a number"),
    about("any size from one sample on", ValueError, lambda: padded_to(None, dynamic=True, fewest=1), "not 1",
          then="fewest is a number of samples, at least 2"),
    about("a usual size where there is one for each", ValueError, lambda: padded_to(None, usual=4), "not 4",
          then="usual is what most batches have where dynamic allows for any"),
    about("padded, and of any size", ValueError, lambda: padded_to(4, dynamic=True), "pad_to", "dynamic",
          then="pass one of them"),
    about("any size, and no samples", ValueError, lambda: padded_to(None, dynamic=True)(X()[:0]), "without samples",
          then="skip an empty one"),
    about("padding what has no samples", ValueError, lambda: padded_to(4)(torch.tensor(1.0)), "dimension 0",
          then="fill up the tensors of a batch"),
    about("check_rule without a parameter", ValueError, lambda: check_rule(F.linear, X(), X()),
          "a tensor that requires grad (a parameter)", then="check_rule needs"),
]
QUERIES = [
    about("nothing asked of a tape", ValueError, afterwards(lambda tape, losses: tape.ask(losses)),
          "into=", then="pass queries by name, such as norms=eachgrad.norms()"),
    about("nothing asked", ValueError, Accumulator, "nothing is asked", then="such as norms=eachgrad.norms()"),
    about("query that is none", TypeError, lambda: Accumulator(norms="norms"), "norms", "not str",
          then="a query such as eachgrad.norms()"),
    about("nothing gathered", ValueError, lambda: gathered(eachgrad.norms()).answer(), "nothing has been gathered",
          then="pass this to tape.ask(losses, into=...)"),
    about("models with other parameters", ValueError,
          lambda: gathered(eachgrad.norms(), (layer(), X()), (nn.Linear(d, 2), X())), "other parameters",
          then="in an Accumulator of its own"),
    about("Gram matrix of several batches", ValueError,
          lambda: gathered(eachgrad.gram(), *[(layer(), X())] * 2), "Gram matrix of several batches",
          then="ask grads.gram(other)"),
    about("batches of other lengths", ValueError,
          lambda: gathered(eachgrad.dot({"weight": torch.ones(2, d)}, positions=True),
                           *[(nn.Linear(d, 2, bias=False), torch.randn(B, n, d)) for n in (4, 2)]),
          "positions: 4, then {'weight': 2}", then="Pad them to one length, or ask each for itself"),
    about("no such parameter", ValueError, asked(lambda grads: grads.select("decoder.*")), "'decoder.*'",
          then="there are encoder.block.fc.weight, encoder.block.fc.bias"),
    about("norms by something else", ValueError, asked(lambda grads: grads.norms(by="layer")), "'layer'",
          then='norms(by=...) is None, "parameter" or "module"'),
    about("too many norms", ValueError, asked(lambda grads: grads.topk_norms(4)), "not 4",
          then="k is between 0 and the 3 samples"),
    about("one weight too many", ValueError, asked(lambda grads: grads.weighted_sum(torch.ones(4))), "not (4,)",
          then="one weight per sample is (3,) or (K, 3)"),
    about("one weight too few", ValueError, asked(lambda grads: grads.weighted_sum(torch.ones(2))), "not (2,)",
          then="one weight per sample is (3,) or (K, 3)"),
    about("one weight too many for a parameter", ValueError,
          asked(lambda grads: grads["encoder.block.fc.weight"].weighted_sum(torch.ones(4))), "not (4,)",
          then="one weight per sample is (3,) or (K, 3)"),
    about("unknown groups", ValueError, asked(lambda grads: grads.clipped_sum(1.0, groups="module")), "'module'",
          then='groups is None, "parameter" or {group: names or globs}'),
    about("group that is a text", ValueError, asked(lambda grads: grads.clipped_sum(1.0, groups={"all": "*"})),
          "group 'all'", "'*'", then="is a list of names or globs"),
    about("group of no parameter", ValueError, asked(lambda grads: grads.clipped_sum(1.0, groups={"all": ["head.*"]})),
          "group 'all'", "'head.*', which matches no parameter", then="see model.named_parameters()"),
    about("parameter in no group", ValueError, asked(lambda grads: grads.clipped_sum(1.0, groups={"w": ["*.weight"]})),
          "'encoder.block.fc.bias' is in no group", then="put each parameter in exactly one"),
    about("bounds of other groups", ValueError, asked(lambda grads: grads.clipped_sum({"w": 1.0})), "{'w': 1.0}",
          then="max_norm is a number, or one for each group"),
    about("bound of zero", ValueError, asked(lambda grads: grads.clipped_sum(0.0)), "not 0.0",
          then="max_norm is a positive number"),
    about("gamma of zero", ValueError, asked(lambda grads: grads.clipped_sum(1.0, normalise=True, gamma=0.0)), "not 0.0",
          then="gamma is a positive number"),
    about("unknown treatment of samples that are not finite", ValueError,
          asked(lambda grads: grads.clipped_sum(1.0, nonfinite="skip")), "'skip'", then='nonfinite is "raise" or "zero"'),
    about("clipped sum with a sample that is not finite", CaptureError,
          asked(lambda grads: grads.clipped_sum(1.0), with_nan(B, d)), "clipped_sum", "samples [1]",
          then='Leave them out with nonfinite="zero"'),
    about("direction of no parameter", ValueError, asked(lambda grads: grads.dot({"head": X()})), "'head'",
          then="none of the parameters encoder.block.fc.weight"),
    about("direction of another shape", ValueError, asked(lambda grads: grads.dot({"encoder.block.fc.bias": X()[0, :3]})),
          "'encoder.block.fc.bias'", "not (3,)", then="is (5,) or (K, *(5,))"),
    about("numbers of directions that differ", ValueError,
          asked(lambda grads: grads.dot({n: torch.ones(k, *g.parameter.shape) for k, (n, g) in enumerate(grads.items())})),
          "'encoder.block.fc.bias': 1", then="give the same number of directions for every name"),
    about("positions of a bias", ValueError,
          asked(lambda grads: grads.dot({"encoder.block.fc.bias": torch.ones(d)}, positions=True)),
          "'encoder.block.fc.bias' are sums over positions", then="Leave them out with select()"),
    about("positions of one bias", ValueError,
          asked(lambda grads: grads["encoder.block.fc.bias"].dot(torch.ones(d), positions=True)),
          "'encoder.block.fc.bias' are sums over positions", then="Ask without positions"),
    about("numbers of positions that differ", ValueError,
          lambda: (grads := answer(nested(net(lambda m, x: m.b(m.a(x).sum(1, keepdim=True)),
                                              a=linear(d, 2, False), b=linear(2, 2, False))), TOKENS())
                   ).dot({n: torch.ones_like(g.parameter) for n, g in grads.items()}, positions=True),
          "{'encoder.block.a.weight': 4, 'encoder.block.b.weight': 1}", then="with select()"),
    about("Gram matrix of other parameters", ValueError, asked(lambda grads: grads.gram(grads.select("*.bias"))),
          "only one side has ['encoder.block.fc.weight']", then="Choose the same on both sides with select()"),
    about("Gram matrix of other shapes", ValueError,
          asked(lambda grads: grads["encoder.block.fc.bias"].gram(grads["encoder.block.fc.weight"])),
          "'encoder.block.fc.bias' has the shape (5,) on one side and (5, 5) on the other",
          then="ask for the gradients of the same parameter"),
    about("projection to nothing", ValueError, asked(lambda grads: grads.project(0)), "not 0",
          then="dim is a positive number"),
    about("unknown projection", ValueError, asked(lambda grads: grads.project(2, kind="dense")), "'dense'",
          then="kind is one of 'gaussian'"),
    about("variance of one sample", ValueError, asked(lambda grads: grads.variance(), numbers(1, d)), "not 1",
          then="ask a larger batch, or pass unbiased=False"),
    about("noise scale of one sample", ValueError, asked(lambda grads: grads.noise_scale(), numbers(1, d)), "not 1",
          then="ask a larger batch"),
]
CALLS = [
    about("call with an unknown reduction", RuntimeError, called(loss_reduction="max"), "'max'",
          then="loss_reduction argument to be sum or mean"),
    about("call of no module", RuntimeError, called(make=lambda: score), "got function",
          then="Module passed must be nn.Module"),
    about("call with a batch size that is no number", RuntimeError, called(batch_size="3"), "got str",
          then="must be None or an integer"),
    about("call with a batch size of zero", RuntimeError, called(batch_size=0), "got 0", then="must be positive"),
    about("call with a hook", CaptureError,
          with_hook(Tensor.register_post_accumulate_grad_hook, lambda m: call_for_per_sample_grads(m)(X())),
          "'encoder.block.fc.weight' has a hook", then="remove it, and apply it to grad_sample"),
    about("call with gradients from before", RuntimeError, called_twice,
          "'encoder.block.fc.weight' has a grad_sample already", then="Set it to None"),
    about("backward with gradients from another call", RuntimeError, two_backwards(True),
          "'encoder.block.fc.weight' has the grad_sample of another backward", then="Set it to None"),
    about("second backward of a call", RuntimeError, two_backwards(False), "a second backward through the same call",
          then="pass retain_graph=True to the first one"),
    about("call without a batch", RuntimeError, called(x=numbers()), "cannot compute the batch size",
          then="Pass batch_size"),
    about("call with two batch sizes", RuntimeError,
          lambda: call_for_per_sample_grads(nn.Bilinear(d, d, 2))(X(), torch.randn(4, d)),
          "batch size 3 and one with batch size 4", then="Pass batch_size"),
    about("call with an empty batch", RuntimeError, called(x=numbers(0, d)), "the inputs are an empty batch",
          then="skip such batches"),
    about("call that returns a number", CaptureError,
          called(make=lambda: nested(net(lambda m, x: m.fc(x).sum(), fc=linear(d, d)))), "returns a single number",
          then="return one loss per sample, or use eachgrad.record"),
    about("call that returns no samples", RuntimeError,
          called(make=lambda: nested(net(lambda m, x: m.fc(x).sum(0), fc=linear(d, d)))),
          "the outputs (5,) hold no 3 samples along dimension 0", then="Return one row per sample"),
    about("derivative by the parameters of a call", RuntimeError,
          lambda: (model := layer(), torch.autograd.grad(call_for_per_sample_grads(model)(X()).sum(),
                                                         list(model.parameters()), allow_unused=True)),
          "torch.autograd.grad for the parameters", then="Call backward() on the loss"),
    about("call differentiated again", RuntimeError, called(backward=lambda loss: loss.backward(create_graph=True)),
          "cannot be differentiated again", then="eachgrad.record(module, create_graph=True)"),
]
# fmt: on
REFUSALS = [*IN_THE_MODEL, *THE_LOSS, *RECORDING, *QUERIES, *CALLS]


@cache
def raised(refusal: Refusal) -> Exception:
    torch.manual_seed(0)
    try:
        refusal.program()
    except Exception as error:
        return error
    pytest.fail(f"{refusal.name}: not refused")


def says(message: str, word: str) -> bool:
    """Whether these words are in the message; line 20 is not in line 205."""
    return re.search(re.escape(word) + r"(?!\d)", message) is not None


@pytest.mark.parametrize("refusal", REFUSALS, ids=str)
def test_a_refusal_says_what_where_and_what_next(refusal: Refusal):
    error = raised(refusal)
    assert isinstance(error, refusal.error), f"{type(error).__name__}: {error}"
    message = str(error)
    missing = [w for w in (*refusal.found, refusal.then) if w not in refusal.lacks and not says(message, w)]
    assert not missing, f"{missing} not in: {message}"
    found = [w for w in refusal.lacks if says(message, w)]
    assert not found, f"the message says {found} now: take it out of what the row says that it lacks"


def sites() -> dict[str, tuple[str, range]]:
    """Every place in the source that makes such an error: its name for a reader, its file, and the lines it covers."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and not APART & {*path.parents}]
        for node in calls:
            kind = getattr(node.func, "id", getattr(node.func, "attr", None))
            if kind in KINDS:
                name = f"{path.relative_to(SOURCE)}:{node.lineno} ({kind})"
                found[name] = str(path), range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return found


def met(error: BaseException | None) -> Iterator[tuple[str, int]]:
    """Where this error was raised, and those that it was raised for."""
    while error is not None:
        *_, (frame, line) = walk_tb(error.__traceback__)
        yield frame.f_code.co_filename, line
        error = error.__context__


def test_every_refusal_has_a_row():
    reached = {place for refusal in REFUSALS for place in met(raised(refusal))}
    every = sites()
    assert len(every) > 100
    without = [name for name, (path, lines) in every.items() if not any((path, line) in reached for line in lines)]
    assert not without, (
        f"no row here meets {', '.join(sorted(without))}: add one with a program that is refused there, and the words "
        "that say what was found, where, and what to do next"
    )


def test_names_are_unique():
    names = [refusal.name for refusal in REFUSALS]
    assert len(set(names)) == len(names)
