"""What a recording cannot look into: autograd.Functions, custom ops, scripts, compiled parts, vmap; and the fallback."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import eachgrad
from cases import score
from eachgrad import CaptureError, UnsupportedOp
from oracle import assert_same, loop

pytestmark = pytest.mark.usefixtures("double")
B, T, d = 3, 4, 5


class Net(nn.Module):
    def __init__(self, body, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
        self.body = body

    def forward(self, *batch):
        return self.body(self, *batch)


def losses(model, *batch):
    return score(model(*batch))


def assert_exact(model, *batch, twin: nn.Module | None = None, calls: int = 3, **options):
    """`twin` is the same model for the loop, where a script cannot be copied."""
    want = loop(twin or model, losses, [tuple(t[i : i + 1] for t in batch) for i in range(len(batch[0]))])
    size = sum(t.reshape(len(t), -1).square().sum(1) for t in want.values()).sqrt()
    for _ in range(calls):
        with eachgrad.record(model, **options) as tape:
            each = losses(model, *batch)
        answer = tape.ask(each, grads=eachgrad.dense(), norms=eachgrad.norms())
        assert_same(answer.grads, want, 1e-10)
        torch.testing.assert_close(answer.norms, size, rtol=1e-10, atol=0)
    with eachgrad.record(model, check=True, **options) as tape:
        each = losses(model, *batch)
    grads = tape.backward(each)
    assert_same({name: g.dense() for name, g in grads.items()}, want, 1e-10)
    assert grads.receipt().deviation < 1e-12
    assert all(p.grad is None for p in model.parameters())
    return grads


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, (g * x).reshape(-1, x.shape[-1]).sum(0)


class Two(torch.autograd.Function):
    """Two outputs, an argument that is no tensor, and a backward that cannot be differentiated again."""

    @staticmethod
    def forward(ctx, x, k, w, b):
        ctx.save_for_backward(x, w)
        return x * w + b, k * x.sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        rest = list(range(g.ndim - 1))
        return g * w + 2.0 * h[..., None], None, (g * x).sum(rest), g.sum(rest)


class ThroughNumpy(torch.autograd.Function):
    """Nothing that it does can be seen, and vmap cannot batch it."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.detach().numpy() * w.detach().numpy())

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, torch.from_numpy((g.numpy() * x.numpy()).reshape(-1, x.shape[-1]).sum(0))


class Round(torch.autograd.Function):
    """A quantiser of weights with a straight-through gradient; no batch."""

    @staticmethod
    def forward(ctx, w, scale):
        return (w / scale).round() * scale

    @staticmethod
    def backward(ctx, g):
        return g, None


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return -2 * g


def w():
    return torch.randn(d)


def lin(a: int = d, b: int = d):
    return nn.Linear(a, b)


