"""What record and its tape promise, apart from the numbers of single ops."""

import copy
import dataclasses
import functools
import gc
import re
import threading
import weakref
from collections.abc import Mapping

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import eachgrad
from cases import Net, score
from eachgrad import CaptureError, Dense, Outer, UnsupportedOp, record
from eachgrad.rules import RULES
from eachgrad.rules.registry import as_called
from eachgrad.testing import check_rule
from oracle import assert_same, loop

B, T, d = 4, 3, 5


pytestmark = pytest.mark.usefixtures("double")


def scores(model, *batch):
    return score(model(*batch))


def cut(batch, dim=0):
    return [tuple(t.narrow(dim, i, 1) for t in batch) for i in range(batch[0].shape[dim])]


def per_sample(model, *batch, losses=scores, **options):
    with record(model, **options) as tape:
        values = losses(model, *batch)
    return tape.backward(values)


def of_scalar(model, *batch, loss, reduction="sum", **options):
    with record(model, **options) as tape:
        value = loss(model, *batch)
    return tape.backward(value, reduction)


def assert_right(model, *batch, losses=scores, **options):
    """The recorded answer is the loop's, by every query; returns it."""
    grads = per_sample(model, *batch, losses=losses, **options)
    want = loop(model, losses, cut(batch))
    assert_same(grads.dense(), want, 1e-10)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in want.values()]).norm(dim=0)
    assert_same({"norms": grads.norms()}, {"norms": norms}, 1e-10)
    c = torch.linspace(-1, 2, grads.batch_size)
    assert_same(grads.weighted_sum(c), {name: torch.tensordot(c, g, 1) for name, g in want.items()}, 1e-10)
    return grads


def mlp(bias=True):
    return nn.Sequential(nn.Linear(d, 4, bias=bias), nn.Tanh(), nn.Linear(4, 2, bias=bias))


def state_of(model):
    """Everything that a recording could leave behind on a model."""
    modules = {name: dict(module.__dict__) for name, module in model.named_modules()}
    contents = {
        (name, key): tuple(value.items()) if isinstance(value, dict) else value
        for name, held in modules.items()
        for key, value in held.items()
    }
    parameters = {
        name: (id(p), p._version, p.requires_grad, p.grad, p._backward_hooks, tuple(vars(p)))
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    return contents, parameters, {name: t.clone() for name, t in model.state_dict().items()}


def assert_untouched(model, before):
    contents, parameters, tensors = state_of(model)
    assert contents == before[0]
    assert parameters == before[1]
    assert tensors.keys() == before[2].keys()
    assert all(torch.equal(tensors[name], before[2][name]) for name in tensors)


# One tape, one forward, one backward


def test_a_model_may_be_recorded_again():
    model = mlp()
    assert_right(model, torch.randn(B, d))
    assert_right(model, torch.randn(B + 1, T, d))


def test_a_tape_cannot_be_entered_again():
    model = mlp()
    with record(model) as tape:
        losses = scores(model, torch.randn(B, d))
    with pytest.raises(CaptureError, match="used: call"), tape:
        pass
    assert tape.backward(losses).batch_size == B
    with pytest.raises(CaptureError, match="used: call"), tape:
        pass


def test_a_tape_answers_one_backward():
    model = mlp()
    with record(model) as tape:
        losses = scores(model, torch.randn(B, d))
    tape.backward(losses)
    with pytest.raises(CaptureError, match="record the forward again"):
        tape.backward(losses)


def test_a_refused_loss_leaves_the_tape_usable():
    model, x = mlp(), torch.randn(B, d)
    with record(model) as tape:
        out = model(x)
        losses = score(out)
    with pytest.raises(CaptureError, match="one loss per sample"):
        tape.backward(out)
    assert_same(tape.backward(losses).dense(), loop(model, scores, cut((x,))), 1e-10)


def test_backward_before_and_inside_the_block():
    model = mlp()
    tape = record(model)
    with pytest.raises(CaptureError, match="record the forward"):
        tape.backward(torch.ones(B, requires_grad=True))
    with tape:
        losses = scores(model, torch.randn(B, d))
        with pytest.raises(CaptureError, match="leave the record block"):
            tape.backward(losses)
    assert tape.backward(losses).batch_size == B


def test_a_nested_record_is_refused_and_the_outer_one_goes_on():
    model, other, x = mlp(), mlp(), torch.randn(B, d)
    with record(model) as tape:
        hidden = model[1](model[0](x))
        for inner in (model, other):
            with pytest.raises(CaptureError, match="inside another record"), record(inner):
                pass
        losses = score(model[2](hidden))
    assert_same(tape.backward(losses).dense(), loop(model, scores, cut((x,))), 1e-10)
    assert_right(other, x)


def test_a_backward_inside_another_recording():
    first, second, x = mlp(), mlp(), torch.randn(B, d)
    with record(first) as one:
        losses = scores(first, x)
    with record(second) as two:
        others = scores(second, x)
        grads = one.backward(losses)
    assert_same(grads.dense(), loop(first, scores, cut((x,))), 1e-10)
    assert_same(two.backward(others).dense(), loop(second, scores, cut((x,))), 1e-10)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True, "4"])
def test_a_batch_size_is_a_positive_integer(bad):
    with pytest.raises(ValueError, match="batch_size is a positive integer"):
        record(mlp(), batch_size=bad)


def test_record_takes_a_module():
    with pytest.raises(TypeError, match="not function"):
        record(lambda x: x)


# Threads


def in_threads(*works):
    errors = []

    def guarded(work):
        try:
            work()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


def test_two_threads_record_the_same_model_at_once():
    model, together = mlp(), threading.Barrier(2)
    batches, found = [torch.randn(B, d), torch.randn(B + 2, T, d)], {}

    def work(k):
        with record(model) as tape:
            together.wait(10)
            losses = scores(model, batches[k])
            together.wait(10)
        found[k] = tape.backward(losses).dense()

    in_threads(lambda: work(0), lambda: work(1))
    for k, x in enumerate(batches):
        assert_same(found[k], loop(model, scores, cut((x,))), 1e-10)


def test_a_recording_does_not_see_another_thread():
    model, x, y = mlp(), torch.randn(B, d), torch.randn(B + 3, d)
    with record(model) as tape:
        losses = scores(model, x)
        in_threads(lambda: scores(model, y).sum().backward())
    assert all(p.grad is not None for p in model.parameters())
    assert_same(tape.backward(losses).dense(), loop(model, scores, cut((x,))), 1e-10)


def test_a_recording_that_ends_while_another_thread_calls_the_model():
    model, x = mlp(), torch.randn(B, d)
    entered, calling, ended = threading.Event(), threading.Event(), threading.Event()
    caller = {}

    def wait(module, args):
        if threading.get_ident() == caller.get("id"):
            calling.set()
            ended.wait(10)

    def short():
        with record(model):
            entered.set()
            calling.wait(10)
        ended.set()

    def long():
        caller["id"] = threading.get_ident()
        entered.wait(10)
        assert_right(model, x)

    model.register_forward_pre_hook(wait)
    in_threads(short, long)


