"""Products of matrices that are padded in the graph are what they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from eachgrad.alignment import align, is_slow

aten = torch.ops.aten


def head(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    """A head of 13 tokens: the gradient of its logits is read by three products, two of them by sample."""
    B, T = t.shape
    logits = x.view(B * T, -1) @ w.t()
    g = torch.softmax(logits, 1).view(B, T, -1) - torch.nn.functional.one_hot(t, len(w))
    flat = g.view(B * T, -1)
    return flat @ w, g.mT @ x, g.permute(0, 2, 1) @ (2 * x), flat.t() @ x.view(B * T, -1), flat.sum(0)


def skewed(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, ...]:
    """Odd rows and columns, each alone and both at once."""
    odd = x[0] @ w.t()  # (8, 13)
    return (odd.t() @ x[0], w @ x[0].t(), odd @ odd.t(), odd.t() @ odd, odd.t() @ torch.cat([odd, odd[:, :4]], 1))


def problem() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 8, 16, dtype=torch.float64), torch.randn(13, 16).double(), torch.randint(13, (4, 8))


@pytest.mark.parametrize("fn", [head, skewed])
def test_the_numbers_stay(fn):
    args = problem()
    traced = make_fx(fn, tracing_mode="fake")(*args)
    want = traced(*args)
    assert align(traced.graph, slow=lambda value: value.dtype == torch.float64)
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(traced(*args), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_one_padding_serves_all_products():
    traced = make_fx(head, tracing_mode="fake")(*problem())
    assert align(traced.graph, slow=lambda value: value.dtype == torch.float64) == 4
    pads = [node for node in traced.graph.nodes if node.target == aten.cat.default]
    assert len(pads) == 2  # the gradient of the logits, and the weight


def test_only_where_it_pays():
    traced = make_fx(head, tracing_mode="fake")(*problem())
    assert align(traced.graph) == 0  # not on a GPU
    assert not is_slow(torch.empty(1 << 21, dtype=torch.bfloat16))
