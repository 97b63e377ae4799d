"""Samples that move, losses that mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from .attention import attend
from .base import (
    SEQUENCE,
    B,
    Batch,
    Case,
    T,
    batch,
    cut_only,
    cut_rows,
    d,
    fixed,
    ids,
    image,
    linear,
    made,
    net,
    reals,
    rows_of,
    score,
    weight,
)
from .recurrent import recurrent


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """A mixture of experts: tokens picked by a boolean mask."""
    rows = x.reshape(-1, d)
    choice = (rows * 3).sum(-1).long() % 2
    out = torch.zeros(len(rows), 2, dtype=x.dtype)
    for k, expert in enumerate(m.experts):
        out[choice == k] = expert(rows[choice == k])
    return (out * m.gate(rows).sigmoid()).view(len(x), -1, 2)


def routed_by_index(m: nn.Module, x: Tensor) -> Tensor:
    """A mixture of experts: tokens picked by index, weighted by a gate, added back."""
    rows = x.reshape(-1, d)
    gates, choice = m.gate(rows).softmax(-1).topk(2, -1)
    out = torch.zeros(len(rows), 2, dtype=x.dtype)
    for k, expert in enumerate(m.experts):
        token, slot = torch.where(choice == k)
        out.index_add_(0, token, expert(rows[token]) * gates[token, slot, None])
    return out.view(len(x), -1, 2)


class Hidden(torch.autograd.Function):
    """A product with a parameter that only autograd sees."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.mT, (x.mT @ g).sum(0)


def routed_one_by_one(m: nn.Module, x: Tensor) -> Tensor:
    """A mixture of experts whose weights are one tensor, indexed by a number that the routing gives."""
    rows = x.reshape(-1, d)
    choice = (rows * 3).sum(-1).long() % len(m.w)
    out = torch.zeros(len(rows), 2, dtype=x.dtype)
    for expert in choice.unique():
        token = torch.where(choice == expert)[0]
        out.index_add_(0, token, F.linear(rows[token], m.w[expert]))
    return out.view(len(x), -1, 2)


def two_streams(m: nn.Module, a: Tensor, b: Tensor) -> Tensor:
    """Two inputs of ids, each with positions of its own."""
    place = torch.arange(a.shape[1])
    return m.fc(m.e(a) + m.pos(place)).mean(1, keepdim=True) * m.fc(m.e(b) + m.pos(place)).tanh()


def slots(m: nn.Module, x: Tensor) -> Tensor:
    """Learned slots that are broadcast after they were shifted."""
    noise = torch.linspace(-1, 1, 2 * d, dtype=x.dtype).view(2, d)
    return m.fc((m.mu + m.sigma.exp() * noise).expand(len(x), 2, d)) @ x.mT


def experts(n: int) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleList(nn.Sequential(nn.Linear(d, 3), nn.GELU(), nn.Linear(3, 2)) for _ in range(n))