def test_two_threads_keep_the_gradients_that_parameters_have():
    model, x = mlp(), torch.randn(B, d)
    kept = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = kept[name]
    first_is_in, second_is_in, first_is_done = threading.Event(), threading.Event(), threading.Event()

    def meet(enter, leave, g):
        enter.set()
        leave.wait(0.5)

    def backward(enter, leave):
        """A backward that says when it has begun, and then waits for the other."""
        with record(model) as tape:
            out = model(x)
            out.register_hook(functools.partial(meet, enter, leave))
            losses = score(out)
        return tape.backward(losses).dense()

    def first():
        backward(first_is_in, second_is_in)
        first_is_done.set()

    def second():
        first_is_in.wait(10)
        backward(second_is_in, first_is_done)

    in_threads(first, second)
    assert all(p.grad is kept[name] for name, p in model.named_parameters())


# What a recording leaves behind


def grad_holder():
    model = mlp()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model[2].bias.requires_grad_(False)
    model[0].register_forward_hook(lambda module, args, out: out * 1)
    model[2].register_forward_pre_hook(lambda module, args: None)
    return model


def test_a_recording_leaves_the_model_as_it_was():
    model = grad_holder()
    before = state_of(model)
    grads = assert_right(model, torch.randn(B, d))
    grads.clipped_sum(1.0)
    grads.receipt()
    assert_untouched(model, before)
    of_scalar(model, torch.randn(B, d), loss=lambda m, x: m(x).pow(2).sum())
    assert_untouched(model, before)
    per_sample(model, torch.randn(B, d), check=True)
    assert_untouched(model, before)


class Interrupted(Exception):
    pass


def recorded_until_interrupted(model, forward=True):
    with record(model):
        if forward:
            model(torch.randn(B, d))
        raise Interrupted


@pytest.mark.parametrize("where", ["before", "after", "within"])
def test_an_exception_in_the_block_leaves_the_model_as_it_was(where):
    model = grad_holder()
    before = state_of(model)

    def interrupt(*_):
        raise Interrupted

    handle = model[1].register_forward_hook(interrupt) if where == "within" else None
    with pytest.raises(Interrupted):
        recorded_until_interrupted(model, forward=where != "before")
    if handle is not None:
        handle.remove()
    assert_untouched(model, before)
    assert_right(model, torch.randn(B, d))


def test_an_exception_in_the_backward_leaves_the_model_as_it_was():
    model = grad_holder()
    before = state_of(model)
    with record(model) as tape:
        out = model(torch.randn(B, d))
        losses = score(out - out.mean(0))
    with pytest.raises(CaptureError, match="mixes the samples"):
        tape.backward(losses)
    assert_untouched(model, before)
    assert_right(model, torch.randn(B, d))


def test_the_forward_gives_the_same_numbers():
    model, x = nn.Sequential(mlp(), nn.LayerNorm(2), nn.Linear(2, 2)), torch.randn(B, T, d)
    with record(model):
        recorded = model(x)
    assert torch.equal(recorded, model(x))


def test_hooks_of_the_user_run_and_stay():
    model, x, seen = mlp(), torch.randn(B, d), []
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, out: seen.append(out.shape) or out + 1)
    model[2].register_full_backward_hook(lambda module, inwards, outwards: None)
    before = state_of(model)
    assert_right(model, x)
    assert seen
    assert_untouched(model, before)


def test_no_activation_outlives_the_answer():
    model, held = mlp(), []
    model[1].register_forward_hook(lambda module, args, out: held.append(weakref.ref(out)))
    x = torch.randn(B, d)
    held.append(weakref.ref(x))
    with record(model) as tape:
        losses = scores(model, x)
    grads = tape.backward(losses)
    grads.norms()
    grads.receipt()
    assert all(reference() is not None for reference in held)
    del grads, tape, losses, x
    gc.collect()
    assert all(reference() is None for reference in held)


def test_no_activation_outlives_an_interrupted_recording():
    model, held = mlp(), []
    model[1].register_forward_hook(lambda module, args, out: held.append(weakref.ref(out)))
    with pytest.raises(Interrupted):
        recorded_until_interrupted(model)
    gc.collect()
    assert held[0]() is None


# Losses that cannot be


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        (lambda m, x: m(x), rf"shape \({B}, 2\): reduce it to one loss per sample"),
        (lambda m, x: score(m(x))[:0], "empty batch"),
        (lambda m, x: score(m(x)).to(torch.complex128), "real numbers"),
        (lambda m, x: score(m(x)).detach(), "depend on no trainable parameter.*under no_grad"),
        (lambda m, x: score(m(x)).tolist(), "a tensor, not list"),
    ],
    ids=["rank 2", "empty", "complex", "detached", "list"],
)
def test_losses_that_cannot_be(losses, words):
    model, x = mlp(), torch.randn(B, d)
    with record(model) as tape:
        values = losses(model, x)
    with pytest.raises((CaptureError, TypeError), match=words):
        tape.backward(values)


def test_losses_under_no_grad():
    model = mlp()
    with record(model) as tape, torch.no_grad():
        losses = scores(model, torch.randn(B, d))
    with pytest.raises(CaptureError, match="no_grad"):
        tape.backward(losses)


def test_a_forward_outside_the_block_is_refused():
    model, x = mlp(), torch.randn(B, d)
    with record(model) as tape:
        pass
    with pytest.raises(CaptureError, match=r"'[02]\.(weight|bias)'"):
        tape.backward(scores(model, x))
    hidden = model[:2](x)
    with record(model) as tape:
        losses = model[2](hidden).pow(2).sum(1)
    with pytest.raises(CaptureError, match=r"'[02]\.(weight|bias)'"):
        tape.backward(losses)


def test_tokens_are_no_samples():
    model, x = mlp(), torch.randn(B, T, d)
    with record(model) as tape:
        losses = model(x).pow(2).sum(-1).flatten()
    with pytest.raises(CaptureError, match=rf"{B * T} losses.*\[\({B}, {T}\)\].*batch_size={B * T}"):
        tape.backward(losses)
    # Said to be the samples, they are.
    grads = per_sample(model, x, losses=lambda m, x: m(x).pow(2).sum(-1).flatten(), batch_size=B * T)
    rows = x.flatten(0, 1)
    assert_same(grads.dense(), loop(model, lambda m, x: m(x).pow(2).sum(-1), cut((rows,))), 1e-10)


def test_a_given_batch_size_that_is_not_the_number_of_losses():
    with pytest.raises(CaptureError, match=f"{B} losses, but batch_size={B + 1}"):
        per_sample(mlp(), torch.randn(B, d), batch_size=B + 1)


