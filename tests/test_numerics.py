"""Numbers: norms and clipped sums in sixteen bits, samples that are not finite, plans that do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import eachgrad
from eachgrad import CaptureError, PerSampleGrads
from eachgrad.blocks import Block, Dense, Outer, Patches, Rows, Sum
from oracle import assert_same, loop
from test_cases import norms as norms_of
from test_cases import weighted

B = 5


# Cancellation: output gradients that sum to zero over T, inputs that share a strong direction


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def common(*shape: int, dim: int = -1) -> Tensor:
    """Numbers around 10 u, with one direction u along `dim`."""
    u = drawn(shape[dim], seed=3)
    like = [1] * len(shape)
    like[dim] = shape[dim]
    return 10 * (u / u.norm()).view(like) + 0.5 * drawn(*shape)


def zero_sum(T: int, *rest: int) -> Tensor:
    """(B, T, *rest) small integers, exact in any dtype, that add up to zero over T; any numbers if T = 1."""
    half = torch.randint(-4, 5, (B, max(1, T // 2), *rest), generator=torch.Generator().manual_seed(4)).float()
    return half + (half == 0) if T == 1 else torch.cat([half, -half.flip(1)], 1)


class Twice(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.layer(x).tanh())


class Tied(nn.Module):
    def __init__(self, size: int, width: int):
        super().__init__()
        self.tokens, self.head = nn.Embedding(size, width), nn.Linear(width, size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.tokens(ids).cumsum(1).tanh())


class Last(nn.Module):
    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


@dataclass(frozen=True)
class Built:
    """A model, its input, and the gradient that arrives at its output."""

    name: str
    make: Callable[[], nn.Module]
    x: Callable[[], Tensor]
    g: Callable[[], Tensor]
    route: str | None = None  # that the norms of the first parameter take

    def __str__(self) -> str:
        return self.name


def linear(T: int, p: int, d: int, route: str) -> Built:
    make = lambda: nn.Linear(d, p, bias=False)  # noqa: E731
    return Built(f"linear T={T} p={p} d={d}", make, lambda: common(B, T, d), lambda: zero_sum(T, p), route)


def convolution(route: str, C: int, p: int, side: int, padding: int = 0, groups: int = 1) -> Built:
    out = side - 2 + 2 * padding
    return Built(
        f"convolution, {route}" + ", groups" * (groups > 1),
        lambda: nn.Conv2d(C, p, 3, padding=padding, groups=groups, bias=False),
        lambda: common(B, C, side, side, dim=1),
        lambda: zero_sum(out * out, p).mT.reshape(B, p, out, out),
        route,
    )


def repeated_ids() -> Tensor:
    """Each sample reads three rows, again and again."""
    return torch.arange(12).remainder(3).expand(B, 12) + torch.arange(B)[:, None]


BUILT = [
    linear(1, 16, 24, "product of norms"), linear(1, 2, 1, "product of norms"), linear(4, 48, 48, "Gram"),
    linear(16, 64, 64, "Gram"), linear(40, 96, 96, "Gram"), linear(2, 2, 2, "direct"), linear(40, 8, 8, "direct"),
    linear(64, 4, 3, "direct"), linear(128, 24, 16, "direct"),
    convolution("direct", 2, 8, 10), convolution("Gram of pixels", 48, 48, 4, padding=1),
    convolution("Gram", 64, 8, 4), convolution("direct", 4, 8, 6, groups=2),
    Built("embedding", lambda: nn.Embedding(9, 6), repeated_ids, lambda: zero_sum(12, 6), "sorted rows"),
    Built("tied", lambda: Tied(9, 6), repeated_ids, lambda: zero_sum(12, 9)),
    Built("module used twice", lambda: Twice(16), lambda: common(B, 12, 16), lambda: zero_sum(12, 16)),
    Built("lstm", lambda: Last(nn.LSTM(6, 5, batch_first=True)), lambda: common(B, 12, 6), lambda: zero_sum(12, 5)),
]  # fmt: skip

# LSTM in sixteen bits throughout is no case of torch's on a CPU; under autocast it is.
PRECISIONS = ["bfloat16", "float16", "bfloat16 autocast", "float32"]


def grads_of(built: Built, precision: str, scale: Tensor | None = None) -> PerSampleGrads:
    """The recorded gradients; `scale` multiplies the losses."""
    torch.manual_seed(0)
    model, x, g = built.make(), built.x(), built.g()
    dtype = getattr(torch, precision.split()[0])
    if "autocast" not in precision:
        model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    with eachgrad.record(model) as tape, torch.autocast("cpu", torch.bfloat16, enabled="autocast" in precision):
        losses = (model(x).float() * g).flatten(1).sum(1)
    return tape.backward(losses if scale is None else losses * scale)


def exact(block: Block) -> Tensor:
    """The gradients of the very factors that a block holds, formed in float64."""
    if isinstance(block, Outer):
        return Outer(block.left.double(), block.right.double(), block.shape).dense()
    if isinstance(block, Rows):
        return replace(block, value=block.value.double()).dense()
    if isinstance(block, Patches):
        return Patches(block.x.double(), block.g.double(), block.geometry).dense()
    if isinstance(block, Sum):
        return torch.stack([exact(part) for part in block.parts]).sum(0)
    assert isinstance(block, Dense)
    return block.value.double()


def exact_norms(grads: PerSampleGrads) -> dict[str, Tensor]:
    return {n: exact(g.block).flatten(1).norm(dim=1) for n, g in grads.items() if g.block is not None}


def has(built: Built, precision: str) -> bool:
    return built.name != "lstm" or precision in ("bfloat16 autocast", "float32")


HERE = [(built, precision) for built in BUILT for precision in PRECISIONS if has(built, precision)]


@pytest.mark.parametrize(("built", "precision"), HERE, ids=str)
def test_norms_are_those_of_the_recorded_numbers(built: Built, precision: str):
    grads = grads_of(built, precision)
    if built.route is not None and precision != "bfloat16 autocast":
        assert grads.explain("norms").rows[0].route == built.route
    want = exact_norms(grads)
    for name, value in grads.norms(by="parameter").items():
        torch.testing.assert_close(value.double(), want[name], rtol=1e-3, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(grads.norms().double(), norms_of(want), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cases_cancel(dtype):
    """In sixteen bits a Gram itself, or a sum of rounded terms, would be off: this is what they are for."""
    block = grads_of(linear(16, 64, 64, "Gram"), "float32")["weight"].block
    assert isinstance(block, Outer)
    left, right = block.left.to(dtype), block.right.to(dtype)
    gram = ((left @ left.mT) * (right @ right.mT)).sum((1, 2)).double().clamp(min=0).sqrt()
    size = exact(Outer(left, right)).flatten(1).norm(dim=1)
    assert ((gram / size - 1).abs() > 1e-3).any()
    assert (size < 0.2 * (left.double().flatten(1).norm(dim=1) * right.double().flatten(1).norm(dim=1))).all()


def in_full(grads: PerSampleGrads) -> PerSampleGrads:
    """The same gradients as of float32 parameters, so that the answer is not rounded to sixteen bits."""
    wide = {n: replace(g, parameter=g.parameter.detach().float()) for n, g in grads.items()}
    return PerSampleGrads(wide, grads.batch_size, grads._record)


def size(answer: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in answer.values()))


def bounds(grads: PerSampleGrads) -> list[float]:
    """Far below the norms, among them, and above."""
    norms = grads.norms().double()
    return [1e-3 * float(norms.min()), float(norms.median()) * 0.7, float(norms.max()) * 1.5]


@pytest.mark.parametrize("known", [False, True], ids=["clipped at once", "norms before"])
@pytest.mark.parametrize(("built", "precision"), HERE, ids=str)
def test_no_sample_taken_alone_adds_more_than_the_bound(built: Built, precision: str, known: bool):
    given = grads_of(built, precision)
    # An answer in sixteen bits is rounded once more, by half a unit of its last digit.
    rounding = max(torch.finfo(g.parameter.dtype).eps for g in given.values()) / 2
    for grads, slack in ((in_full(given), 1e-3), (given, 1e-3 + rounding)):
        for C in bounds(grads):
            for i in range(B):
                alone = PerSampleGrads({n: g.take(torch.tensor([i])) for n, g in grads.items()}, 1, grads._record)
                if known:  # then no gradients are kept
                    alone.norms()
                assert size(alone.clipped_sum(C)) <= C * (1 + slack)


@pytest.mark.parametrize("known", [False, True], ids=["clipped at once", "norms before"])
@pytest.mark.parametrize(("built", "precision"), HERE, ids=str)
def test_no_sample_of_a_batch_adds_more_than_the_bound(built: Built, precision: str, known: bool):
    def total(C: float, scale: Tensor | None = None) -> dict[str, Tensor]:
        grads = in_full(grads_of(built, precision, scale))
        if known:
            grads.norms()
        return grads.clipped_sum(C)

    for C in bounds(grads_of(built, precision)):
        whole = total(C)
        for i in (0, B - 1):
            others = total(C, (torch.arange(B) != i).float())
            # What a sum of B parts in float32 loses is no part of any.
            assert size({n: whole[n].double() - others[n] for n in whole}) <= C * (1 + 1e-3 + 1e-6 * B)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_micro_batches_in_sixteen_bits_are_not_added_up_in_sixteen_bits(dtype):
    model = nn.Linear(3, 2).to(dtype)
    x = drawn(2, 3).to(dtype)
    total, once = eachgrad.Accumulator(clipped=eachgrad.clipped_sum(1.0), mean=eachgrad.mean()), None
    for _ in range(300):
        with eachgrad.record(model) as tape:
            losses = model(x).float().sum(1)
        tape.ask(losses, into=total)
        once = once or total.answer().clipped
    assert once is not None
    assert_same(total.answer().clipped, {n: 300 * t.float() for n, t in once.items()}, 1e-2)
    mean = {"weight": x.float().mean(0).expand(2, 3), "bias": torch.ones(2)}
    assert_same(total.answer().mean, mean, 1e-2)


@pytest.mark.parametrize(("T", "p", "d"), [(1, 3, 5), (4, 48, 48), (40, 8, 8)])
def test_small_weights_do_not_vanish_in_float16(T, p, d):
    """c[i] g[i] may lie below what float16 holds while the gradients, and the answer in float32, do not."""
    grads = in_full(grads_of(linear(T, p, d, ""), "float16"))
    c = torch.linspace(0.5, 1, B) * 1e-7
    want = torch.tensordot(c.double(), exact(grads["weight"].block), 1)
    assert_same(grads.weighted_sum(c), {"weight": want}, 1e-3)


# Samples that are not finite


def scored(model: nn.Module, x: Tensor, scale: Tensor) -> Tensor:
    return model(x).square().flatten(1).mean(1) * scale


FINITE = {
    "linear": (lambda: nn.Linear(4, 3), lambda: drawn(B, 4)),
    "linear T": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: drawn(B, 6, 4)),
    "4-D linear": (lambda: nn.Sequential(nn.Linear(4, 40), nn.Tanh(), nn.Linear(40, 30)), lambda: drawn(B, 2, 3, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 4, 2, groups=2)),
                    lambda: drawn(B, 2, 7, 7)),
    "lstm": (lambda: Last(nn.LSTM(4, 3, batch_first=True)), lambda: drawn(B, 5, 4)),
    "norm": (lambda: nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)), lambda: drawn(B, 3, 4)),
    "twice": (lambda: Twice(4), lambda: drawn(B, 3, 4)),
    "tied": (lambda: Tied(7, 4), lambda: torch.arange(B * 3).view(B, 3) % 7),
}  # fmt: skip


@pytest.mark.parametrize("what", ["nan input", "inf input", "nan loss", "inf loss"])
@pytest.mark.parametrize("name", FINITE)
def test_a_sample_that_is_not_finite_leaves_the_others_alone(name: str, what: str, visits):
    torch.manual_seed(0)
    make, draw = FINITE[name]
    model, x, scale = make().double(), draw(), torch.ones(B, dtype=torch.float64)
    x = x.double() if x.is_floating_point() else x
    kind, where = what.split()
    if where == "input" and not x.is_floating_point():
        pytest.skip("ids are finite")
    bad = 2
    keep = torch.arange(B) != bad
    with eachgrad.record(model) as tape:
        losses = scored(model, x[keep], scale[keep])
    without = tape.backward(losses)
    C = float(without.norms().median())
    want, norms = without.clipped_sum(C), without.norms()
    broken, broken_scale = x.clone(), scale.clone()
    (broken if where == "input" else broken_scale)[bad] = float(kind)
    for call in range(4):
        for memory in (None, 0):
            with eachgrad.record(model, memory=memory) as tape:
                losses = scored(model, broken, broken_scale)
            answer = tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(C, nonfinite="zero"))
            assert answer.norms.isfinite().tolist() == keep.tolist(), call
            torch.testing.assert_close(answer.norms[keep], norms, rtol=1e-12, atol=0)
            assert_same(answer.grad, want, 1e-12)
        with eachgrad.record(model) as tape:
            losses = scored(model, broken, broken_scale)
        with pytest.raises(CaptureError, match=r"samples \[2\]"):
            tape.ask(losses, grad=eachgrad.clipped_sum(C))
    assert visits or name in ("lstm", "tied")
    with eachgrad.record(model) as tape:
        losses = scored(model, broken, broken_scale)
    grads = tape.backward(losses)
    assert grads.norms().isfinite().tolist() == keep.tolist()
    assert_same(grads.clipped_sum(C, nonfinite="zero"), want, 1e-12)
    with pytest.raises(CaptureError, match=r"samples \[2\]"):
        grads.clipped_sum(C)


# Exact numbers: every way to an answer against the loop over samples


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, 2))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.attention, self.norm_2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Decoder(nn.Module):
    """GPT-2 in small: pre-norm, causal, positions learned, the head tied to the tokens."""

    def __init__(self, size: int = 13, width: int = 8, T: int = 6):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(size, width), nn.Embedding(T, width)
        self.layers, self.norm = nn.Sequential(Layer(width, 2), Layer(width, 2)), nn.LayerNorm(width)
        self.head = nn.Linear(width, size, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.layers(x)))


class Reused(nn.Module):
    """One layer three times, at several widths of T, and one input shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate, self.up = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        x = self.gate(x).sigmoid() * self.up(x)
        return self.layer(self.layer(x[:, ::2]).tanh())


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    out = model(ids)[:, :-1]
    return F.cross_entropy(out.transpose(1, 2), ids[:, 1:], reduction="none").sum(1)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().flatten(1).sum(1)


