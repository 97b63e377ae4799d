"""Tests of the tests: an error of 1% in any rule, composite or block, and any use left out, does not pass unseen."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from cases import CASES, B, Case, batch, d, ids, net, reals, weight
from eachgrad import CaptureError, cover, solve, tape, uses
from eachgrad import layout as lay
from eachgrad.blocks import Block, Dense, Fold, Geometry, Outer, Patches, Rows, Sum
from eachgrad.blocks.base import Rough
from eachgrad.grads import Gradient, PerSampleGrads
from eachgrad.rules import COMPOSITES, RULES, looped
from eachgrad.rules.linear import Unanswered
from eachgrad.rules.registry import ViaVmap
from eachgrad.testing import check_rule
from test_cases import QUERIES, answer, truth

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def op_case(name: str, body: Callable, *data: Callable, **parts: Callable) -> Case:
    return Case(name, (), net(body, **parts), batch(*(data or (reals(B, d),))))


def in_eval(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    mean, variance = torch.full_like(x[0], 0.1), torch.full_like(x[0], 2.0)
    return torch.batch_norm(x, w, b, mean, variance, False, 0.1, 1e-5, False)


# What no case of the list reaches. The last ones cancel to a ten-thousandth, so that norms are computed again.
ALMOST = 1 + 1e-4
EXTRA = [
    op_case("expand_as", lambda m, x: m.w.expand_as(x) * x, w=weight(d)),
    op_case("broadcast_to", lambda m, x: torch.broadcast_to(m.w, x.shape) * x, w=weight(d)),
    op_case("torch.max", lambda m, x: torch.max(x, m.w) * x, w=weight(d)),
    op_case("torch.min", lambda m, x: torch.min(x, m.w) * x, w=weight(d)),
    op_case("torch.batch_norm", lambda m, x: in_eval(x, m.w, m.b), w=weight(d), b=weight(d)),
    op_case("rmatmul", lambda m, x: m.w.__rmatmul__(x), w=weight(d, 2)),
    op_case("einsum of a list", lambda m, x: torch.einsum("bd,dp->bp", [x, m.w]), w=weight(d, 2)),
    op_case("einsum, parameter first", lambda m, x: torch.einsum("dp,bd->bp", m.w, x), w=weight(d, 2)),
    op_case("rnn_relu_cell", lambda m, x: torch.rnn_relu_cell(x, x, m.w, m.v), w=weight(d, d), v=weight(d, d)),
    op_case("torch.embedding", lambda m, i: torch.embedding(m.w, i), ids(3, B, 2), w=weight(3, d)),
    op_case(
        "tied, the head before the table",
        lambda m, x, i: F.linear(x, m.w) * F.embedding(i, m.w).sum(1)[:, :3],
        reals(B, d),
        ids(3, B, 2),
        w=weight(3, d),
    ),
    op_case(
        "positions that almost cancel",
        lambda m, x: F.linear(torch.stack([x, x * ALMOST], 1), m.w).diff(dim=1),
        reals(B, 8),
        w=weight(8, 8),
    ),
    op_case(
        "uses that almost cancel",
        lambda m, x: F.linear(x, m.w) - (x[:, None] * ALMOST * m.w).sum(-1),
        w=weight(2, d),
    ),
    op_case(
        "look-ups that almost cancel",
        lambda m, i: F.embedding(i, m.w) - F.one_hot(i, 3).to(m.w) * ALMOST @ m.w,
        ids(3, B, 2),
        w=weight(3, d),
    ),
    op_case(
        "convolutions that almost cancel",
        lambda m, x: F.conv1d(x, m.w) - F.conv1d(x * ALMOST, m.w),
        reals(B, 2, d),
        w=weight(3, 2, 3),
    ),
]

OFF = 1.01
EXACT = [case for case in (*CASES, *EXTRA) if case.tolerance < 1e-6]
QUERY_METHODS = ["dense", "fold", "take", "weighted_sum", "measured", "dots"]
BLOCKS = [Dense, Outer, Patches, Rows, Sum]
METHODS = [(cls, name) for cls in BLOCKS for name in QUERY_METHODS] + [
    (Outer, "roughly"), (Patches, "roughly"),
    (Outer, "_gram"), (Outer, "concatenate"), (Rows, "concatenate"), (Fold, "join"), (Geometry, "unfold"),
]  # fmt: skip


def ours(functions: Iterable[Callable]) -> list[Callable]:
    """Each once, without what the tests registered for ops of their own."""
    return [f for f in dict.fromkeys(functions) if inspect.isfunction(f) and f.__module__.startswith("eachgrad.")]


# looped._by_loop has no answer of its own: test_an_error_in_the_loop.
RULE_FUNCTIONS = [f for f in ours(rule.function for rule in RULES.values()) if f is not looped._by_loop]
COMPOSITE_FUNCTIONS = ours(COMPOSITES.values())


def name_of(value: Any) -> str:
    return value.__name__.strip("_")


def op_of(function: Callable) -> str:
    """A composite by the ops it stands for: several share a function's name."""
    return ", ".join(name_of(op) for op, f in COMPOSITES.items() if f is function)


