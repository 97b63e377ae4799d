"""One sample by the graph for any number: its answer is the eager one, or it is filled up to two."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from eachgrad import judging
from eachgrad.alone import Entries
from oracle import assert_same, loop
from test_sizes import MODELS, asked, assert_right, d, losses

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:.*is_fx_tracing will return true:UserWarning"),
]
DRAWN = (4, 4, 3, 3, 2, 1, 1, 4, 1, 1, 3, 1)  # the 1st, 2nd, 4th and 8th are measured; the first 1 is filled up to 2


@pytest.fixture
def alone(monkeypatch):
    """How often one sample was computed as one."""
    found, own = [], Entries.alone

    def counted(self, args):
        found.append(own(self, args))
        return found[-1]

    monkeypatch.setattr(Entries, "alone", counted)
    return found


def the_step(ask):
    (graph,) = ask.graphs
    (found,) = graph.step.values()
    return found


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", MODELS)
def test_one_sample_is_computed_as_one(name, backend, alone):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    ask = asked(make(), fewest=2, usual=4, backend=backend)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for n in DRAWN:
            assert_right(ask, batch(n))
    assert not ask.reasons()
    assert len(alone) == DRAWN.count(1)
    assert (1, False) in the_step(ask).checked


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", MODELS)
def test_the_answer_is_that_of_a_loop(name, alone):
    torch.manual_seed(0)
    make, batch = MODELS[name]
    model = make()
    ask = asked(model, fewest=2)
    for n in DRAWN:
        x = batch(n)
        want, got = loop(model, losses, [(one,) for one in x.split(1)]), ask(x)
        norms = sum(g.flatten(1).square().sum(1) for g in want.values()).sqrt()
        torch.testing.assert_close(got.norms, norms, rtol=1e-10, atol=0)
        factor = (0.02 / norms).clamp(max=1.0)
        assert_same(got.grad, {k: torch.tensordot(factor, g, 1) for k, g in want.items()}, 1e-10)
        assert_same(got.total, {k: g.mean(0) for k, g in want.items()}, 1e-10)
    assert len(alone) == DRAWN.count(1)


@pytest.mark.usefixtures("double")
def test_more_than_two_are_filled_up_with_more(alone):
    make, batch = MODELS["mlp"]
    ask = asked(make(), fewest=3)
    for n in DRAWN:
        assert_right(ask, batch(n))
    assert not alone


@pytest.mark.parametrize("dynamic", [False, 2])
@pytest.mark.usefixtures("double")
def test_one_sample_in_other_graphs(dynamic, alone):
    """Of fixed sizes each has its own; with multiples of two, one is filled up to two, and cut again."""
    make, batch = MODELS["positions"]
    options = {"fewest": 2} if dynamic else {"pad_to": (1, 4)}
    ask = asked(make(), dynamic=dynamic, **options)
    for n in DRAWN:
        assert_right(ask, batch(n))
    assert not ask.reasons()
    assert bool(alone) == bool(dynamic)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("which", [1, 2, -1])  # a loss; norms; a sum
def test_a_wrong_answer_about_one_is_refused(which, monkeypatch):
    """By 1%, from the first one on; two samples and more are compiled as before."""
    own, tried = Entries.alone, []

    def wrong(self, args):
        found = list(own(self, args))
        found[which] = found[which] * 1.01
        tried.append(found)
        return tuple(found)

    monkeypatch.setattr(Entries, "alone", wrong)
    torch.manual_seed(0)
    make, batch = MODELS["positions"]
    ask = asked(make(), fewest=2)
    for n in DRAWN:
        assert_right(ask, batch(n))
    assert len(tried) == 1
    assert not ask.reasons()
    assert the_step(ask).refuses_one
    assert (2, True) in the_step(ask).checked


@pytest.mark.usefixtures("double")
def test_an_error_with_one_is_no_reason(monkeypatch):
    tried = []

    def fails(self, args):
        tried.append(args)
        raise AssertionError("expected size 1==1, stride 1==6 at dim=0")

    monkeypatch.setattr(Entries, "alone", fails)
    make, batch = MODELS["positions"]
    ask = asked(make(), fewest=2)
    for n in DRAWN:
        assert_right(ask, batch(n))
    assert len(tried) == 1
    assert not ask.reasons()


def test_with_random_numbers_one_is_filled_up(alone):
    """Nothing tells whether its answer is right."""
    ask = asked(nn.Sequential(nn.Linear(d, 8), nn.Dropout(0.5), nn.Linear(8, 3)), fewest=2)
    for n in (*DRAWN, 1, 1):
        ask(torch.randn(n, d))
    assert not ask.reasons()
    assert len(alone) == 1
    assert the_step(ask).refuses_one


def rough(backend="aot_eager"):
    torch.manual_seed(0)
    ask = asked(nn.Sequential(nn.Linear(d, 16), nn.Tanh(), nn.Linear(16, 3)), fewest=2, usual=4, backend=backend)

    def run(n):
        x = torch.randn(n, 5, d)
        with torch.autocast("cpu", torch.bfloat16):
            got, want = ask(x), ask.eager((x,))
        torch.testing.assert_close(got.norms, want.norms, rtol=3e-2, atol=0)
        torch.testing.assert_close(got.losses, want.losses, rtol=3e-2, atol=0)
        assert_same(got.grad, want.grad, 5e-2)

    return ask, run


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_in_sixteen_bits_float32_is_the_judge(backend, alone):
    ask, run = rough(backend)
    for n in (*DRAWN, 1, 1, 1):
        run(n)
    assert not ask.reasons()
    assert (1, False) in the_step(ask).checked
    assert 1 <= the_step(ask).ones < judging.STRIKES
    assert len(alone) >= DRAWN.count(1) + 2


def test_in_sixteen_bits_a_wrong_sum_is_refused(monkeypatch):
    """By 10%, which a comparison with the eager answer would not see; three times, since one may fail by chance."""
    own, tried = Entries.alone, []

    def wrong(self, args):
        found = [t * 1.1 for t in own(self, args)]
        tried.append(found)
        return tuple(found)

    ask, run = rough()
    monkeypatch.setattr(Entries, "alone", wrong)
    for n in (*DRAWN, 1, 1, 1, 1):
        run(n)
    assert the_step(ask).refuses_one
    assert len(tried) == 2 * judging.STRIKES  # for the answer, and for the judge
    assert not ask.reasons()


def test_in_sixteen_bits_float32_may_fail(monkeypatch):
    """Where nobody can judge, one is filled up."""
    ask, run = rough()
    for n in DRAWN[:5]:
        run(n)

    def fails(*_):
        raise torch.OutOfMemoryError("too large")

    monkeypatch.setattr(judging, "widened", fails)
    for n in DRAWN[5:]:
        run(n)
    assert the_step(ask).refuses_one
    assert not ask.reasons()


@pytest.mark.usefixtures("double")
def test_another_parameter_has_another_step(alone):
    make, batch = MODELS["mlp"]
    model = make()
    ask = asked(model, fewest=2)
    for n in DRAWN:
        assert_right(ask, batch(n))
    before = len(alone)
    model[0].weight = nn.Parameter(torch.randn_like(model[0].weight))
    for n in (1, 1, 3, 2, 1):
        assert_right(ask, batch(n))
    assert not ask.reasons()
    assert len(alone) > before


@pytest.mark.usefixtures("double")
def test_no_batch_is_kept():
    make, batch = MODELS["mlp"]
    ask = asked(make(), fewest=2)
    kept = []
    for n in DRAWN:
        x = batch(n)
        kept.append(StorageWeakRef(x.untyped_storage()))
        ask(x)
        del x
        gc.collect()
        assert kept[-1].expired(), f"a batch of {n}"


def test_what_a_graph_is_entered_with_is_known_or_it_is_not():
    """A tensor that is none of the arguments, or a number that is not that of the samples: no one enters it with one."""
    x, y = torch.randn(2, 3), torch.randn(2)
    for given, known in (((2, x, y), True), ((2, x, y.clone()), False), ((3, x, y), False), ((x,), True)):
        entries = Entries({"backend": lambda gm, _: gm})
        entered = entries(lambda *args: args, [])
        entered(*given)
        entries.remember([x, y], 2)
        assert entries.takes_one == known
    one = (torch.randn(1, 3), torch.randn(1))
    assert entries.alone(one) == (one[0],)


def test_a_graph_for_other_sizes_is_not_entered():
    entries = Entries({"backend": lambda gm, _: gm})
    x = torch.randn(3, 3)
    entries(lambda *args: args, [])(3, x)
    entries.remember([x], 3)
    assert not entries.takes_one


def test_a_mode_is_passed_on_to_the_compiler(monkeypatch):
    import torch._inductor

    given = []
    monkeypatch.setattr(torch._inductor, "compile", lambda gm, example, options: given.append(options) or gm)
    Entries({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"})(lambda: None, [])
    Entries({"backend": "inductor", "mode": None})(lambda: None, [])
    Entries({"backend": "inductor", "options": {"reorder_for_locality": False}})(lambda: None, [])
    assert given == [{"max_autotune": True, "coordinate_descent_tuning": True}, {}, {"reorder_for_locality": False}]
