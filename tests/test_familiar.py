"""Forwards that are followed by a script: what is recorded, answered and refused is what the ordinary way has."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import eachgrad
from cases import CASES, REFUSED, Case, Refused
from cases.base import _cast
from eachgrad import familiar, mixing
from eachgrad.rules import RULES
from eachgrad.tags import Owners
from oracle import assert_same, loop

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

B = D = 4  # sizes collide
FIRST = 4  # the call that is followed first: the third finds a plan, the fourth is written down
CHANGED = (5, 6)  # calls at which a forward is another one
CALLS = 8

original = familiar.begin


@contextlib.contextmanager
def following(on: bool) -> Iterator[list[familiar.Reader]]:
    """The readers of forwards in this context, or none of them has one."""
    readers: list[familiar.Reader] = []

    def begin(*args: Any) -> familiar.Reader | familiar.Writer | None:
        found = original(*args) if on else None
        readers.extend([found] if isinstance(found, familiar.Reader) else [])
        return found

    mixing.FOUND.clear()
    familiar.begin = begin
    try:
        yield readers
    finally:
        familiar.begin = original


def state(tape: eachgrad.Tape) -> dict[str, Any]:
    """All that a recorder knows of a forward, in terms that two of them have in common."""
    recorder, tensors = tape.recorder, tape.recorder.tensors
    live = {id(t): t for known in (tensors.strong, tensors._tags) for r, _ in known.values() if (t := r()) is not None}
    each = [(tensors.number(t), tuple(t.shape), t.dtype, described(tensors.tag(t))) for t in live.values()]
    uses = [
        (
            use.op, use.rule, use.parameters(), use.strong, str(use.where), use.ops_since, use.autocast, len(use.aliases),
            [id(t) in use.samples for t in (*use.args, *use.kwargs.values())], len(use.samples), type(use.piece),
            sorted(version for _, version in use.versions), sorted(version for _, version in use.source_versions),
            use.tap.shape, use.tap.dtype, use.tap.node.name(), None if use.saved is None else [*map(total, use.saved)],
        )
        for use in recorder.uses
    ]  # fmt: skip
    return {
        "signature": recorder.signature.value, "count": tensors.count, "opaque": tensors.opaque, "ops": recorder._ops,
        "without rule": recorder.without_rule, "may rerun": recorder.may_rerun, "uses": uses,
        "tensors": sorted(repr(one) for one in each if one[0] or one[3] is not None),
    }  # fmt: skip


def described(tag: Any) -> Any:
    return ("owners", tag.table.tolist(), tag.several, tag.what) if isinstance(tag, Owners) else tag


def total(t: Tensor) -> float:
    return float(t.double().sum())


def ask(tape: eachgrad.Tape, losses: Tensor, k: int) -> Any:
    if k % 2:
        grads = tape.backward(losses)
        return {"norms": grads.norms(), "dense": grads.dense()}
    return vars(tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(0.7), mean=eachgrad.mean()))


Found = list[tuple[dict[str, Any] | None, Any]]  # by call, what was known of the forward, and the answer or the error


def run(make: Callable[[], nn.Module], losses: Callable[[nn.Module, int], Tensor], **options: Any) -> Found:
    torch.manual_seed(0)
    model, found = make(), []
    for k in range(CALLS):
        torch.manual_seed(k)
        known = None
        try:
            with eachgrad.record(model, **options) as tape:
                value = losses(model, k)
            known = state(tape)
            answer = ask(tape, value, k)
        except (RuntimeError, TypeError, AttributeError) as error:
            answer = type(error).__name__, str(error)
        found.append((known, answer))
    return found


def both(
    make: Callable[[], nn.Module], losses: Callable[[nn.Module, int], Tensor], **options: Any
) -> tuple[Found, int]:
    """What was found of forwards that were followed, and how many of them were to their end; it is the same if none is."""
    with following(False):
        want = run(make, losses, **options)
    with following(True) as readers:
        found = run(make, losses, **options)
    for k in range(CALLS):
        assert found[k][0] == want[k][0], f"call {k}"
        if isinstance(want[k][1], tuple):
            assert found[k][1] == want[k][1], f"call {k}"
        else:
            torch.testing.assert_close(found[k][1], want[k][1], rtol=0, atol=0, equal_nan=True, msg=f"call {k}")
    return found, sum(reader.place == len(reader.entries) for reader in readers)


# Every kind of model


def of_case(case: Case | Refused) -> tuple[Found, int]:
    def losses(model: nn.Module, k: int) -> Tensor:
        batch = case.data(Generator().manual_seed(k))
        return case.losses(model, *(_cast(t, getattr(case, "dtype", torch.float64)) for t in batch))

    return both(lambda: case.build()[0], losses, batch_size=case.batch_size, batch_dim=case.batch_dim)


@pytest.mark.parametrize("case", [*CASES[::4], *REFUSED[::3]], ids=str)
def test_a_followed_forward_is_known_as_any_other(case: Case | Refused):
    of_case(case)


def test_most_cases_are_followed():
    cases = CASES[::20]
    assert sum(of_case(case)[1] == CALLS - FIRST for case in cases) >= 0.6 * len(cases)


# Forwards that change


class Net(nn.Module):
    def __init__(self, body: Callable[..., Tensor]):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.w, self.v = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D, D))
        self.fixed = nn.Parameter(torch.randn(D, D), requires_grad=False)
        self.register_buffer("ones", torch.ones(D, D))
        self.body, self.late = body, False

    def forward(self, *batch: Tensor) -> Tensor:
        return self.body(self, *batch)


def squares(model: nn.Module, *batch: Tensor) -> Tensor:
    return model(*batch).pow(2).flatten(1).sum(1)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return torch.matmul(h, w.t())

    @staticmethod
    def backward(ctx, g):
        h, w = ctx.saved_tensors
        return g @ w, g.t() @ h


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


class DoubledWith(torch.autograd.Function):
    """The same op in its forward; the parameter is in its backward alone."""

    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h)
        return h * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, g.t() @ ctx.saved_tensors[0]


class InPlace(torch.autograd.Function):
    """No op of its own, and a gradient for a parameter."""

    @staticmethod
    def forward(ctx, h, w):
        ctx.mark_dirty(h)
        return h

    @staticmethod
    def backward(ctx, g):
        return g * 3, g.t() @ torch.ones_like(g)


def frozen_meanwhile(m, x):
    h = m.a(x)
    m.w.requires_grad_(not m.late)
    y = F.linear(h, m.w)
    m.w.requires_grad_(True)
    return y.tanh()


def none_for_a_result(m, x):
    h, bias = m.a(x), m.fixed[0] * 1.0
    bias = None if m.late else bias  # and what it was is gone
    return F.linear(h, m.w, bias).tanh()


def none_by_name(m, x):
    h, bias = m.a(x), m.fixed[0] * 1.0
    bias = None if m.late else bias
    return F.linear(h, m.w, bias=bias).tanh()


def inference(m, x):
    with torch.inference_mode() if m.late else torch.no_grad():
        y = x * 2
        y = y + 1
    return m.b(m.a(x).tanh())


def function_appears(m, x):
    h = m.a(x)
    with torch.no_grad() if not m.late else contextlib.nullcontext():
        y = Product.apply(h, m.w) if m.late else torch.matmul(h, m.w.t())
    return y.tanh() + h


def function_with_a_parameter(m, x):
    h = m.a(x)
    y = DoubledWith.apply(h, m.w) if m.late else Doubled.apply(h)
    return m.b(y.tanh())


def function_in_place(m, x):
    h = m.a(x) * 1.0
    if m.late:
        InPlace.apply(h, m.w)
    return m.b(h.tanh())


def constant(m, x):
    h, w = m.a(x).tanh(), m.w * (m.ones if m.late else torch.ones(D, D))
    return m.b(h) + F.linear(h, w)


def mapped(m, x):
    h = m.a(x)
    product = lambda k: F.linear(h, m.w)  # noqa: E731
    return (torch.vmap(product)(torch.arange(2))[0] if m.late else product(0)).tanh()


def in_place(m, x):
    y = m.a(x) * 2
    if m.late:
        y.add_(1)
    return m.b(y)


def in_place_by_a_view(m, x):
    y = m.a(x) * 2
    part = y[:, 0]
    if m.late:
        part.add_(1)
    return m.b(y)


def hooked(m, x):
    h = m.a(x)
    if m.late:
        h.register_hook(lambda g: g * 2)
    return m.b(h.tanh())


def in_a_checkpoint(m, x):
    part = lambda h: m.b(h.tanh()).tanh()  # noqa: E731
    h = m.a(x)
    return checkpoint(part, h, use_reentrant=False) if m.late else part(h)


def caught(m, x):
    y = m.a(x).tanh()
    if m.late:
        with contextlib.suppress(RuntimeError):
            y.view(7, 7)
    return m.b(y.reshape(B if len(x) > 1 else 1, D))


def tied(m, x):
    w = m.w if m.late else m.v
    return F.linear(F.linear(m.a(x), m.w).tanh(), w)


CHANGES: dict[str, Callable[..., Tensor]] = {
    "nothing": lambda m, x: m.norm(m.b(m.a(x).T.T.tanh())),
    "a branch": lambda m, x: m.a(x).tanh() if m.late else m.b(m.a(x).tanh()),
    "more ops": lambda m, x: m.b(m.a(x)).sin().cos() if m.late else m.b(m.a(x)).sin(),
    "the wiring": lambda m, x: (lambda h, p, q: m.b(p + (p if m.late else q)))(h := m.a(x), h.tanh(), h.sin()),
    "a constant for a batch": lambda m, x: m.b(m.a(x) * (m.fixed[0].expand_as(x) if m.late else x)),
    "a batch for a constant": lambda m, x: m.b(m.a(x) * (x if m.late else torch.full((len(x), D), 0.5))),
    "a result for a constant": lambda m, x: (lambda p: m.b(m.a(x) * (p if m.late else torch.ones(len(x), D))))(x.tanh()),
    "a constant for what may be of the batch": constant,
    "a mask": lambda m, x: m.a(x).masked_fill(x > 0 if m.late else m.fixed[: len(x)] > 9, 0.0),
    "the parameter": lambda m, x: F.linear(m.a(x), m.v if m.late else m.w).tanh(),
    "a frozen one": lambda m, x: F.linear(m.a(x), m.w if m.late else m.fixed).tanh(),
    "a tied one": tied,
    "a dimension": lambda m, x: m.a(x[:, None].expand(-1, 3, -1)).sum(-1 if m.late else -2).tanh(),
    "the type of a number": lambda m, x: m.b(m.a(x) * (True if m.late else 1)),
    "no gradient": lambda m, x: m.b(m.a(x).detach() if m.late else m.a(x)) + x,
    "a parameter that is frozen meanwhile": frozen_meanwhile,
    "None for a result": none_for_a_result,
    "None for a result, by name": none_by_name,
    "inference mode": inference,
    "a Function around the ops": function_appears,
    "a parameter for a Function": function_with_a_parameter,
    "a Function that works in place": function_in_place,
    "vmap": mapped,
    "in place": in_place,
    "in place by a view": in_place_by_a_view,
    "a hook": hooked,
    "a checkpoint": in_a_checkpoint,
    "an op that fails": caught,
}  # fmt: skip


def changing(model: nn.Module, k: int) -> Tensor:
    model.late = k in CHANGED
    return squares(model, torch.randn(B, D))


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", CHANGES)
def test_a_forward_that_changes(name):
    body = CHANGES[name]
    found, full = both(lambda: Net(body), changing)
    assert full  # one was followed before it changed
    torch.manual_seed(0)
    model = Net(body)
    for k, (_, answer) in enumerate(found):
        torch.manual_seed(k)
        model.late, x = k in CHANGED, torch.randn(B, D)
        assert not isinstance(answer, tuple), answer
        if k % 2:
            assert_same(answer["dense"], loop(model, squares, [(row,) for row in x.split(1)]), 1e-10)


REFUSALS: dict[str, tuple[Callable[..., Tensor], str]] = {
    "a mean, detached": (
        lambda m, x: m.b(m.a(x)) - (m.a(x).detach().mean(0) if m.late else m.fixed[0] * 1), "statistic over the batch",
    ),
    "a mean of the input": (
        lambda m, x: m.b(x - x.mean(0 if m.late else 1, keepdim=True)), "statistic over the batch",
    ),
    "samples for features": (
        lambda m, x: m.b(x - (x.mean(0)[None] if m.late else x.mean(1)[:, None]).expand(B, D)), "statistic over the batch",
    ),
    "more ops": (lambda m, x: (lambda h: h + h.mean(0).detach() if m.late else h)(m.b(m.a(x)).sin()), "statistic over"),
    "rows in another order": (
        lambda m, x: m.b(m.a(x)[torch.tensor([1, 0, 3, 2]) if m.late else slice(None)]), "input of another one",
    ),
    "a derivative": (
        lambda m, x: (lambda h, f: h * (torch.func.grad(f)(torch.ones(())) if m.late else f(1.0)[:, None]))(
            h := m.a(x), lambda s: F.linear(h, m.w).pow(2).sum(1) if not m.late else (F.linear(h, m.w) * s).sum()
        ), "inside torch.func.grad",
    ),
    "what was read is changed": (
        lambda m, x: (lambda h, y: (h.add_(1) if m.late else h, y)[1])(h := m.a(x) * 1, m.b(h)), "changed in place",
    ),
}  # fmt: skip


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_refused_is_refused_also_when_it_comes_late(name):
    body, words = REFUSALS[name]
    found, full = both(lambda: Net(body), changing)
    assert full
    for k, (_, answer) in enumerate(found):
        assert isinstance(answer, tuple) == (k in CHANGED), answer
        assert not isinstance(answer, tuple) or words in answer[1]


def test_autocast_that_comes_late():
    def losses(model, k):
        with torch.autocast("cpu", torch.bfloat16, enabled=k in CHANGED):
            return squares(model, torch.randn(B, D))

    found, full = both(lambda: Net(lambda m, x: m.b(m.a(x).sin().tanh()).float()), losses)
    assert full
    assert [known["uses"][1][6] is not None for known, _ in found] == [k in CHANGED for k in range(CALLS)]


@pytest.mark.usefixtures("double")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_part_that_comes_late():
    def make():
        model = Net(lambda m, x: m.b((m.scripted if m.late else m.a)(m.a(x).tanh())))
        model.scripted = torch.jit.script(nn.Linear(D, D))
        return model

    found, full = both(make, changing)
    assert full
    assert [known["opaque"] for known, _ in found] == [k in CHANGED for k in range(CALLS)]


def test_dropout_that_comes_late():
    body = lambda m, x: m.b(F.dropout(m.a(x), 0.5, m.late))  # noqa: E731
    assert both(lambda: Net(body), changing)[1]


# What a forward is given


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("late", [False, True])
def test_one_tensor_as_two_inputs_is_another_kind(late):
    """The second of two is perhaps of no sample; one that is both is of the batch."""

    def losses(model, k):
        x, y = torch.randn(B, D), torch.randn(B, D)
        return squares(model, x, x if (k in CHANGED) == late else y)

    assert both(lambda: Net(lambda m, x, y: m.b(F.linear(y, m.w).tanh()) + x), losses)[1]


@pytest.mark.usefixtures("double")
def test_a_parameter_of_another_type_is_another_one():
    class Own(nn.Parameter):
        pass

    def losses(model, k):
        found = squares(model, torch.randn(B, D))
        model.w = (Own if k + 1 in CHANGED else nn.Parameter)(model.w.detach())  # for the next one
        return found

    make = lambda: Net(lambda m, x: F.linear(m.a(x), m.w).tanh())  # noqa: E731
    both(make, losses)
    with following(True) as readers:
        run(make, losses)
    followed = [reader.place == len(reader.entries) for reader in readers]
    assert followed == [k not in CHANGED for k in range(FIRST, CALLS)]


@pytest.mark.usefixtures("double")
def test_a_rule_that_is_registered_anew_is_asked(monkeypatch):
    torch.manual_seed(0)
    model, seen = Net(lambda m, x: m.b(m.a(x).tanh())), []
    known = RULES[F.linear]

    @wraps(known.function)
    def noted(*args, **kwargs):
        seen.append(1)
        return known.function(*args, **kwargs)

    with following(True) as readers:
        for k in range(CALLS):
            if k == CALLS - 1:
                monkeypatch.setitem(RULES, F.linear, replace(known, function=noted))
            x = torch.randn(B, D)
            with eachgrad.record(model) as tape:
                losses = squares(model, x)
            found = tape.backward(losses).dense()
            assert_same(found, loop(model, squares, [(row,) for row in x.split(1)]), 1e-10)
    assert len(readers) == CALLS - FIRST
    assert len(seen) == 2


@pytest.mark.usefixtures("double")
def test_after_an_error_in_the_block_all_is_known():
    """Who catches it may ask about the losses that there are."""

    def known(on: bool) -> list[dict[str, Any]]:
        found, model = [], Net(lambda m, x: m.b(m.a(x).tanh()))
        with following(on):
            for k in range(CALLS):
                with contextlib.suppress(KeyError), eachgrad.record(model) as tape:
                    losses = squares(model, torch.randn(B, D)) * 2
                    if k in CHANGED:
                        raise KeyError
                found.append(state(tape))
                ask(tape, losses, k)
        return found

    assert known(True) == known(False)


# Life time


def recorded(model: nn.Module, calls: int = CALLS) -> list[weakref.ref]:
    """References to the tensors of some forwards, which were asked about."""
    found = []
    for k in range(calls):
        x = torch.randn(B, D)
        with eachgrad.record(model) as tape:
            out = model(x)
            losses = out.square().sum(1)
        ask(tape, losses, k)
        found += map(weakref.ref, (x, out, losses, tape.recorder))
    return found


def test_a_script_holds_neither_the_model_nor_its_tensors():
    model = Net(lambda m, x: m.norm(m.b(m.a(x).tanh())))
    gc.collect()
    gc.disable()
    try:
        tensors, parts = recorded(model), [weakref.ref(t) for t in (model, model.a, model.a.weight)]
        assert [known.script is not None for known in familiar._known[model].values()] == [True]
        assert not any(ref() is not None for ref in tensors)
        del model
        assert not any(ref() is not None for ref in parts)
    finally:
        gc.enable()


def test_many_kinds_of_inputs_leave_few_scripts():
    model = Net(lambda m, x: m.b(m.a(x).tanh()))
    for k in range(60):
        with eachgrad.record(model) as tape:
            losses = squares(model, torch.randn(2 + k % 12, D))
        tape.ask(losses, norms=eachgrad.norms())
    assert len(familiar._known[model]) <= familiar._KEPT
