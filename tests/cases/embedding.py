"""Embeddings: ids of every shape."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from .base import (
    B,
    Case,
    T,
    batch,
    cut_only,
    cut_second,
    d,
    fixed,
    ids,
    linear,
    made,
    net,
    reals,
    scored_second,
    weight,
)

REPEATED = fixed(1, 1, 4)
# fmt: off
EMBEDDING = [
    Case("ids (B, T)", (), lambda: nn.Embedding(7, d), batch(ids(7, B, T))),
    Case("ids (B,)", ("ids (B,)",), lambda: nn.Embedding(7, d), batch(ids(7, B))),
    Case("ids (B,) repeated", ("ids (B,)", "repeated index"), lambda: nn.Embedding(7, d), batch(REPEATED)),
    Case("ids repeated", ("repeated index",), lambda: nn.Embedding(2, d), batch(ids(2, B, T))),
    Case("ids (B, T, 2)", ("rank 3",), lambda: nn.Embedding(7, d), batch(ids(7, B, T, 2))),
    Case("ids T = B", ("T = B",), lambda: nn.Embedding(B, B), batch(ids(B, B, B))),
    Case(
        "ids time first T = B", ("T = B", "time first"), lambda: nn.Embedding(7, d), batch(ids(7, B, B)),
        scored_second, 1, cut_second,
    ),
    Case("ids B = 1", ("B = 1", "repeated index"), lambda: nn.Embedding(2, d), batch(ids(2, 1, T))),
    Case("padding_idx", ("padding_idx",), lambda: nn.Embedding(3, d, padding_idx=1), batch(ids(3, B, T))),
    Case(
        "functional padding_idx negative", ("padding_idx", "functional use"),
        net(lambda m, i: F.embedding(i, m.w, padding_idx=-1), w=weight(3, d)), batch(ids(3, B, T)),
    ),
    Case("max_norm", ("max_norm",), lambda: nn.Embedding(5, d, max_norm=0.7), batch(ids(5, B, T))),
    Case(
        "scale_grad_by_freq", ("scale_grad_by_freq", "repeated index"),
        lambda: nn.Embedding(3, d, scale_grad_by_freq=True), batch(ids(3, B, T)),
    ),
    Case("sparse embedding", ("sparse",), lambda: nn.Embedding(7, d, sparse=True), batch(ids(7, B, T))),
    Case("embedding_bag sum", ("repeated index",), lambda: nn.EmbeddingBag(4, d, mode="sum"), batch(ids(4, B, T))),
    Case(
        "embedding_bag mean", ("repeated index", "padding_idx"),
        lambda: nn.EmbeddingBag(4, d, mode="mean", padding_idx=2), batch(ids(4, B, T)),
    ),
    Case("embedding_bag max", ("repeated index",), lambda: nn.EmbeddingBag(4, d, mode="max"), batch(ids(4, B, T))),
    Case(
        "embedding_bag with weights", ("repeated index", "two inputs"),
        net(lambda m, i, w: m.bag(i, per_sample_weights=w), bag=made(nn.EmbeddingBag, 4, d, mode="sum")),
        batch(ids(4, B, T), reals(B, T)),
    ),
    Case(
        "embedding_bag with offsets", ("ragged", "no batch dimension"),
        net(lambda m, i, start: m.bag(i, start), bag=made(nn.EmbeddingBag, 4, d, mode="mean")),
        batch(ids(4, 7), fixed(0, 3, 4)),
        cut=lambda batch, i: (batch[0].tensor_split([3, 4])[i], torch.zeros(1, dtype=torch.long)), batch_size=B,
    ),
    Case(
        "positions (T,)", ("positions",),
        net(lambda m, x: m.fc(x + m.pos(torch.arange(T))), fc=linear(d, 2), pos=lambda: nn.Embedding(6, d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "positions (1, T)", ("positions",),
        net(lambda m, x: m.fc(x + m.pos(torch.arange(T)[None])), fc=linear(d, 2), pos=lambda: nn.Embedding(6, d)),
        batch(reals(B, T, d)),
    ),
    Case(
        "positions (T,) T = B", ("positions", "T = B"),
        net(lambda m, x: m.fc(x + m.pos(torch.arange(B))), fc=linear(d, 2), pos=lambda: nn.Embedding(6, d)),
        batch(reals(B, B, d)),
    ),
    Case(
        "positions expanded", ("positions", "T = B"),
        net(
            lambda m, i: m.fc(m.tok(i) + m.pos(torch.arange(B)[None].expand(i.shape))),
            tok=lambda: nn.Embedding(7, d), pos=lambda: nn.Embedding(6, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, B)),
    ),
    Case(
        "positions among the arguments (T,)", ("positions", "T = B"),
        net(
            lambda m, i, where: m.fc((m.tok(i) + m.pos(where)).tanh()), tok=lambda: nn.Embedding(7, d),
            pos=lambda: nn.Embedding(6, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, B), fixed(2, 0, 2)), cut=cut_only(0),
    ),
    Case(
        "token types", ("two inputs",),
        net(
            lambda m, i, kind: m.fc(m.tok(i) + m.kind(kind)), tok=lambda: nn.Embedding(7, d),
            kind=lambda: nn.Embedding(2, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, T), ids(2, B, T)),
    ),
    Case(
        "token types zeros in forward", ("repeated index",),
        net(
            lambda m, i: m.fc(m.tok(i) + m.kind(torch.zeros_like(i))), tok=lambda: nn.Embedding(7, d),
            kind=lambda: nn.Embedding(2, d), fc=linear(d, 2),
        ),
        batch(ids(7, B, T)),
    ),
]
# fmt: on