FUNCTIONS = {
    "of the input": lambda: Net(lambda m, x: Product.apply(x, m.w), w=w()),
    "before a layer": lambda: Net(lambda m, x: m.fc(Product.apply(x, m.w)), fc=lin(), w=w()),
    "after a layer": lambda: Net(lambda m, x: Product.apply(m.fc(x), m.w), fc=lin(), w=w()),
    "twice in a row": lambda: Net(lambda m, x: Product.apply(Product.apply(x, m.w).tanh(), m.w), w=w()),
    "used with an op": lambda: Net(lambda m, x: Product.apply(x, m.w) * m.w + m.w, w=w()),
    "two side by side": lambda: Net(lambda m, x: Product.apply(x, m.w) * Product.apply(m.fc(x), m.w), w=w(), fc=lin()),
    "of a derived weight": lambda: Net(lambda m, x: Product.apply(x, m.w.exp() * m.v), w=w(), v=w()),
    "of a quantised weight": lambda: Net(lambda m, x: Product.apply(x, Round.apply(m.w, torch.tensor(0.1))), w=w()),
    "of the square of a weight": lambda: Net(lambda m, x: x * Product.apply(m.w, m.w), w=w()),
    "a quantiser": lambda: Net(
        lambda m, x: nn.functional.linear(x, Round.apply(m.fc.weight, torch.tensor(0.1)), m.fc.bias), fc=lin()
    ),
    "two outputs": lambda: Net(
        lambda m, x: (o := Two.apply(m.fc(x), 2.0, m.w, m.b), o[0] * o[1][..., None])[1], fc=lin(), w=w(), b=w()
    ),
    "one of two outputs": lambda: Net(lambda m, x: Two.apply(x, 2.0, m.w, m.b)[0], w=w(), b=w()),
    "through numpy": lambda: Net(lambda m, x: ThroughNumpy.apply(x, m.w).tanh(), w=w()),
    "through numpy, then a layer": lambda: Net(lambda m, x: m.fc(ThroughNumpy.apply(m.fc(x), m.w)), w=w(), fc=lin()),
    "reversed gradients": lambda: Net(lambda m, x: m.fc(Reverse.apply(m.fc(x))), fc=lin()),
    "inside a checkpoint": lambda: Net(
        lambda m, x: checkpoint(lambda h: m.fc(Product.apply(h, m.w)), m.fc(x), use_reentrant=False), fc=lin(), w=w()
    ),
    "with a bias that is broadcast": lambda: Net(lambda m, x: Product.apply(x + m.b, m.w), w=w(), b=w()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(B, d), (B, T, d), (d, d, d), (1, d)], ids=str)
def test_an_autograd_function(name, shape):
    torch.manual_seed(1)
    assert_exact(FUNCTIONS[name](), torch.randn(*shape))


class Unsummed(torch.autograd.Function):
    """Its backward leaves it to autograd to sum what was broadcast."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


class Again(torch.autograd.Function):
    """Its backward computes the forward once more and differentiates it, as adjoint methods do."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.tanh(nn.functional.linear(x, w))

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            a, b = torch.autograd.grad(torch.tanh(nn.functional.linear(x, w)), (x, w), g, allow_unused=True)
        return a, torch.zeros_like(w) if b is None else b


