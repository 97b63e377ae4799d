"""Compiled answers in sixteen bits are held to float32: they may be no farther from it than the eager ones are."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eachgrad
from eachgrad import judging
from eachgrad.agreement import farther
from eachgrad.blocks.arithmetic import has_short_products
from eachgrad.precise import all_bits, in_float32, widened
from eachgrad.queries import Answer
from eachgrad.step import Step

pytestmark = pytest.mark.usefixtures("fresh_compiler")

d = 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(d, 32), nn.LayerNorm(32), nn.Linear(32, 4)

    def forward(self, x):
        h = F.gelu(self.first(x))
        h = h + self.norm(h).to(h.dtype)  # a constant for the compiler
        return self.last(h)


def inside(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    return out.float().square().mean((1, 2))


def outside(model, x):
    return model(x).float().square().mean((1, 2))


def by_itself(model, x):
    return model(x.bfloat16()).float().square().mean((1, 2))


CASES = {"autocast inside": (inside, False), "autocast outside": (outside, True), "parameters": (by_itself, False)}


def asked(case, dynamic=True, **options):
    torch.manual_seed(0)
    loss_fn, cast = CASES[case]
    model = Net().bfloat16() if case == "parameters" else Net()
    queries = {"grad": eachgrad.clipped_sum(0.5), "norms": eachgrad.norms()}
    ask = eachgrad.compile(model, loss_fn, dynamic=dynamic, **({"backend": "aot_eager"} | options), **queries)

    def run(n=9, eager=False):
        x = torch.randn(n, 5, d)
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return ask.eager((x,)) if eager else ask(x)

    return ask, run


@pytest.fixture
def judged(monkeypatch):
    """The sizes of the batches that were compared, and what was found."""
    found, own = [], judging.Judge.farther

    def farther(self, step, args, size):
        found.append((size, own(self, step, args, size)))
        return found[-1][1]

    monkeypatch.setattr(judging.Judge, "farther", farther)
    return found


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_a_right_answer_is_compiled(case, dynamic, backend, judged):
    ask, run = asked(case, dynamic, backend=backend)
    for n in (9, 9, 9, 9, 12, 12) if dynamic else (9,) * 5:
        run(n)
    assert not ask.reasons()
    assert judged == [(8 if dynamic else 0, "")]  # once, with few samples where any number may come


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_tenth_is_too_much(case, dynamic, which, monkeypatch):
    """Losses, the first parameter's sum, norms: well below the half of an answer that sixteen bits may be off."""
    ask, run = asked(case, dynamic)
    own = Step.run

    def wrong(self, args):
        found = list(own(self, args))
        found[which] = found[which] * 1.1
        return tuple(found)

    monkeypatch.setattr(Step, "run", wrong)
    for _ in range(6):  # three of them compiled: what is far once may be so by chance
        assert not ask.reasons()
        assert_eager(ask, run)
    (reason,) = ask.reasons()
    assert "of its size in float32, the eager ones by" in reason
    assert_eager(ask, run)


def assert_eager(ask, run):
    state = torch.get_rng_state()
    got = run()
    torch.set_rng_state(state)
    want = run(eager=True)
    torch.testing.assert_close((got.norms, got.losses), (want.norms, want.losses), rtol=1e-5, atol=0)


def test_far_once_is_no_reason(judged, monkeypatch):
    """With few samples the eager answer may be near by chance: the batch is answered eagerly, and the next one decides."""
    said = iter(["norms by 0.2 of its size", ""])
    monkeypatch.setattr(judging, "farther", lambda *answers: next(said))
    ask, run = asked("autocast inside")
    for _ in range(6):
        run()
    assert not ask.reasons()
    assert [found for _, found in judged] == ["norms by 0.2 of its size", ""]
    assert ask.graphs[0].step


