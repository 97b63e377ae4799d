"""Sums that the norms of a traced step are of, term by term.

The input of a norm in a transformer is the sum of what the layers before have put out. A compiler adds it up anew in each
kernel that reads it, and writes it every few layers, when there are too many terms. A kernel of ours that reads it would
have it written for each norm: so it is given terms, which are there anyway.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.kernels.library import DTYPES
from eachgrad.kernels.norm_sums import MOST
from eachgrad.tidy import narrower

aten = torch.ops.aten

# After so many terms a sum is taken as written: about as a compiler does, which counts what it reads.
PERIOD = 4
assert MOST > PERIOD


def spread(graph: Graph) -> int:
    """Give sums for norms the terms of their input instead of it; of how many there were several."""
    depths: dict[Node, int] = {}  # how many terms have been added to the first one
    found = 0
    for node in list(graph.nodes):
        args: Any = node.args
        depths[node] = 1 + max(depths[a] for a in args[:2]) if _is_sum(node) else 0
        if node.target is torch.ops.eachgrad.norm_sums.default:
            terms = _terms(graph, args[1][0], depths)
            node.update_arg(1, terms)
            found += len(terms) > 1
    graph.eliminate_dead_code()
    return found


def _terms(graph: Graph, x: Node, depths: dict[Node, int]) -> list[Node]:
    terms: list[Node] = []
    while depths[x] % PERIOD:
        a, b = cast(Any, x.args[:2])
        x, term = (a, b) if depths[a] >= depths[b] else (b, a)
        terms.insert(0, narrower(graph, term) or term)
    return [narrower(graph, x) or x, *terms]


def _is_sum(node: Node) -> bool:
    """Whether it adds two tensors of its size in float32: what such sums are does not depend on who adds them."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return False
    value, given = node.meta["val"], [_value(a) for a in node.args[:2]]
    if value.dtype != torch.float32 or value.ndim != 3:
        return False
    return all(a is not None and a.shape == value.shape and a.dtype in DTYPES for a in given)


def _value(a: Any) -> Tensor | None:
    value = a.meta.get("val") if isinstance(a, Node) else None
    return value if isinstance(value, Tensor) else None
