"""How the tensors of a traced graph lie in memory: otherwise than when it was traced, where that is faster.

Ops whose numbers do not depend on how their inputs lie take them as they come. All others are given them as they lay: an
op of torch may read memory as if it were contiguous, because what called it had seen to that when the graph was traced.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from eachgrad.alignment import align
from eachgrad.channels import channels_last
from eachgrad.entropy import entropies
from eachgrad.tidy import loosen

aten = torch.ops.aten

_INDIFFERENT = {
    aten.sum, aten.mean, aten.amax, aten.amin, aten.any, aten.all, aten.linalg_vector_norm, aten.var_mean, aten.cumsum,
    aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.convolution, aten.convolution_backward, aten.clone, aten._to_copy,
    aten.cat, aten.stack, aten.constant_pad_nd, aten.new_zeros, aten.new_ones, aten.new_empty, aten.new_full,
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.index, aten.index_select, aten.index_add,
    aten.index_put, aten.gather, aten.scatter, aten.scatter_add, aten.embedding, aten.where, aten.sort, aten.reshape,
    aten.flip, aten.tril, aten.triu, aten._softmax, aten._log_softmax, aten._softmax_backward_data,
    aten._log_softmax_backward_data,
}  # fmt: skip


class _Unfit(Exception):
    """A tensor cannot be put back."""


def laid_out(traced: GraphModule) -> Graph:
    """The graph with its matrices aligned and the channels of its maps last, if it gains by that.

    The gradients of large cross entropies are aligned where they are computed.
    """
    graph = copy.deepcopy(traced.graph)
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            node.meta["stride"] = value.stride()
    found = entropies(graph)
    if found:
        loosen(graph)
        _propagate(traced, graph)
    if not found + align(graph) + channels_last(graph):
        return traced.graph
    try:
        _restore(traced, graph)
    except _Unfit:
        return traced.graph
    return graph


def _restore(traced: GraphModule, graph: Graph) -> None:
    """Before each op that may care, put what it reads back to where it lay."""
    _propagate(traced, graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not _is_indifferent(node.target):
            for a in node.all_input_nodes:
                if _has_moved(a):
                    node.replace_input_with(a, _put_back(graph, node, a))


def _propagate(traced: GraphModule, graph: Graph) -> None:
    """Note how everything lies now."""
    given = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in given if isinstance(value, FakeTensor))
    FakeTensorProp(GraphModule(traced, graph), mode=mode).propagate_dont_convert_inputs(*given)


def _is_indifferent(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return True  # such as taking one of several outputs
    if target.namespace == "eachgrad" or target.overloadpacket in _INDIFFERENT or torch.Tag.pointwise in target.tags:
        return True
    if target in (aten.as_strided.default, aten._reshape_alias.default):
        return False
    returned = target._schema.returns
    return len(returned) == 1 and returned[0].alias_info is not None and not target._schema.is_mutable  # views


def _has_moved(node: Node) -> bool:
    value, before = node.meta.get("val"), node.meta.get("stride")
    if not isinstance(value, Tensor) or before is None:
        return False
    return any(a != b for a, b, n in zip(value.stride(), before, value.shape, strict=True) if n > 1)


def _put_back(graph: Graph, reader: Node, node: Node) -> Node:
    """A copy of the node that lies as it did."""
    shape, before = node.meta["val"].shape, node.meta["stride"]
    order = sorted(range(len(shape)), key=lambda k: (-before[k], k))
    size = 1
    for k in reversed(order):  # without gaps, or there is no such copy
        if shape[k] > 1 and before[k] != size:
            raise _Unfit
        size *= shape[k]
    with graph.inserting_before(reader):
        turned = graph.call_function(aten.permute.default, (node, order))
        options: Any = {"memory_format": torch.contiguous_format}
        lying = graph.call_function(aten.clone.default, (turned,), options)
        return graph.call_function(aten.permute.default, (lying, sorted(range(len(order)), key=lambda k: order[k])))