@pytest.mark.parametrize("dynamic", [True, False])
def test_zeros_say_nothing(dynamic, judged, monkeypatch):
    """Samples without a gradient come first: more of them are compared, and another batch if there are no others."""
    torch.manual_seed(0)
    ask = eachgrad.compile(
        Net(), lambda model, x, counted: inside(model, x) * counted, dynamic=dynamic, backend="aot_eager",
        grad=eachgrad.clipped_sum(0.5), norms=eachgrad.norms(),
    )  # fmt: skip
    own = Step.run
    monkeypatch.setattr(Step, "run", lambda self, args: tuple(1.1 * t for t in own(self, args)))
    x, counted = torch.randn(16, 5, d), torch.ones(16)
    for _ in range(2):
        ask(x, counted)
    counted[:] = 0
    ask(x, counted)
    assert not ask.reasons()
    assert judged == ([(8, None), (16, None)] if dynamic else [(0, None)])
    counted[8:] = 1
    for _ in range(6):
        ask(x, counted)
    (reason,) = ask.reasons()
    assert "of its size in float32" in reason


def test_an_op_without_float32_is_not_judged(monkeypatch):
    """Nor what has no room: the comparison with the eager answer, which is rough, is all there is."""
    own, tried = judging.widened, []

    def failing(args):
        tried.append(own(args))
        raise torch.OutOfMemoryError("float32 does not fit")

    monkeypatch.setattr(judging, "widened", failing)
    ask, run = asked("autocast inside")
    for _ in range(4):
        run()
    assert not ask.reasons()
    assert [args[-1].shape[0] for args in tried] == [8, 9]  # fit(1) is 8 as well


def test_a_comparison_that_is_interrupted_is_made_again(judged, monkeypatch):
    own, interrupts = judging.widened, [KeyboardInterrupt()]

    def interrupted(args):
        if interrupts:
            raise interrupts.pop()
        return own(args)

    monkeypatch.setattr(judging, "widened", interrupted)
    ask, run = asked("autocast inside")
    run(), run()
    with pytest.raises(KeyboardInterrupt):
        run()
    run(), run()
    assert not ask.reasons()
    assert judged == [(8, "")]


def test_no_graph_is_compiled_for_it(judged):
    """One for any number of samples has guards: few samples may be another one's."""
    compiled = []

    def backend(gm, example):
        compiled.append(gm)
        assert next(a for a in example if isinstance(a, torch.SymInt)) > 8  # a guard
        return gm

    ask, run = asked("autocast inside", backend=backend)
    for _ in range(4):
        run()
    assert not ask.reasons()
    assert len(compiled) == 1
    assert judged == [(9, "")], "with the batch at hand"


def test_random_numbers_are_not_judged(judged):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d, 8), nn.Dropout(0.5), nn.Linear(8, 3)).bfloat16()
    ask = eachgrad.compile(
        model, lambda model, x: model(x).float().square().mean(1), backend="aot_eager", norms=eachgrad.norms()
    )
    for _ in range(4):
        ask(torch.randn(9, d, dtype=torch.bfloat16))
    assert not ask.reasons()
    assert not judged


def test_float32_is_not_judged(judged):
    ask = eachgrad.compile(Net(), outside, backend="aot_eager", norms=eachgrad.norms())
    for _ in range(4):
        ask(torch.randn(9, 5, d))
    assert not ask.reasons()
    assert not judged


def test_a_forward_in_float32():
    found = []

    def backend(gm, example):
        found.append(gm)
        return gm

    class Casts(nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                y = x @ x.mT
            z = y.to(torch.float16).half().bfloat16() + torch.zeros(4, 4, dtype=torch.bfloat16)
            return z + x.to(dtype=torch.bfloat16)

    x = torch.randn(4, 4)
    torch.compile(Casts(), backend=backend, fullgraph=True)(x)
    (gm,) = found
    before = copy.deepcopy(gm.graph)
    (got,) = in_float32(gm)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, x @ x.mT + x)
    assert str(gm.graph) == str(before), "the graph itself stays"
    assert not torch.is_autocast_enabled("cpu")


def test_arguments_are_widened():
    p = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
    n, x, w = widened((7, torch.arange(3), p))
    assert n == 7
    assert x.dtype == torch.int64
    assert w.dtype == torch.float32
    assert torch.equal(w, p.detach().float())


