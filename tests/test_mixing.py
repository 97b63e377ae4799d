"""Samples that meet where no gradient shows it are refused; what only looks like it is answered as the loop does."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import eachgrad
from cases.base import Net, score
from eachgrad import mixing
from eachgrad.signature import looked_at
from eachgrad.tags import Loose, Owners
from eachgrad.tensors import Tensors
from oracle import assert_same, loop

B, T, d = 4, 3, 6
ORDER = torch.tensor([1, 2, 3, 0])
Mix = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def cut_mix(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 3:] = x[ORDER][:, 3:]
    return x


def nearest(x: Tensor) -> Tensor:
    return x + x[torch.cdist(x, x).topk(2, dim=1, largest=False).indices].mean(1)


def nearest_by_gather(x: Tensor) -> Tensor:
    near = (x[:, None] - x[None]).norm(dim=-1).topk(2, dim=1, largest=False).indices
    return x + x.expand(B, B, d).gather(1, near[..., None].expand(-1, -1, d)).mean(1)


def batch_norm_by_hand(x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, 0)
    return (x - mean) / (var + 1e-5).sqrt()


def quantised(x: Tensor) -> Tensor:
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


ROWS: dict[str, tuple[Mix, str]] = {  # (B, d), and the op where samples meet
    "first sample": (lambda x: x - x[0], "sub"),
    "first sample, sliced": (lambda x: x - x[:1], "sub"),
    "last sample's norm": (lambda x: x / x[-1].norm(), "div"),
    "select": (lambda x: x - x.select(0, 1), "sub"),
    "narrow": (lambda x: x - x.narrow(0, 1, 1), "sub"),
    "unbind": (lambda x: x - x.unbind()[0], "sub"),
    "index_select": (lambda x: x - x.index_select(0, torch.tensor([2])), "sub"),
    "mixup": (lambda x: 0.3 * x + 0.7 * x[ORDER], "add"),
    "mixup by flip": (lambda x: x + x.flip(0), "add"),
    "mixup by roll": (lambda x: x + x.roll(1, 0), "add"),
    "mixup by lerp": (lambda x: torch.lerp(x, x[ORDER], 0.3), "lerp"),
    "mixup by cat": (lambda x: x + torch.cat([x[1:], x[:1]]), "add"),
    "cut mix by where": (lambda x: torch.where(x > 0, x, x[ORDER]), "where"),
    "neighbours, stacked": (lambda x: torch.stack([x[i] + x[i - 1] for i in range(B)]), "add"),
    "in place": (lambda x: x.clone().add_(x[0]), "add_"),
    "cdist": (lambda x: x + torch.cdist(x, x).mean(1, keepdim=True), "cdist"),
    "Gram": (lambda x: x + (x @ x.T).sum(1, keepdim=True), "matmul"),
    "attention": (lambda x: (x @ x.T).softmax(-1) @ x, "matmul"),
    "Gram by einsum": (lambda x: x + torch.einsum("id,jd->ij", x, x).logsumexp(1)[:, None], "einsum"),
    "moments by addmm": (lambda x: torch.addmm(x, x, x.T @ x), "matmul"),
    "attention by torch": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0], "attention"),
    "Fourier": (lambda x: torch.fft.fft(x, dim=0).real, "fft"),
    "pairs": (lambda x: x + (x[:, None] - x[None]).abs().mean(1), "sub"),
    "outer": (lambda x: x + torch.outer(x[:, 0], x[:, 1]).sum(1)[:, None], "outer"),
    "cosine": (lambda x: x + F.cosine_similarity(x[:, None], x[None], -1).mean(1)[:, None], "cosine_similarity"),
    "nearest": (nearest, "mean"),
    "nearest by gather": (nearest_by_gather, "mean"),
    "softmax": (lambda x: x.softmax(0), "softmax"),
    "logsumexp": (lambda x: x - x.logsumexp(0), "logsumexp"),
    "max": (lambda x: x - x.max(0).values, "max"),
    "sort": (lambda x: x - x.sort(0).values, "sort"),
    "rank": (lambda x: x + x.argsort(0).argsort(0).double(), "argsort"),
    "cov": (lambda x: x @ torch.cov(x.T), "cov"),
    "corrcoef": (lambda x: x @ torch.corrcoef(x.T), "corrcoef"),
    "cov of samples": (lambda x: x + torch.cov(x).sum(1)[:, None], "cov"),
    "singular vectors": (lambda x: x @ torch.linalg.svd(x).Vh, "svd"),
    "var_mean": (batch_norm_by_hand, "var_mean"),
    "cummax": (lambda x: x.cummax(0).values, "cummax"),
    "median": (lambda x: x - x.median(), "median"),
    "kthvalue": (lambda x: x - x.kthvalue(1, 0).values, "kthvalue"),
    "std as a scale": (lambda x: x / x.std(), "std"),
    "norm of all": (lambda x: x / torch.linalg.vector_norm(x), "vector_norm"),
    "quantile": (lambda x: x - x.quantile(0.5), "quantile"),
    "normalize": (lambda x: F.normalize(x, dim=0), "normalize"),
    "quantisation": (quantised, "max"),
    "histc": (lambda x: x + torch.histc(x, d), "histc"),
    "unique": (lambda x: x + x.round().unique().sum(), "unique"),
    "bincount": (lambda x: x + torch.bincount((x[:, 0] > 0).long(), minlength=2)[0] / B, "bincount"),
    "cut mix": (cut_mix, "samples meet in"),
}


def frequencies(x: Tensor) -> Tensor:
    return x * (1 + F.one_hot((x.reshape(-1, d)[:, 0] > 0).long(), 2).double().mean(0)[0])


def capacity(x: Tensor) -> Tensor:
    hot = F.one_hot((x.reshape(-1, d)[:, 0] > 0).long(), 2)
    return x * ((hot * hot.cumsum(0)).sum(1) <= 3).view(len(x), -1, 1)


TOKENS: dict[str, tuple[Mix, str]] = {  # (B, T, d)
    "folded mean": (lambda x: x - x.reshape(-1, d).mean(0), "mean"),
    "flattened std": (lambda x: x / x.flatten(0, 1).std(0), "std"),
    "samples inside": (lambda x: x - x.transpose(0, 1).reshape(-1, d).mean(0), "mean"),
    "channels first": (lambda x: x - x.permute(2, 0, 1).reshape(d, -1).mean(1), "mean"),
    "two dimensions": (lambda x: x - x.mean((0, 1), keepdim=True), "mean"),
    "first token of all": (lambda x: x - x.reshape(-1, d)[0], "sub"),
    "pairs of tokens": (lambda x: x + (x.reshape(-1, d) @ x.reshape(-1, d).T).mean(1).view(len(x), -1, 1), "matmul"),
    "expert frequencies": (frequencies, "mean"),
    "expert capacity": (capacity, "cumsum"),
}


def behind(mix: Mix, how: str) -> Callable[..., Tensor]:
    def body(m: Any, x: Tensor) -> Tensor:
        if how == "input":
            return m.b(mix(x))
        h = m.a(x)
        if how == "detached":
            return m.b(h + mix(h.detach()))
        with torch.no_grad():
            mixed = mix(h)
        return m.b(h + mixed)

    return body


def two_layers(body: Callable[..., object]) -> Net:
    torch.manual_seed(0)
    return Net(body, a=nn.Linear(d, d), b=nn.Linear(d, d), experts=nn.ModuleList(nn.Linear(d, d) for _ in range(2)),
        lstm=nn.LSTM(d, d, batch_first=True), places=nn.Embedding(20, d))  # fmt: skip


def answered(m: Any, *batch: Tensor) -> dict[str, Tensor]:
    with eachgrad.record(m) as tape:
        losses = score(m(*batch))
    return tape.backward(losses).dense()


@pytest.mark.parametrize("how", ["input", "detached", "no_grad"])
@pytest.mark.parametrize("name", [*ROWS, *TOKENS])
def test_samples_that_meet_are_refused(name: str, how: str):
    mix, op = (ROWS | TOKENS)[name]
    m = two_layers(behind(mix, how))
    with pytest.raises(eachgrad.CaptureError, match="mixes the samples") as refusal:
        answered(m, torch.randn(B, d) if name in ROWS else torch.randn(B, T, d))
    assert op in str(refusal.value)
    assert "test_mixing.py:" in str(refusal.value)


@pytest.mark.parametrize("move", [lambda x: x.flip(0), lambda x: x[ORDER], lambda x: x.roll(1, 0)])
def test_losses_in_another_order_are_refused(move: Mix):
    with pytest.raises(eachgrad.CaptureError, match="Move the losses back"):
        answered(two_layers(behind(move, "input")), torch.randn(B, d))


@pytest.mark.parametrize(
    "name", ["first sample", "unbind", "Gram", "pairs", "cosine", "max", "quantisation", "in place"]
)
def test_one_sample_meets_nobody(name: str):
    m, x = two_layers(behind(ROWS[name][0], "input")), torch.randn(1, d)
    assert_same(answered(m, x), loop(m, lambda m, x: score(m(x)), [(x,)]), 1e-10)


# What is harmless: (model, x of shape (B, T, d), lengths (B,))


def sorted_by_length(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    order = lengths.argsort(descending=True)
    packed = pack_padded_sequence(x[order], lengths[order], batch_first=True)
    return m.b(pad_packed_sequence(m.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0])[order.argsort()]


def sorted_and_divided(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    ordered, order = lengths.sort(descending=True)
    return m.b(m.a(x[order]).detach() / ordered.to(x)[:, None, None])[torch.argsort(order)]


def experts_by_index(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = x.reshape(-1, d)
    choice, out = (rows[:, 0] > 0).long(), torch.zeros_like(rows)
    for k, expert in enumerate(m.experts):
        token = (choice == k).nonzero().squeeze(-1)
        out.index_add_(0, token, expert(rows[token]))
    return m.b(out.view_as(x) + x.detach())


def experts_by_sorting(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    rows = x.reshape(-1, d)
    choice = (rows[:, 0] > 0).long()
    order, counts = choice.argsort(stable=True), torch.bincount(choice, minlength=2).tolist()
    found = torch.cat([expert(part) for expert, part in zip(m.experts, rows[order].split(counts), strict=True)])
    out = torch.empty_like(found)
    out[order] = found
    return out.view_as(x)


def one_row_of_tokens(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    """Attention within samples that were packed into one row, by a mask."""
    keep = torch.arange(x.shape[1]) < lengths[:, None]
    rows, owner = x[keep], torch.repeat_interleave(torch.arange(len(x)), lengths)
    place = torch.arange(len(rows)) - (lengths.cumsum(0) - lengths)[owner]
    h = rows + m.places(place).detach() + place[:, None].double()
    h = (h @ h.T).masked_fill(owner[:, None] != owner, -torch.inf).softmax(-1) @ h
    bias = torch.zeros(len(rows), len(rows)).masked_fill_(owner[:, None] != owner, -torch.inf)
    out = torch.zeros(x.shape)
    out[keep] = m.b((h @ h.T + bias).softmax(-1) @ h)
    return out


def filled_one_by_one(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    for i in range(len(x)):
        out[i] = m.b(x[i] - x[i].mean(0))
    return out


def mask_of_lengths(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    longest: Any = lengths.max()
    keep = torch.arange(longest) < lengths[:, None]
    keep = F.pad(keep, (0, x.shape[1] - keep.shape[1]))[..., None]
    return m.b((m.a(x).detach() * keep).sum(1) / keep.sum(1))


def relative_places(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    return m.b(x) + m.places((place[:, None] - place).abs()).sum(1)


def graphs(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    edges = torch.block_diag(*[torch.ones(x.shape[1], x.shape[1])] * len(x))
    return m.b((edges @ x.reshape(-1, d)).view_as(x))


def seen_only(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    m.largest = x.abs().max()
    assert x[0].shape == x.shape[1:]
    return m.b(x) + torch.zeros_like(m.largest) if x.sum() > -1e9 else m.a(x)


def quantised_by_sample(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    scale = x.abs().amax((1, 2), keepdim=True) / 127
    return m.b((x / scale).round() * scale)


def two_views(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    a, b = m.b(torch.cat([x, x.flip(-1)])).chunk(2)
    return a * b.detach()


HARMLESS: list[Callable[[Any, Tensor, Tensor], Tensor]] = [
    sorted_by_length, sorted_and_divided, experts_by_index, experts_by_sorting, one_row_of_tokens, filled_one_by_one,
    mask_of_lengths, relative_places, graphs, seen_only, quantised_by_sample, two_views,
]  # fmt: skip
SHORT: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "stacked in order": lambda m, x, n: torch.stack([m.b(x[i].detach() / n[i]) for i in range(len(x))]),
    "put together in order": lambda m, x, n: torch.cat([m.b(part - part.mean(1, True)) for part in x.split(1)]),
    "there and back": lambda m, x, n: m.b(x.flip(0).detach()).flip(0),
    "last token by index": lambda m, x, n: m.b(x[torch.arange(len(x)), n - 1]),
    "last token by gather": lambda m, x, n: m.b(x.gather(1, (n - 1)[:, None, None].expand(-1, 1, d)).squeeze(1)),
    "repeated": lambda m, x, n: m.b(x.repeat_interleave(2, 0).detach()).unflatten(0, (-1, 2)).amax(1),
    "first token of each": lambda m, x, n: m.b(x - x[:, :1] + x.roll(1, 1)),
    "over time": lambda m, x, n: m.b(x.transpose(0, 1).cumsum(0).transpose(0, 1)),
    "diagonal of a Gram matrix": lambda m, x, n: m.b(x) * (x.flatten(1) @ x.flatten(1).T).diagonal()[:, None, None],
    "gate that is closed": lambda m, x, n: m.b(x + 0.0 * x.flip(0)),
    "best tokens": lambda m, x, n: m.b(x.gather(1, x.norm(dim=-1).topk(2, 1).indices[..., None].expand(-1, -1, d))),
}


@pytest.mark.parametrize("tokens", [T, B], ids=["T", "T = B"])
@pytest.mark.parametrize("body", [*HARMLESS, *SHORT.values()], ids=[*(f.__name__ for f in HARMLESS), *SHORT])
def test_what_is_harmless_is_answered(body: Callable[..., Tensor], tokens: int):
    m, x, lengths = two_layers(body), torch.randn(B, tokens, d), torch.tensor([2, tokens, 1, tokens - 1])
    want = loop(m, lambda m, *batch: score(m(*batch)), [(x[i : i + 1], lengths[i : i + 1]) for i in range(B)])
    assert_same(answered(m, x, lengths), want, 1e-10)


PLACED: dict[str, tuple[Callable[..., Tensor], tuple[int, ...]]] = {
    "positions": (lambda m, x, p: m.b(x) * (1 + (p[:, None] - p).abs().sum(1))[:, None], (B,)),
    "mask": (lambda m, x, p: (x @ x.mT + p + p.T - p[0]).softmax(-1) @ m.b(x), (B, B)),
}


@pytest.mark.parametrize("name", PLACED)
def test_an_input_that_may_be_positions_is_not_taken_for_samples(name: str):
    body, shape = PLACED[name]
    m, x, place = two_layers(body), torch.randn(B, B, d), torch.randn(shape)
    want = loop(m, lambda m, *batch: score(m(*batch)), [(x[i : i + 1], place) for i in range(B)])
    assert_same(answered(m, x, place), want, 1e-10)


def test_owners_are_looked_up_where_the_same_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    """And nothing else is taken for the same: another order, another dimension, other owners, a gate with other values."""
    monkeypatch.setattr(mixing, "FOUND", mixing.Found())
    asked, own = [], mixing.follow
    monkeypatch.setattr(mixing, "follow", lambda func, *rest: asked.append(func) or own(func, *rest))

    def tag_of(func: Callable, args: tuple, tags: dict[int, Any]) -> Any:
        """The tag of the result; `tags`: of which arguments, by their place among all tensors."""
        tensors = Tensors({}, [])
        given, call = looked_at(args, {})
        tensors._tags = {id(given[k]): (weakref.ref(given[k]), tag) for k, tag in tags.items()}
        out = func(*args)
        tensors.follow(func, args, {}, out, given, call)
        return tensors.tag(out)

    t, token = torch.randn(B, T, d), torch.randn(B, 1, d)
    first = tag_of(torch.cat, ([token, t], 1), {1: 0})
    assert first.table.squeeze(2).tolist() == [[-1, i, i, i] for i in range(B)]
    assert tag_of(torch.cat, ([token.clone(), t.clone()], 1), {1: 0}) is first
    assert len(asked) == 1
    assert tag_of(torch.cat, ([t, token], 1), {0: 0}).table.squeeze(2).tolist() == [[i, i, i, -1] for i in range(B)]
    other = Owners(torch.tensor(ORDER.tolist()).view(B, 1, 1), B)
    assert tag_of(torch.cat, ([token, t], 1), {1: other}).table.squeeze(2).tolist() == [
        [-1, i, i, i] for i in ORDER.tolist()
    ]
    assert tag_of(torch.cat, ([t, t.clone()], 1), {0: 0, 1: 0}) == 0
    assert tag_of(torch.cat, ([t, t.clone()], 1), {0: 0}).table.squeeze(2).tolist() == [
        [i] * T + [-1] * T for i in range(B)
    ]

    x = torch.randn(B, T + 1, d)
    turned = [tag_of(torch.Tensor.transpose, (x, 0, 1), {0: first}) for _ in range(2)]
    assert turned[0] is turned[1]
    assert torch.equal(turned[0].table, first.table.transpose(0, 1))
    assert torch.equal(tag_of(torch.Tensor.transpose, (x, 0, 2), {0: first}).table, first.table.transpose(0, 2))
    # An input that may have no samples, and one that has, lie alike.
    assert type(tag_of(torch.relu, (t,), {0: Loose(0)})) is Loose
    assert type(tag_of(torch.relu, (t,), {0: 0})) is int
    assert type(tag_of(torch.relu, (t,), {0: Loose(0)})) is Loose

    # What samples have met in, and a number by which all is multiplied, are looked at each time.
    both, y = Owners(torch.tensor([[[-2], [0]]] * B), B, several=True), torch.randn(B, 2, d)
    for gate in (torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [1.0]])):
        assert (tag_of(torch.mul, (y, gate), {0: both}).table == -2).any() == bool(gate.all())
    for gate in (1.0, 0.0, 1.0):
        assert (tag_of(torch.mul, (x, torch.tensor(gate)), {0: first}) is None) == (not gate)
        assert (tag_of(torch.mul, (x, gate), {0: first}) is None) == (not gate)

    # So are a row that a tensor names, and a gate that may be of the batch.
    for k in (2, 0, 1):
        for func, args in ((torch.select, (t, 0, torch.tensor(k))), (torch.narrow, (t, 0, torch.tensor(k), 1))):
            assert set(tag_of(func, args, {0: 0}).table.flatten().tolist()) == {k}
    for gate in (1.0, 0.0, 1.0):
        assert (tag_of(torch.mul, (x, torch.full((1, 1, 1), gate)), {0: first, 1: Loose(0)}) is None) == (not gate)
    square = [torch.randn(2, d) for _ in range(2)]
    for dim in (1, 0, 1):
        assert tag_of(torch.stack, (square, torch.tensor(dim)), {0: 0, 1: 0}) == 1 - dim


def test_what_is_remembered_has_an_end(monkeypatch: pytest.MonkeyPatch):
    """Rows in an order that is new at every step make tables that nobody asks for again."""
    monkeypatch.setattr(mixing, "FOUND", mixing.Found())
    monkeypatch.setattr(mixing.Found, "elements", 1000)
    monkeypatch.setattr(mixing.Found, "calls", 30)
    t = torch.randn(B, T, d)
    for _ in range(200):
        tag = Owners(torch.randperm(B).view(B, 1, 1).expand(B, T, 1).contiguous(), B)
        key = mixing.key_of(torch.relu, (), [tag], t)
        mixing.remember(key, torch.relu, [t], [tag], tag)
        assert mixing.FOUND[key] is tag
        assert sum(found.table.numel() for found in mixing.FOUND.values()) <= 1000
        assert len(mixing.FOUND) <= 30
    large = Owners(torch.zeros(10, 10, dtype=torch.int64), B)
    mixing.remember("large", torch.relu, [t], [large], large)
    assert "large" not in mixing.FOUND


def test_what_is_lost_from_sight_and_what_comes_in_parts_is_looked_up_too(monkeypatch: pytest.MonkeyPatch):
    """The heads of a vision transformer: a token of nobody's, three parts by one op, attention that is not followed."""
    monkeypatch.setattr(mixing, "FOUND", mixing.Found())
    asked, own = [], mixing.follow
    monkeypatch.setattr(mixing, "follow", lambda func, *rest: asked.append(func) or own(func, *rest))
    x, table = torch.randn(B, T, 3 * d), Owners(torch.tensor([[-1, *[i] * (T - 1)] for i in range(B)])[:, :, None], B)

    def tags() -> list[Any]:
        tensors = Tensors({}, [])
        tensors._tags = {id(x): (weakref.ref(x), table)}
        kept = []

        def run(func: Callable, *args: Any) -> Any:
            given, call = looked_at(args, {})
            kept.append(func(*args))
            tensors.follow(func, args, {}, kept[-1], given, call)
            return kept[-1]

        parts = run(torch.Tensor.unbind, run(torch.Tensor.view, x, B, T, 3, d), 2)
        mixed = run(F.scaled_dot_product_attention, *parts)
        return [tensors.tag(t) for t in (*parts, mixed)]

    first = tags()
    assert all(isinstance(tag, Owners) for tag in first[:3])
    assert asked == [torch.Tensor.view, torch.Tensor.unbind, F.scaled_dot_product_attention]
    assert [a is b for a, b in zip(first, tags(), strict=True)] == [True] * 4
    assert len(asked) == 3