def ragged(m: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
    """Only the tokens that are kept pass the layer."""
    rows = m.b(m.a(x[keep > 0]).tanh())
    return torch.zeros(*x.shape[:2], 2, dtype=x.dtype).masked_scatter(keep[..., None] > 0, rows)


def permuted(m: nn.Module, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return m.b(m.a(x[order]).tanh())[order.argsort()]


def masked_loss(m: nn.Module, i: Tensor, target: Tensor) -> Tensor:
    each = F.cross_entropy(m(i).transpose(1, 2), target, ignore_index=0, reduction="none")
    return each.sum(1) / (target != 0).sum(1).clamp(min=1)


def several_views(m: nn.Module, x: Tensor) -> Tensor:
    out = m(torch.cat([x, x.flip(-1)]))
    return score(out[: len(x)] * out[len(x) :])


def nodes(n: int) -> Callable[[Generator], Batch]:
    return lambda g: (reals(n, d)(g), torch.arange(n) * B // n)


def graphs(m: nn.Module, x: Tensor, owner: Tensor) -> Tensor:
    """The nodes of all graphs in one table, summed by graph."""
    out = m.b(m.a(x).tanh())
    return torch.zeros(int(owner.max()) + 1, 2, dtype=x.dtype).index_add(0, owner, out)


class Reversed(torch.autograd.Function):
    """Passes values on and turns gradients round."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return -2 * g


def scaled_by_a_hook(m: nn.Module, x: Tensor) -> Tensor:
    h = m.a(x)
    h.register_hook(lambda g: g * 3)
    return m.b(h)


def derivative(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The model's outputs, and their derivative by the input, with a graph of its own."""
    x = x.detach().requires_grad_()
    out = m(x)
    return out, torch.autograd.grad(out.sum(), x, create_graph=True)[0]


def forces(m: nn.Module, x: Tensor) -> Tensor:
    energy, force = derivative(m, x)
    return score(energy) + score(force)


def gradient_penalty(m: nn.Module, x: Tensor) -> Tensor:
    return (derivative(m, x)[1].flatten(1).norm(dim=1) - 1) ** 2


def adversarial(m: nn.Module, x: Tensor) -> Tensor:
    """The loss at an input moved by a gradient that is taken while recording."""
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(score(m(x)).sum(), x)
    return score(m((x + 0.1 * g.sign()).detach()))


def hooked_backward() -> nn.Module:
    m = nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2))
    m[1].register_full_backward_hook(lambda module, g_in, g_out: (g_in[0] * 2,))
    m[2].register_full_backward_pre_hook(lambda module, g_out: (g_out[0] * 3,))
    return m


def one_loss_at_a_time(m: nn.Module, x: Tensor) -> Tensor:
    return torch.stack([m(row).pow(2).sum() + 0.1 * m.weight.pow(2).sum() for row in x])


KEEP = torch.tensor([[1, 0, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]])
LANGUAGE = net(lambda m, i: m.fc(m.tok(i).cumsum(1).tanh()), tok=lambda: nn.Embedding(5, d), fc=linear(d, 5))
TARGETS = torch.tensor([[1, 2, 0, 0], [3, 0, 4, 1], [0, 0, 0, 0]])


def weighted_experts(m: nn.Module, x: Tensor) -> Tensor:
    gates = m.gate(x).softmax(-1)
    best, which = gates.topk(2, -1)
    share = torch.zeros_like(gates).scatter(-1, which, best / best.sum(-1, keepdim=True))
    hidden = torch.einsum("btd,edf->btef", x, m.a).relu()
    return torch.einsum("btef,efp,bte->btp", hidden, m.b, share)


def limited_experts(m: nn.Module, x: Tensor) -> Tensor:
    """Each expert takes the first two tokens of a sample that want it; the others are dropped."""
    gates = m.gate(x).softmax(-1)
    wanted = F.one_hot(gates.argmax(-1), 3)
    slot = (wanted.cumsum(1) - 1).clamp(0, 2)
    sent = (F.one_hot(slot, 3)[..., :2] * wanted[..., None]).to(x.dtype)
    done = torch.einsum("becd,edp->becp", torch.einsum("btec,btd->becd", sent, x), m.w).tanh()
    return torch.einsum("btec,becp->btp", sent * gates[..., None], done)


def sorted_experts(m: nn.Module, x: Tensor) -> Tensor:
    rows = x.reshape(-1, d)
    best, which = m.gate(rows).softmax(-1).max(-1)
    order, counts = which.argsort(stable=True), torch.bincount(which, minlength=3).tolist()
    done = torch.cat([part @ m.w[k] for k, part in enumerate(rows[order].split(counts))])
    return (done[order.argsort()] * best[:, None]).view(len(x), -1, 2)


def triplet(m: nn.Module, x: Tensor, near: Tensor, far: Tensor) -> Tensor:
    a, p, n = m.fc(torch.cat([x, near, far])).split(len(x))
    return F.softplus((a - p).pow(2) - (a - n).pow(2))


def pairs(g: Generator) -> Batch:
    """Graphs of two nodes and their edges, as one graph."""
    nodes = torch.arange(2 * B)
    return reals(2 * B, d)(g), nodes // 2, torch.stack([nodes, nodes ^ 1])


def cut_pairs(batch: Batch, i: int) -> Batch:
    x, owner, _ = batch
    return x[owner == i], torch.zeros(2, dtype=torch.long), torch.tensor([[0, 1], [1, 0]])


def messages(m: nn.Module, x: Tensor, owner: Tensor, edges: Tensor) -> Tensor:
    h, (source, target) = m.a(x), edges
    for _ in range(2):
        sent = m.msg(torch.cat([h[source], h[target]], -1)).relu()
        h = m.cell(torch.zeros_like(h).index_add(0, target, sent), h)
    return h.new_zeros(int(owner.max()) + 1, 4).scatter_add(0, owner[:, None].expand(-1, 4), h)


def integrated(m: nn.Module, x: Tensor) -> Tensor:
    for _ in range(3):
        half = x + 0.1 * m.fc(x).tanh()
        x = x + 0.2 * m.fc(half).tanh()
    return x


def fixed_point(m: nn.Module, x: Tensor) -> Tensor:
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(3):
            z = torch.tanh(0.1 * m.w(z) + m.u(x))
    return torch.tanh(0.1 * m.w(z) + m.u(x))


def pointer(m: nn.Module, x: Tensor) -> Tensor:
    """Two positions, one after the other, none twice."""
    out, (h, c) = m.enc(x)
    h, c, given = h[0], c[0], m.start.expand(len(x), -1)
    taken, outs = torch.zeros(x.shape[:2], dtype=torch.bool), []
    for _ in range(2):
        h, c = m.cell(given, (h, c))
        p = ((m.a(out) + m.b(h)[:, None]).tanh() @ m.v).masked_fill(taken, -20.0).log_softmax(1)
        best = p.argmax(1)
        taken, given = taken.scatter(1, best[:, None], True), x[torch.arange(len(x)), best]
        outs.append(p)
    return torch.stack(outs, 1)


def greedy(m: nn.Module, x: Tensor) -> Tensor:
    h, token, outs = m.enc(x)[1][0], torch.zeros(len(x), dtype=torch.long), []
    for _ in range(3):
        h = m.cell(m.tok(token), h)
        outs.append(m.out(h))
        token = outs[-1].argmax(-1)
    return torch.stack(outs, 1)


def coupling(m: nn.Module, x: Tensor) -> Tensor:
    x = (x + m.shift) * m.scale.exp()
    a, b = x[..., :1], x[..., 1:]
    s, t = m.fc(a).chunk(2, -1)
    z = torch.cat([a, b * s.tanh().exp() + t], -1)
    volume = s.tanh().sum((1, 2)) + x.shape[1] * m.scale.sum()
    return torch.cat([z.pow(2).flatten(1), volume[:, None]], 1)


def points(m: nn.Module, x: Tensor) -> Tensor:
    turn = m.t(m.a(x.mT).amax(-1)).view(-1, d, d)
    return m.b((x @ turn).mT).max(-1).values


def u_net(m: nn.Module, x: Tensor) -> Tensor:
    a = m.a(x).relu()
    b = m.b(F.max_pool2d(a, 2)).relu()
    return m.out(torch.cat([a, F.interpolate(b, scale_factor=2, mode="nearest"), m.up(b)], 1))


def kernels(m: nn.Module, x: Tensor) -> Tensor:
    kernel = (m.fc(x.mean(2)).sigmoid() @ m.w.flatten(1)).view(-1, 4, 3)
    return F.conv1d(x.reshape(1, -1, x.shape[-1]), kernel, groups=len(x)).view(len(x), 2, -1)


# fmt: off
SAMPLES = [
    Case("experts by mask", ("ragged", "setitem"), net(routed, experts=experts(2), gate=linear(d, 1)), SEQUENCE),
    Case(
        "experts by mask T = B", ("ragged", "T = B"), net(routed, experts=experts(2), gate=linear(d, 1)),
        batch(reals(B, B, d)),
    ),
    Case("experts by index", ("ragged",), net(routed_by_index, experts=experts(3), gate=linear(d, 3)), SEQUENCE),
    Case(
        "tokens selected", ("ragged", "two inputs"), net(ragged, a=linear(d, 4), b=linear(4, 2)),
        batch(reals(B, T, d), lambda g: KEEP),
    ),
    Case(
        "tokens selected, one sample has none", ("ragged", "zero-gradient sample"),
        net(ragged, a=linear(d, 4), b=linear(4, 2)),
        batch(reals(B, T, d), lambda g: KEEP * torch.tensor([[1], [0], [1]])),
    ),
    Case("batch permuted and put back", ("permuted",), net(permuted, a=linear(d, 4), b=linear(4, 2)), SEQUENCE),
    Case(
        "batch flipped and put back T = B", ("permuted", "T = B"),
        net(lambda m, x: m.fc(x.flip(0)).tanh().flip(0), fc=linear(d, B)), batch(reals(B, B, d)),
    ),
    Case(
        "masked loss", ("masked loss", "zero-gradient sample"), LANGUAGE, batch(ids(5, B, T), lambda g: TARGETS),
        masked_loss,
    ),
    Case(
        "last token only", ("masked loss",), LANGUAGE, batch(ids(5, B, T), fixed(0, 3, 1)),
        lambda m, i, last: score(m(i)[torch.arange(len(i)), last]),
    ),
    Case(
        "only position i of sample i T = B", ("masked loss", "T = B"),
        net(lambda m, x: m.fc(x + m.w).tanh(), fc=linear(d, 2), w=weight(B, d)),
        batch(reals(B, B, d), fixed(0, 1, 2)), lambda m, x, k: score(m(x)[torch.arange(len(x)), k]),
    ),
    Case(
        "weights per sample", ("masked loss", "zero-gradient sample"), linear(d, 2),
        batch(reals(B, d), lambda g: torch.tensor([0.0, 2.0, -1.0])), lambda m, x, w: score(m(x)) * w,
    ),
    Case(
        "all but one sample weigh nothing", ("zero-gradient sample", "T = B"),
        net(lambda m, x: m.fc(x + m.w).tanh(), fc=linear(d, 2), w=weight(B, d)),
        batch(reals(B, B, d), lambda g: torch.tensor([0.0, 2.0, 0.0])), lambda m, x, w: score(m(x)) * w,
    ),
    Case(
        "several views of each sample", ("folded", "2B rows"), linear(d, 2), batch(reals(B, d)), several_views,
        batch_size=B,
    ),
    Case(
        "two inputs T = B", ("two inputs", "T = B"),
        net(lambda m, x, y: m.a(x) * m.b(y), a=linear(d, 2), b=linear(4, 2)), batch(reals(B, B, d), reals(B, B, 4)),
    ),
    Case(
        "second input meets a parameter first", ("two inputs", "T = B", "raw parameter"),
        net(lambda m, x, y: x * (m.w * y).tanh() + m.v * y, w=weight(B, d), v=weight(d)),
        batch(reals(B, B, d), reals(B, B, d)),
    ),
    Case(
        "positions are the first argument T = B", ("positions", "T = B", "two inputs"),
        net(lambda m, where, x: m.fc(x + m.pos(where)).tanh(), pos=lambda: nn.Embedding(B, d), fc=linear(d, 2)),
        lambda g: (torch.arange(B), reals(B, B, d)(g)), lambda m, where, x: score(m(where, x)), cut=cut_only(1),
    ),
    Case(
        "large batch", ("two passes",), net(routed_by_index, experts=experts(2), gate=linear(d, 2)),
        batch(reals(70, 2, d)),
    ),
    Case(
        "mask is the first argument T = B", ("mask (B, B)", "T = B", "two inputs"),
        net(lambda m, mask, x: attend(m, x, mask > 0), qkv=linear(d, 9), out=linear(3, 2)),
        lambda g: (torch.ones(B, B).tril(), reals(B, B, d)(g)), cut=cut_only(1),
    ),
    Case(
        "detached samples sorted and brought back", ("sorted lengths",),
        net(lambda m, x: m.b(x.flip(0).detach() + m.a(x).detach().flip(0)).flip(0), a=linear(d, d), b=linear(d, 2)),
        SEQUENCE,
    ),
    Case(
        "a scale of its own for every sample", ("detached statistic",),
        net(lambda m, x: m.b(x / m.a(x).detach().abs().amax((1, 2), keepdim=True)), a=linear(d, d), b=linear(d, 2)),
        SEQUENCE,
    ),
    Case(
        "adversarial input made while recording", ("double backward", "module used twice"),
        lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)), batch(reals(B, d)), adversarial,
    ),
    Case("backward hooks of modules", ("hooks",), hooked_backward, SEQUENCE),
    Case(
        "one loss at a time, with a penalty", ("rank 0", "derived weight"), linear(d, 2), SEQUENCE,
        one_loss_at_a_time, batch_size=B,
    ),
    Case(
        "an ensemble by vmap", ("raw parameter", "d = B"),
        net(lambda m, x: torch.vmap(lambda w: x @ w)(m.w).movedim(0, 1), w=weight(B, d, 2)), SEQUENCE,
    ),
    Case("samples by vmap", ("vmap",), net(lambda m, x: torch.vmap(m.fc)(x), fc=linear(d, 2)), SEQUENCE),
    Case(
        "parameter in an autograd.Function", ("autograd.Function",),
        net(lambda m, x: m.fc(Hidden.apply(x, m.w)), w=weight(d, 4), fc=linear(4, 2)), SEQUENCE,
    ),
    Case("experts one by one", ("ragged", "index"), net(routed_one_by_one, w=weight(3, 2, d)), SEQUENCE),
    Case(
        "two streams of ids T = B", ("positions", "T = B", "two inputs"),
        net(two_streams, e=lambda: nn.Embedding(7, d), pos=lambda: nn.Embedding(B, d), fc=linear(d, 2)),
        batch(ids(7, B, B), ids(7, B, B)),
    ),
    Case(
        "two streams of ids", ("positions", "two inputs"),
        net(two_streams, e=lambda: nn.Embedding(7, d), pos=lambda: nn.Embedding(T, d), fc=linear(d, 2)),
        batch(ids(7, B, T), ids(7, B, T)),
    ),
    Case("slots", ("raw parameter", "expand"), net(slots, mu=weight(2, d), sigma=weight(d), fc=linear(d, d)), SEQUENCE),
    Case(
        "expanded as, twice", ("raw parameter", "expand"),
        net(lambda m, x: x * m.w.expand(d).expand_as(x) + m.v.repeat(d).expand_as(x), w=weight(1), v=weight(1)), SEQUENCE,
    ),
    Case(
        "repeated, then viewed and changed", ("raw parameter", "expand", "in-place after"),
        net(
            lambda m, x: x * m.w.exp().unsqueeze(0).repeat(len(x), 1, 1).mul_(2).view(-1, d).tanh().view_as(x),
            w=weight(T, d),
        ), SEQUENCE,
    ),
    Case(
        "dtype and shape of another", ("raw parameter",),
        net(lambda m, x: x * m.w.to(x).view_as(x[0, 0]) + m.w.type_as(x).reshape_as(x[0, 0]), w=weight(d)), SEQUENCE,
    ),
    Case(
        "masked_fill_ by a parameter", ("in-place before", "raw parameter", "rank 0"),
        net(lambda m, x: m.fc(x.clone().masked_fill_(x > 0, m.w)), w=weight(), fc=linear(d, 2)), SEQUENCE,
    ),
    Case(
        "an expert without tokens", ("ragged", "unused"), net(routed, experts=experts(3), gate=linear(d, 1)),
        SEQUENCE,
    ),
    Case(
        "list of samples", ("no batch dimension",),
        net(lambda m, xs: torch.stack([m.fc(x).tanh().sum(0) for x in xs]), fc=linear(d, 2)), SEQUENCE,
        lambda m, x: score(m(list(x))), batch_size=B,
    ),
    *(
        Case(
            f"graphs, {n} nodes with a sample index", ("ragged", "no batch dimension"),
            net(graphs, a=linear(d, 4), b=linear(4, 2)), nodes(n),
            cut=lambda batch, i: (batch[0][batch[1] == i], batch[1][batch[1] == i] * 0), batch_size=B,
        )
        for n in (6, 7)
    ),
    Case(
        "keyword arguments", ("keyword call", "two inputs"),
        net(
            lambda m, *, ids, kind: m.tok(ids) * m.kind(kind), tok=lambda: nn.Embedding(7, d),
            kind=lambda: nn.Embedding(2, d),
        ),
        batch(ids(7, B, T), ids(2, B, T)), lambda m, i, k: score(m(kind=k, ids=i)),
    ),
    Case(
        "dict input and tuple output", ("dict input",),
        net(lambda m, inputs: (m.a(inputs["x"]), [m.b(inputs["y"])]), a=linear(d, 2), b=linear(4, 2)),
        batch(reals(B, T, d), reals(B, 4)),
        lambda m, x, y: (lambda out: score(out[0]) * score(out[1][0]))(m({"y": y, "x": x})),
    ),
    Case(
        "functional_call with derived weights", ("functional use", "derived weight"), linear(d, 2), SEQUENCE,
        lambda m, x: score(torch.func.functional_call(m, {n: p * 2 for n, p in m.named_parameters()}, (x,))),
    ),
    Case(
        "functional_call with the model's own weights", ("functional use",), linear(d, 2), SEQUENCE,
        lambda m, x: score(torch.func.functional_call(m, dict(m.named_parameters()), (x,))),
    ),
    Case(
        "weights generated for each sample", ("hypernetwork",),
        net(lambda m, x: torch.bmm(x, m.fc(x.mean(1)).view(len(x), d, 2)) + m.w, fc=linear(d, 2 * d), w=weight(2)),
        SEQUENCE,
    ),
    Case(
        "custom function without parameters", ("custom function",),
        net(lambda m, x: m.b(Reversed.apply(m.a(x))), a=linear(d, 4), b=linear(4, 2)), SEQUENCE,
    ),
    Case("gradient hook that scales", ("hooks",), net(scaled_by_a_hook, a=linear(d, 4), b=linear(4, 2)), SEQUENCE),
    Case(
        "parameters in lists and dicts", ("raw parameter",),
        net(
            lambda m, x: sum(x * w for w in m.many) @ m.named["w"],
            many=lambda: nn.ParameterList([torch.randn(d), torch.randn(1)]),
            named=lambda: nn.ParameterDict({"w": torch.randn(d, 2)}),
        ),
        SEQUENCE,
    ),
    Case("non-contiguous input", ("non-contiguous",), linear(d, 2), lambda g: (reals(d, T, B)(g).permute(2, 1, 0),)),
    Case(
        "every other row", ("non-contiguous",), lambda: nn.Conv1d(4, 2, 3),
        lambda g: (reals(2 * B, 4, 14)(g)[::2, :, ::2],),
    ),
    Case(
        "expanded input", ("non-contiguous", "expanded"), net(lambda m, x, y: m.fc(x) * y, fc=linear(d, 2)),
        lambda g: (reals(1, T, d)(g).expand(B, -1, -1), reals(B, 1, 2)(g)),
    ),
    Case(
        "input that requires grad", ("input requires grad",),
        lambda: nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, 2)),
        lambda g: (reals(B, T, d)(g).requires_grad_(),),
    ),
    Case(
        "hidden state that requires grad", ("input requires grad", "given state"), recurrent(nn.GRU, d, 2),
        lambda g: (reals(B, T, d)(g), reals(1, B, 2)(g).requires_grad_()),
        cut=lambda batch, i: (batch[0].narrow(0, i, 1), batch[1].narrow(1, i, 1)),
    ),
    Case(
        "image as rows, T = B", ("folded", "T = B"),
        net(lambda m, x: m.fc(x.permute(0, 2, 3, 1).reshape(-1, B)).view(len(x), -1), fc=linear(B, B)),
        batch(reals(B, B, B, B)),
    ),
    Case(
        "pixel shuffle and pooling", (),
        net(
            lambda m, x: F.max_pool2d(F.pixel_shuffle(m.a(x), 2), 2) + m.b(x), a=made(nn.Conv2d, 4, 8, 1),
            b=made(nn.Conv2d, 4, 2, 1),
        ),
        image(4, 4),
    ),
    Case(
        "experts in one product, each token's best two", ("one-hot",),
        net(weighted_experts, gate=linear(d, 3), a=weight(3, d, 4), b=weight(3, 4, 2)), SEQUENCE,
    ),
    Case(
        "experts with room for two tokens", ("one-hot", "cumsum"),
        net(limited_experts, gate=linear(d, 3), w=weight(3, d, 2)), SEQUENCE,
    ),
    Case(
        "tokens sorted by expert", ("ragged", "permuted"), net(sorted_experts, gate=linear(d, 3), w=weight(3, d, 2)),
        SEQUENCE,
    ),
    Case(
        "a matrix looked up for each token", ("repeated index", "rank 3"),
        net(
            lambda m, i: torch.einsum("btd,btdp->btp", m.tok(i), m.w[i % 2]), tok=lambda: nn.Embedding(5, d),
            w=weight(2, d, 2),
        ),
        batch(ids(5, B, T)),
    ),
    Case(
        "two inputs as 2B rows, subtracted", ("2B rows", "two inputs"),
        net(lambda m, x, y: torch.sub(*m.fc(torch.cat([x, y])).chunk(2)).abs(), fc=linear(d, 2)),
        batch(reals(B, T, d), reals(B, T, d)),
    ),
    Case(
        "anchor, positive and negative as 3B rows", ("3B rows", "two inputs"), net(triplet, fc=linear(d, 2)),
        batch(reals(B, d), reals(B, d), reals(B, d)),
    ),
    Case(
        "two inputs stacked side by side", ("folded", "2B rows"),
        net(
            lambda m, x, y: m.fc(torch.stack([x, y], 1).flatten(0, 1)).unflatten(0, (-1, 2)).prod(1), fc=linear(d, 2),
        ),
        batch(reals(B, T, d), reals(B, T, d)),
    ),
    Case(
        "each sample three times in a row", ("folded", "3B rows"),
        net(
            lambda m, x: (m.fc(x.repeat_interleave(3, 0)) * m.w.repeat(len(x))[:, None]).view(len(x), 3, -1).sin(),
            fc=linear(d, 2), w=weight(3),
        ),
        batch(reals(B, d)),
    ),
    Case(
        "views, one of them without gradient", ("2B rows", "module used twice"),
        net(lambda m, x: m.p(m.fc(x)) * m.fc(x.flip(1)).detach(), fc=linear(d, 3), p=linear(3, 3)), SEQUENCE,
    ),
    Case(
        "as many fixed negatives as samples", ("as many constants as samples",),
        net(
            lambda m, x: (m.fc(x) @ m.fc(m.fixed[0].to(x.dtype)).T).log_softmax(-1), fc=linear(d, 3),
            fixed=lambda: [torch.linspace(-1, 1, B * d).view(B, d)],
        ),
        batch(reals(B, d)),
    ),
    Case(
        "messages along the edges of graphs", ("ragged", "no batch dimension", "module used twice"),
        net(messages, a=linear(d, 4), msg=linear(8, 4), cell=made(nn.GRUCell, 4, 4)), pairs, cut=cut_pairs,
        batch_size=B,
    ),
    Case(
        "sums between offsets", ("ragged", "no batch dimension"),
        net(
            lambda m, x, at: F.pad(m.b(m.a(x).tanh()).cumsum(0), (0, 0, 1, 0))[at].diff(dim=0), a=linear(d, 4),
            b=linear(4, 2),
        ),
        rows_of(1, 3, 2), cut=cut_rows, batch_size=B,
    ),
    Case(
        "means of pieces", ("ragged", "no batch dimension"),
        net(
            lambda m, x, at: torch.stack([h.mean(0) for h in m.a(x).tanh().split(at.diff().tolist())]),
            a=linear(d, 4),
        ),
        rows_of(1, 3, 2), cut=cut_rows, batch_size=B,
    ),
    Case(
        "no time at all", ("empty",), net(lambda m, x: m.fc(x).sum(1) + m.w, fc=linear(d, 2), w=weight(2)),
        batch(reals(B, 0, d)),
    ),
    Case(
        "samples along dimension 2", ("batch dimension",),
        net(lambda m, x: m.fc(x.permute(2, 0, 1)).permute(1, 2, 0), fc=linear(d, 2)), batch(reals(T, d, B)),
        lambda m, x: score(m(x), 2), 2, lambda batch, i: (batch[0].narrow(2, i, 1),),
    ),
    Case(
        "the same layer at every step of an integrator", ("module used twice",), net(integrated, fc=linear(d, d)),
        SEQUENCE,
    ),
    Case(
        "fixed point found without gradient", ("unused", "module used twice"),
        net(fixed_point, w=linear(d, d), u=linear(d, d)), SEQUENCE,
    ),
    Case(
        "pointer network", ("learned state", "scatter", "module used twice"),
        net(
            pointer, enc=made(nn.LSTM, d, 3, batch_first=True), cell=made(nn.LSTMCell, d, 3), start=weight(1, d),
            a=linear(3, 3), b=linear(3, 3), v=weight(3),
        ),
        SEQUENCE,
    ),
    Case(
        "greedy decoding", ("repeated index", "module used twice"),
        net(
            greedy, enc=made(nn.GRU, d, 3, batch_first=True), tok=lambda: nn.Embedding(4, 2),
            cell=made(nn.GRUCell, 2, 3), out=linear(3, 4),
        ),
        SEQUENCE,
    ),
    Case(
        "coupling flow with its determinant", (),
        net(coupling, fc=linear(1, 2 * (d - 1)), shift=weight(d), scale=weight(d)), SEQUENCE,
    ),
    Case(
        "maximum over points, after a learned transform", ("hypernetwork",),
        net(points, a=made(nn.Conv1d, d, 4, 1), t=linear(4, d * d), b=made(nn.Conv1d, d, 4, 1)), SEQUENCE,
    ),
    Case(
        "skips between resolutions", (),
        net(
            u_net, a=made(nn.Conv2d, 2, 3, 3, padding=1), b=made(nn.Conv2d, 3, 3, 3, padding=1),
            up=made(nn.ConvTranspose2d, 3, 2, 2, stride=2), out=made(nn.Conv2d, 8, 2, 1),
        ),
        image(4, 4, channels=2),
    ),
    Case(
        "channels weighted by their means", (),
        net(
            lambda m, x: (lambda h: h * m.b(m.a(h.mean((2, 3))).relu()).sigmoid()[..., None, None])(m.conv(x)),
            conv=made(nn.Conv2d, 2, 4, 3), a=linear(4, 2), b=linear(2, 4),
        ),
        image(4, 4, channels=2),
    ),
    Case(
        "sampled where a layer says", ("grid_sample",),
        net(
            lambda m, x: m.conv(
                F.grid_sample(
                    x, F.affine_grid(m.fc(x.flatten(1)).view(-1, 2, 3), x.shape, align_corners=False),
                    align_corners=False,
                ),
            ),
            fc=linear(32, 6), conv=made(nn.Conv2d, 2, 2, 1),
        ),
        image(4, 4, channels=2),
    ),
    Case(
        "a kernel for each sample, by groups", ("hypernetwork",),
        net(kernels, fc=linear(4, 3), w=weight(3, 2, 4, 3)), image(6),
    ),
    Case(
        "a kernel for each pixel", ("hypernetwork",),
        net(
            lambda m, x: (
                (m.conv(x).view(len(x), 1, 9, 4, 4) * F.unfold(x, 3, padding=1).view(len(x), 2, 9, 4, 4)).sum(2)
            ),
            conv=made(nn.Conv2d, 2, 9, 1),
        ),
        image(4, 4, channels=2),
    ),
    Case(
        "users, items and their biases", ("ids (B,)", "repeated index", "rank 0"),
        net(
            lambda m, u, i: ((m.u(u) * m.i(i)).sum(-1) + m.b(u).squeeze(-1) + m.w)[:, None],
            u=lambda: nn.Embedding(5, 3), i=lambda: nn.Embedding(4, 3), b=lambda: nn.Embedding(5, 1), w=weight(),
        ),
        batch(ids(5, B), ids(4, B)),
    ),
    Case(
        "adaptive softmax", ("ragged", "ids (B,)"),
        net(
            lambda m, x, y: m.head(m.fc(x), y).output[:, None], fc=linear(d, 4),
            head=made(nn.AdaptiveLogSoftmaxWithLoss, 4, 10, [3, 6], div_value=2),
        ),
        batch(reals(B, d), fixed(1, 7, 4)),
    ),
]
# fmt: on
