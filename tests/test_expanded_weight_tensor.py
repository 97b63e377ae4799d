"""The class ExpandedWeight called directly, against a loop over samples in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from eachgrad import expanded_weights as ew
from eachgrad.expanded_weights import ExpandedWeight

B = 4


@dataclass(frozen=True)
class Case:
    """A call of `op` on an input (or on ids below `ids`) with weights of the given shapes."""

    op: Callable
    input: tuple[int, ...]
    weights: dict[str, tuple[int, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    ids: int = 0
    dtype: torch.dtype = torch.float64
    batch_dim: int = 0
    channels_last: bool = False

    def tensors(self) -> tuple[Tensor, dict[str, Tensor]]:
        torch.manual_seed(0)
        x = torch.randint(self.ids, self.input) if self.ids else torch.randn(self.input, dtype=self.dtype)
        x = x.to(memory_format=torch.channels_last) if self.channels_last else x
        return x, {name: torch.randn(s, dtype=self.dtype) for name, s in self.weights.items()}


LINEAR = {"weight": (5, 3), "bias": (5,)}
TABLE = {"weight": (7, 3)}
AFFINE = {"weight": (6,), "bias": (6,)}
CONV = {"weight": (6, 2, 3, 3), "bias": (6,)}
RUNNING = {"running_mean": torch.linspace(-1, 1, 6).double(), "running_var": torch.linspace(1, 2, 6).double()}
IDS = (B, 5)

CASES = {
    "linear": Case(F.linear, (B, 3), LINEAR),
    "linear rank 4": Case(F.linear, (B, 2, B, 3), LINEAR),
    "linear without bias": Case(F.linear, (B, 3), {"weight": (5, 3)}),
    "linear complex": Case(F.linear, (B, 2, 3), LINEAR, dtype=torch.complex128),
    "linear batch second": Case(F.linear, (B, B, 3), LINEAR, batch_dim=1),
    "embedding": Case(F.embedding, IDS, TABLE, ids=7),
    "embedding padding": Case(F.embedding, IDS, TABLE, {"padding_idx": -5}, ids=7),
    "embedding max_norm": Case(F.embedding, IDS, TABLE, {"max_norm": 1.0}, ids=7),
    "embedding by frequency": Case(F.embedding, (B, 9, 2), TABLE, {"scale_grad_by_freq": True}, ids=7),
    "embedding sparse": Case(F.embedding, IDS, TABLE, {"sparse": True}, ids=7),
    "embedding batch second": Case(F.embedding, (5, B), TABLE, ids=7, batch_dim=1),
    "conv1d": Case(F.conv1d, (B, 2, 8), {"weight": (6, 2, 3), "bias": (6,)}, {"stride": 2, "padding": 1}),
    "conv2d": Case(F.conv2d, (B, 2, 7, 6), CONV, {"stride": (2, 1), "padding": (1, 0), "dilation": 2}),
    "conv2d groups": Case(F.conv2d, (B, 4, 7, 6), CONV, {"groups": 2}),
    "conv2d same": Case(F.conv2d, (B, 2, 7, 6), CONV, {"padding": "same", "dilation": (2, 1)}),
    "conv2d valid": Case(F.conv2d, (B, 2, 7, 6), CONV, {"padding": "valid"}),
    "conv2d channels_last": Case(F.conv2d, (B, 2, 7, 6), CONV, channels_last=True),
    "conv2d complex": Case(F.conv2d, (B, 2, 4, 4), CONV, dtype=torch.complex128),
    "conv3d": Case(F.conv3d, (B, 2, 5, 6, 5), {"weight": (6, 2, 2, 3, 2), "bias": (6,)}, {"dilation": 2}),
    "layer_norm": Case(F.layer_norm, (B, 3, 6), AFFINE, {"normalized_shape": (6,), "eps": 0.1}),
    "layer_norm batch second": Case(
        F.layer_norm, (B, B, 6), AFFINE, {"normalized_shape": (6,)}, batch_dim=1
    ),
    "layer_norm rank 2": Case(
        F.layer_norm, (B, 2, 6), {"weight": (2, 6), "bias": (2, 6)}, {"normalized_shape": (2, 6)}
    ),
    "group_norm": Case(F.group_norm, (B, 6, 3, 2), AFFINE, {"num_groups": 2, "eps": 0.1}),
    "group_norm rank 2": Case(F.group_norm, (B, 6), AFFINE, {"num_groups": 3}),
    "instance_norm": Case(F.instance_norm, (B, 6, 5), AFFINE, {"eps": 0.1}),
    "instance_norm running": Case(F.instance_norm, (B, 6, 5), AFFINE, RUNNING | {"use_input_stats": False}),
}  # fmt: skip
case_of = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def total(t: Tensor) -> Tensor:
    """A real loss of an output that has been multiplied by its coefficients."""
    return torch.view_as_real(t).sum() if t.is_complex() else t.sum()


def coefficients(case: Case) -> Tensor:
    """Different weights for every output, so that no two samples have the same gradient."""
    x, weights = case.tensors()
    return torch.randn_like(case.op(input=x, **weights, **case.options))


def loop(case: Case) -> dict[str, Tensor]:
    """Each weight's gradients (B, *shape) and the input's gradient, by a batch of one at a time."""
    c, rows = coefficients(case), []
    for i in range(B):
        x, given = case.tensors()
        x = x.narrow(case.batch_dim, i, 1)
        given |= {} if case.ids else {"input": x}
        given = {name: t.clone().requires_grad_() for name, t in given.items()}
        out = case.op(**({"input": x} | given | case.options))
        grads = torch.autograd.grad(total(out * c.narrow(case.batch_dim, i, 1)), list(given.values()))
        rows.append({name: g.to_dense() for name, g in zip(given, grads, strict=True)})
    stacked = {name: torch.stack([row[name] for row in rows]) for name in case.weights}
    return stacked if case.ids else stacked | {"input": torch.cat([r["input"] for r in rows], case.batch_dim)}


def door(case: Case, reduction: str = "sum", frozen: tuple[str, ...] = (), call: str = "mixed") -> dict:
    """The same through ExpandedWeights; what is `frozen` takes no gradient and is missing from the answer."""
    c = coefficients(case)
    x, weights = case.tensors()
    x.requires_grad_(not case.ids and "input" not in frozen)
    originals = {name: w.requires_grad_() for name, w in weights.items() if name not in frozen}
    expanded = {name: ExpandedWeight(w, B, reduction) for name, w in originals.items()}
    for w in expanded.values():
        w.set_batch_first(case.batch_dim == 0)
    given = weights | expanded | case.options
    if call == "mixed":
        out = case.op(x, **given)
    else:
        out = case.op(**dict(sorted((given | {"input": x}).items(), reverse=call == "descending")))
    loss = total(out * c)
    (loss / B if reduction == "mean" else loss).backward()
    assert all(w.grad is None for w in weights.values())
    found: dict[str, Any] = {name: w.grad_sample for name, w in originals.items()}
    # The input's gradient stays that of the loss as it is.
    return found if x.grad is None else found | {"input": x.grad * (B if reduction == "mean" else 1)}


@case_of
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("call", ["mixed", "ascending", "descending"])
def test_each_sample_has_its_own_gradient(case: Case, reduction: str, call: str) -> None:
    torch.testing.assert_close(door(case, reduction, call=call), loop(case))


@case_of
@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_takes_no_gradient(case: Case, frozen: str) -> None:
    if frozen == "weight" and "bias" not in case.weights:
        return  # nothing would be left
    expected = {name: value for name, value in loop(case).items() if name != frozen}
    torch.testing.assert_close(door(case, frozen=(frozen,)), expected)


def pair(reduction: str = "sum", n: int = B) -> tuple[ExpandedWeight, ExpandedWeight]:
    torch.manual_seed(1)
    weights = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in LINEAR.values())
    return tuple(ExpandedWeight(w, n, reduction) for w in weights)


def inputs(n: int = B) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(n, 3, dtype=torch.float64)


def outer(x: Tensor) -> Tensor:
    return x[:, None, :].expand(-1, 5, -1)


def test_uses_add_up_on_an_original_that_is_no_leaf() -> None:
    original = torch.randn(5, 3, dtype=torch.float64, requires_grad=True) * 2
    weight, x = ExpandedWeight(original, B, "sum"), inputs()
    (F.linear(x, weight) + 3 * F.linear(x, weight)).sum().backward()
    torch.testing.assert_close(original.grad_sample, 4 * outer(x))


def test_a_smaller_batch_has_zero_rows_for_the_samples_it_lacks() -> None:
    (weight, bias), x = pair(n=B + 2), inputs()
    with ew.allow_smaller_batches((weight,), {"bias": bias}):
        out = F.linear(x, weight, bias)
    out.sum().backward()
    torch.testing.assert_close(weight.orig_weight.grad_sample, F.pad(outer(x), (0, 0, 0, 0, 0, 2)))


def test_running_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    x, (mean, var) = torch.randn(B, 6, 5, requires_grad=True), (torch.zeros(6), torch.ones(6))
    weight = ExpandedWeight(torch.ones(6, requires_grad=True), B, "sum")
    F.instance_norm(x, mean, var, weight).square().sum().backward()
    expected = torch.zeros(6), torch.ones(6)
    F.instance_norm(x.detach(), *expected)
    torch.testing.assert_close((mean, var), expected)


def test_autocast_gives_gradients_in_the_dtype_of_the_weight() -> None:
    weight, x = torch.randn(5, 3, requires_grad=True), torch.randn(B, 3).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = F.linear(x, ExpandedWeight(weight, B, "sum"))
    out.sum().backward()
    torch.testing.assert_close(weight.grad_sample, outer(x.float()))
    torch.testing.assert_close(x.grad, weight.bfloat16().sum(0).expand(B, 3))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    (weight, bias), x = pair(), inputs().requires_grad_()
    checkpoint(lambda t: F.linear(t, weight, bias), x, use_reentrant=reentrant).sum().backward()
    torch.testing.assert_close(weight.orig_weight.grad_sample, outer(x))


def test_what_autograd_forbids_stays_forbidden() -> None:
    (weight, _), x = pair(), inputs().requires_grad_()
    out = F.linear(x * 1, weight)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        out.sum().backward()
    (grad,) = torch.autograd.grad(F.linear(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.square().sum().backward()
    out = F.linear(x, weight)
    with torch.no_grad():
        weight.orig_weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


RECURRENT = {
    "rnn": (nn.RNN, {"bias": False}),
    "rnn relu": (nn.RNN, {"nonlinearity": "relu", "num_layers": 2}),
    "gru": (nn.GRU, {"num_layers": 2, "bidirectional": True}),
    "lstm": (nn.LSTM, {"bidirectional": True, "batch_first": True}),
    "lstm projected": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "batch_first": True}),
}


def expanded(module: nn.Module, x: Tensor | PackedSequence, reduction: str = "sum") -> Any:
    weights = {name: ExpandedWeight(p, B, reduction) for name, p in module.named_parameters()}
    return torch.func.functional_call(module, weights, (x,))


def weighted(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("kind", "options"), RECURRENT.values(), ids=RECURRENT)
def test_recurrent(kind: type[nn.RNNBase], options: dict[str, Any], packed: bool) -> None:
    torch.manual_seed(0)
    module, first = kind(3, 4, **options).double(), "batch_first" in options
    lengths = [6, 4, 4, 1] if packed else [6] * B
    x = torch.randn((B, 6, 3) if first else (6, B, 3), dtype=torch.float64, requires_grad=True)
    out, final = expanded(module, pack_padded_sequence(x, lengths, first) if packed else x)
    out = pad_packed_sequence(out, first)[0] if packed else out
    coefficient, dim = torch.randn_like(out), 0 if first else 1
    share = torch.arange(1.0, B + 1)[:, None]  # each sample's weight for its final state
    ((out * coefficient).sum() + sum((s * share).sum() for s in as_tuple(final))).backward()
    found = [p.grad_sample for p in module.parameters()]
    rows = []
    for i, n in enumerate(lengths):
        one, c = (t.narrow(dim, i, 1).narrow(1 - dim, 0, n).detach() for t in (x, coefficient))
        out_i, final_i = module(one)
        loss = (out_i * c).sum() + sum((s * share[i]).sum() for s in as_tuple(final_i))
        rows.append(torch.autograd.grad(loss, list(module.parameters())))
    torch.testing.assert_close(found, [torch.stack(g) for g in zip(*rows, strict=True)])


def as_tuple(state: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (state,) if isinstance(state, Tensor) else state


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_dropout_between_layers_is_applied(kind: type[nn.RNNBase]) -> None:
    module, x = kind(3, 4, num_layers=2, dropout=0.5).double(), torch.randn(6, B, 3, dtype=torch.float64)
    torch.manual_seed(5)
    plain = module(x)[0]
    weighted(plain).backward()
    torch.manual_seed(5)
    out = expanded(module, x)[0]
    torch.testing.assert_close(out, plain)
    weighted(out).backward()
    for p in module.parameters():
        torch.testing.assert_close(p.grad_sample.sum(0), p.grad)


def test_a_user_adds_an_op() -> None:
    @ew.implements_per_sample_grads(torch.mul)
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, names: tuple[str, ...], func: Callable, *flat: Any) -> Tensor:
            args, kwargs = ew.standard_kwargs(names, flat)
            ctx.x, ctx.weight = args
            return ew.forward_helper(func, args, kwargs)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
            ew.set_grad_sample_if_exists(ctx.weight, lambda w: ew.sum_over_all_but_batch_and_last_n(g * ctx.x, w.ndim))
            return None, None, g * ew.unpack_expanded_weight_or_tensor(ctx.weight), None

    try:
        original, x = torch.randn(3, requires_grad=True), torch.randn(B, 2, 3)
        torch.mul(x, ExpandedWeight(original, B, "sum")).sum().backward()
        torch.testing.assert_close(original.grad_sample, x.sum(1))
    finally:
        del ew.HANDLED_FUNCTIONS[torch.mul]


def test_the_original_answers_for_its_form() -> None:
    weight, _ = pair()
    original = weight.orig_weight
    for name in ("dtype", "shape", "device", "is_cuda"):
        assert getattr(weight, name) == getattr(original, name)
    assert weight.data_ptr() == original.data_ptr() == weight.data.data_ptr()
    assert weight.get_device() == -1
    assert repr(weight) == "ExpandedWeight((5, 3), batch_size=4, loss_reduction='sum')"
    assert torch._cudnn_rnn_flatten_weight([weight], 1, 3, 2, 5, 0, 1, False, False) is None


@pytest.mark.parametrize(
    ("context", "flag", "within"),
    [
        (ew.batch_second, "batch_first", False),
        (ew.allow_smaller_batches, "allow_smaller_batches", True),
        (lambda *a: ew.setup_rnn(True, *a), "batch_first", False),
        (lambda *a: ew.setup_rnn(False, *a), "allow_smaller_batches", True),
    ],
)
def test_flags_are_restored(context: Callable, flag: str, within: bool) -> None:
    weight, bias = pair()
    setattr(bias, flag, within)
    with pytest.raises(KeyError), context((1, [weight, weight]), {"bias": bias}):  # noqa: PT012
        assert getattr(weight, flag) is within
        raise KeyError
    assert getattr(weight, flag) is not within
    assert getattr(bias, flag) is within


def refused() -> dict[str, tuple[str, Callable[[], Any]]]:
    (w, b), x = pair(), inputs()
    mean, small = pair("mean"), pair(n=3)
    second = pair()
    second[0].set_batch_first(False)
    kernel = ExpandedWeight(torch.randn(6, 2, 3, requires_grad=True), B, "sum")
    turned = ExpandedWeight(kernel.orig_weight, B, "sum")
    turned.set_batch_first(False)
    gain = ExpandedWeight(torch.randn(6, requires_grad=True), 6, "sum")
    normal = torch.randn(5, dtype=torch.float64, requires_grad=True)
    state = torch.zeros(1, B, 4, dtype=torch.float64)
    hidden = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    u, v = (ExpandedWeight(t.requires_grad_(), B, "sum") for t in hidden)

    def rnn(*weights: Tensor) -> Any:
        return torch.rnn_tanh(x[None], state, list(weights), False, 1, 0.0, False, False, False)

    def packed(*sizes: int) -> Any:
        form = torch.tensor(sizes)
        return torch.rnn_tanh(x, form, state[:, : sizes[0]], [u, v], False, 1, 0.0, False, False)

    return {
        "no tensor": ("Can only make Expanded Weights of Tensors", lambda: ExpandedWeight(3, B, "sum")),
        "no grad": ("of tensors that requires_grad", lambda: ExpandedWeight(x, B, "sum")),
        "reduction": ("to be sum or mean", lambda: ExpandedWeight(w.orig_weight, B, "max")),
        "op": ("Expanded Weights encountered but cannot handle function torch.add", lambda: torch.add(x, w)),
        "attribute": ("cannot handle function torch.Tensor.grad_fn", lambda: w.grad_fn),
        "input": ("do not support inputs that are also ExpandedWeights.", lambda: F.linear(w, w)),
        "number": ("requires a Tensor as the first input", lambda: ew.forward_helper(F.linear, (3, w), {})),
        "scalar": (
            "requires a batch dimension but got an input of size 0",
            lambda: F.linear(torch.tensor(3.0), w, b),
        ),
        "empty": ("0 is not a valid batch size for Expanded Weights", lambda: F.linear(x[:0], w, b)),
        "batch size": (
            "Expected ExpandedWeights to have batch size matching input",
            lambda: F.linear(x, *small),
        ),
        "packed batch size": ("to have batch size matching input", lambda: packed(2, 2)),
        "reductions": (
            "Expected ExpandedWeights to all have the same loss_reduction",
            lambda: F.linear(x, w, mean[1]),
        ),
        "flags": ("to all have the same batch_first", lambda: F.linear(x[None], *second)),
        "mixture": (
            "does not support a mixture of ExpandedWeight parameters and normal Parameters",
            lambda: F.linear(x, w, normal),
        ),
        "recurrent mixture": ("does not support a mixture", lambda: rnn(u, v.orig_weight)),
        "linear 1-D": ("Expanded Weights.*no batch dimension", lambda: F.linear(x[0], w, b)),
        "linear vector": ("Expanded Weights.*not a matrix", lambda: F.linear(torch.randn(B, 5), b)),
        "conv": ("Expanded Weights.*no batch dimension", lambda: F.conv1d(torch.randn(2, 8), kernel)),
        "padding": (
            "Expanded Weights.*neither 'same' nor 'valid'",
            lambda: F.conv1d(torch.randn(B, 2, 8), kernel, padding="full"),
        ),
        "ids": ("Expanded Weights", lambda: F.embedding(torch.arange(4), w)),
        "id": ("Expanded Weights", lambda: F.embedding(torch.tensor(1), w)),
        "layer_norm": ("Expanded Weights.*batch", lambda: F.layer_norm(torch.randn(6), (6,), gain)),
        "second dimension": ("Expanded Weights.*dimension 1", lambda: F.conv1d(torch.randn(3, B, 8), turned)),
        "second of one": ("along dimension 1", lambda: ew.forward_helper(F.conv1d, (x[0], turned), {})),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused())
def test_refusals_say_why(name: str) -> None:
    message, call = refused()[name]
    with pytest.raises(RuntimeError, match=message):
        call()


def test_helpers() -> None:
    weight, bias = pair("mean")
    args, kwargs = ew.standard_kwargs(("a", "b"), (1, 2, 3, 4))
    assert (args, kwargs) == ((1, 2), {"a": 3, "b": 4})
    assert ew.is_batch_first([3, weight])
    assert ew.unpack_expanded_weight_or_tensor(weight) is weight.orig_weight
    assert ew.unpack_expanded_weight_or_tensor(bias, len) == 5
    assert ew.unpack_expanded_weight_or_tensor("same", len) is None
    t = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(ew.sum_over_all_but_batch_and_last_n(t, 1), t.sum((1, 2)))
    torch.testing.assert_close(ew.sum_over_all_but_batch_and_last_n(t, 3), t)
    rows = torch.ones(B - 1, 5)
    torch.testing.assert_close(ew.maybe_scale_by_batch_size(rows, bias), B * rows)
    ew.set_grad_sample_if_exists(bias, lambda w: rows)
    torch.testing.assert_close(bias.orig_weight.grad_sample, F.pad(B * rows, (0, 0, 0, 1)))
    with pytest.raises(RuntimeError, match="5 rows of gradients"):
        ew.set_grad_sample_if_exists(bias, lambda w: torch.ones(5, 5))
    with pytest.raises(RuntimeError, match="does not support a mixture"):
        ew.set_grad_sample_if_exists(weight.orig_weight, lambda w: w)


def test_a_registered_function_serves_call_for_per_sample_grads():
    @ew.implements_per_sample_grads(torch.ger)
    class OuterPerSampleGrad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, kwarg_names, function, *flat):
            args, kwargs = ew.standard_kwargs(kwarg_names, flat)
            ctx.input, ctx.weight = args[0], args[1]
            return ew.forward_helper(function, args, kwargs)

        @staticmethod
        def backward(ctx, g):
            ew.set_grad_sample_if_exists(ctx.weight, lambda _: g * ctx.input[:, None])
            return None, None, g @ ctx.weight.orig_weight, None

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))

        def forward(self, x):
            return torch.ger(x, self.weight)

    model, x = Model(), torch.randn(4, dtype=torch.float64)
    ew.call_for_per_sample_grads(model)(x).pow(2).sum().backward()
    torch.testing.assert_close(model.weight.grad_sample, 2 * x[:, None].square() * model.weight.detach())
