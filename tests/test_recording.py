"""What a recording leaves alone and lets go of: hooks, ops in place, cycles, sums that nobody asks for."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import eachgrad
from eachgrad import doubts, plan
from eachgrad.blocks import arithmetic
from eachgrad.cover import check_complete
from eachgrad.errors import CaptureError
from eachgrad.graph import own_history
from eachgrad.passes import Passes
from eachgrad.rules import RULES
from eachgrad.signature import Signature
from eachgrad.use import Tap
from oracle import assert_same, loop

pytestmark = pytest.mark.usefixtures("double")


class Hooked(nn.Module):
    """Every kind of output with hooks on it, before and after it is changed in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.group = nn.Conv1d(3, 4, 2), nn.GroupNorm(2, 4)
        self.flat, self.norm, self.long = nn.Linear(20, 5), nn.LayerNorm(5), nn.Linear(4, 4)

    def forward(self, x):
        h = self.conv(x)
        h.register_hook(lambda g: 3 * g)
        h.mul_(2)
        h = self.group(h)
        h.register_hook(lambda g: 7 * g)
        h.add_(1).relu_()
        h = self.long(h.mT)
        h.register_hook(lambda g: g / 5)
        h[:, 0] = 0
        h = self.flat(h.flatten(1))
        h.register_hook(lambda g: 11 * g)
        h.tanh_()
        h = self.norm(h)
        h.register_hook(lambda g: g / 2)
        return h.exp_().sum(1)


def test_hooks_and_ops_in_place_on_what_an_op_returns():
    torch.manual_seed(0)
    model, x = Hooked(), torch.randn(5, 3, 6)
    want = loop(model, lambda m, x: m(x), [(row[None],) for row in x])
    for call in range(6):  # measured, and by the plan
        with eachgrad.record(model) as tape:
            losses = model(x)
        got = tape.backward(losses).dense() if call % 2 else tape.ask(losses, all=eachgrad.dense()).all
        assert_same(got, want, 1e-10)


def asked(model: nn.Module, x: torch.Tensor) -> ref:
    with eachgrad.record(model) as tape:
        losses = model(x).square().sum((1, 2))
    tape.ask(losses, grad=eachgrad.clipped_sum(1.0))
    return ref(tape.recorder)


def test_what_was_recorded_is_gone_with_the_tape():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False)), torch.randn(3, 5, 4)
    gc.collect()
    gc.disable()
    try:
        assert [asked(model, x)() for _ in range(5)] == [None] * 5
    finally:
        gc.enable()


def test_a_gradient_that_outlives_its_tape_knows_its_name():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    with eachgrad.record(model) as tape:
        losses = model(x).square().sum(1)
    gradient = tape.backward(losses)["0.weight"]
    del tape, losses
    x.add_(1)
    with pytest.raises(CaptureError, match=r"'0\.weight', '0\.bias', used by .*linear at .*test_recording\.py"):
        gradient.dense()


def test_a_way_to_a_parameter_is_found_whether_or_not_the_leaves_are_known():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)
    with eachgrad.record(model) as tape:
        out = model(x).square().sum(1)
    for losses, covered in ((out, True), (out + model[0].bias.sum(), False)):
        passes, uses = Passes(tape.recorder, [losses]), [(use, set[int]()) for use in tape.recorder.uses]
        for leaves in (None, passes.leaves):
            if covered:
                check_complete(tape.recorder, uses, [losses], leaves)
                continue
            with pytest.raises(CaptureError, match=r"parameter '0\.bias' is used by"):
                check_complete(tape.recorder, uses, [losses], leaves)


@pytest.mark.parametrize("op", [F.linear, F.conv1d, F.conv_transpose1d])
def test_a_bias_that_is_not_there_is_not_summed(op):
    x, weight = torch.randn(3, 4, 5), torch.randn(4, 4, 1) if op is not F.linear else torch.randn(4, 5)
    g, rule = torch.randn_like(op(x, weight)), RULES[op].function
    assert set(rule(g, x, weight)) == {"weight"}
    found = rule(g, x, weight, torch.zeros(4))
    over = 1 if op is F.linear else 2
    torch.testing.assert_close(found["bias"].dense(), g.sum(over))


def test_an_output_is_copied_only_if_its_op_needs_it_again():
    x = torch.randn(3, 4, requires_grad=True)
    kept = {"norm": F.layer_norm(x, (4,)), "groups": F.group_norm(x, 2), "linear": F.linear(x, torch.randn(2, 4))}
    for name, out in kept.items():
        assert own_history(out).data_ptr() == out.data_ptr(), name
    for name, out in {"exp": x.exp(), "softmax": x.softmax(1), "sqrt": x.abs().sqrt()}.items():
        assert own_history(out).data_ptr() != out.data_ptr(), name