class Batched(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w, g * x


@pytest.mark.parametrize("shape", [(), (1,), (d,)], ids=str)
def test_a_function_whose_gradient_autograd_sums(shape):
    model = Net(
        lambda m, x: Unsummed.apply(m.fc(x), m.w.exp()) + Unsummed.apply(x, m.w), w=torch.randn(shape), fc=lin()
    )
    assert_exact(model, torch.randn(B, T, d))


def test_a_function_that_computes_its_forward_again_in_its_backward():
    for body in (lambda m, x: Again.apply(m.fc(x), m.w), lambda m, x: m.fc(Again.apply(x, m.w))):
        assert_exact(Net(body, w=torch.randn(d, d), fc=lin()), torch.randn(B, T, d))


def test_a_function_under_vmap_counts_once():
    assert_exact(Net(lambda m, x: torch.vmap(lambda row: Batched.apply(row, m.w))(x), w=w()), torch.randn(B, d))


class Both(torch.autograd.Function):
    """Through numpy: one output of the batch, and one that is a weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.from_numpy(x.detach().numpy() * w.detach().numpy()), 2 * w

    @staticmethod
    def backward(ctx, g, h):
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0) + 2 * h


def test_an_output_that_is_a_weight_beside_one_of_the_batch_is_not_lost():
    model = Net(lambda m, x: (lambda a, b: a * b)(*Both.apply(x, m.w)), w=w())
    with pytest.raises(CaptureError, match="'w'"):
        assert_exact(model, torch.randn(B, d))


def test_the_row_of_a_function_in_explain():
    model = FUNCTIONS["before a layer"]()
    found = eachgrad.explain(model, losses, torch.randn(B, d))
    (row,) = [row for row in found.rows if row.parameter == "w"]
    assert row.op.endswith("Product")
    assert f"{__file__}:" in row.where
    assert row.representation == "Dense, by vmap"
    assert "no rule" in row.reason


def test_the_receipt_names_what_has_no_rule():
    receipt = assert_exact(FUNCTIONS["of a derived weight"](), torch.randn(B, d)).receipt()
    (piece,) = receipt.pieces
    assert piece.startswith("v, w in ")
    assert f"Product at {__file__}:" in piece
    assert f"without a rule, one derivative for each sample: {piece}" in str(receipt)


def test_a_function_that_mixes_samples_is_refused():
    class Centred(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            x = x - x.mean(0)
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            h = g * w
            return h - h.mean(0), (g * x).sum(0)

    for body in (lambda m, x: Centred.apply(x, m.w), lambda m, x: Centred.apply(m.fc(x), m.w)):
        with pytest.raises(CaptureError, match=r"mixes the samples|statistic"):
            assert_exact(Net(body, w=w(), fc=lin()), torch.randn(B, d))


def test_what_is_mixed_after_a_function_is_refused():
    for body in (
        lambda m, x: m.fc(x) * (lambda h: h - h.mean(0))(Product.apply(x, m.w)),
        lambda m, x: m.fc(x) * (lambda h: h - h.mean(0))(Product.apply(m.fc(x), m.w)),
    ):
        with pytest.raises(CaptureError, match=r"'w'|'fc\.weight'"):
            assert_exact(Net(body, w=w(), fc=lin()), torch.randn(B, d))


def test_a_function_with_a_sample_that_is_not_finite():
    model, x = FUNCTIONS["of the input"](), torch.randn(B, d)
    x[1] = float("nan")
    with eachgrad.record(model) as tape:
        each = losses(model, x)
    with pytest.raises(CaptureError, match="not finite"):
        tape.backward(each)


def test_a_function_is_differentiable_once_more():
    model, x = FUNCTIONS["before a layer"](), torch.randn(B, d)
    with eachgrad.record(model, create_graph=True) as tape:
        each = losses(model, x)
    total = tape.backward(each).norms().square().sum()
    got = torch.autograd.grad(total, list(model.parameters()))
    rows = [torch.autograd.grad(one, list(model.parameters()), create_graph=True) for one in losses(model, x)]
    want = torch.autograd.grad(sum(t.square().sum() for row in rows for t in row), list(model.parameters()))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


# Ops without a rule


@torch.library.custom_op("eachgrad_foreign::blend", mutates_args=())
def blend(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x * w, x.square() + w


@blend.register_fake
def _(x, w):
    return torch.empty_like(x), torch.empty_like(x)


def _blend_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _blend_backward(ctx, g, h):
    x, w = ctx.saved_tensors
    return g * w + 2 * h * x, (g * x + h).reshape(-1, x.shape[-1]).sum(0)


blend.register_autograd(_blend_backward, setup_context=_blend_setup)


def blended(m, x):
    a, b = blend(m.fc(x), m.w.exp())
    return a + b.tanh()


@torch.library.custom_op("eachgrad_foreign::unbatched", mutates_args=())
def unbatched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w


def _unbatched_backward(ctx, g):
    x, w = ctx.saved_tensors
    if float(g.abs().max()) == 0.0:  # what vmap cannot decide for all samples
        return g, torch.zeros_like(w)
    return g * w, (g * x).sum(0)


unbatched.register_autograd(_unbatched_backward, setup_context=_blend_setup)


def test_an_op_without_a_rule_is_refused_by_default():
    model = nn.Sequential(Net(blended, fc=lin(), w=w()))
    with pytest.raises(UnsupportedOp) as caught:
        assert_exact(model, torch.randn(B, d))
    message, line = str(caught.value), blended.__code__.co_firstlineno + 1
    assert f"parameter '0.w' ({d},) is used by torch.ops.eachgrad_foreign.blend.default at {__file__}:{line}" in message
    assert "in module '0' (Net)" in message
    assert "@eachgrad.rule" in message
    assert 'record(fallback="vmap")' in message


@pytest.mark.parametrize("fallback", ["vmap", "loop"])
@pytest.mark.parametrize("shape", [(B, d), (B, T, d), (d, d, d)], ids=str)
def test_an_op_without_a_rule_by_the_fallback(fallback, shape):
    model = nn.Sequential(Net(blended, fc=lin(), w=w()))
    grads = assert_exact(model, torch.randn(*shape), fallback=fallback)
    rows = [row for row in grads.explain("norms").rows if row.parameter == "0.w"]
    assert {row.op for row in rows} == {"torch.ops.eachgrad_foreign.blend.default"}
    assert all("by vmap" in row.representation for row in rows)


def test_explain_and_verify_take_the_fallback():
    model, x = Net(blended, fc=lin(), w=w()), torch.randn(B, d)
    assert eachgrad.verify(model, losses, x, fallback="vmap", quiet=True).ok
    found = eachgrad.explain(model, losses, x, fallback="vmap")
    assert "one derivative of the op for each sample, by vmap" in str(found)
    with pytest.raises(UnsupportedOp, match="blend"):
        eachgrad.explain(model, losses, x)


def test_the_cost_of_a_piece_is_counted():
    model, x = Net(lambda m, x: torch.vmap(m.fc)(x), fc=nn.Linear(d, d, bias=False)), torch.randn(B, T, d)
    found = eachgrad.explain(model, losses, x, query="norms")
    (row,) = found.rows
    assert row.flops == found.formed
    assert row.flops == pytest.approx(
        (B + 1) * 2 * B * T * d * d, rel=0.01
    )  # the whole batch for each sample, and a check


def test_an_op_that_cannot_be_batched_needs_the_loop():
    model = Net(lambda m, x: unbatched(x, m.w), w=w())
    with pytest.raises(UnsupportedOp, match=r"unbatched.*cannot be batched.*fallback=\"loop\""):
        assert_exact(model, torch.randn(B, d), fallback="vmap")
    grads = assert_exact(model, torch.randn(B, d), fallback="loop")
    (row,) = grads.explain("norms").rows
    assert "by a loop" in row.representation


def test_the_fallback_is_one_of_three():
    with pytest.raises(ValueError, match="fallback"):
        eachgrad.record(lin(), fallback="always")


# vmap inside the model


VMAPPED = {
    "over samples": lambda: Net(lambda m, x: torch.vmap(lambda row: m.fc(row).tanh() * m.w)(x), fc=lin(), w=w()),
    "over time": lambda: Net(lambda m, x: torch.vmap(m.fc, in_dims=1, out_dims=1)(x), fc=lin()),
    "twice": lambda: Net(lambda m, x: torch.vmap(torch.vmap(lambda v: m.fc(v) * m.w))(x), fc=lin(), w=w()),
    "after a layer": lambda: Net(lambda m, x: m.fc(torch.vmap(lambda row: row * m.w)(m.fc(x))), fc=lin(), w=w()),
    "an ensemble": lambda: Net(
        lambda m, x: torch.vmap(lambda k: torch.tanh(x @ k), out_dims=1)(m.k), k=torch.randn(2, d, d)
    ),
    "an ensemble of derived weights": lambda: Net(
        lambda m, x: torch.vmap(lambda k, b: torch.tanh(x @ k + b), out_dims=1)(m.k.tanh(), m.b),
        k=torch.randn(2, d, d), b=torch.randn(2, d),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VMAPPED)
@pytest.mark.parametrize("shape", [(B, T, d), (d, d, d)], ids=str)
def test_vmap_inside_the_model(name, shape):
    assert_exact(VMAPPED[name](), torch.randn(*shape))


def test_a_derivative_inside_the_model_is_refused():
    model = Net(lambda m, x: torch.func.grad(lambda v: (v * m.w).sum().square())(x), w=w())
    with pytest.raises(UnsupportedOp, match=r"'w' is used inside torch\.func\.grad"):
        assert_exact(model, torch.randn(B, d))


# Things that stand for tensors


class Halves(NamedTuple):
    """A weight as two parts, of which torch's functions make one."""

    high: torch.Tensor
    low: torch.Tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        args = [a.high + a.low if isinstance(a, Halves) else a for a in args]
        return func(*args, **(kwargs or {}))


def test_a_weight_that_is_a_tuple_with_a_torch_function_of_its_own():
    model = Net(lambda m, x: nn.functional.linear(x, Halves(m.a, m.b.tanh())), a=torch.randn(4, d), b=torch.randn(4, d))
    assert_exact(model, torch.randn(B, T, d))


# Scripts, compiled parts


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        return torch.tanh(self.norm(self.fc(x)))


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d))

    def forward(self, x):
        return (x - x.mean(0)) * self.w


