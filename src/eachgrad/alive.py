"""The memory of the nodes of a traced graph: whose it is, and how much."""

from __future__ import annotations

import operator

from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.tidy import origins

GIVEN = ("placeholder", "get_attr")


def size_of(node: Node) -> int:
    """The bytes of a node's tensor; none, if numbers decide its size."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not all(isinstance(n, int) for n in value.shape):
        return 0
    return value.numel() * value.element_size()


def bytes_of(node: Node) -> int:
    """The bytes that a node takes; an argument takes none."""
    return 0 if node.op in GIVEN else size_of(node)


def memory_of(graph: Graph) -> dict[Node, Node]:
    """The node whose memory each node reads, also for one of several views (of a `split`)."""
    found: dict[Node, Node] = {}
    viewed = origins(graph)
    for node in graph.nodes:
        source = _split(node) or (viewed[node] if viewed[node] is not node else None)
        found[node] = node if source is None else found[source]
    return found


def _split(node: Node) -> Node | None:
    """What a node is several views of, or one of several views."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if node.target is operator.getitem:
        return source if _split(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    if schema is None or len(schema.returns) != 1 or not isinstance(node.meta.get("val"), (list, tuple)):
        return None
    return source if schema.returns[0].alias_info is not None else None
