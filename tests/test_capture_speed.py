"""What the recorded forward does the short way is what the long way does."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import eachgrad
from eachgrad import capture, recording, refusals, signature
from eachgrad.errors import CaptureError
from eachgrad.functions import PASSIVE, TEMPLATED
from eachgrad.graph import edge_at, replace, same, tensors_of
from eachgrad.signature import Signature, looked_at
from eachgrad.tensors import Tensors
from eachgrad.use import Use, version_of

pytestmark = pytest.mark.usefixtures("double")


class Own(torch.Tensor):
    """A tensor of the user's."""


def calls():
    x, w = torch.randn(3, 4, requires_grad=True), nn.Parameter(torch.randn(2, 4))
    plain = [
        ((x, w), {}), ((x, -1), {}), ((x, -2.0), {}), ((x, (1, -2), [w, x]), {}), ((x, w.shape), {}), ((x, True, None), {}),
        ((x,), {"dim": -1, "dtype": torch.float32}), ((), {"input": x, "weight": [w]}), (([], (), x), {}),
        ((x, torch.device("cpu"), 1j, "sum"), {"out": (x, w)}), ((3, "a"), {}), ((x.detach()[0], x), {"p": 0.5}),
    ]  # fmt: skip
    others = [
        ((x, slice(1, 2)), {}), ((x, (slice(None), 0)), {}), ((x.as_subclass(Own), w), {}), ((x, {"a": w}), {}),
        ((x, torch.contiguous_format), {}), ((x,), {"index": [slice(0, 1), x]}), (([w, {"b": x}], x), {"k": torch.Size([1])}),
    ]  # fmt: skip
    return [(*call, True) for call in plain] + [(*call, False) for call in others]


@pytest.mark.parametrize(("args", "kwargs", "plain"), calls())
def test_one_look_finds_what_two_would(args, kwargs, plain):
    found, call = looked_at(args, kwargs)
    assert [id(t) for t in found] == [id(t) for t in tensors_of(args, kwargs)]
    assert (call is not None) == plain
    if call is not None:
        assert call == (signature._describe(args), signature._describe(kwargs) if kwargs else ())
        assert hash(call) == hash((signature._describe(args), signature._describe(kwargs) if kwargs else ()))


def test_the_short_way_signs_as_the_long_one():
    for args, kwargs, _ in calls():
        found, call = looked_at(args, kwargs)
        values = []
        for given in (call, None):
            one = Signature(lambda t: True)
            one.add(torch.Tensor.sum, args, kwargs, found, (1,) * len(found), given)
            values.append(one.value)
        assert values[0] == values[1] is not None


def test_a_slice_by_a_tensor_has_no_signature():
    x = torch.randn(4, 4, requires_grad=True)
    for index in (slice(torch.tensor(1), None), (slice(None), slice(torch.tensor(0), torch.tensor(2)))):
        found, call = looked_at((x, index), {})
        one = Signature(lambda t: True)
        one.add(torch.Tensor.sum, (x, index), {}, found, (1,), call)
        assert one.value is None


def tensors():
    x = torch.randn(3, 4, requires_grad=True)
    z = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    return [x.exp(), x.exp().T, x.exp()[:, 1:], x.exp()[:, :1].expand(3, 4), x.sum(), x[:0] * 2, z.conj(), z.conj().imag,
            F.linear(torch.randn(2, 3, 4), x, x[:, 0])]  # fmt: skip


@pytest.mark.parametrize("k", range(len(tensors())))
def test_another_name_for_a_tensor_is_no_view_of_it(k):
    t = tensors()[k]
    for again in (same(t), torch.ops.aten._unsafe_view(t, t.shape)):
        assert not again._is_view()
        assert again.requires_grad
        assert again.grad_fn is not t.grad_fn
        assert again.grad_fn is not None
        assert again.grad_fn.next_functions == ((t.grad_fn, t.output_nr),)
        assert (again.data_ptr(), again.stride(), again.is_conj(), again.is_neg()) == (
            t.data_ptr(), t.stride(), t.is_conj(), t.is_neg(),
        )  # fmt: skip
        before, node = t._version, t.grad_fn
        if again.numel() and k != 3:  # which has several elements in one place
            again.mul_(2)
            assert t._version == before
            assert t.grad_fn is node
    assert t.exp()[None]._is_view()  # views are noted again afterwards


def test_an_edge_is_the_one_that_torch_gives():
    x = torch.randn(3, 4, requires_grad=True)
    for t in (x, x.exp(), x.unbind()[1], checkpoint(torch.exp, x, use_reentrant=True)):
        mine, theirs = edge_at(t), get_gradient_edge(t)
        assert mine[:2] == theirs[:2]
        assert (mine[2] is None) == (theirs[2] is None)
    with pytest.raises(RuntimeError, match="does not require gradients"):
        edge_at(x.detach())


def test_replacing_leaves_what_is_not_named():
    x, w, new = torch.randn(2), nn.Parameter(torch.randn(2)), torch.randn(2)
    got = replace((x, w, [w, (x, 1)], {"a": w}, None, "w", w.as_subclass(Own)), {id(w): new})
    assert got[0] is x
    assert got[1] is new
    assert got[2][0] is new
    assert got[2][1] == (x, 1)
    assert got[3]["a"] is new
    assert got[4:6] == (None, "w")
    assert isinstance(got[6], Own)