def test_settings_come_back():
    own = torch.backends
    every = [own.cuda.matmul, own.cudnn.conv, own.cudnn.rnn, own.mkldnn.matmul, own.mkldnn.conv, own.mkldnn.rnn]
    start = [part.fp32_precision for part in every]
    try:
        for setting in SETTINGS.values():
            setting()
            before = [part.fp32_precision for part in every]
            with suppress(KeyError), torch.autocast("cpu", torch.bfloat16), all_bits():
                assert {part.fp32_precision for part in every} <= {"none", "ieee"}
                assert not torch.is_autocast_enabled("cpu")
                raise KeyError
            assert [part.fp32_precision for part in every] == before
            for part, value in zip(every, start, strict=True):
                part.fp32_precision = value
    finally:
        torch.set_float32_matmul_precision("highest")
        for part, value in zip(every, start, strict=True):
            part.fp32_precision = value


SETTINGS = {
    "none": lambda: None,
    "legacy": lambda: torch.set_float32_matmul_precision("medium"),
    "one": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "another": lambda: setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee"),
}


def test_a_setting_of_one_backend_is_understood(judged):
    """Where torch does not tell its setting for all of them."""
    part = torch.backends.cuda.matmul
    before = part.fp32_precision
    try:
        assert not has_short_products()
        part.fp32_precision = "tf32"
        assert has_short_products()
        _, run = asked("autocast inside")
        for _ in range(3):
            run()
        assert judged == [(8, "")]
    finally:
        part.fp32_precision = before


@pytest.mark.parametrize(
    ("found", "eager", "far"),
    [
        (1.0299, 1.0, False),
        (1.0301, 1.0, True),
        (0.9699, 1.0, True),
        (1.0599, 1.02, False),
        (1.0601, 1.02, True),
        (1.598, 0.8, False),
        (1.602, 0.8, True),
        (1.0, 3.0, False),
    ],
)
def test_how_far_is_too_far(found, eager, far):
    """From 1: three times as far as the eager one, or 3% of it."""
    exact = torch.arange(1.0, 9.0)
    said = farther(*(Answer(norms=value * exact) for value in (found, eager, 1.0)))
    assert bool(said) == far
    assert not far or said.startswith(f"norms by {abs(found - 1):.2g} of its size in float32, the eager ones by ")


def test_a_few_numbers_may_be_near_by_chance():
    """The eager ones: a compiled number that is not so near is no worse for that."""
    exact = torch.ones(7)
    assert farther(*(Answer(norms=value * exact) for value in (1.2, 1.0, 1.0))) is None
    exact = torch.ones(4)  # with another parameter's there are enough
    assert farther(*(Answer(grad={"a": value * exact, "b": value * exact}) for value in (1.2, 1.0, 1.0)))


@pytest.mark.parametrize(
    ("size", "found", "eager", "far"),
    [
        (0.1, 1.031, 1.0, True),  # of the part 3%, of all 0.3%: the larger one counts
        (0.2, 1.029, 1.0, False),
        (0.05, 1.061, 1.0, True),
        (0.05, 1.059, 1.0, False),
        (0.05, 1.061, 1.021, False),
        (1e-6, 100.0, 1.0, False),
    ],
)
def test_a_parameter_is_judged_by_its_own_size(size, found, eager, far):
    """A bias that is wrong does not hide beside large weights."""
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    part = torch.randn(8, generator=torch.Generator().manual_seed(1))
    part *= size * whole.norm() / (part.norm() * (1 - size**2) ** 0.5)  # as much of all
    said = farther(*(Answer(grad={"weight": whole, "bias": value * part}) for value in (found, eager, 1.0)))
    assert bool(said) == far
    assert not far or said.startswith(f"grad['bias'] by {found - 1:.2g} of its size in float32")


def test_what_should_be_zero_is_judged_by_all():
    whole = torch.ones(1000)
    for wrong, far in ((2.9e-3, False), (3.1e-3, True)):
        found = {"weight": whole, "unused": torch.full((10,), wrong * 1000**0.5 / 10**0.5)}
        right = {"weight": whole, "unused": torch.zeros(10)}
        assert bool(farther(Answer(grad=found), Answer(grad=right), Answer(grad=right))) == far
