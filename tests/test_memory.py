"""Norms and sums over samples allocate nothing of the size of B gradients."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import eachgrad
from eachgrad import plan

B = 64


class Largest(TorchDispatchMode):
    """Remembers how many elements the largest tensor has that is made while it is active."""

    def __init__(self):
        super().__init__()
        self.numel, self.op = 0, None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            # By its storage: a view that repeats its elements takes no memory.
            if isinstance(t, torch.Tensor):
                numel = t.untyped_storage().nbytes() // t.element_size()
                if numel > self.numel:
                    self.numel, self.op = numel, func
        return out


QUERIES = {
    "norms": lambda grads: grads.norms(),
    "norms by parameter": lambda grads: grads.norms(by="parameter"),
    "weighted_sum": lambda grads: grads.weighted_sum(torch.ones(B)),
    "clipped_sum": lambda grads: grads.clipped_sum(1.0),
}


class Tied(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.tokens(ids).cumsum(1).tanh())[:, -1]


class HeadFirst(Tied):
    """The same parameter, met by a matrix product first."""

    def forward(self, x, ids):
        return (self.head(x)[..., :64] * self.tokens(ids)).sum(1)


def linears():
    return nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def embeddings():
    return nn.Sequential(nn.Embedding(5000, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def repeated():
    layer = nn.Linear(128, 128)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer)


MODELS = {
    "linear, T = 1": (linears, lambda: (torch.randn(B, 128),)),
    "linear, T = 8": (linears, lambda: (torch.randn(B, 8, 128),)),
    "linear, time first": (linears, lambda: (torch.randn(8, B, 128),)),
    "one linear used three times": (repeated, lambda: (torch.randn(B, 2, 128),)),
    "embedding, T = 1": (embeddings, lambda: (torch.randint(5000, (B,)),)),
    "embedding, T = 8": (embeddings, lambda: (torch.randint(5000, (B, 8)),)),
    "embedding, one row": (embeddings, lambda: (torch.zeros(B, 8, dtype=torch.long),)),
    "tied embedding and head": (lambda: Tied(600, 64), lambda: (torch.randint(600, (B, 2)),)),
    "tied head and embedding": (
        lambda: HeadFirst(600, 64),
        lambda: (torch.randn(B, 2, 64), torch.randint(600, (B, 2))),
    ),
}


def recorded(model, *batch):
    with eachgrad.record(model, batch_size=B) as tape:
        out = model(*batch)
        losses = out.pow(2).sum([k for k in range(out.ndim) if k != out.shape.index(B)])
    return tape.backward(losses)


def bound(model):
    """Far below B gradients of the largest parameter."""
    return B * max(p.numel() for p in model.parameters()) // 8


@pytest.mark.parametrize("query", QUERIES)
@pytest.mark.parametrize("name", MODELS)
def test_no_query_makes_the_gradients_of_all_samples(name, query):
    make, batch = MODELS[name]
    model = make()
    grads = recorded(model, *batch())
    with Largest() as largest:
        QUERIES[query](grads)
    assert 0 < largest.numel < bound(model), largest.op


@pytest.mark.parametrize("name", MODELS)
def test_no_backward_makes_the_gradients_of_all_samples(name):
    make, batch = MODELS[name]
    model, inputs = make(), batch()
    with Largest() as largest:
        recorded(model, *inputs)
    assert 0 < largest.numel < bound(model), largest.op


def test_the_measure_sees_the_gradients_of_all_samples():
    model = linears()
    grads = recorded(model, torch.randn(B, 128))
    with Largest() as largest:
        grads.dense()
    assert largest.numel == B * 256 * 256


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(128, 128), (B, 64, 128)),
        (lambda: nn.Conv1d(16, 32, 3), (B, 16, 20)),
        (lambda: nn.Conv2d(4, 64, 3), (B, 4, 6, 6)),
    ],
    ids=["linear", "conv1d", "conv2d"],
)
@pytest.mark.parametrize("query", ["norms", "weighted_sum", "clipped_sum"])
def test_the_direct_routes_go_in_chunks(make, shape, query, monkeypatch):
    # These do make gradients of single samples, because that is cheaper; a few at a time. A clipped sum keeps
    # them where that takes no more room than the factors.
    model, x = make().double(), torch.randn(shape).double()
    whole = QUERIES[query](recorded(model, x))
    chunk = 8 * model.weight.numel()
    monkeypatch.setattr(plan, "CHUNK", chunk)
    grads = recorded(model, x)
    inputs = max(x.numel(), math.prod(model(x).shape))
    with Largest() as largest:
        parts = QUERIES[query](grads)
    kept = B * model.weight.numel() if query == "clipped_sum" else 0
    factors = x.numel() + math.prod(model(x).shape)
    allowed = max(chunk, inputs, kept if kept <= factors else 0)
    assert largest.numel <= allowed < B * model.weight.numel() + (kept == allowed), largest.op
    torch.testing.assert_close(parts, whole)