def test_a_number_needs_its_reduction_and_losses_have_none():
    model, x = mlp(), torch.randn(B, d)
    with record(model) as tape:
        loss = scores(model, x).sum()
    with pytest.raises(ValueError, match='loss_reduction="sum" or "mean"'):
        tape.backward(loss)
    with record(model) as tape:
        losses = scores(model, x)
    with pytest.raises(ValueError, match="one per sample"):
        tape.backward(losses, "sum")


@pytest.mark.parametrize("reduction", ["Mean", "avg", "none", 1])
def test_an_unknown_reduction(reduction):
    with pytest.raises(ValueError, match=r"sum.*mean"):
        of_scalar(mlp(), torch.randn(B, d), loss=lambda m, x: scores(m, x).mean(), reduction=reduction)


# How many samples


@pytest.mark.parametrize("n", [1, 2, 61, 62, 130])
def test_batches_of_any_size(n):
    assert_right(mlp(), torch.randn(n, d))


@pytest.mark.parametrize("n", [1, 61, 62, 130])
def test_batches_of_any_size_in_another_order(n):
    model = Net(lambda m, x: m.b(m.a(x.flip(0)).tanh()).flip(0), a=nn.Linear(d, 4), b=nn.Linear(4, 2))
    assert_right(model, torch.randn(n, 2, d))


@pytest.mark.parametrize("n", [4, 5, 17])
def test_batches_in_float16_take_more_passes(n):
    model, x = mlp().half(), torch.randn(n, d).half()
    losses = lambda m, x: score(m(x).float())  # noqa: E731
    grads = per_sample(model, x, losses=losses)
    assert_same(grads.dense(), loop(model, losses, cut((x,))), 4e-3)


def test_batch_size_and_dimension_are_found_or_given():
    model, x = mlp(), torch.randn(T, B, d)
    losses = lambda m, x: score(m(x), 1)  # noqa: E731
    want = loop(model, losses, cut((x,), 1))
    for options in ({"batch_dim": 1}, {"batch_size": B, "batch_dim": 1}, {"batch_size": B}, {}):
        assert_same(per_sample(model, x, losses=losses, **options).dense(), want, 1e-10)


# Samples that are not finite, or zero

MODELS = {
    "linear": (mlp, (B, d)),
    "linear rank 3": (mlp, (B, T, d)),
    "linear T = B": (mlp, (B, B, d)),
    "norm": (lambda: nn.Sequential(nn.Linear(d, d), nn.LayerNorm(d), nn.Linear(d, 2)), (B, T, d)),
    "convolution": (lambda: nn.Sequential(nn.Conv1d(d, 3, 2), nn.GroupNorm(1, 3)), (B, d, 6)),
    "lstm": (lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(d, 2, 2, batch_first=True)), (B, T, d)),
    "gru": (lambda: Net(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(d, 2, batch_first=True)), (B, T, d)),
    "raw": (lambda: Net(lambda m, x: (x * m.w + m.v).tanh(), w=torch.randn(d), v=torch.randn(T, d)), (B, T, d)),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(d, 2)), (B, d)),
}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["input", "loss"])
@pytest.mark.parametrize("name", MODELS)
def test_a_sample_that_is_not_finite_stays_alone(name, where, value):
    make, shape = MODELS[name]
    model, x, bad = make(), torch.randn(shape), 1
    factor = torch.ones(B)
    if where == "input":
        x[bad] = value
    else:
        factor[bad] = value
    with record(model) as tape:
        losses = scores(model, x) * factor
    grads = tape.backward(losses)
    good = [i for i in range(B) if i != bad]
    want = loop(model, scores, [cut((x,))[i] for i in good])
    assert_same({name: g[good] for name, g in grads.dense().items()}, want, 1e-10)
    finite = torch.ones(B, dtype=torch.bool)
    finite[bad] = False
    assert torch.equal(grads.norms().isfinite(), finite)


@pytest.mark.parametrize("positions", [3, B, 2 * B])
def test_a_nan_sample_stays_alone_beside_a_position_table(positions):
    model = Net(
        lambda m, x: m.fc(x + m.table(torch.arange(x.shape[1]))), fc=nn.Linear(d, 2), table=nn.Embedding(2 * B, d)
    )
    x = torch.randn(B, positions, d)
    x[1] = torch.nan
    finite = torch.tensor([True, False, True, True])
    assert torch.equal(per_sample(model, x).norms().isfinite(), finite)


@pytest.mark.parametrize(
    "body",
    [lambda m, x: torch.cdist(x, m.w), lambda m, x: torch.einsum("...d,pd->...p", x, m.w)],
    ids=["cdist", "einsum"],
)
def test_a_nan_sample_in_the_loop_is_refused(body):
    model, x = Net(body, w=torch.randn(2, d)), torch.randn(B, T, d)
    x[1] = torch.nan
    with pytest.raises(CaptureError, match="a sample is not finite"):
        per_sample(model, x)


