"""In which order a traced step computes: what is asked of a gradient follows it, and not the whole backward.

A rule is asked when the backward is over, and so the trace has every gradient first and every answer after them. A compiler
fuses what is near, at most 64 of its kernels apart, and what it finds far away it reads from memory a second time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.fx import Graph, Node

from eachgrad.kernels import signals  # noqa: F401  (its op)
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


def late(graph: Graph, device: str = "cuda") -> int:
    """Move products that are answers behind the last flag that the host waits for, on such a device; how many.

    When the host knows the flag it goes on, to the update and to the next step. With nothing left to do until then the device
    would wait for it: norms are known with the last layer, and so all means would be there already. Half of them, by size, is
    what the host needs on an H200 beside ViT-B/16, and what they are made of is held no longer than for a clipped sum. Which
    they are depends on the weights alone, so that graphs that are one but for the number of samples stay so.
    """
    flags = list(graph.find_nodes(op="call_function", target=torch.ops.eachgrad.signal.default))
    if not flags or cast(Node, flags[-1].args[0]).meta["val"].device.type != device:
        return 0
    flag = max(flags)
    needed = _reached([flag], lambda node: node.all_input_nodes)
    products = [node for target in _PRODUCTS for node in graph.find_nodes(op="call_function", target=target)]
    found = [(node, _reached([node], lambda node: list(node.users))) for node in sorted(products) if node < flag]
    found = [(node, after) for node, after in found if not after & needed and not any(map(draws, after))]
    left, moved = sum(_size(node) for node, _ in found) // 2, set[Node]()
    for node, after in reversed(found):
        if left <= 0:
            break
        left -= _size(node)
        moved |= {other for other in after if other.op == "call_function" and other < flag}
    last = flag
    for node in sorted(moved):
        last.append(node)
        last = node
    return len(moved)


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.mm.dtype)


def _size(node: Node) -> int:
    return node.meta["val"].numel()


def _reached(begin: list[Node], below: Callable[[Node], list[Node]]) -> set[Node]:
    found, stack = set(begin), begin
    while stack:
        fresh = [node for node in below(stack.pop()) if node not in found]
        found.update(fresh)
        stack = [*stack, *fresh]
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
