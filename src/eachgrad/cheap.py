"""Which nodes of a traced graph are cheap to compute a second time: pointwise ops, views, and norms by their statistics."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.dtypes import accumulation_dtype

aten = torch.ops.aten

_BY_STRIDES = {aten.as_strided.default, aten._reshape_alias.default, aten.view.dtype}

Call = Callable[..., Node]  # of an op and its arguments


def inputs_of(node: Node, memory: dict[Node, Node]) -> list[Node] | None:
    """What a cheap node is computed from; None for one that is not. `memory`: the node that each is a view of."""
    if node.op != "call_function" or node.target in _BY_STRIDES:
        return None
    if memory[node] is not node or _is_pointwise(node):
        return node.all_input_nodes
    source = node.args[0] if node.target is operator.getitem else None
    return _norm_inputs(source) if isinstance(source, Node) and node.args[1] == 0 else None


def _is_pointwise(node: Node) -> bool:
    op, value = node.target, node.meta.get("val")
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or not isinstance(value, Tensor):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags or len(op._schema.returns) != 1 or not node.all_input_nodes:
        return False
    if op is aten._to_copy.default:  # between devices it takes long
        return all(_device(a) == value.device for a in node.all_input_nodes)
    return torch.Tag.pointwise in op.tags


def _device(node: Node) -> torch.device | None:
    value = node.meta.get("val")
    return value.device if isinstance(value, Tensor) else None


def name_statistics(graph: Graph) -> None:
    """Give every output of a norm a node."""
    for norm in [node for node in graph.nodes if node.target in NORMS]:
        named = {user.args[1] for user in norm.users}
        for k in set(range(1, len(norm.meta["val"]))) - named:
            with graph.inserting_after(norm):
                graph.call_function(operator.getitem, (norm, k)).meta["val"] = norm.meta["val"][k]


def _statistics(norm: Node) -> list[Node]:
    places: dict[Any, Node] = {user.args[1]: user for user in norm.users}
    return [places[k] for k in range(1, len(norm.meta["val"]))]


def _norm_inputs(norm: Node) -> list[Node] | None:
    """Input, statistics, weight and bias of a norm; None where the statistics are rounded, as a CPU does in sixteen bits."""
    if norm.target not in NORMS:
        return None
    statistics, wide = _statistics(norm), _wide(norm.args[0])
    if any(s.meta["val"].dtype != wide for s in statistics):
        return None
    return [*norm.all_input_nodes, *statistics]


def _wide(x: Any) -> torch.dtype:
    """What a norm of x computes in."""
    return accumulation_dtype(x.meta["val"].dtype)


def normed(norm: Node, call: Call, now: Callable[[Node], Node]) -> Node:
    """The first output of a norm, from its statistics; `now` has the node that is to be read for each of its inputs."""
    x, scale, shift = (None if a is None else now(a) for a in _operands(norm))
    assert x is not None
    value, narrow, wide = x, x.meta["val"].dtype, _wide(x)
    if narrow != wide:
        value = call(aten._to_copy.default, value, dtype=wide)
    *mean, rstd = [now(s) for s in _statistics(norm)]
    if norm.target is aten.native_group_norm.default:
        C, G = norm.args[4], norm.args[6]
        *mean, rstd = [_each_channel(s, C, G, x.meta["val"].ndim, call) for s in (*mean, rstd)]
        shape = [C, *[1] * (x.meta["val"].ndim - 2)]
        scale, shift = (None if a is None else call(aten.reshape.default, a, shape) for a in (scale, shift))
    for m in mean:
        value = call(aten.sub.Tensor, value, m)
    value = call(aten.mul.Tensor, value, rstd)
    if scale is not None:
        value = call(aten.mul.Tensor, value, scale)
    if shift is not None:
        value = call(aten.add.Tensor, value, shift)
    return value if narrow == wide else call(aten._to_copy.default, value, dtype=narrow)


def _operands(norm: Node) -> list[Any]:
    """Input, weight and bias, as far as the op has them."""
    x, *rest = norm.args
    return [x, *(rest[k] if k is not None and k < len(rest) else None for k in NORMS[norm.target])]


def _each_channel(s: Node, C: Any, G: Any, ndim: int, call: Call) -> Node:
    """A statistic (N, G) of groups as one of channels, (N, C, 1, ...)."""
    N = s.meta["val"].shape[0]
    apart = call(aten.expand.default, call(aten.unsqueeze.default, s, 2), [N, G, C // G])
    return call(aten.reshape.default, apart, [N, C, *[1] * (ndim - 2)])


# Where weight and bias are among the arguments after the input.
NORMS: dict[Any, tuple[int | None, int | None]] = {
    aten.native_layer_norm.default: (1, 2),
    aten.native_group_norm.default: (0, 1),
    aten._fused_rms_norm.default: (1, None),
}
