"""Norms by Grams of several layers of a traced step, in one launch.

A layer has some more programs than a GPU has multiprocessors, and those that are left over take as long as all the others. Of
four layers fewer are left over. They wait for the last of the four. What they read must be kept until then anyway if a sum
reads it again; for norms alone it is kept for that, where four layers are few of all.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.alive import GIVEN, memory_of
from eachgrad.kernels.gram import MOST
from eachgrad.tidy import call

ops = torch.ops.eachgrad

SHARE = 8  # layers that are kept for a launch are at most this part of all


def together(graph: Graph) -> int:
    """Let the norms of neighbours be computed together, where the last of them is; of how many layers.

    The graph must not write into tensors. What is joined depends on its structure, so that graphs that are one but for the
    number of samples stay so.
    """
    groups = [group for group in _groups(graph) if len(group) > 1]
    for group in groups:
        _join(graph, group)
    return sum(map(len, groups))


def _groups(graph: Graph) -> list[list[Node]]:
    found, reads = list[list[Node]](), _Reads(graph)
    nodes = graph.find_nodes(op="call_function", target=ops.gram_norms.default)
    most, current = min(MOST, len(nodes) // SHARE), dict[tuple, list[Node]]()
    for node in nodes:
        # Those that would be kept for a launch, of whichever kind: with this one no more than `most`, or they go now.
        kept = {kind: sum(not reads.stays(m, node) for m in group) for kind, group in current.items()}
        full = sum(kept.values()) + 1 > most
        for kind, group in list(current.items()):
            if len(group) == MOST or (full and kept[kind]) or not all(reads.can_wait(m, node) for m in group):
                del current[kind]
        if _kind(node) not in current:
            found.append(current.setdefault(_kind(node), []))
        current[_kind(node)].append(node)
    return found


def _kind(node: Node) -> tuple:
    """What the nodes of one launch have in common; a node that is to stay alone has its own."""
    left = cast(Node, node.args[0]).meta["val"]
    fixed = all(isinstance(n, int) for n in left.shape)
    return (*left.shape[:2], left.dtype, left.device) if fixed and left.dtype.itemsize == 2 else (node,)


class _Reads:
    """Until when the tensors of a graph are there."""

    def __init__(self, graph: Graph):
        self.memory = memory_of(graph)
        self.last: dict[Any, Node] = {}  # who reads each piece of memory last
        for node in graph.nodes:
            for user in node.users:
                self.last[self._piece(node)] = max(user, self.last.get(self._piece(node), user))

    def _piece(self, node: Node) -> Any:
        """The memory of a node; that of a reshape that was a copy is its own."""
        value = node.meta.get("val")
        return self.memory[node], value.untyped_storage()._cdata if isinstance(value, Tensor) else None

    def can_wait(self, node: Node, other: Node) -> bool:
        """Whether nobody needs a node's result before a later one."""
        return all(user > other for user in node.users)

    def stays(self, node: Node, other: Node) -> bool:
        """Whether what a node reads is there until a later one anyway."""
        return all(self.memory[a].op in GIVEN or self.last[self._piece(a)] >= other for a in node.all_input_nodes)


def _join(graph: Graph, group: list[Node]) -> None:
    lefts, rights = zip(*(cast(tuple[Node, Node], node.args) for node in group), strict=True)
    with graph.inserting_before(group[-1]):
        joint = call(graph, ops.gram_norms_of_many.default, list(lefts), list(rights))
        parts = [call(graph, torch.ops.aten.select.int, joint, 0, k) for k in range(len(group))]
    for node, part in zip(group, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)