@pytest.mark.parametrize("shape", [(6, 5, 7), (6, 3), (6, 2, 3, 4)])
def test_factors_are_rounded_once(shape, monkeypatch):
    monkeypatch.setattr(arithmetic, "on_gpu", lambda t: True)
    value, c = torch.randn(shape, dtype=torch.bfloat16).transpose(0, -1).contiguous().transpose(0, -1), torch.rand(6)
    weight = c.float().view(-1, *[1] * (len(shape) - 1))
    found = arithmetic.scaled(value, c)
    assert found.dtype == torch.bfloat16
    assert found.stride() == value.stride()
    assert torch.equal(found, (value.float() * weight).to(torch.bfloat16))


def test_a_condition_is_computed_only_while_something_is_traced():
    assert not doubts.note(lambda: pytest.fail("nobody asked"))
    with doubts.gathered() as noted:
        assert doubts.note(lambda: torch.tensor(True))
    assert len(noted.noted) == 1


def test_a_remembered_route_knows_the_memory_it_may_take(monkeypatch):
    sizes = 64, 40, 50, 60, 4
    before = plan.product_norms(*sizes)
    monkeypatch.setattr(plan, "CHUNK", 2000)
    assert plan.product_norms(*sizes).bytes < before.bytes
    monkeypatch.undo()
    assert plan.product_norms(*sizes) == before


def test_two_that_wait_at_one_tap_hear_both():
    x = torch.randn(3, requires_grad=True)
    out = x * 2
    tap = Tap.at(out, lambda: None)
    heard = []
    handles = [tap.watch(lambda g, k=k: heard.append((k, g.sum().item()))) for k in range(2)]
    out.sum().backward(retain_graph=True)
    assert sorted(heard) == [(0, 3.0), (1, 3.0)]
    handles[0].remove()
    out.sum().backward()
    assert sorted(heard) == [(0, 3.0), (1, 3.0), (1, 3.0)]
    handles[1].remove()
    assert tap.post.arrived is None


def test_scaled_gradients_of_sixteen_bits_are_followed(monkeypatch):
    monkeypatch.setattr(arithmetic, "is_rounded", lambda value: True)  # as on a GPU
    value, c = torch.randn(4, 3, dtype=torch.bfloat16, requires_grad=True), torch.rand(4, dtype=torch.float32)
    out = arithmetic.scaled(value, c)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert torch.equal(value.grad, c[:, None].expand(4, 3).bfloat16())


def test_attached_weights_that_are_derived_have_answers_at_every_call():
    """A plan that is known frees nothing that they are pulled back through."""

    class Written(nn.Module):
        def __init__(self):
            super().__init__()
            self.W = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            w = torch.zeros(4, 4)
            w[1:3] = self.W[:2]
            return F.linear(x, w, w[1])

    torch.manual_seed(0)
    model, losses = Written(), lambda m, x: m(x).square().sum(1)
    for _ in range(6):
        x = torch.randn(5, 4)
        with eachgrad.record(model) as tape:
            value = losses(model, x)
        assert_same(tape.backward(value).dense(), loop(model, losses, [(one,) for one in x.split(1)]), 1e-12)


def signature_of(func, *args):
    """What the signature of a forward is after one op on a tensor of the batch."""
    found = Signature(lambda t: True)
    found.add(func, args, {}, [a for a in args if isinstance(a, torch.Tensor)], (1,))
    return found.value


@pytest.mark.parametrize(
    ("func", "args"),
    [(torch.sort, (0,)), (torch.Tensor.argsort, ()), (torch.topk, (1,)), (torch.tensordot, ("same", 1)),
     (torch.kron, ("same",)), (torch.Tensor.flip, (0,)), (torch.Tensor.cumsum, (0,))],
)  # fmt: skip
def test_ops_that_values_decide_have_no_signature(func, args):
    x = torch.randn(4, 4, requires_grad=True)
    assert signature_of(func, x, *(x if a == "same" else a for a in args)) is None


def test_numbers_that_hash_alike_are_told_apart():
    x = torch.randn(4, 4, requires_grad=True)
    found = [signature_of(torch.Tensor.sum, x, k) for k in (-1, -2, 0, 1, (-1,), (-2,), -1.0, -2.0)]
    assert None not in found
    assert len(set(found[:6])) == 6
    assert found[6] != found[7]