def scripted(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are deprecated, and still there
        return torch.jit.script(module)


def traced(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, torch.randn(2, d))


@pytest.mark.parametrize("make", [scripted, traced])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_scripted_part(make, calls):
    def body(m, x):
        for _ in range(calls):
            x = m.script(x)
        return m.last(x)

    twin = Net(body, script=Block(), last=lin())
    model = Net(body, script=make(twin.script), last=twin.last)
    receipt = assert_exact(model, torch.randn(B, d), twin=twin).receipt()
    assert len(receipt.pieces) == calls


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(d, d)

    def forward(self, x, scale: float = 1.0):
        return self.fc(x) * scale


def test_a_scripted_part_with_keywords():
    twin = Net(lambda m, x: m.script(x, scale=3.0), script=Scaled())
    model = Net(twin.body, script=scripted(twin.script))
    assert_exact(model, torch.randn(B, d), twin=twin)


def test_a_scripted_part_whose_input_is_changed_afterwards_is_refused():
    model, h = Net(lambda m, x: m.script(x), script=scripted(Block())), torch.randn(B, d)
    with eachgrad.record(model) as tape:
        each = losses(model, h)
        h.mul_(2)
    with pytest.raises(CaptureError, match="changed in place"):
        tape.backward(each)


def test_a_scripted_part_in_sixteen_bits_that_mixes_samples_is_refused():
    model = nn.Sequential(scripted(Centred()), nn.Linear(d, 2)).to(torch.bfloat16)
    with eachgrad.record(model) as tape:
        each = losses(model, torch.randn(B, d, dtype=torch.bfloat16))
    with pytest.raises(CaptureError, match="computes something else"):
        tape.backward(each)


def test_a_scripted_part_that_mixes_samples_is_refused():
    model = Net(lambda m, x: m.last(m.script(x)), script=scripted(Centred()), last=lin())
    with pytest.raises(CaptureError, match="scripted module 'script' computes something else for a sample alone"):
        assert_exact(model, torch.randn(B, d), twin=Net(model.body, script=Centred(), last=lin()))


def test_a_scripted_function_of_a_parameter_is_refused():
    script = scripted(_centred)
    for body in (lambda m, x: m.fc(x) * script(x, m.w), lambda m, x: x * script(x, m.w)):
        with pytest.raises(UnsupportedOp, match=r"'w' goes through .* hides its ops"):
            assert_exact(Net(body, w=w(), fc=lin()), torch.randn(B, d))


def _centred(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) * w


def test_a_scripted_model_is_refused():
    with pytest.raises(CaptureError, match="scripted model hides its ops"):
        eachgrad.record(scripted(Block())).__enter__()


def test_a_compiled_part():
    part = torch.compile(Block(), backend="eager")
    model = Net(lambda m, x: m.last(m.part(x)), part=part, last=lin())
    assert_exact(model, torch.randn(B, d))
