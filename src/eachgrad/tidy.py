"""Changes to a traced graph that change no number: one tensor is one node, and memory may be laid out anew.

A rule sees its op's input by another way than the op did: detached, with its samples moved to the front of it where they
were already. The compiler does not know these as one, and computes statistics of a norm a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node


def merge(graph: Graph) -> int:
    """Replace nodes that view the same memory in the same way by the first of them; how many there were.

    The graph must not write into tensors.
    """
    first: dict[Any, Node] = {}
    found = 0
    for node in graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        same = first.setdefault(_place(value), node)
        if same is not node and node.op == "call_function":
            node.replace_all_uses_with(same)
            found += 1
    graph.eliminate_dead_code()
    return found


def _place(value: Tensor) -> tuple:
    """Where a tensor lies: two with the same place are equal."""
    storage = value.untyped_storage()._cdata  # of a fake one, which the node holds on to
    flags = value.is_conj(), value.is_neg(), value.device, value.dtype
    return storage, value.storage_offset(), tuple(value.shape), value.stride(), *flags


aten = torch.ops.aten
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_BY_STRIDES = {aten.as_strided.default, aten._reshape_alias.default}


def loosen(graph: Graph) -> bool:
    """Let nodes lie in memory otherwise than when they were traced; False if one cannot, and nothing was done.

    Views become reshapes, which copy where they must. An op that is given strides reads memory as it was: what it reads
    is copied into that order first.
    """
    readers = [node for node in graph.nodes if node.target in _BY_STRIDES]
    if not all(_is_contiguous(node.args[0]) for node in readers):
        return False
    for node in readers:
        with graph.inserting_before(node):
            options: Any = {"memory_format": torch.contiguous_format}
            copy = graph.call_function(aten.clone.default, (node.args[0],), options)
        copy.meta["val"] = node.args[0].meta["val"]
        node.update_arg(0, copy)
    for node in graph.nodes:
        if node.target in _VIEWS:
            node.target = aten.reshape.default
    return True


def _is_contiguous(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, Tensor) and value.is_contiguous() and value.storage_offset() == 0
