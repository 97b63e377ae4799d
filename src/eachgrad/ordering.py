"""In which order a traced step computes: what is asked of a gradient follows it, and not the whole backward.

A rule is asked when the backward is over, and so the trace has every gradient first and every answer after them. A compiler
fuses what is near, at most 64 of its kernels apart, and what it finds far away it reads from memory a second time.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from eachgrad.tidy import draws

# Inductor would move each node to the first that reads it: all answers to the norms of all, at the end again.
KEPT = {"reorder_for_locality": False}
# It would let rows of more than 1024 numbers begin at multiples of 128 bytes: GPT-2's 50,264 logits at 50,304.
WHOLE = {"comprehensive_padding": False}


def soon(graph: Graph, turn: Node) -> int:
    """Move whatever follows from `turn` to the last of what it follows from; how many were moved.

    What it reads beside, which does not follow from `turn`, comes along. The graph must not write into tensors.
    """
    late, found = {turn}, 0
    for node in list(graph.nodes):
        given = [a for a in node.all_input_nodes if a in late]
        if node.op != "call_function" or not given:
            continue
        late.add(node)
        last = max(given)
        moved = [*sorted(_missing(node, last)), node]
        if last.next is node or any(map(draws, moved)):
            continue
        for other in moved:
            last.append(other)
            last = other
        found += 1
    return found


def _missing(node: Node, last: Node) -> set[Node]:
    """What a node is computed from that comes after `last`."""
    found, stack = set[Node](), [node]
    while stack:
        for a in stack.pop().all_input_nodes:
            if a > last and a not in found:
                found.add(a)
                stack.append(a)
    return found


def in_order(options: dict[str, Any], whole: bool = False) -> dict[str, Any]:
    """The options of torch.compile, with those of its own compiler that keep a graph's order.

    `whole`: and that leave no gaps between rows, where one tensor is written over another.
    """
    if options["backend"] != "inductor":
        return options
    from torch._inductor import list_mode_options

    mode = options.get("mode")
    modes = {} if mode is None else list_mode_options(mode, dynamic=False)
    return {"backend": "inductor", "options": modes | KEPT | (WHOLE if whole else {})}
