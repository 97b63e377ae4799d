"""Parameters used without a module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import encoder
from .base import B, Case, Maker, T, batch, d, ids, linear, net, reals, weight


def raw(name: str, body: Callable[..., object], *hazards: str, x: Maker | None = None, **parts) -> Case:
    return Case(name, ("raw parameter", *hazards), net(body, **parts), batch(x or reals(B, T, d)))


def fill(x: Tensor, value: Tensor) -> Tensor:
    out = torch.zeros(len(x), 2 * d, dtype=x.dtype)
    out[:, :d] = x[:, 0]
    out[:, d:] = value
    return out


def prompt(m: nn.Module, x: Tensor) -> Tensor:
    table = torch.zeros(x.shape[1:], dtype=x.dtype)
    table[0] = m.w
    return (x + table).tanh()


def quantised(m: nn.Module, x: Tensor) -> Tensor:
    z = m.fc(x)
    q = m.code[torch.cdist(z, m.code).argmin(-1)]
    return torch.cat([z + (q - z).detach(), (q - z.detach()).pow(2), (z - q.detach()).pow(2)], -1)


def best_keys(m: nn.Module, x: Tensor) -> Tensor:
    value, which = (x @ m.k.T).topk(2, -1)
    return (value.softmax(-1)[..., None] * m.v[which]).sum(-2)


def filtered(x: Tensor, kernel: Tensor) -> Tensor:
    """The causal convolution of x (B, d, T) by a kernel (d, T)."""
    n = x.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(x, n=2 * n) * torch.fft.rfft(kernel, n=2 * n), n=2 * n)[..., :n]


def long_convolution(m: nn.Module, x: Tensor) -> Tensor:
    return filtered(x.mT, m.k).mT + x * m.skip


def state_space(m: nn.Module, x: Tensor) -> Tensor:
    pole = (-torch.exp(m.decay) + 1j * m.turn) * m.step.exp()[:, None]
    out = torch.complex(*m.out.unbind(-1)) * (torch.exp(pole) - 1)
    kernel = torch.exp(pole[..., None] * torch.arange(x.shape[1], dtype=x.dtype))
    return filtered(x.mT, torch.einsum("hn,hnt->ht", out, kernel).real)


def scan(m: nn.Module, x: Tensor) -> Tensor:
    step, b, c = F.softplus(m.step(x)), m.b(x), m.c(x)
    h, outs = x.new_zeros(len(x), d, 2), []
    for t in range(x.shape[1]):
        h = torch.exp(-step[:, t, :, None] * m.a.exp()) * h + (step * x)[:, t, :, None] * b[:, t, None]
        outs.append((h * c[:, t, None]).sum(-1))
    return torch.stack(outs, 1)


def capsules(m: nn.Module, x: Tensor) -> Tensor:
    votes = torch.einsum("btd,tjed->btje", x, m.w)
    logits, out = votes.new_zeros(votes.shape[:3]), votes.new_zeros(())
    for _ in range(2):
        pooled = (logits.softmax(2)[..., None] * votes).sum(1)
        out = pooled * pooled.norm(dim=-1, keepdim=True) / (1 + pooled.pow(2).sum(-1, keepdim=True))
        logits = logits + (votes * out[:, None]).sum(-1)
    return out


def random_field(m: nn.Module, x: Tensor) -> Tensor:
    emit = m.fc(x)
    state = m.start + emit[:, 0]
    for t in range(1, x.shape[1]):
        state = torch.logsumexp(state[:, :, None] + m.trans + emit[:, t, None], 1)
    return state


def rows_and_columns(m: nn.Module, x: Tensor) -> Tensor:
    columns, rows = m.columns.unsqueeze(0).repeat(4, 1, 1), m.rows.unsqueeze(1).repeat(1, 4, 1)
    return x + torch.cat([columns, rows], -1).permute(2, 0, 1).unsqueeze(0)


def normals(m: nn.Module, x: Tensor) -> Tensor:
    parts = torch.distributions.Independent(torch.distributions.Normal(m.mean, m.s.exp()), 1)
    return torch.distributions.MixtureSameFamily(torch.distributions.Categorical(logits=m.logits), parts).log_prob(x)


def covariance(m: nn.Module, x: Tensor) -> Tensor:
    root = m.low.tril(-1) + torch.diag_embed(m.s.exp())
    return torch.distributions.MultivariateNormal(m.mean, scale_tril=root).log_prob(x)


ONE = torch.tensor([1, 1])


def index_put(x: Tensor, value: Tensor) -> Tensor:
    return x.index_put_((torch.arange(len(x)), torch.zeros(len(x), dtype=torch.long)), value)


def filled(x: Tensor, value: Tensor) -> Tensor:
    x[:, 0].fill_(value)
    return x


# fmt: off
RAW = [
    raw("mul", lambda m, x: x * m.w, w=weight(d)),
    raw("mul d = B", lambda m, x: x * m.w, "d = B", "T = B", w=weight(B), x=reals(B, B, B)),
    raw("mul by a column d = B", lambda m, x: m.w * x, "d = B", "T = B", w=weight(B, 1), x=reals(B, B, B)),
    raw("add", lambda m, x: (x + m.w).tanh(), w=weight(d)),
    raw("position table", lambda m, x: (x + m.w[: x.shape[1]]).tanh(), "positions", w=weight(6, d)),
    raw(
        "position table T = B", lambda m, x: (x + m.w).tanh(), "positions", "T = B", w=weight(B, d), x=reals(B, B, d),
    ),
    raw("position table (1, T, d)", lambda m, x: (m.w + x).tanh(), "positions", w=weight(1, T, d)),
    raw(
        "position table with dropout off", lambda m, x: (x + F.dropout(m.w, 0.0)).tanh(), "positions", w=weight(T, d),
    ),
    raw("cls token", lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), w=weight(1, 1, d)),
    raw(
        "cls token B = 1", lambda m, x: torch.cat([m.w.expand(len(x), -1, -1), x], 1), "B = 1", w=weight(1, 1, d),
        x=reals(1, T, d),
    ),
    raw("cls token repeated", lambda m, x: torch.cat([m.w.repeat(len(x), 1, 1), x], 1), w=weight(1, 2, d)),
    raw(
        "cls token then attention", lambda m, x: m.enc(torch.cat([m.w.expand(len(x), -1, -1), x], 1) + m.pos)[:, 0],
        "T = B", w=weight(1, 1, 4), pos=weight(1, B, 4), enc=encoder(True), x=reals(B, B - 1, 4),
    ),
    raw("layer scale", lambda m, x: x + m.w * m.fc(x), w=weight(d), fc=linear(d, d)),
    raw("temperature", lambda m, x: x / m.w.exp(), "rank 0", w=weight()),
    raw("temperature of logits", lambda m, x: (m.fc(x) * m.w).log_softmax(-1), "rank 0", w=weight(), fc=linear(d, 2)),
    raw("power", lambda m, x: x.abs() ** m.w.abs(), w=weight(d)),
    raw("where", lambda m, x: torch.where(x > 0, x, m.w), w=weight(d)),
    raw("masked_fill", lambda m, x: x.masked_fill(x > 0, m.w) * m.w, "rank 0", w=weight()),
    raw("mask token", lambda m, x: torch.where((x[..., :1] > 0), m.w, x).tanh(), w=weight(1, 1, d)),
    raw("lerp", lambda m, x: torch.lerp(x, x.flip(1), m.w.sigmoid()), w=weight(d)),
    raw("addcmul", lambda m, x: torch.addcmul(m.b, x, m.w, value=0.5).tanh(), w=weight(d), b=weight(d)),
    raw("clamp by a parameter", lambda m, x: torch.clamp(x, -m.w.abs(), m.w.abs()) * x, w=weight(d)),
    raw("number minus", lambda m, x: (1 - m.w) * x + 2 / (3 + m.w**2), w=weight(d)),
    raw("matmul right", lambda m, x: x @ m.w, w=weight(d, 2)),
    raw("matmul left", lambda m, x: m.w @ x, w=weight(2, T)),
    raw("matmul left T = B", lambda m, x: m.w @ x, "T = B", w=weight(B, B), x=reals(B, B, B)),
    raw("matmul rank 2 d = B", lambda m, x: x @ m.w, "d = B", w=weight(B, B), x=reals(B, B)),
    raw("matmul by a vector", lambda m, x: x @ m.w, w=weight(d)),
    raw(
        "matmul both sides by one parameter", lambda m, x: m.w.T @ (x @ m.w), "T = B", "module used twice",
        w=weight(B, 2), x=reals(B, B, B),
    ),
    raw(
        "mm, mv", lambda m, x: torch.mm(x, m.w) * torch.mv(x, m.v)[:, None], w=weight(d, 2), v=weight(d),
        x=reals(B, d),
    ),
    raw("outer product with a vector", lambda m, x: torch.outer(x, m.w), w=weight(2), x=reals(B)),
    raw("bmm with per-sample copies", lambda m, x: torch.bmm(x, m.w.expand(len(x), -1, -1)), w=weight(d, 2)),
    raw("baddbmm", lambda m, x: torch.baddbmm(m.b, x, m.w.expand(len(x), -1, -1)), w=weight(d, 2), b=weight(1, 1, 2)),
    raw("tensordot", lambda m, x: torch.tensordot(x, m.w, dims=([2], [1])), w=weight(2, d)),
    raw("einsum", lambda m, x: torch.einsum("btd,dp->btp", x, m.w), w=weight(d, 2)),
    raw(
        "einsum transposed T = B", lambda m, x: torch.einsum("btd,pt->bpd", x, m.w), "T = B", w=weight(2, B),
        x=reals(B, B, d),
    ),
    raw("einsum diagonal", lambda m, x: torch.einsum("bij,ii->bj", x, m.w), w=weight(B, B), x=reals(B, B, d)),
    raw("einsum ellipsis", lambda m, x: torch.einsum("...d,pd->...p", x, m.w), w=weight(2, d)),
    raw("einsum implicit output", lambda m, x: torch.einsum("abd,dz", x, m.w), w=weight(d, 2)),
    raw(
        "einsum three operands", lambda m, x: torch.einsum("btd,dh,hp->btp", x, m.a, m.b), a=weight(d, 2),
        b=weight(2, 3),
    ),
    raw("einsum one parameter twice", lambda m, x: torch.einsum("btd,dh,ph->btp", x, m.w, m.w), w=weight(d, 2)),
    raw("weights per head", lambda m, x: torch.einsum("btd,hde->bhte", x, m.w), w=weight(2, d, 3)),
    raw("weights per head by matmul", lambda m, x: x[:, None] @ m.w, "d = B", w=weight(B, d, 2)),
    raw(
        "weights per position", lambda m, x: torch.einsum("btd,tde->bte", x, m.w), "T = B", w=weight(B, d, 2),
        x=reals(B, B, d),
    ),
    raw(
        "bmm over heads, samples folded", lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), "T = B",
        w=weight(B, d, 2), x=reals(B, B, d),
    ),
    raw("setitem", lambda m, x: fill(x, m.w), w=weight(d)),
    raw("setitem into a table", prompt, w=weight(d)),
    raw("setitem into a table T = B", prompt, "T = B", w=weight(d), x=reals(B, B, d)),
    raw(
        "index_put into a table T = B",
        lambda m, x: (x + torch.zeros(B, d, dtype=x.dtype).index_put((torch.tensor([1]),), m.w[None])).tanh(),
        "T = B", w=weight(d), x=reals(B, B, d),
    ),
    raw("index by ids", lambda m, i: m.w[i].tanh(), "repeated index", w=weight(4, d), x=ids(4, B, T)),
    raw("index by negative ids", lambda m, i: m.w[i - 4].tanh(), "repeated index", w=weight(4, d), x=ids(4, B, T)),
    raw("index of a vector", lambda m, i: m.w[i].tanh(), "repeated index", "rank 1", w=weight(4), x=ids(4, B, T)),
    raw(
        "index of matrices", lambda m, i: torch.bmm(m.w[i], m.w[i].mT), "repeated index", "rank 3", w=weight(4, 2, 3),
        x=ids(4, B),
    ),
    raw(
        "index by two ids", lambda m, i: m.w[i[:, 0], i[:, 1]].tanh(), "repeated index", w=weight(4, 4, 2),
        x=ids(4, B, 2),
    ),
    raw("index_select", lambda m, i: m.w.index_select(0, i).tanh(), "repeated index", w=weight(4, 3), x=ids(4, B)),
    raw(
        "index_select of columns", lambda m, i: m.w.index_select(1, i).mT.tanh(), "repeated index", w=weight(3, 4),
        x=ids(4, B),
    ),
    raw(
        "gather", lambda m, i: m.w.expand(len(i), -1).gather(1, i).tanh(), "repeated index", w=weight(4),
        x=ids(4, B, T),
    ),
    raw("take", lambda m, i: torch.take(m.w, i).tanh(), "repeated index", w=weight(4), x=ids(4, B, T)),
    raw("norm of differences to a codebook", lambda m, x: torch.cdist(x, m.w), w=weight(3, d)),
    raw("squared distances to a codebook", lambda m, x: (x[:, :, None] - m.w).pow(2).sum(-1), w=weight(3, d)),
    raw("cosine similarity", lambda m, x: F.cosine_similarity(x[:, :, None], m.w, -1), w=weight(3, d)),
    raw(
        "null row before folded rows", lambda m, x: torch.cat([m.w, x.flatten(0, 1)])[1:].view(x.shape) + m.w,
        w=weight(1, d),
    ),
    raw(
        "penalty in every loss", lambda m, x: m.fc(x).sum((1, 2))[:, None] * 0.1 + m.fc.weight.pow(2).sum(),
        "derived weight", fc=linear(d, 2),
    ),
    raw(
        "convolution of a parameter", lambda m, x: F.conv1d(x, m.w) + F.conv1d(m.w, m.v).sum(), w=weight(2, T, 3),
        v=weight(1, T, 1),
    ),
    raw(
        "bias by addition time first", lambda m, x: (x.transpose(0, 1) + m.w).tanh().transpose(0, 1), "T = B",
        w=weight(B, 1, 1), x=reals(B, B, d),
    ),
    raw("cumulative gates", lambda m, x: (x.cumsum(1) * m.w.cumsum(0)).tanh(), "derived weight", w=weight(d)),
    raw("quantised by a codebook, straight through", quantised, "repeated index", fc=linear(d, d), code=weight(3, d)),
    raw(
        "mean of each sample, transposed d = B", lambda m, x: m.w * x.T.mean(0)[:, None], "d = B", w=weight(2),
        x=reals(B, B),
    ),
    raw("memory of keys and values", lambda m, x: (x @ m.k.T).softmax(-1) @ m.v, k=weight(3, d), v=weight(3, 2)),
    raw("best keys of a memory", best_keys, "repeated index", k=weight(5, d), v=weight(5, 2)),
    raw(
        "bumps on a learned grid",
        lambda m, x: torch.einsum("btik,oik->bto", torch.exp(-((x[..., None] - m.grid) ** 2)), m.w), grid=weight(3),
        w=weight(2, d, 3),
    ),
    raw(
        "learned frequencies", lambda m, x: m.fc(torch.cat([(x @ m.w.T).sin(), (x @ m.w.T).cos()], -1)),
        "module used twice", w=weight(3, d), fc=linear(6, 2),
    ),
    raw("long convolution by fft", long_convolution, "complex", k=weight(d, T), skip=weight(d)),
    raw(
        "diagonal state space by fft", state_space, "complex", step=weight(d), decay=weight(d, 2), turn=weight(d, 2),
        out=weight(d, 2, 2),
    ),
    raw("selective scan", scan, a=weight(d, 2), step=linear(d, d), b=linear(d, 2), c=linear(d, 2)),
    raw("capsules", capsules, "T = B", w=weight(B, 2, 3, d), x=reals(B, B, d)),
    raw(
        "conditional random field, as many tags as samples", random_field, "d = B", fc=linear(d, B),
        trans=weight(B, B), start=weight(B),
    ),
    raw(
        "generalised mean", lambda m, x: x.abs().clamp(min=1e-3).pow(m.p).mean(1).pow(1 / m.p), "rank 0",
        p=lambda: torch.tensor(3.0),
    ),
    raw(
        "table resized to the input", lambda m, x: x + F.interpolate(m.w, size=x.shape[1], mode="linear").mT,
        "positions", "derived weight", w=weight(1, d, 3),
    ),
    raw(
        "tables of rows and columns", rows_and_columns, "positions", "derived weight", rows=weight(4, 1),
        columns=weight(4, 1), x=reals(B, 2, 4, 4),
    ),
    raw("broadcast_tensors", lambda m, x: torch.mul(*torch.broadcast_tensors(x, m.w)), w=weight(d)),
    raw(
        "broadcast_tensors of a derived one", lambda m, x: torch.mul(*torch.broadcast_tensors(m.w.exp(), x)),
        "derived weight", "T = B", w=weight(B, d), x=reals(B, B, d),
    ),
    raw(
        "meshgrid", lambda m, x: torch.mul(*torch.meshgrid(x, m.w, indexing="ij")), "rank 1", w=weight(2), x=reals(B),
    ),
    raw(
        "normal density with a learned scale",
        lambda m, x: torch.distributions.Normal(m.fc(x), m.s.exp()).log_prob(x[..., :2]), fc=linear(d, 2),
        s=weight(2),
    ),
    raw("mixture of learned normals", normals, "distribution", logits=weight(3), mean=weight(3, d), s=weight(3, d)),
    raw(
        "normal density with a learned covariance", covariance, "derived weight", mean=weight(d), low=weight(d, d),
        s=weight(d),
    ),
    raw(
        "solve_triangular",
        lambda m, x: torch.linalg.solve_triangular(m.w.tril() + 3 * torch.eye(d), x.mT, upper=False),
        "derived weight", w=weight(d, d),
    ),
    raw(
        "stft with a learned window",
        lambda m, x: torch.stft(x, 4, 2, window=m.w, center=False, return_complex=True).abs(), "complex", w=weight(4),
        x=reals(B, 12),
    ),
    raw(
        "slice_scatter", lambda m, x: torch.slice_scatter(x, m.w.expand(len(x), 1, d), 1, 0, 1).tanh() * x,
        w=weight(d),
    ),
    raw("index_put_", lambda m, x: index_put(x.clone(), m.w) * x, "in-place before", w=weight(d)),
    raw(
        "index_add_ into a table T = B",
        lambda m, x: (x + torch.zeros(B, d, dtype=x.dtype).index_add_(0, ONE, m.w)).tanh(), "in-place before",
        "T = B", "derived weight", w=weight(2, d), x=reals(B, B, d),
    ),
    raw(
        "scatter_add_",
        lambda m, x: x.clone().scatter_add_(1, torch.zeros(len(x), 1, d).long(), m.w.expand(len(x), 1, d)).tanh(),
        "in-place before", w=weight(d),
    ),
    raw(
        "scatter_",
        lambda m, x: x.clone().scatter_(1, torch.zeros(len(x), 1, d).long(), m.w.expand(len(x), 1, d)) * x,
        "in-place before", w=weight(d),
    ),
    raw(
        "index_copy_", lambda m, x: x.clone().index_copy_(1, torch.tensor([1]), m.w.expand(len(x), 1, d)) * x,
        "in-place before", w=weight(d),
    ),
    raw("addmm_", lambda m, x: x.clone().addmm_(x, m.w, alpha=0.5), "in-place before", w=weight(d, d), x=reals(B, d)),
    raw("fill_", lambda m, x: x.clone().fill_(m.w) * x, "in-place before", "rank 0", w=weight()),
    raw("fill_ of a view", lambda m, x: filled(x.clone(), m.w) * x, "in-place before", "rank 0", w=weight()),
    raw(
        "sparse input", lambda m, x: torch.sparse.mm(x.relu().to_sparse(), m.w), "sparse", w=weight(d, 2),
        x=reals(B, d),
    ),
    raw(
        "sparse input by matmul", lambda m, x: x.relu().to_sparse() @ m.fc.weight.T + m.fc.bias, "sparse",
        "derived weight", fc=linear(d, 2), x=reals(B, d),
    ),
    raw(
        "distances to centres of the classes", lambda m, i: (m.e(i) - m.w[i]).pow(2), "repeated index",
        w=weight(4, 3), e=lambda: nn.Embedding(4, 3), x=ids(4, B),
    ),
    raw(
        "residuals to centres, softly assigned",
        lambda m, x: F.normalize((m.fc(x).softmax(-1)[..., None] * (x[:, :, None] - m.w)).sum(1), dim=-1),
        fc=linear(d, 3), w=weight(3, d),
    ),
]
# fmt: on