# Errors


def off(value: Any) -> Any:
    """The same, 1% larger: a tensor, a block, all of a dict, the first of a tuple."""
    if isinstance(value, Tensor):
        return value * OFF if value.is_floating_point() or value.is_complex() else value  # an index stays one
    if isinstance(value, tuple):
        return (off(value[0]), *value[1:])
    if isinstance(value, dict):
        return {name: off(v) for name, v in value.items()}
    if isinstance(value, Sum):
        return Sum(tuple(map(off, value.parts)))
    field = {Dense: "value", Outer: "left", Rows: "value", Patches: "g", Rough: "total"}.get(type(value))
    return value if field is None else dataclasses.replace(value, **{field: off(getattr(value, field))})


def wrapped(function: Callable, after: Callable[[Any], Any]) -> Callable:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return after(function(*args, **kwargs))

    return wrapper


def replace_rule(patch: pytest.MonkeyPatch, function: Callable, new: Callable) -> None:
    for op, rule in list(RULES.items()):
        if rule.function is function:
            patch.setitem(RULES, op, dataclasses.replace(rule, function=new))


def replace_composite(patch: pytest.MonkeyPatch, function: Callable, new: Callable) -> None:
    for op, found in list(COMPOSITES.items()):
        if found is function:
            patch.setitem(COMPOSITES, op, new)


# Which case exercises what: every case once, with everything watched


@functools.cache
def census() -> dict[Any, list[Case]]:
    """{what: the cases that reach it, the fastest first}.

    A rule and an argument, reached or only answered for ("answers", rule, argument); a composite; a block class and a
    method; or "loop".
    """
    seen: dict[Any, dict[Case, float]] = defaultdict(dict)
    reached: set[Any] = set()
    with pytest.MonkeyPatch.context() as patch:
        _watch(patch, reached)
        for case in EXACT:
            reached.clear()
            start = time.perf_counter()
            try:
                grads = answer(case)
                grads.dense()
                grads.norms()
                grads.weighted_sum(torch.ones(grads.batch_size, dtype=torch.float64))
            except Exception:  # a case that fails by itself proves nothing here
                continue
            for key in reached:
                seen[key][case] = time.perf_counter() - start
    return {key: sorted(cases, key=cases.__getitem__) for key, cases in seen.items()}


def _watch(patch: pytest.MonkeyPatch, reached: set[Any]) -> None:
    last: list[Callable] = []

    def note(key: Any) -> Callable[[Any], Any]:
        return lambda out: out if out is NotImplemented else (reached.add(key), out)[1]

    for function in RULE_FUNCTIONS:
        replace_rule(patch, function, wrapped(function, lambda out, f=function: (last.append(f), out)[1]))
    by_source = uses._by_source

    def sorted_by_source(names: list[list[str]], found: dict[str, Block]) -> list[Block | None]:
        known = {name for name, block in found.items() if not isinstance(block, Unanswered)}
        reached.update(("answers", last[-1], name) for name in known)
        reached.update((last[-1], name) for group in names for name in known.intersection(group))
        return by_source(names, found)

    patch.setattr(uses, "_by_source", sorted_by_source)
    patch.setattr(uses, "_by_loop", wrapped(uses._by_loop, note("loop")))
    for function in COMPOSITE_FUNCTIONS:
        replace_composite(patch, function, wrapped(function, note(function)))
    for cls, method in METHODS:
        patch.setattr(cls, method, wrapped(getattr(cls, method), note((cls, method))))


# Whether an error is noticed


def wrong(case: Case) -> bool:
    """Whether some query of this case differs from the loop over samples."""
    grads, want = answer(case), truth(case)
    for query in QUERIES:
        try:
            query(grads, want, case.tolerance)
        except AssertionError:
            return True
    return False


@functools.cache
def passes(case: Case) -> bool:
    try:
        return not wrong(case)
    except Exception:
        return False


