"""Attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import (
    SEQUENCE,
    B,
    Case,
    Net,
    T,
    batch,
    cut_rows,
    cut_second,
    d,
    image,
    linear,
    net,
    reals,
    rows_of,
    scored_second,
    weight,
)


def attend(m: nn.Module, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """One head, by hand."""
    q, k, v = m.qkv(x).chunk(3, -1)
    weights = q @ k.mT
    if mask is not None:
        weights = weights.masked_fill(~mask, -torch.inf)
    return m.out(weights.softmax(-1) @ v)


def block_diagonal(m: nn.Module, x: Tensor) -> Tensor:
    """All samples in one row of tokens, kept apart by the mask."""
    rows = torch.arange(len(x)).repeat_interleave(x.shape[1])
    return attend(m, x.reshape(1, -1, d), rows[:, None] == rows).view(len(x), -1, 2)


def relative(m: nn.Module, x: Tensor) -> Tensor:
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1]) + x.shape[1] - 1
    return (m.qk(x) @ x.mT + m.table(distance).squeeze(-1)).softmax(-1) @ x


def with_mask(m: nn.Module) -> nn.Module:
    m.register_buffer("mask", torch.ones(B, B, dtype=torch.bool).tril())
    return m


def encoder(batch_first: bool, **options: object) -> Callable[[], nn.Module]:
    return lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=batch_first, **options)


def alibi(m: nn.Module, x: Tensor) -> Tensor:
    """Two heads, each with a slope of its own."""
    q = m.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
    place = torch.arange(x.shape[1], dtype=x.dtype)
    return (q @ q.mT - m.slopes.exp()[:, None, None] * (place[:, None] - place).abs()).softmax(-1) @ q


def rotary(m: nn.Module, x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), m.freq)
    a, b = m.fc(x).chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


def rotary_complex(m: nn.Module, x: Tensor) -> Tensor:
    angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), m.freq)
    pairs = torch.view_as_complex(m.fc(x).unflatten(-1, (2, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(2)


def heads_with_bias(m: nn.Module, x: Tensor) -> Tensor:
    n = x.shape[1]
    distance = torch.arange(n)[:, None] - torch.arange(n) + n - 1
    bias = m.table[distance.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
    q = m.q(x).unflatten(-1, (2, 2)).transpose(1, 2)
    return (q @ q.mT + bias.unsqueeze(0)).softmax(-1) @ q


def linear_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
    return torch.einsum("btd,btde->bte", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)


def retention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.qkv(x).chunk(3, -1)
    place = torch.arange(x.shape[1])
    return (q @ k.mT * (m.decay.sigmoid() ** (place[:, None] - place).clamp(min=0)).tril()) @ v


def patches(x: Tensor) -> Tensor:
    """Patches of 2 x 2 of a map (B, 2, 4, 4) as tokens, (B, 4, 8)."""
    return x.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


def shifted_windows(m: nn.Module, x: Tensor) -> Tensor:
    maps = torch.roll(x.permute(0, 2, 3, 1), (-1, -1), (1, 2))
    h = m.fc(maps.view(len(x), 2, 2, 2, 2, 2).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 2))
    h = (h @ h.mT + m.bias).softmax(-1) @ h
    h = h.view(len(x), 2, 2, 2, 2, -1).permute(0, 1, 3, 2, 4, 5).reshape(len(x), 4, 4, -1)
    return torch.roll(h, (1, 1), (1, 2))


def axial(m: nn.Module, x: Tensor) -> Tensor:
    h = x.permute(0, 2, 3, 1)
    for _ in range(2):
        lines = h.reshape(-1, 4, 2)
        h = m.mha(lines, lines, lines)[0].view(len(x), 4, 4, 2).transpose(1, 2)
    return h


def masked_autoencoder(m: nn.Module, x: Tensor) -> Tensor:
    """Half of the tokens pass, the others are a learned one, and all are put back where they were."""
    n, order = x.shape[1], x[..., 0].argsort(1)
    kept = m.fc(torch.gather(x, 1, order[:, : n // 2, None].expand(-1, -1, d)))
    full = torch.cat([kept, m.mask.expand(len(x), n - n // 2, -1)], 1)
    return m.out(torch.gather(full, 1, order.argsort(1)[..., None].expand(-1, -1, 3)) + m.pos)


def memory(m: nn.Module, x: Tensor) -> Tensor:
    cells, outs = m.cells.expand(len(x), -1, -1), []
    for step in x.unbind(1):
        key = m.key(step)
        weights = F.cosine_similarity(cells, key[:, None], -1).softmax(-1)[..., None]
        outs.append((weights * cells).sum(1))
        cells = cells * (1 - weights) + weights * key[:, None]
    return torch.stack(outs, 1)


def one_row(m: nn.Module, x: Tensor, offsets: Tensor) -> Tensor:
    """Attention within each sequence of a row of tokens, summed by sequence."""
    lengths = offsets.diff()
    owner = torch.arange(len(lengths)).repeat_interleave(lengths)
    q = m.q(x)
    mixed = (q @ q.mT).masked_fill(owner[:, None] != owner, -torch.inf).softmax(-1) @ q
    return torch.zeros(len(lengths), 3, dtype=x.dtype).index_add_(0, owner, mixed)


# fmt: off
ATTENTION = [
    Case(
        "MultiheadAttention", (),
        net(lambda m, x: m.mha(x, x, x)[0], mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
        batch(reals(B, T, 4)),
    ),
    Case(
        "MultiheadAttention without weights T = B", ("T = B",),
        net(
            lambda m, x: m.mha(x, x, x, need_weights=False)[0],
            mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        batch(reals(B, B, 4)),
    ),
    Case(
        "MultiheadAttention time first T = B", ("time first", "T = B"),
        net(lambda m, x: m.mha(x, x, x)[0], mha=lambda: nn.MultiheadAttention(4, 2)), batch(reals(B, B, 4)),
        scored_second, 1, cut_second,
    ),
    Case(
        "MultiheadAttention kdim vdim bias_k zero_attn", ("raw parameter", "two inputs"),
        net(
            lambda m, x, y: m.mha(x, y, y)[0],
            mha=lambda: nn.MultiheadAttention(
                4, 2, kdim=d, vdim=d, batch_first=True, add_bias_kv=True, add_zero_attn=True,
            ),
        ),
        batch(reals(B, T, 4), reals(B, 3, d)),
    ),
    Case(
        "MultiheadAttention masked", ("two inputs",),
        net(
            lambda m, x, pad: m.mha(x, x, x, key_padding_mask=pad.bool())[0],
            mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        batch(reals(B, T, 4), lambda g: torch.tensor([[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])),
    ),
    Case("TransformerEncoderLayer", ("T = B",), encoder(True), batch(reals(B, B, 4))),
    Case(
        "TransformerEncoderLayer norm first", (), encoder(True, norm_first=True, activation="gelu"),
        batch(reals(B, T, 4)),
    ),
    Case("TransformerEncoderLayer in eval", (), lambda: encoder(True)().eval(), batch(reals(B, T, 4))),
    Case(
        "TransformerEncoderLayer time first T = B", ("time first", "T = B"), encoder(False), batch(reals(B, B, 4)),
        scored_second, 1, cut_second,
    ),
    Case(
        "TransformerDecoderLayer", ("two inputs",),
        net(
            lambda m, x, y: m.layer(x, y),
            layer=lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        ),
        batch(reals(B, T, 4), reals(B, 3, 4)),
    ),
    Case(
        "attention by hand, causal mask (B, B)", ("T = B", "mask (B, B)"),
        lambda: with_mask(Net(lambda m, x: attend(m, x, m.mask), qkv=nn.Linear(d, 9), out=nn.Linear(3, 2))),
        batch(reals(B, B, d)),
    ),
    Case(
        "attention mask (B, B) kept in an attribute", ("T = B", "mask (B, B)"),
        net(
            lambda m, x: attend(m, x, m.mask[0]), qkv=linear(d, 9), out=linear(3, 2),
            mask=lambda: [torch.ones(B, B, dtype=torch.bool).tril()],
        ),
        batch(reals(B, B, d)),
    ),
    Case(
        "all samples in one row of tokens", ("packed", "T = B"),
        net(block_diagonal, qkv=linear(d, 9), out=linear(3, 2)), batch(reals(B, B, d)),
    ),
    Case(
        "scaled_dot_product_attention with learned bias", ("raw parameter", "T = B"),
        net(
            lambda m, x: F.scaled_dot_product_attention(
                *m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4), m.bias,
            ),
            qkv=linear(d, 24), bias=weight(2, B, B),
        ),
        batch(reals(B, B, d)),
    ),
    Case(
        "scaled_dot_product_attention over learned memory", ("raw parameter",),
        net(
            lambda m, x: F.scaled_dot_product_attention(
                m.q(x), m.k.expand(len(x), -1, -1), m.v.expand(len(x), -1, -1),
            ),
            q=linear(d, 4), k=weight(3, 4), v=weight(3, 4),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "learned queries through a layer", ("raw parameter", "derived weight"),
        net(
            lambda m, x: m.out((m.q(m.queries).tanh() @ m.k(x).mT).softmax(-1) @ x), queries=weight(B, d),
            q=linear(d, 4), k=linear(d, 4), out=linear(d, 2),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "relative positions", ("positions", "T = B", "derived weight"),
        net(relative, qk=linear(d, d), table=lambda: nn.Embedding(2 * B - 1, 1)), batch(reals(B, B, d)),
    ),
    Case(
        "grouped query attention", (),
        net(
            lambda m, x: F.scaled_dot_product_attention(
                m.q(x).unflatten(-1, (4, 2)).transpose(1, 2), m.k(x).unflatten(-1, (2, 2)).transpose(1, 2),
                m.v(x).unflatten(-1, (2, 2)).transpose(1, 2), is_causal=True, enable_gqa=True,
            ),
            q=linear(d, 8), k=linear(d, 4), v=linear(d, 4),
        ),
        batch(reals(B, T, d)),
    ),
    Case(
        "learned slopes of distances", ("raw parameter", "T = B"), net(alibi, q=linear(d, 4), slopes=weight(2)),
        batch(reals(B, B, d)),
    ),
    Case(
        "rotary with learned frequencies", ("raw parameter", "derived weight"),
        net(rotary, fc=linear(d, 4), freq=weight(2)), SEQUENCE,
    ),
    Case(
        "rotary with learned frequencies, complex", ("complex", "derived weight"),
        net(rotary_complex, fc=linear(d, 4), freq=weight(2)), SEQUENCE,
    ),
    Case(
        "relative bias of heads from a table T = B", ("positions", "T = B", "derived weight"),
        net(heads_with_bias, q=linear(d, 4), table=weight(2 * B - 1, 2)), batch(reals(B, B, d)),
    ),
    Case(
        "learned queries through MultiheadAttention", ("raw parameter", "expanded"),
        net(
            lambda m, x: m.mha(m.latent.expand(len(x), -1, -1), m.fc(x), m.fc(x))[0] + m.latent, latent=weight(B, 4),
            fc=linear(d, 4), mha=lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        ),
        SEQUENCE,
    ),
    Case(
        "object queries from an embedding, time first", ("raw parameter", "time first"),
        net(
            lambda m, x: m.layer(m.queries.weight[:, None].repeat(1, len(x), 1), m.fc(x).transpose(0, 1)).transpose(
                0, 1,
            ),
            queries=lambda: nn.Embedding(B, 4), fc=linear(d, 4),
            layer=lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0),
        ),
        SEQUENCE,
    ),
    Case("linear attention by cumulative sums", ("cumsum",), net(linear_attention, qkv=linear(d, 9)), SEQUENCE),
    Case(
        "retention with a learned decay", ("rank 0", "derived weight"),
        net(retention, qkv=linear(d, 9), decay=weight()), SEQUENCE,
    ),
    Case(
        "patches, class token and positions", ("raw parameter", "windows"),
        net(
            lambda m, x: m.layer(torch.cat([m.cls.expand(len(x), -1, -1), m.fc(patches(x))], 1) + m.pos)[:, 0],
            fc=linear(8, 4), cls=weight(1, 1, 4), pos=weight(1, 5, 4), layer=encoder(True),
        ),
        image(4, 4, channels=2),
    ),
    Case(
        "shifted windows with a learned bias", ("folded", "windows", "raw parameter"),
        net(shifted_windows, fc=linear(2, 3), bias=weight(4, 4)), image(4, 4, channels=2),
    ),
    Case(
        "rows, then columns, as the batch of one attention", ("folded", "module used twice"),
        net(axial, mha=lambda: nn.MultiheadAttention(2, 1, batch_first=True)), image(4, 4, channels=2),
    ),
    Case(
        "masked tokens put back in order", ("gather", "raw parameter"),
        net(masked_autoencoder, fc=linear(d, 3), mask=weight(1, 1, 3), pos=weight(1, T, 3), out=linear(3, 2)),
        SEQUENCE,
    ),
    Case(
        "memory that is read and written", ("raw parameter", "learned state"),
        net(memory, cells=weight(1, 3, 4), key=linear(d, 4)), SEQUENCE,
    ),
    Case(
        "all sequences in one row, by offsets", ("ragged", "no batch dimension"), net(one_row, q=linear(d, 3)),
        rows_of(1, 3, 2), cut=cut_rows, batch_size=B,
    ),
]
# fmt: on