def ids_of(size: int, T: int) -> Tensor:
    return torch.randint(size, (B, T), generator=torch.Generator().manual_seed(5))


BAR = {
    "tied decoder": (Decoder, lambda: ids_of(13, 6), next_token),
    "reused modules": (Reused, lambda: drawn(B, 6, 5).double(), squares),
    "lstm": (
        lambda: Last(nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True)),
        lambda: drawn(B, 5, 4).double(), squares,
    ),
    "4-D linears": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), lambda: drawn(B, 3, 2, 4).double(), squares,
    ),
    "conv2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.Tanh(), nn.Conv2d(4, 6, (2, 3), (1, 2), groups=2)),
        lambda: drawn(B, 2, 9, 9).double(), squares,
    ),
    "conv1d": (
        lambda: nn.Sequential(nn.Conv1d(3, 6, 3, 2, 1, groups=3), nn.Tanh(), nn.Conv1d(6, 4, 2)),
        lambda: drawn(B, 3, 11).double(), squares,
    ),
}  # fmt: skip
STREAMED = set(BAR) - {"tied decoder"}  # whose table of positions is a candidate


def asked(model: nn.Module, C: float, groups: dict[str, list[str]]) -> dict[str, eachgrad.queries.Query]:
    return {
        "norms": eachgrad.norms(), "flat": eachgrad.clipped_sum(C),
        "groups": eachgrad.clipped_sum(C / 2, groups=groups), "each": eachgrad.clipped_sum(C / 3, groups="parameter"),
        "normal": eachgrad.clipped_sum(C, normalise=True, gamma=0.1),
    }  # fmt: skip