def some(key: Any, count: int = 3) -> list[Case]:
    """A few cases that reach this and pass; to be called before anything is changed."""
    chosen: list[Case] = []
    for case in census().get(key, []):
        if len(chosen) < count and passes(case):
            chosen.append(case)
    return chosen


def refused(case: Case) -> bool:
    try:
        answer(case, check=True)
    except CaptureError:
        return True
    return False


@functools.cache
def passes_checked(case: Case) -> bool:
    try:
        answer(case, check=True)
    except Exception:
        return False
    return True


# Rules


def arguments_of(function: Callable) -> list[str]:
    return sorted(key[1] for key in census() if isinstance(key, tuple) and key[0] is function)


@pytest.mark.parametrize("function", RULE_FUNCTIONS, ids=name_of)
def test_an_error_in_a_rule(function, monkeypatch):
    arguments = arguments_of(function)
    assert arguments, f"no case reaches {name_of(function)}"
    for argument in arguments:
        cases = some((function, argument))
        checked = list(filter(passes_checked, cases))
        assert cases, f"no case that passes reaches {argument} of {name_of(function)}"
        with monkeypatch.context() as patch:
            change = lambda answer, n=argument: answer | {n: off(answer[n])} if n in answer else answer  # noqa: E731
            replace_rule(patch, function, wrapped(function, change))
            assert any(map(refused, checked)), f"check=True, {argument} of {name_of(function)}"
            assert any(map(wrong, cases)), f"{argument} of {name_of(function)}, in {', '.join(map(str, cases))}"


def test_every_argument_that_a_rule_answers_for_is_a_parameter_somewhere():
    answered = {key[1:] for key in census() if isinstance(key, tuple) and key[0] == "answers"}
    assert {(name_of(f), n) for f, n in answered} == {(name_of(f), n) for f, n in answered if (f, n) in census()}


def test_an_error_in_the_loop(monkeypatch):
    cases = some("loop")
    monkeypatch.setattr(uses, "_by_loop", wrapped(uses._by_loop, off))
    assert cases
    assert all(map(wrong, cases))


def test_an_error_in_a_dense_rule_is_made_up_for_by_the_loop(monkeypatch):
    monkeypatch.setitem(
        RULES, torch.trapezoid, dataclasses.replace(RULES[F.linear], function=ViaVmap(torch.trapezoid), run=None)
    )
    check = lambda: check_rule(torch.trapezoid, torch.randn(3, 5), torch.randn(5, requires_grad=True))  # noqa: E731
    check()
    monkeypatch.setattr(ViaVmap, "__call__", wrapped(ViaVmap.__call__, off))
    check()
    monkeypatch.setattr(uses, "_by_loop", wrapped(uses._by_loop, off))
    with pytest.raises(AssertionError):
        check()


def test_an_error_in_a_derived_weight(monkeypatch):
    cases = [case for case in EXACT if case.name in ("weight_norm", "product of two weights", "cat of parameters")]
    assert len(cases) == 3
    assert all(map(passes, cases))
    monkeypatch.setattr(solve, "_batched_pull", wrapped(solve._batched_pull, lambda found: [t * OFF for t in found]))
    assert all(map(wrong, cases))


# Composites


@pytest.mark.parametrize("function", COMPOSITE_FUNCTIONS, ids=op_of)
def test_an_error_in_a_composite(function, monkeypatch):
    cases = some(function)
    assert cases, f"no case that passes reaches {op_of(function)}"
    with monkeypatch.context() as patch:
        replace_composite(patch, function, wrapped(function, lambda out: out if out is NotImplemented else off(out)))
        assert any(map(wrong, cases)), f"{op_of(function)}, in {', '.join(map(str, cases))}"


# Blocks


def a_sum() -> Sum:
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return Sum((Outer(draw(4, 2, 3), draw(4, 2, 5)), Dense(draw(4, 3, 5))))


def check_sum_folds() -> None:
    fold = Fold(torch.tensor([[0, 2], [3, -1]]), "ragged")
    value = a_sum().dense()
    torch.testing.assert_close(a_sum().fold(fold).dense(), torch.stack([value[0] + value[2], value[3]]))


def check_sum_dots() -> None:
    other = torch.ones(4, 3, 5, dtype=torch.float64)
    torch.testing.assert_close(a_sum().dots(Dense(other)), a_sum().dense().sum((1, 2)))


# No rule makes a sum by itself: a sum is neither folded nor part of another, so far.
BY_HAND = {(Sum, "fold"): check_sum_folds, (Sum, "dots"): check_sum_dots}


