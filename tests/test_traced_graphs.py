"""What is done to a traced graph before it is compiled: the numbers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from eachgrad.channels import channels_last
from eachgrad.tidy import merge

aten = torch.ops.aten


def targets(traced: torch.fx.GraphModule) -> list:
    return [node.target for node in traced.graph.nodes if node.op == "call_function"]


def detours(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """The statistics of one input, reached by four ways, and of two others that only look alike."""
    ways = (x, x.detach(), x.unsqueeze(0)[0], x.permute(1, 0).t().view(x.shape))
    same = [torch.var_mean(way, 1)[0] for way in ways]
    return *same, torch.var_mean(x.t().contiguous().view(x.shape), 1)[0], torch.var_mean(x + 0, 1)[0], x @ w


def test_one_tensor_is_one_node():
    x, w = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    traced = make_fx(detours, tracing_mode="fake")(x, w)
    want = detours(x, w)
    assert merge(traced.graph)
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(traced(x, w), want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    statistics = [node for node in traced.graph.nodes if node.target == aten.var_mean.correction]
    assert len({node.args[0] for node in statistics}) == 3  # the input, transposed, and the sum
    assert aten.detach.default not in targets(traced)


def test_parts_of_a_tensor_are_not_one():
    def parts(x: Tensor) -> tuple[Tensor, ...]:
        return x[0].exp(), x[1].exp(), x.t()[0].exp(), x.view(torch.int64).bitwise_not()

    x = torch.randn(2, 2, dtype=torch.float64)
    traced = make_fx(parts, tracing_mode="fake")(x)
    merge(traced.graph)
    traced.recompile()
    for a, b in zip(traced(x), parts(x), strict=True):
        assert torch.equal(a, b)


def convolutions(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    where = ([1, 1], [1, 1], [1, 1])
    out = torch.relu(torch.convolution(x, w, None, *where, False, [0, 0], 1))
    back = aten.convolution_backward(g * out, x, w, None, *where, False, [0, 0], 1, [True, True, False])
    window = ([3, 3], [1, 1], [1, 1], [1, 1])
    ours = torch.ops.eachgrad.conv_squares(x, g * out, *window), torch.ops.eachgrad.conv_gradients(x, g * out, *window)
    grouped = torch.convolution(x, w[:, :2], None, *where, False, [0, 0], 2)
    return out, back[0], back[1], *ours, torch.ops.eachgrad.conv_sum(x, g * out, *window), grouped


@pytest.mark.parametrize("merged", [False, True])
def test_convolutions_have_their_channels_last(merged):
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 4, 5, 6), torch.randn(8, 4, 3, 3), torch.randn(2, 8, 5, 6)
    traced = make_fx(convolutions, tracing_mode="fake")(x, w, g)
    want = traced(x, w, g)
    if merged:
        merge(traced.graph)
    assert channels_last(traced.graph) == 0  # not on a GPU
    assert channels_last(traced.graph, slow=lambda value: True) >= 3
    traced.graph.lint()
    traced.recompile()
    for a, b in zip(traced(x, w, g), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    clones = {node for node in traced.graph.nodes if node.target == aten.clone.default}
    for node in traced.graph.nodes:
        if node.target == aten.convolution_backward.default:
            assert set(node.args[:3]) <= clones
        if node.target == aten.convolution.default and node.args[8] == 2:
            assert not set(node.args[:2]) & clones