def clipped(want: dict[str, Tensor], C: float, groups: dict[str, list[str]]) -> dict[str, Tensor]:
    found = {}
    for names in groups.values():
        part = {n: want[n] for n in names}
        found |= weighted(part, (C / norms_of({n: g.flatten(1).norm(dim=1) for n, g in part.items()})).clamp(max=1))
    return found


@pytest.mark.parametrize("memory", ["retained", None, 0, "10GiB"])
@pytest.mark.parametrize("name", BAR)
def test_every_way_is_exact(name: str, memory, visits):
    torch.manual_seed(0)
    make, draw, losses_of = BAR[name]
    model, x = make().double(), draw()
    want = loop(model, losses_of, [(x[i : i + 1],) for i in range(B)])
    size = norms_of({n: g.flatten(1).norm(dim=1) for n, g in want.items()})
    C, names = float(size.median()), list(want)
    groups = {"odd": names[::2], "even": names[1::2]}
    expected = {
        "flat": clipped(want, C, {"": names}), "groups": clipped(want, C / 2, groups),
        "each": clipped(want, C / 3, {n: [n] for n in names}), "normal": weighted(want, C / (size + 0.1)),
    }  # fmt: skip
    for _ in range(3):
        visits.clear()
        with eachgrad.record(model, memory=None if memory == "retained" else memory) as tape:
            losses = losses_of(model, x)
        if memory == "retained":
            grads = tape.backward(losses)
            got = {
                "norms": grads.norms(), "flat": grads.clipped_sum(C), "groups": grads.clipped_sum(C / 2, groups=groups),
                "each": grads.clipped_sum(C / 3, groups="parameter"),
                "normal": grads.clipped_sum(C, normalise=True, gamma=0.1),
            }  # fmt: skip
        else:
            got = vars(tape.ask(losses, **asked(model, C, groups)))
        assert_same({"": got["norms"]}, {"": size}, 1e-10)
        for key, value in expected.items():
            assert_same(got[key], value, 1e-10)
    if memory == "retained" or name not in STREAMED:
        assert not visits
    else:
        assert visits == ([False, True] if memory == 0 else [True])


