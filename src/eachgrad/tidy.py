"""Nodes of a traced graph that are one and the same tensor, made one.

A rule sees its op's input by another way than the op did: detached, with its samples moved to the front of it where they
were already. The compiler does not know these as one, and computes statistics of a norm a second time.
"""

from __future__ import annotations

from typing import Any

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
