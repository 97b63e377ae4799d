"""Convolutions of a traced step with channels last in memory, as a GPU's kernels read and write them.

A compiler lets the forward's convolutions choose, but hands the backward's what lay there when it was traced: channels
first. For ResNet-18 on an H200 the way there and back took 5.4 of 18.6 ms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.tidy import loosen

aten = torch.ops.aten

# Where the maps and the weight are among the arguments, and the groups.
_FORWARD, _BACKWARD = aten.convolution.default, aten.convolution_backward.default
_MAPS = {_FORWARD: (0, 1), _BACKWARD: (0, 1, 2)}
_GROUPS = {_FORWARD: 8, _BACKWARD: 9}


def is_slow(value: Tensor) -> bool:
    """Whether a convolution of these maps is slow with channels first."""
    return value.is_cuda and value.is_floating_point()


def channels_last(graph: Graph, slow: Callable[[Tensor], bool] = is_slow) -> int:
    """Give the convolutions of the graph, and our own ops for them, maps with their channels last; how many maps."""
    own = [getattr(torch.ops.eachgrad, name).default for name in ("conv_squares", "conv_gradients", "conv_sum")]
    found = [
        (node, k)
        for node in graph.nodes
        if node.target in own or (node.target in _MAPS and node.args[_GROUPS[node.target]] == 1)
        for k in _MAPS.get(node.target, (0, 1))
        if _is_map(node.args[k], slow)
    ]
    if not found:
        return 0
    loosen(graph)
    made: dict[Node, Node] = {}
    for node, k in found:
        node.update_arg(k, _turned(graph, cast(Node, node.args[k]), made))
    return len(made)


def _is_map(node: Any, slow: Callable[[Tensor], bool]) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.ndim == 4 and slow(value)


def _turned(graph: Graph, node: Node, made: dict[Node, Node]) -> Node:
    if node not in made:
        with graph.inserting_after(node):
            options: Any = {"memory_format": torch.channels_last}
            copy = made[node] = graph.call_function(aten.clone.default, (node,), options)
        # Or both would be kept: the one for convolutions, the other for the backward of a ReLU.
        node.replace_all_uses_with(copy, lambda user: user is not copy and _is_pointwise(user))
    return made[node]


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())