# Plans, and streaming: a number at any call is right, or there is an error


class Free(nn.Module):
    """A linear layer, something free, a linear layer; `call` counts the forwards."""

    def __init__(self, between: Callable[[Tensor, int], Tensor] = lambda h, call: h):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between, self.call = nn.Linear(4, 5), nn.Linear(5, 5), between, -1

    def forward(self, x: Tensor) -> Tensor:
        self.call += 1
        return self.b(self.between(self.a(x).tanh(), self.call))


def row_norms(model: nn.Module, losses: Tensor) -> Tensor:
    """(B,): the norm of each loss's derivative, by plain autograd."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = [torch.autograd.grad(one, parameters, retain_graph=True, allow_unused=True) for one in losses]
    return torch.stack([torch.cat([g.flatten() for g in row if g is not None]).norm() for row in rows])


def right_or_refused(
    model: nn.Module,
    losses_of: Callable[[nn.Module, Tensor, int], Tensor],
    outside: Callable[[Tensor, int], Tensor] = lambda losses, call: losses,
    before: Callable[[nn.Module, int], object] = lambda model, call: None,
    memory: int | None = None,
    calls: int = 5,
) -> list[str]:
    """What happened at each call: "right" or "refused"; a wrong number fails."""
    found = []
    for call in range(calls):
        before(model, call)
        x = drawn(B, 3, 4, seed=call).double()
        try:
            with eachgrad.record(model, memory=memory) as tape:
                losses = losses_of(model, x, call)
            answer = tape.ask(outside(losses, call), norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1e9))
        except CaptureError:
            found.append("refused")
            continue
        finally:
            again = getattr(model, "call", 0)
            if isinstance(model, Free):
                model.call = again - 1
        want = row_norms(model, outside(losses_of(model, x, call), call))
        torch.testing.assert_close(answer.norms, want, rtol=1e-10, atol=0, msg=lambda m, k=call: f"call {k + 1}: {m}")
        found.append("right")
    return found


def summed(model: nn.Module, x: Tensor, call: int) -> Tensor:
    return model(x).square().sum((1, 2))


def mixing_hook(h: Tensor, call: int) -> Tensor:
    if call >= 2 and h.requires_grad:
        h.register_hook(lambda g: g - g.mean(0, keepdim=True))
    return h


def doubling_hook(h: Tensor, call: int) -> Tensor:
    if call >= 2 and h.requires_grad:
        h.register_hook(lambda g: 2 * g)
    return h


def where_flipped(h: Tensor, call: int) -> Tensor:
    return torch.where(torch.full((1, 1, 1), call < 2), h, h.flip(0))


def gathered_by_a_matrix(h: Tensor, call: int) -> Tensor:
    neighbours = torch.eye(B, dtype=h.dtype)
    return torch.tensordot(neighbours if call < 2 else neighbours.roll(1, 0), h, dims=1)


def gated_roll(h: Tensor, call: int) -> Tensor:
    return h + torch.tensor(0.0 if call < 2 else 0.5) * h.roll(1, 0)


MIXING = {"hook": mixing_hook, "where": where_flipped, "matrix": gathered_by_a_matrix, "gate": gated_roll}


@pytest.mark.parametrize("name", MIXING)
def test_what_begins_to_mix_at_the_third_call_is_refused(name: str):
    right_or_refused(Free(MIXING[name]).double(), summed)


@pytest.mark.parametrize("name", MIXING)
def test_what_was_refused_once_is_not_answered_by_the_old_plan(name: str):
    model, late = Free(), MIXING[name]
    model.between = lambda h, call: late(h, 5) if call >= 3 else h * 1
    if name != "hook":  # the same ops at all calls
        model.between = lambda h, call: late(h, 5 if call >= 3 else 0)
    assert right_or_refused(model.double(), summed, calls=7) == ["right"] * 3 + ["refused"] * 4


def permuted(losses: Tensor, call: int) -> Tensor:
    eye = torch.eye(B, dtype=losses.dtype)
    return (eye if call < 2 else eye.roll(1, 0)) @ losses


def selected(values: Tensor, call: int) -> Tensor:
    mask = torch.tensor([1, 1, 0], dtype=torch.bool).repeat(B, 1)
    if call >= 2:
        mask[0, 2], mask[1, 1] = True, False
    return values.masked_select(mask).view(B, 2).sum(1)


@pytest.mark.parametrize(
    ("losses_of", "outside"),
    [
        pytest.param(summed, permuted, id="a matrix"),
        pytest.param(lambda m, x, call: m(x).square().sum(2), selected, id="masked_select"),
    ],
)
def test_losses_that_begin_to_mix_outside_the_block_are_refused(losses_of, outside):
    right_or_refused(Free().double(), losses_of, outside)


def freeze(model, call):
    model.a.weight.requires_grad_(call < 2)


def unfreeze(model, call):
    model.a.weight.requires_grad_(call >= 2)


def tie(model, call):
    if call == 0:
        model.a = nn.Linear(4, 4).double()
        model.b = nn.Linear(4, 4).double()
    if call == 2:
        model.b.weight = model.a.weight


def untie(model, call):
    if call == 0:
        model.a = nn.Linear(4, 4).double()
        model.b = nn.Linear(4, 4).double()
        model.b.weight = model.a.weight
    if call == 2:
        model.b.weight = nn.Parameter(model.a.weight.detach() + 1)


def replace_layer(model, call):
    if call == 2:
        model.b = nn.Linear(5, 5).double()


def parametrize(model, call):
    if call == 2:
        nn.utils.parametrizations.weight_norm(model.b)


CHANGES = [freeze, unfreeze, tie, untie, replace_layer, parametrize]


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_model_that_changes_between_calls(change, memory):
    assert right_or_refused(Free().double(), summed, before=change, memory=memory, calls=7) == ["right"] * 7


@pytest.mark.parametrize("memory", [None, 0])
def test_a_hook_that_scales_gradients_is_followed(memory):
    assert right_or_refused(Free(doubling_hook).double(), summed, memory=memory) == ["right"] * 5


class Checkpointed(Free):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = lambda z: self.a(z).tanh()  # noqa: E731
        x = x.clone().requires_grad_() if self.reentrant else x
        h = checkpoint(inner, x, use_reentrant=self.reentrant)
        assert isinstance(h, Tensor)
        return self.b(checkpoint(lambda z: self.b(z), h, use_reentrant=self.reentrant))  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [None, 0])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_at_every_call(reentrant: bool, memory):
    model = Checkpointed(reentrant).double()
    x = drawn(B, 3, 4).double()
    want = loop(model, lambda m, a: m(a).square().sum((1, 2)), [(x[i : i + 1],) for i in range(B)])
    length = norms_of({n: g.flatten(1).norm(dim=1) for n, g in want.items()})
    C = float(length.median())
    for _ in range(5):
        with eachgrad.record(model, memory=memory) as tape:
            losses = model(x).square().sum((1, 2))
        answer = tape.ask(losses, norms=eachgrad.norms(), grad=eachgrad.clipped_sum(C))
        assert_same({"": answer.norms}, {"": length}, 1e-10)
        assert_same(answer.grad, weighted(want, (C / length).clamp(max=1)), 1e-10)
        assert all(p.grad is None for p in model.parameters())


def test_autocast_that_comes_and_goes():
    """The plan of one precision is none for the other; each is answered as by its own retained gradients."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), drawn(B, 3, 4)
    for call in range(8):
        on = call % 2 == 1 if call < 6 else call == 7
        answers = []
        for ask in (True, False):
            with eachgrad.record(model) as tape, torch.autocast("cpu", torch.bfloat16, enabled=on):
                losses = model(x).float().square().sum((1, 2))
            answers.append(tape.ask(losses, n=eachgrad.norms()).n if ask else tape.backward(losses).norms())
        want = row_norms(model, losses_under(model, x, on))
        for norms in answers:
            torch.testing.assert_close(norms, want, rtol=2e-2 if on else 1e-5, atol=0)


