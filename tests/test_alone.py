"""One sample by the graph for any number: its answer is the eager one, or it is filled up to two."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import eachgrad
from eachgrad import judging
from eachgrad.alone import COMPARED, MISSES, Entries
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


def refuses_one(ask):
    return not the_step(ask).entries.takes_one


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
    assert refuses_one(ask)
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
    assert refuses_one(ask)


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
    assert the_step(ask).entries.right == COMPARED
    assert len(alone) == DRAWN.count(1) + 3 + COMPARED  # and once more for the judge


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
    assert refuses_one(ask)
    assert len(tried) == 2 * MISSES  # for the answer, and for the judge
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
    assert refuses_one(ask)
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
    for given, known in (((2, x, y.clone()), False), ((3, x, y), False), ((x, y), False), ((y, 2, x), True)):
        entries = Entries({"backend": lambda gm, _: gm}, {})
        entered = entries(lambda *args: args, [])
        entered(*given)
        entries.remember([x, y], 2)
        assert entries.takes_one == known
    one = (torch.randn(1, 3), torch.randn(1))
    assert entries.alone(one) == (one[1], 1, one[0])


def test_a_graph_for_other_sizes_is_not_entered():
    entries = Entries({"backend": lambda gm, _: gm}, {})
    x = torch.randn(3, 3)
    entries(lambda *args: args, [])(3, x)
    entries.remember([x], 3)
    assert not entries.takes_one


def test_a_mode_is_passed_on_to_the_compiler(monkeypatch):
    import torch._inductor

    given = []
    monkeypatch.setattr(torch._inductor, "compile", lambda gm, example, options: given.append(options) or gm)
    Entries({"backend": "inductor", "mode": "max-autotune-no-cudagraphs"}, {})(lambda: None, [])
    Entries({"backend": "inductor", "mode": None}, {})(lambda: None, [])
    Entries({"backend": "inductor", "options": {"reorder_for_locality": False}}, {})(lambda: None, [])
    assert given == [{"max_autotune": True, "coordinate_descent_tuning": True}, {}, {"reorder_for_locality": False}]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("first", [4, 1])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_what_has_two_entries_and_is_no_sample_is_not_cut(backend, first, alone):
    """Also when one sample is filled up to two, and measured: here at the 8th call."""
    torch.manual_seed(0)
    queries = {"norms": eachgrad.norms(), "grad": eachgrad.clipped_sum(0.02), "total": eachgrad.mean()}
    model = nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, 2))
    weighed = lambda model, x, w: (model(x).square() * w).sum(1)  # noqa: E731
    ask = eachgrad.compile(model, weighed, dynamic=True, fewest=2, backend=backend, **queries)
    for n in (first, first, 4, 4, 1, 1, 1, 1, 1, 3, 3, 1, 4, 1, 1, 1, 3, 1, 1):  # again at the 16th
        assert_right_about(ask, torch.randn(n, d), torch.rand(2) + 0.1)
    assert not ask.reasons()
    assert len(alone) >= 5
    for n in (2, 2, 1, 2, 3, 1, 2, 1, 4):  # it may be taken for samples now, which has reasons, and right answers
        assert_right_about(ask, torch.randn(n, d), torch.rand(2) + 0.1)


def assert_right_about(ask, *batch):
    got, want = ask(*batch), ask.eager(batch)
    torch.testing.assert_close((got.norms, got.losses), (want.norms, want.losses), rtol=1e-10, atol=0)
    assert_same(got.grad, want.grad, 1e-10)
    assert_same(got.total, want.total, 1e-10)


@pytest.mark.usefixtures("double")
def test_a_sample_without_a_gradient_says_nothing(monkeypatch):
    """The next one is compared as well, and the wrong answer found."""
    own, tried = Entries.alone, []

    def wrong(self, args):
        tried.append(args)
        return tuple(t * 1.5 for t in own(self, args))

    monkeypatch.setattr(Entries, "alone", wrong)
    ask = asked(nn.Linear(d, 3), lambda model, x: losses(model, x) * (x[:, 0] > 0), fewest=2)
    for k, n in enumerate((4, 4, 4, 4, 1, 1, 1, 1, 1, 1, 1)):
        x = torch.randn(n, d)
        x[:, 0] = -1 if k in (5, 6) else x[:, 0].abs()  # the 8th is measured
        assert_right(ask, x)
    assert len(tried) == 3
    assert refuses_one(ask)


@pytest.mark.usefixtures("double")
def test_zeros_of_several_samples_say_nothing(monkeypatch):
    """Also where each size has a graph of its own; but a model that has no gradient is compiled in the end."""
    from eachgrad.step import Step

    own = Step.run
    ask = asked(nn.Linear(d, 3), lambda model, x: losses(model, x) * (x[:, 0] > 0), dynamic=False)
    monkeypatch.setattr(Step, "run", lambda self, args: tuple(t * 1.5 for t in own(self, args)))
    for k in range(6):
        x = torch.randn(4, d)
        x[:, 0] = -1 if k == 2 else x[:, 0].abs()
        assert_right(ask, x)
    (reason,) = ask.reasons()
    assert "differ from the eager ones" in reason
    monkeypatch.undo()
    ask = asked(nn.Linear(d, 3), lambda model, x: losses(model, x) * 0, dynamic=False)
    for _ in range(12):
        ask(torch.randn(4, d))
    assert the_step(ask).checked


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_samples_along_the_second_dimension(T, backend, alone):
    torch.manual_seed(0)
    along = lambda model, x: model(x).square().mean((0, 2))  # noqa: E731
    ask = asked(
        nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, 3)), along, fewest=2, batch_dim=1, backend=backend
    )
    for n in DRAWN:
        assert_right(ask, torch.randn(T, n, d))
    assert not ask.reasons()
    assert alone


@pytest.mark.usefixtures("double")
def test_a_doubt_about_one_is_heard(alone):
    """A sample that is not finite is answered by the eager code, at once or when it is asked for."""
    model = nn.Sequential(nn.Linear(d, 8), nn.Tanh(), nn.Linear(8, 3))
    ask = eachgrad.compile(
        model, losses, dynamic=True, fewest=2, backend="aot_eager", grad=eachgrad.clipped_sum(0.02, nonfinite="zero")
    )
    for n in DRAWN:
        ask(torch.randn(n, d))
    before = len(alone)
    x = torch.full((1, d), float("nan"))
    for value in ask(x).grad.values():
        assert not value.any()
    assert len(alone) == before + 1
    ask.trusting(torch.randn(1, d))
    assert not ask.doubted()
    ask.trusting(x)
    assert ask.doubted()
    assert len(alone) == before + 3