def test_a_nan_sample_in_another_order_stays_alone_or_is_refused():
    model = Net(lambda m, x: m.fc(x.flip(0)).flip(0), fc=nn.Linear(d, 2))
    x = torch.randn(B, T, d)
    x[1] = torch.nan
    try:
        grads = per_sample(model, x)
    except CaptureError:
        return
    assert torch.equal(grads.norms().isfinite(), torch.tensor([True, False, True, True]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_samples_of_tiny_gradients_are_told_apart_or_refused(dtype):
    model, x = nn.Linear(d, 2).to(dtype), torch.randn(B, B, d).to(dtype)
    losses = lambda m, x: m(x).float().pow(2).sum((0, 2)) * 1e-30  # noqa: E731
    want = loop(model, losses, cut((x,), 1))
    try:
        grads = per_sample(model, x, losses=losses, batch_dim=1)
    except CaptureError:
        return
    assert_same(grads.dense(), want, 1e-2)


def test_a_sample_without_gradient():
    model, x = mlp(), torch.randn(B, T, d)
    factor = torch.tensor([1.0, 0.0, 2.0, -1.0])
    with record(model) as tape:
        losses = scores(model, x) * factor
    grads = tape.backward(losses)
    assert grads.norms()[1] == 0
    assert (grads.norms()[[0, 2, 3]] > 0).all()
    assert all(torch.isfinite(g).all() for g in grads.clipped_sum(1e-3).values())


def test_no_sample_has_a_gradient():
    model, x = mlp(), torch.randn(B, T, d)
    with record(model) as tape:
        losses = scores(model, x) * 0
    grads = tape.backward(losses)
    assert torch.equal(grads.norms(), torch.zeros(B))
    assert not any(g.any() for g in grads.dense().values())
    assert not any(g.any() for g in grads.clipped_sum(1.0).values())
    assert grads.receipt().deviation == 0


# The mapping


def test_parameters_that_are_not_used_have_zeros():
    model = Net(lambda m, x: m.fc(x), fc=nn.Linear(d, 2), other=nn.Linear(d, 3), w=torch.randn(7))
    grads = assert_right(model, torch.randn(B, d))
    assert grads["w"].shape == (B, 7)
    assert torch.equal(grads["w"].dense(), torch.zeros(B, 7))
    assert torch.equal(grads["other.weight"].norms(), torch.zeros(B))
    assert torch.equal(grads.weighted_sum(torch.ones(B))["w"], torch.zeros(7))
    assert repr(grads["w"]) == f"Gradient('w', ({B}, 7), unused)"


def test_a_model_of_which_nothing_is_used():
    model, weight = mlp(), torch.randn(d, requires_grad=True)
    grads = per_sample(model, torch.randn(B, d), losses=lambda m, x: x @ weight)
    assert list(grads) == list(dict(model.named_parameters()))
    assert torch.equal(grads.norms(), torch.zeros(B))


def test_frozen_parameters_are_absent():
    model = mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    grads = assert_right(model, torch.randn(B, d))
    assert list(grads) == ["0.bias", "2.weight"]
    with pytest.raises(KeyError):
        grads["0.weight"]


def test_a_model_without_trainable_parameters():
    model, x = mlp().requires_grad_(False), torch.randn(B, d, requires_grad=True)
    grads = per_sample(model, x)
    assert len(grads) == 0
    assert torch.equal(grads.norms(), torch.zeros(B))
    assert grads.clipped_sum(1.0) == {}


def test_it_is_a_mapping_in_the_order_of_named_parameters():
    model = Net(lambda m, x: m.a(m.b(x)), a=nn.Linear(4, 2), b=nn.Linear(d, 4))
    grads = assert_right(model, torch.randn(B, d))
    names = [name for name, _ in model.named_parameters()]
    assert isinstance(grads, Mapping)
    assert list(grads) == names == list(grads.dense()) == list(grads.norms(by="parameter"))
    assert len(grads) == 4
    assert "a.weight" in grads
    assert "c" not in grads
    assert all(grads[name].parameter is p for name, p in model.named_parameters())
    assert repr(grads) == f"PerSampleGrads(B={B}, 4 parameters)"


def test_both_names_of_a_tied_parameter():
    model = Net(lambda m, i: m.head(m.tok(i)), tok=nn.Embedding(6, d), head=nn.Linear(d, 6, bias=False))
    model.head.weight = model.tok.weight
    grads = assert_right(model, torch.randint(6, (B, T)))
    assert list(grads) == ["tok.weight"]
    assert grads["head.weight"] is grads["tok.weight"]
    assert "head.weight" in grads


# Queries


@pytest.mark.parametrize("shape", [(), (1,), (B + 1,), (B, 1), (1, 1, B)])
def test_weights_of_another_shape(shape):
    grads = per_sample(mlp(), torch.randn(B, T, d))
    with pytest.raises(ValueError, match=rf"one weight per sample is \({B},\)"):
        grads.weighted_sum(torch.ones(shape))
    with pytest.raises(ValueError, match=rf"one weight per sample is \({B},\)"):
        grads["0.weight"].weighted_sum(torch.ones(shape))


@pytest.mark.parametrize("bound", [0, -1.0, float("nan")])
def test_a_bound_that_is_no_bound(bound):
    grads = per_sample(mlp(), torch.randn(B, d))
    with pytest.raises(ValueError, match="positive number"):
        grads.clipped_sum(bound)


def test_every_clipped_gradient_is_within_the_bound():
    model, x = mlp(), torch.randn(B, T, d)
    grads = per_sample(model, x)
    norms = grads.norms()
    for bound in (float(norms.min()) / 2, float(norms.median()), float(norms.max()) * 2):
        total = dict.fromkeys(grads, 0)
        for i in range(B):
            # Alone, a sample's clipped sum is its contribution.
            part = per_sample(model, x[i : i + 1]).clipped_sum(bound)
            norm = torch.cat([g.flatten() for g in part.values()]).norm()
            assert norm <= bound * (1 + 1e-6)
            assert norms[i] > bound or torch.isclose(norm, norms[i])
            total = {name: total[name] + g for name, g in part.items()}
        assert_same(grads.clipped_sum(bound), total, 1e-10)


def test_norms_by_something_else():
    with pytest.raises(ValueError, match="'layer'"):
        per_sample(mlp(), torch.randn(B, d)).norms(by="layer")


@pytest.mark.parametrize(
    ("dtype", "norm"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.complex128, torch.float64),
    ],
    ids=str,
)
def test_dtypes_of_the_answers(dtype, norm):
    layers = [nn.Linear(d, 4, dtype=dtype), nn.Tanh(), nn.Linear(4, 2, dtype=dtype)]
    x = torch.randn(B, T, d).to(dtype)
    grads = per_sample(nn.Sequential(*layers), x, losses=lambda m, x: m(x).abs().float().pow(2).sum((1, 2)))
    assert {g.dtype for g in grads.dense().values()} == {dtype}
    assert {g.dtype for g in grads.weighted_sum(torch.ones(B)).values()} == {dtype}
    assert {g.dtype for g in grads.clipped_sum(1.0).values()} == {dtype}
    assert {g.dtype for g in grads.norms(by="parameter").values()} == {norm}
    assert grads.norms().dtype == norm


def test_dtypes_of_a_mixed_model():
    model = nn.Sequential(nn.Linear(d, 4).float(), nn.Tanh())
    model.register_parameter("scale", nn.Parameter(torch.ones(4)))
    grads = per_sample(model, torch.randn(B, d).float(), losses=lambda m, x: score(m(x) * m.scale))
    assert {name: g.dtype for name, g in grads.dense().items()} == {
        "scale": torch.float64, "0.weight": torch.float32, "0.bias": torch.float32,
    }  # fmt: skip
    assert grads.norms().dtype == torch.float64


# Trust: verify, check, receipt


def off_by(factor, function, argument="weight"):
    """A rule function that scales the block of one argument."""

    @functools.wraps(function)
    def wrong(*args, **kwargs):
        answer = function(*args, **kwargs)
        return answer | {argument: Dense(answer[argument].dense() * factor)}

    return wrong


@pytest.fixture
def wrong_linear(monkeypatch):
    rule = RULES[F.linear]
    monkeypatch.setitem(RULES, F.linear, dataclasses.replace(rule, function=off_by(1.01, rule.function)))


def test_verify_prints_a_table(capsys):
    model, x, y = mlp(), torch.randn(B, d), torch.randn(B, 2)
    result = eachgrad.verify(model, lambda out, y: (out - y).pow(2).sum(1), x, y)
    printed = capsys.readouterr().out
    assert result.ok
    assert [row[:2] for row in result.rows] == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert max(error for *_, error in result.rows) < 1e-12
    assert printed == f"{result}\n"
    assert printed.splitlines()[0].split() == ["parameter", "shape", "error"]
    assert len(printed.splitlines()) == 5
    assert "wrong" not in printed
    eachgrad.verify(model, scores, x, quiet=True)
    assert capsys.readouterr().out == ""


def test_verify_takes_losses_of_the_model_and_numbers():
    model, x, y = mlp(), torch.randn(T, B, d), torch.randn(T, B, 2)
    losses = lambda model, x, y: (model(x) - y).pow(2).sum((0, 2))  # noqa: E731
    assert eachgrad.verify(model, losses, x, y, batch_dim=1, quiet=True).ok
    loss = nn.MSELoss(reduction="sum")
    assert eachgrad.verify(model, loss, x[0], y[0], loss_reduction="sum", quiet=True).ok


def test_losses_with_arguments_that_have_defaults():
    model, x, y, w = mlp(), torch.randn(B, d), torch.randn(B, 2), torch.rand(B)

    def of_model(model, x, y, w=None):
        found = (model(x) - y).pow(2).sum(1)
        return found if w is None else found * w

    def of_output(out, y, w=None, scale=1.0):
        found = scale * (out - y).pow(2).sum(1)
        return found if w is None else found * w

    for losses in (of_model, of_output):
        assert eachgrad.verify(model, losses, x, y, quiet=True).ok
        assert eachgrad.verify(model, losses, x, y, w, quiet=True).ok


@pytest.mark.usefixtures("wrong_linear")
def test_verify_flags_a_wrong_rule(capsys):
    result = eachgrad.verify(mlp(), scores, torch.randn(B, d))
    assert not result.ok
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.endswith("<-- wrong") for line in lines] == [True, False, True, False]