def test_a_tensor_of_inference_mode_has_no_version():
    with torch.inference_mode():
        t = torch.ones(2)
    assert version_of(t) == (t, 0)


class Derived(nn.Module):
    """A weight that is computed, and one that is given as it is, in ops that read their values."""

    def __init__(self):
        super().__init__()
        self.raw, self.scale = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        self.made = self.raw * 2
        return F.layer_norm(F.layer_norm(x, (4,), self.made), (4,), self.scale)


@pytest.mark.parametrize("changed", ["made", "scale"])
def test_a_source_is_held_to_its_version(changed):
    torch.manual_seed(0)
    model, x = Derived(), torch.randn(3, 4)
    with eachgrad.record(model) as tape:
        model(x).sum(1)
    with torch.no_grad():
        getattr(model, changed).mul_(2)
    wrong = []
    for use in tape.recorder.uses:
        try:
            use.check_sources()
        except CaptureError:
            wrong += use.parameters()
    assert wrong == [{"made": "raw", "scale": "scale"}[changed]]


class Doubled(nn.Module):
    """A parameter that is used where it is broadcast, in a layer, and by hand."""

    def __init__(self):
        super().__init__()
        self.layer, self.shift = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

    def forward(self, x):
        x = self.layer(x)
        x = x + self.shift
        return F.linear(x, self.layer.weight)


def test_every_use_knows_its_line_and_its_module():
    model = Doubled()
    with eachgrad.record(model) as tape:
        model(torch.randn(3, 4))
    lines = Doubled.forward.__code__.co_firstlineno
    want = [(1, "in module 'layer' (Linear)"), (2, "in the model (Doubled)"), (3, "in the model (Doubled)")]
    assert [str(use.where) for use in tape.recorder.uses] == [f"{__file__}:{lines + n}, {there}" for n, there in want]


def test_what_needs_care_is_asked_for_once():
    for table in (PASSIVE, TEMPLATED, recording.OWN, refusals.CHECKED):
        assert set(table) <= capture._SPECIAL


def test_what_an_argument_is_and_its_number():
    w, x = nn.Parameter(torch.randn(4)), torch.randn(3, 4)
    known = Tensors({"w": w}, ())
    known.mark_strong(x)
    h = (x * w).exp()
    known.tap_nodes.add(h.grad_fn)
    late, leaf = h * 2, torch.randn(3, requires_grad=True)
    assert known.told_apart([w, x, leaf], False) == ([(w, "pure")], True, (0, 1, 0))
    assert known.told_apart([leaf, w], False) == ([(w, "pure")], False, (0, 0))
    assert known.told_apart([leaf], True) == ([], True, (0,))
    # Its history says that it is of the batch, and so it has a number from here on.
    assert known.told_apart([late, late], False) == ([], True, (2, 2))
    assert known.told_apart([x, late], False) == ([], True, (1, 2))


def test_a_parameter_of_a_plain_type_is_held_to_its_version():
    w, x = torch.randn(4, requires_grad=True), torch.randn(3, 4)
    recorder = capture.Recorder({"w": w})
    recorder.tensors.mark_strong(x)
    with recorder:
        F.layer_norm(x, (4,), w)
    (use,) = recorder.uses
    use.check_sources()
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(CaptureError, match="a parameter was changed in place"):
        use.check_sources()


def test_a_gradient_is_checked_against_what_it_is_made_of(monkeypatch):
    """And not against every op of the forward: twice the layers are at most twice the checks."""
    checked, own = [], Use.check_versions
    monkeypatch.setattr(Use, "check_versions", lambda self: (checked.append(self), own(self))[1])
    found = []
    for depth in (5, 10):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(4, 4), nn.Tanh())]
        model, x = nn.Sequential(*layers), torch.randn(3, 4)
        with eachgrad.record(model) as tape:
            losses = model(x).square().sum(1)
        grads = tape.backward(losses)
        checked.clear()
        grads.clipped_sum(1.0)
        found.append(len(checked))
    assert found[0] >= 10
    assert found[1] <= 2 * found[0]


def test_each_gradient_is_guarded_by_its_own_uses():
    """Of two layers, and of one that is used twice: whichever input is changed, what is made of it is refused."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice, self.once = nn.Conv1d(4, 4, 1), nn.Conv1d(4, 4, 1)

        def forward(self, x):
            first = torch.tanh(self.twice(x))
            second = torch.tanh(self.twice(first))
            self.seen = {"first": first, "second": second}
            return self.once(second)

    for changed, refused, kept in (("first", "twice.weight", "once.weight"), ("second", "once.weight", "twice.weight")):
        model = Net()
        with eachgrad.record(model) as tape:
            losses = model(torch.randn(3, 4, 9)).square().flatten(1).sum(1)
        grads = tape.backward(losses)
        before = grads[kept].weighted_sum(torch.ones(3)).clone()
        with torch.no_grad():
            model.seen[changed].mul_(2)
        with pytest.raises(CaptureError, match="changed in place"):
            grads[refused].weighted_sum(torch.ones(3))
        torch.testing.assert_close(grads[kept].weighted_sum(torch.ones(3)), before, rtol=0, atol=0)