@pytest.mark.parametrize(("cls", "method"), METHODS, ids=lambda v: name_of(v) if isinstance(v, type) else v)
def test_an_error_in_a_block(cls, method, monkeypatch):
    cases, check = some((cls, method), count=6), BY_HAND.get((cls, method))
    assert cases or check
    if check:
        check()
    monkeypatch.setattr(cls, method, wrapped(getattr(cls, method), off))
    if check:
        with pytest.raises(AssertionError):
            check()
    assert check or any(map(wrong, cases)), ", ".join(map(str, cases))


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (Gradient, "dense"), (Gradient, "squared_norms"), (Gradient, "norms"), (Gradient, "weighted_sum"),
        (PerSampleGrads, "dense"), (PerSampleGrads, "norms"), (PerSampleGrads, "weighted_sum"),
        (PerSampleGrads, "clipped_sum"),
    ],
    ids=lambda v: name_of(v) if isinstance(v, type) else v,
)  # fmt: skip
def test_an_error_in_a_query(cls, method, monkeypatch):
    case = next(case for case in EXACT if case.name == "linear rank 3")
    assert passes(case)
    monkeypatch.setattr(cls, method, wrapped(getattr(cls, method), off))
    assert wrong(case)


# Uses


@functools.cache
def one_per_hazard() -> list[Case]:
    """A case for every hazard that the list names: the fastest."""
    order = dict.fromkeys(case for cases in census().values() for case in cases)
    found = {hazard: case for case in order for hazard in case.hazards if passes(case)}
    return list(dict.fromkeys(found.values()))


def missed_without_a_use(case: Case, patch: pytest.MonkeyPatch, seen: Callable[[Case], bool]) -> tuple[list, int]:
    """Leave out one use after the other: those of which nothing was `seen`, and how many there were.

    Candidates stay: the uses further on make up for one that is missing.
    """
    missed, k, count = [], 0, 1

    def shortened(recorder: Any, *args: Any) -> list[cover.Solved]:
        nonlocal count
        found = solve.solved(recorder, *args)
        certain = [item for item, wanted in cover._accept(recorder, found) if wanted and item.use.strong]
        count = len(certain)
        return [item for item in found if not certain or item is not certain[k]]

    patch.setattr(tape, "solved", shortened)
    while k < count:
        if not seen(case) and count:
            missed.append((str(case), k))
        k += 1
    return missed, count


def noticed(case: Case) -> bool:
    try:
        return wrong(case)
    except CaptureError:  # a parameter without any accepted use is named
        return True


def test_a_use_that_is_left_out(monkeypatch):
    cases = one_per_hazard()
    found = [missed_without_a_use(case, monkeypatch, noticed) for case in cases]
    assert not [miss for missed, _ in found for miss in missed]
    assert sum(count for _, count in found) > len(cases) > 20


def test_a_use_that_is_left_out_of_a_checked_recording(monkeypatch):
    cases = [case for case in one_per_hazard() if passes_checked(case)]
    found = [missed_without_a_use(case, monkeypatch, refused) for case in cases]
    assert not [miss for missed, _ in found for miss in missed]
    assert sum(count for _, count in found) > len(cases) > 20


# Layouts


def other_dimension(found: lay.Layout, evidence: lay.Evidence) -> lay.Layout:
    """Samples along the other dimension of the same size, if there is one."""
    shape = evidence.plain.shape
    if not isinstance(found, lay.Along) or found.fold is not None:
        return found
    others = [k for k, n in enumerate(shape) if k != found.dim and n == shape[found.dim]]
    return lay.Along(others[0]) if others else found


def test_samples_taken_along_the_wrong_dimension(monkeypatch):
    cases = [case for case in EXACT if "T = B" in case.hazards and passes(case)]
    find, changed = lay.find, []

    def mistaken(evidence: lay.Evidence) -> lay.Layout:
        found = find(evidence)
        new = other_dimension(found, evidence)
        changed.append(new != found and not evidence.agrees(new))
        return new

    monkeypatch.setattr(lay, "find", mistaken)
    mistakes = 0
    for case in cases:
        changed.clear()
        assert noticed(case) or not any(changed), str(case)
        mistakes += any(changed)
    assert mistakes > 20


def test_samples_taken_in_the_wrong_order(monkeypatch):
    cases = [case for case in EXACT if "folded" in case.hazards and passes(case)]
    assert len(cases) > 4
    join = Fold.join
    monkeypatch.setattr(Fold, "join", lambda self, rows: join(self, rows).flip(0))
    assert all(map(noticed, cases))