def losses_under(model: nn.Module, x: Tensor, on: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=on):
        return model(x).float().square().sum((1, 2))


def test_positions_as_many_as_samples_at_every_call(visits):
    """B = T: no size tells which dimension counts the samples, and the two orders take turns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x = drawn(B, B, 4).double()
    for call in range(12):
        dim = (call // 2) % 2
        with eachgrad.record(model, batch_dim=dim) as tape:
            losses = model(x).square().sum((1 - dim, 2))
        answer = tape.ask(losses, norms=eachgrad.norms())
        want = row_norms(model, model(x).square().sum((1 - dim, 2)))
        torch.testing.assert_close(answer.norms, want, rtol=1e-10, atol=0)
    assert visits


def test_tapes_that_are_open_at_the_same_time(visits):
    """Accumulated over two tapes recorded before either is asked, in either order."""
    torch.manual_seed(0)
    model = Free().double()
    x = drawn(2 * B, 3, 4).double()
    want = row_norms(model, summed(model, x, 0))
    for call in range(5):
        tapes = []
        for part in x.split(B):
            with eachgrad.record(model) as tape:
                tapes.append((tape, summed(model, part, 0)))
        order = tapes if call % 2 else tapes[::-1]
        total = eachgrad.Accumulator(norms=eachgrad.norms(), grad=eachgrad.clipped_sum(1e9))
        for tape, losses in order:
            tape.ask(losses, into=total)
        norms = torch.cat(total.answer().norms.split(B)[:: 1 if call % 2 else -1])
        torch.testing.assert_close(norms, want, rtol=1e-10, atol=0)
        whole = torch.autograd.grad(summed(model, x, 0).sum(), list(model.parameters()))
        assert_same(total.answer().grad, dict(zip(dict(model.named_parameters()), whole, strict=True)), 1e-10)
    assert visits


def test_losses_partly_outside_the_block(visits):
    """Weights per sample, and a penalty on the outputs, added after the recording."""
    found = right_or_refused(
        Free().double(),
        lambda m, x, call: m(x).sum(1),
        lambda out, call: (out.softmax(1) * torch.linspace(1, 2, B)[:, None]).square().sum(1) + 0.1 * out.abs().sum(1),
        calls=6,
    )
    assert found == ["right"] * 6
    assert visits


def test_a_penalty_on_a_parameter_outside_the_block_is_no_silent_loss():
    model = Free().double()
    refused = right_or_refused(
        model, summed, lambda losses, call: losses + (model.a.weight.square().sum() if call >= 2 else 0), calls=6
    )
    assert refused == ["right"] * 2 + ["refused"] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("normalise", [False, True])
def test_what_rounding_leaves_of_terms_that_cancel_is_within_the_bound(dtype, normalise):
    """Large inputs, gradients that sum to zero over the positions: the sample's gradient is next to nothing."""
    torch.manual_seed(0)
    for size in (1e2, 1e4, 1e6):
        g = torch.randn(1, 8, 24)
        g[:, 1::2] = -g[:, ::2]
        x = torch.full((1, 8, 40), size) + torch.randn(1, 8, 40) * size * 1e-3
        x[:, 1::2] = x[:, ::2]
        block = Outer(g.to(dtype), x.to(dtype))
        gradient = eachgrad.grads.Gradient("w", torch.zeros(24, 40), block, 1)
        over = eachgrad.queries.base.Over({"w": gradient.parameter}, {})
        clip = eachgrad.clipped_sum(1.0, normalise=normalise).start(over)
        clip.begin(1, {"w": gradient.cost()})
        clip.add(gradient)
        clip.again()
        assert float(clip.batch["w"].double().norm()) <= 1 + 1e-3


def test_a_wide_sum_keeps_what_sixteen_bits_would_round():
    """300 equal samples: in bfloat16 a sum of 300 has steps of 2, and one sample more would add 0 or 2."""
    model = nn.Linear(3, 1, bias=False).bfloat16()
    x = torch.tensor([[1.0, 0.0, 0.0]]).bfloat16()
    sums = []
    for n in (300, 301):
        with eachgrad.record(model) as tape:
            losses = model(x.expand(n, -1).contiguous())[:, 0]
        grads = tape.backward(losses)
        assert grads.clipped_sum(1.0)["weight"].dtype == torch.bfloat16
        sums.append(grads.clipped_sum(1.0, wide=True)["weight"])
        assert sums[-1].dtype == torch.float32
    assert float((sums[1] - sums[0]).norm()) == pytest.approx(1.0, abs=1e-3)