@pytest.mark.usefixtures("wrong_linear")
def test_check_catches_a_wrong_rule():
    model, x = mlp(), torch.randn(B, d)
    per_sample(model, x)
    with pytest.raises(CaptureError, match=r"'0.weight'.*off the ordinary gradient by \d"):
        per_sample(model, x, check=True)
    with pytest.raises(CaptureError, match=r"'0\.weight'"):
        of_scalar(model, x, loss=lambda m, x: scores(m, x).mean(), reduction="mean", check=True)


def test_check_is_silent_where_all_is_well():
    model, x = nn.Sequential(mlp(), nn.LayerNorm(2)), torch.randn(B, T, d)
    assert_right(model, x, check=True)
    of_scalar(model, x, loss=lambda m, x: F.mse_loss(m(x), torch.zeros(B, T, 2)), reduction="mean", check=True)


@torch.library.custom_op("eachgrad_tests::scale_rows", mutates_args=())
def scale_rows(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return input * weight


@scale_rows.register_fake
def _(input, weight):
    return torch.empty_like(input)


def _scale_rows_backward(ctx, g):
    input, weight = ctx.saved_tensors
    return g * weight, (g * input).flatten(0, -2).sum(0)


scale_rows.register_autograd(
    _scale_rows_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pytest.fixture
def rules_of_one_test():
    before = dict(RULES)
    yield
    RULES.clear()
    RULES.update(before)


def scaling():
    return Net(lambda m, x: scale_rows(m.fc(x), m.w), fc=nn.Linear(d, 3), w=torch.randn(3))


@pytest.mark.usefixtures("rules_of_one_test")
def test_a_rule_of_the_user_is_used_and_checked():
    x = torch.randn(B, T, d)
    with pytest.raises(UnsupportedOp, match=r"'w'.*scale_rows"):
        per_sample(scaling(), x)

    @eachgrad.rule(scale_rows)
    def right(g, input, weight):
        return {"weight": Dense((g * input).flatten(1, -2).sum(1))}

    assert_right(scaling(), x, check=True)
    check_rule(scale_rows, x, torch.randn(d, requires_grad=True))

    @eachgrad.rule(scale_rows)
    def wrong(g, input, weight):
        return {"weight": Dense(g.flatten(1, -2).sum(1))}

    with pytest.raises(CaptureError, match="'w'"):
        per_sample(scaling(), x, check=True)
    with pytest.raises(AssertionError, match="off by"):
        check_rule(scale_rows, x, torch.randn(d, requires_grad=True))
    assert not eachgrad.verify(scaling(), scores, x, quiet=True).ok
    assert per_sample(scaling(), x).receipt().deviation > 1e-3


@pytest.mark.usefixtures("rules_of_one_test")
def test_a_rule_that_forgets_an_argument_is_helped_out():
    @eachgrad.rule(scale_rows)
    def silent(g, input, weight):
        return {}

    assert_right(scaling(), torch.randn(B, T, d))


def test_the_receipt():
    model = Net(lambda m, x: m.fc(x).tanh() * m.w, fc=nn.Linear(d, 4), w=torch.randn(4), other=nn.Linear(2, 2))
    receipt = per_sample(model, torch.randn(B, d)).receipt()
    total = sum(p.numel() for p in model.parameters())
    assert (receipt.batch_size, receipt.covered, receipt.total, receipt.uses) == (B, total, total, 2)
    assert receipt.unused == ("other.weight", "other.bias")
    assert receipt.exempt == ()
    assert receipt.deviation < 1e-12
    first, second = str(receipt).splitlines()
    assert first.startswith(f"covers {total} of {total} parameters for each of {B} samples (2 uses); max deviation")
    assert second == "unused, gradient zero: other.weight, other.bias"


def test_the_receipt_names_what_it_does_not_compare():
    model = nn.Sequential(nn.Embedding(3, d, scale_grad_by_freq=True), nn.Linear(d, 2))
    receipt = per_sample(model, torch.randint(3, (B, T))).receipt()
    assert receipt.exempt == ("0.weight",)
    assert str(receipt).endswith("not compared (gradients scaled by the batch's frequencies): 0.weight")


@pytest.mark.usefixtures("wrong_linear")
def test_the_receipt_of_a_wrong_rule():
    assert per_sample(mlp(), torch.randn(B, d)).receipt().deviation == pytest.approx(0.01, rel=1e-6)


# Refusals


def without_rule(m, x):
    return scale_rows(x, m.grid)  # the line that the message names


@pytest.mark.usefixtures("rules_of_one_test")
def test_an_op_without_a_rule_is_named_with_its_way_out():
    model = nn.Sequential(Net(without_rule, grid=torch.randn(d)))
    with pytest.raises(UnsupportedOp) as caught:
        per_sample(model, torch.randn(B, d))
    message, line = str(caught.value), without_rule.__code__.co_firstlineno + 1
    op = "torch.ops.eachgrad_tests.scale_rows.default"
    assert f"parameter '0.grid' ({d},) is used by {op} at {__file__}:{line}, in module '0' (Net)" in message
    assert "@eachgrad.rule" in message
    way_out = re.search(r"eachgrad\.rule\(.*\)(?=, or)", message).group()
    assert way_out == f"eachgrad.rule({op})(eachgrad.via_vmap({op}))"
    eval(way_out)
    assert_right(model, torch.randn(B, d))


@pytest.mark.parametrize(
    "read",
    [
        lambda x, w: (x > w).to(x),
        lambda x, w: torch.lt(x, w).to(x),
        lambda x, w: torch.bucketize(x, w.sort()[0]).to(x),
        lambda x, w: x.to(w),
        lambda x, w: x.type_as(w),
    ],
    ids=["gt", "lt", "bucketize", "to", "type_as"],
)
def test_a_parameter_that_is_only_read(read):
    model = Net(lambda m, x: m.fc(read(x, m.w)), fc=nn.Linear(d, 2), w=torch.randn(d))
    grads = assert_right(model, torch.randn(B, T, d))
    assert not grads["w"].norms().any()


def test_an_input_changed_in_place_after_its_use():
    model, x = mlp(), torch.randn(B, d)
    with record(model) as tape:
        losses = scores(model, x)
        x.zero_()
    with pytest.raises(CaptureError, match=r"linear at .*changed in place"):
        tape.backward(losses)


def test_an_activation_changed_in_place_after_its_use():
    model = Net(lambda m, x: (h := m.a(x).detach(), m.b(h), h.add_(1))[1], a=nn.Linear(d, 4), b=nn.Linear(4, 2))
    with pytest.raises(CaptureError, match=r"linear at .*changed in place"):
        per_sample(model, torch.randn(B, d))


def test_an_input_changed_in_place_between_two_uses():
    def forward(m, x):
        x = x.clone()
        first = m.a(x)
        x.mul_(2)
        return first * m.b(x)

    model = Net(forward, a=nn.Linear(d, 2), b=nn.Linear(d, 2))
    with pytest.raises(CaptureError, match=r"linear at .*changed in place"):
        per_sample(model, torch.randn(B, d))


@pytest.mark.parametrize("body", [lambda m, x: torch.cdist(x, m.w), lambda m, x: m.rnn(x)[0] * m.w.sum()])
def test_a_parameter_changed_in_place_before_the_backward(body):
    model = Net(body, w=torch.randn(2, d), rnn=nn.GRU(d, 2, batch_first=True))
    with record(model) as tape:
        losses = scores(model, torch.randn(B, T, d))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed in place|modified by an inplace operation"):
        tape.backward(losses)


def test_a_parameter_changed_in_place_where_its_value_is_not_needed():
    model, x = nn.Linear(d, 2), torch.randn(B, d)
    want = loop(model, scores, cut((x,)))
    with record(model) as tape:
        losses = scores(model, x)
    with torch.no_grad():
        model.weight.mul_(2)
    assert_same(tape.backward(losses).dense(), want, 1e-10)


# How the model is called


def test_parameters_used_without_calling_the_model():
    model = Net(lambda m, x: x, w=torch.randn(d, B), b=torch.randn(B))
    losses = lambda m, x: score((x @ m.w + m.b).tanh())  # noqa: E731
    for shape in ((B, d), (B, B, d)):
        for options in ({}, {"batch_size": B}):
            assert_right(model, torch.randn(shape), losses=losses, **options)


def test_a_part_called_instead_of_the_model():
    model = nn.ModuleDict({"used": mlp(), "unused": mlp()})
    for options in ({}, {"batch_size": B}):
        grads = assert_right(model, torch.randn(B, B, d), losses=lambda m, x: scores(m["used"], x), **options)
        assert not grads["unused.0.weight"].norms().any()


def test_a_number_without_a_call_of_the_model():
    model = nn.ModuleDict({"part": mlp()})
    loss = lambda m, x: scores(m["part"], x).sum()  # noqa: E731
    with pytest.raises(CaptureError, match="batch size is not known"):
        of_scalar(model, torch.randn(B, d), loss=loss)
    with pytest.raises(CaptureError, match="call the recorded model itself"):
        of_scalar(model, torch.randn(B, d), loss=loss, batch_size=B)


def test_two_models():
    first, second, x = nn.Linear(d, 4), nn.Linear(4, 2), torch.randn(B, T, d)
    losses = lambda m, x: score(second(m(x).tanh()))  # noqa: E731
    assert_right(first, x, losses=losses)
    after = lambda m, x: score(m(first(x).tanh()))  # noqa: E731
    assert_right(second, x, losses=after)
    assert_right(nn.ModuleList([first, second]), x, losses=lambda m, x: score(m[1](m[0](x).tanh())))


def test_a_model_beside_the_recorded_one_gets_no_gradient():
    first, second = nn.Linear(d, 4), nn.Linear(4, 2)
    grads = per_sample(first, torch.randn(B, d), losses=lambda m, x: score(second(m(x).tanh())))
    assert list(grads) == ["weight", "bias"]
    assert all(p.grad is None for p in (*first.parameters(), *second.parameters()))


def test_a_model_called_twice():
    model, x, y = mlp(), torch.randn(B, d), torch.randn(B, d)
    losses = lambda m, x, y: (m(x) - m(y)).pow(2).sum(1)  # noqa: E731
    assert_right(model, x, y, losses=losses)
    grads = of_scalar(model, x, y, loss=lambda m, x, y: losses(m, x, y).mean(), reduction="mean")
    assert_same(grads.dense(), loop(model, losses, cut((x, y))), 1e-10)


def test_a_model_called_on_another_batch_as_well():
    model, x, other = mlp(), torch.randn(B, d), torch.randn(B + 3, d)

    def losses(m, x):
        with torch.no_grad():
            m(other)
        return scores(m, x)

    assert_right(model, x, losses=losses)


@dataclasses.dataclass
class Inputs:
    x: torch.Tensor
    y: torch.Tensor


CALLS = {
    "keywords": (lambda m, x, y: m.fc(x) * m.w + y, lambda m, x, y: m(y=y, x=x)),
    "dict": (lambda m, i: m.fc(i["x"]) * m.w + i["y"], lambda m, x, y: m({"x": x, "y": y})),
    "nested": (lambda m, i: m.fc(i[0][0]) * m.w + i[1]["y"], lambda m, x, y: m(([x], {"y": y}))),
    "dataclass": (lambda m, i: m.fc(i.x) * m.w + i.y, lambda m, x, y: m(Inputs(x, y))),
    "keyword dataclass": (lambda m, i: m.fc(i.x) * m.w + i.y, lambda m, x, y: m(i=Inputs(x, y))),
}


class Called(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.fc, self.w = body, nn.Linear(d, 2), nn.Parameter(torch.randn(B, 1))

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


@pytest.mark.parametrize("how", CALLS)
def test_inputs_in_containers(how):
    body, call = CALLS[how]
    losses = lambda m, x, y: score(call(m, x, y))  # noqa: E731
    x, y = torch.randn(B, B, d), torch.randn(B, 1, 1)
    model = Called(body)
    assert_right(model, x, y, losses=losses)
    grads = of_scalar(model, x, y, loss=lambda m, x, y: call(m, x, y).pow(2).sum(), batch_size=B)
    want = loop(model, lambda m, x, y: call(m, x, y).pow(2).sum((1, 2)), cut((x, y)))
    assert_same(grads.dense(), want, 1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_as_input(kind):
    model = Net(lambda m, packed: m.rnn(packed)[0], rnn=kind(d, 2))
    sequences = [torch.randn(n, d) for n in (2, 4, 1, 3)]

    def losses(m, *sequences):
        out, _ = pad_packed_sequence(m(pack_sequence(sequences, enforce_sorted=False)), True, total_length=4)
        return out.pow(2).sum((1, 2))

    want = loop(model, losses, [(s,) for s in sequences])
    assert_same(per_sample(model, *sequences, losses=losses).dense(), want, 1e-10)
    number = lambda m, *s: m(pack_sequence(s, enforce_sorted=False)).data.pow(2).sum()  # noqa: E731
    assert_same(of_scalar(model, *sequences, loss=number).dense(), want, 1e-10)


# Losses that are one number


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("time_first", [False, True])
def test_a_number_of_folded_outputs(reduction, time_first):
    def forward(m, x):
        rows = x.transpose(0, 1) if time_first else x
        return m.fc(rows).reshape(-1, 3)

    def loss(m, x, y):
        targets = y.T if time_first else y
        return F.cross_entropy(m(x), targets.reshape(-1), reduction=reduction)

    model = Net(forward, fc=nn.Linear(d, 3))
    x, y = torch.randn(B, B, d), torch.randint(3, (B, B))
    want = loop(model, lambda m, x, y: loss(m, x, y)[None], cut((x, y)))
    assert_same(of_scalar(model, x, y, loss=loss, reduction=reduction).dense(), want, 1e-10)


@pytest.mark.parametrize("used", ["both", "first", "second"])
def test_a_number_of_outputs_and_final_states(used):
    # (L, B, H) with L == B: the declared dimension of the second output is not where its samples lie.
    model = Net(lambda m, x: m.rnn(x), rnn=nn.GRU(d, 2, num_layers=B, batch_first=True))

    def loss(m, x):
        out, final = m(x)
        parts = {"first": out.pow(2).sum(), "second": final.pow(3).sum()}
        return parts.get(used, sum(parts.values()))

    for n in (B, T):
        x = torch.randn(B, n, d)
        want = loop(model, lambda m, x: loss(m, x)[None], cut((x,)))
        assert_same(of_scalar(model, x, loss=loss).dense(), want, 1e-10)


ELSEWHERE = {
    "read time first": lambda m, x: m.fc(x.transpose(0, 1)),
    "returned time first": lambda m, x: m.fc(x).tanh().transpose(0, 1),
    "channels first": lambda m, x: m.fc(x).permute(2, 0, 1),
    "positions added": lambda m, x: (m.fc(x) + m.w).transpose(0, 1),
    "positions only": lambda m, x: (x.mean(-1, keepdim=True) + m.w).tanh().transpose(0, 1),
    "copied first": lambda m, x: m.fc((x * 1).transpose(0, 1).contiguous()).tanh(),
}


@pytest.mark.parametrize("how", ELSEWHERE)
@pytest.mark.parametrize("n", [T, B, 2 * B])
def test_a_number_of_outputs_whose_samples_lie_elsewhere(how, n):
    """Right, or refused: never positions or channels instead of samples."""
    model, x = Net(ELSEWHERE[how], fc=nn.Linear(d, B), w=torch.randn(n, B)), torch.randn(B, n, d)
    try:
        grads = of_scalar(model, x, loss=lambda m, x: m(x).pow(2).sum())
    except CaptureError:
        return
    want = loop(model, lambda m, x: m(x).pow(2).transpose(0, 1).flatten(1).sum(1), cut((x,)))
    assert_same(grads.dense(), want, 1e-10)


MIXING = {
    "of the mean": lambda out: out.mean(0).pow(2).sum(),
    "variance": lambda out: (out - out.mean(0)).pow(2).sum(),
    "root of a sum": lambda out: out.pow(2).sum().sqrt(),
    "contrastive": lambda out: (out @ out.T).logsumexp(1).sum(),
    "rolled": lambda out: (out * out.roll(1, 0)).sum(),
    "softmax": lambda out: out.softmax(0).pow(2).sum(),
    "sorted": lambda out: (out.sort(0)[0] * torch.arange(B)[:, None]).sum(),
    "max": lambda out: out.max(0)[0].sum(),
    "amax": lambda out: out.amax(0).sum(),
    "median": lambda out: out.median(0)[0].sum(),
    "pdist": lambda out: F.pdist(out, 1).sum(),
    "flipped": lambda out: (out - out.flip(0)).abs().sum(),
    "shifted": lambda out: (out - torch.cat([out[1:], out[:1]])).abs().sum(),
    "ranking": lambda out: F.relu(1 - out[: B // 2] + out[B // 2 :]).sum(),
}


@pytest.mark.parametrize("how", MIXING)
def test_a_number_that_mixes_samples_is_refused(how):
    with pytest.raises(CaptureError, match="mixes samples"):
        of_scalar(mlp(), torch.randn(B, d), loss=lambda m, x: MIXING[how](m(x)))


def test_a_penalty_in_a_number_is_refused_and_in_losses_it_counts_for_every_sample():
    model, x = mlp(), torch.randn(B, d)
    penalty = lambda m: m[0].weight.pow(2).sum()  # noqa: E731
    assert_right(model, x, losses=lambda m, x: scores(m, x) + penalty(m))
    with pytest.raises(CaptureError, match=r"'0\.weight'"):
        of_scalar(model, x, loss=lambda m, x: m(x).pow(2).sum() + penalty(m))


class Output(dict):
    """Keys that are attributes as well, as language models return them."""

    __getattr__ = dict.__getitem__


def language_model():
    def forward(m, i):
        logits = m.head(m.tok(i).cumsum(1).tanh())
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, 6), i[:, 1:].reshape(-1))
        return Output(loss=loss, logits=logits)

    return Net(forward, tok=nn.Embedding(6, d), head=nn.Linear(d, 6))


@pytest.mark.parametrize("n", [B, B + 1])
def test_a_number_that_the_model_returns_beside_its_logits(n):
    model, i = language_model(), torch.randint(6, (B, n))
    grads = of_scalar(model, i, loss=lambda m, i: m(i).loss, reduction="mean")
    assert_same(grads.dense(), loop(model, lambda m, i: m(i).loss[None], cut((i,))), 1e-10)


def test_a_number_that_the_model_returns_alone():
    model = Net(lambda m, x: m.fc(x).pow(2).sum(), fc=nn.Linear(d, 2))
    with pytest.raises(CaptureError, match="depends on none of them"):
        of_scalar(model, torch.randn(B, d), loss=lambda m, x: m(x))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_number_for_a_batch_of_one(reduction):
    model, x, y = mlp(), torch.randn(1, d), torch.randn(1, 2)
    loss = lambda m, x, y: F.mse_loss(m(x), y, reduction=reduction)  # noqa: E731
    want = loop(model, lambda m, x, y: loss(m, x, y)[None], cut((x, y)))
    assert_same(of_scalar(model, x, y, loss=loss, reduction=reduction).dense(), want, 1e-10)


# Randomness


@pytest.mark.parametrize("check", [False, True])
def test_dropout_is_that_of_the_ordinary_forward(check):
    model = nn.Sequential(nn.Linear(d, 40), nn.Dropout(0.5), nn.Linear(40, 8), nn.Dropout(0.3), nn.Linear(8, 2))
    x = torch.randn(B, T, d)
    torch.manual_seed(3)
    plain = torch.autograd.grad(scores(model, x).sum(), list(model.parameters()))
    torch.manual_seed(3)
    grads = per_sample(model, x, check=check)
    got = {name: g.sum(0) for name, g in grads.dense().items()}
    assert_same(got, dict(zip(got, plain, strict=True)), 1e-10)
    assert_same(grads.weighted_sum(torch.ones(B)), dict(zip(got, plain, strict=True)), 1e-10)


def test_a_recording_draws_no_random_numbers():
    model, x = mlp(), torch.randn(B, d)
    before = torch.get_rng_state()
    per_sample(model, x, check=True).receipt()
    of_scalar(model, x, loss=lambda m, x: m(x).pow(2).sum())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_copy_of_a_recorded_model():
    model, x = mlp(), torch.randn(B, d)
    per_sample(model, x)
    assert_right(copy.deepcopy(model), x)
    assert isinstance(per_sample(model, x)["0.weight"].block, Outer)


def test_rules_are_found_for_a_custom_op_and_its_overload():
    assert as_called(scale_rows) is torch.ops.eachgrad_tests.scale_rows.default
    assert as_called(torch.ops.eachgrad_tests.scale_rows) is as_called(scale_rows)


@pytest.mark.parametrize("samples", [6, 20, 70])
def test_float16_between_the_taps_gets_smaller_marks(samples):
    body = lambda m, x: m.b(m.a(x).half().to(x.dtype).tanh())  # noqa: E731
    model, x = Net(body, a=nn.Linear(d, d), b=nn.Linear(d, 2)).float(), torch.randn(samples, d).float()
    losses = lambda m, x: (3 * m(x)).sin().sum(1)  # noqa: E731
    with record(model) as tape:
        values = losses(model, x)
    want = loop(model, losses, [(x[i : i + 1],) for i in range(samples)])
    # The gradient is rounded to float16 on its way, in the same place for both.
    assert_same(tape.backward(values).dense(), want, 1e-3)


# Reentrant checkpoints inside each other


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_reentrant_checkpoints_inside_each_other(depth):
    inner = nn.Sequential(nn.Linear(d, d), nn.Tanh())
    for _ in range(depth):
        inner = nn.Sequential(Checkpointed(inner), nn.Linear(d, d), nn.Tanh())
    model = nn.Sequential(nn.Linear(d, d), inner)
    for _ in range(3):
        assert_right(model, torch.randn(B, T, d))


def test_a_mean_over_targets_of_which_each_sample_ignores_as_many():
    model, x = nn.Linear(d, 7), torch.randn(B, T, d)
    y = torch.randint(7, (B, T))
    y[:, -1] = -100
    loss = lambda m, x, y: F.cross_entropy(m(x).flatten(0, 1), y.flatten())  # noqa: E731
    want = loop(model, lambda m, x, y: loss(m, x, y)[None], [(x[i : i + 1], y[i : i + 1]) for i in range(B)])
    with record(model) as tape:
        mean = loss(model, x, y)
    assert_same(tape.backward(mean, "mean").dense(), want, 1e-10)
    y[0, 0] = -100
    with record(model) as tape:
        mean = loss(model, x, y)
    with pytest.raises(CaptureError, match="leaves out ignored targets"):
        tape.backward(mean, "mean")


def test_a_mean_over_targets_of_a_time_first_model():
    """Where samples lie inside one another nothing is known of how many each one ignores."""
    model, x = nn.Linear(d, 7), torch.randn(T, B, d)
    y = torch.randint(7, (T, B))
    y[0, 0] = -100
    with record(model, batch_dim=1) as tape:
        mean = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    with pytest.raises(CaptureError, match="leaves out ignored targets"):
        tape.backward(mean, "mean")


def test_a_statistic_in_the_model_and_a_loss_outside_of_the_block():
    model = Net(lambda m, x: m.fc(x - x[0]), fc=nn.Linear(d, 2))
    with record(model) as tape:
        out = model(torch.randn(B, d))
    with pytest.raises(CaptureError, match="depends on the others"):
        tape.backward(score(out))


def test_a_sample_whose_attention_is_masked_whole():
    """torch's own attention gives zeros there, and so must a recorded one with learned queries."""

    def forward(m, x, mask):
        q = m.q.expand(len(x), -1, -1)
        return F.scaled_dot_product_attention(q, m.k(x), x, attn_mask=mask[:, None].expand(-1, 2, -1))

    model = Net(forward, q=torch.randn(2, d), k=nn.Linear(d, d))
    x, mask = torch.randn(B, T, d), torch.ones(B, T, dtype=torch.bool)
    mask[1] = False
    want = loop(model, lambda m, *b: score(m(*b)), [(x[i : i + 1], mask[i : i + 1]) for i in range(B)])
    with record(model) as tape:
        losses = score(model(x, mask))
    torch.testing.assert_close(losses, score(model(x, mask)))
    assert_same(tape.backward(losses).dense(), want, 1e-10)


def test_answers_inside_autocast_are_those_outside():
    model, x = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).float(), torch.randn(B, 20, 32).float()

    def ask(inside: bool):
        with torch.autocast("cpu", torch.bfloat16):
            with record(model) as tape:
                losses = model(x).float().square().sum((1, 2))
            if inside:
                return tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1.0))
        return tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1.0))

    for _ in range(3):
        one, other = ask(True), ask(False)
        torch.testing.assert_close(one.norms, other.norms, rtol=1e-6, atol=0)
        assert_same(one.grad, other.grad, 1e-6)


def test_one_number_from_outputs_whose_samples_have_moved_to_another_dimension():
    """With T = B the declared dimension fits as well, and would give each sample another one's share."""
    n = 4
    model = Net(lambda m, x: m.a(x.tanh()).transpose(0, 1).flatten(0, 1).unflatten(0, (n, -1)), a=nn.Linear(d, d))
    with record(model) as tape:
        loss = model(torch.randn(n, n, d)).pow(2).sin().sum()
    with pytest.raises(CaptureError, match=r"cannot be told apart|lie along dimension"):
        tape.backward(loss, "sum")
