"""Products of a traced step that are divided by a number and read nowhere else: divided where they are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from eachgrad.kernels import mean_product  # noqa: F401  (its op)
from eachgrad.tidy import call

aten = torch.ops.aten

_PRODUCTS = {aten.mm.default, aten.mm.dtype}


def is_real_on_gpu(value: Tensor) -> bool:
    return value.is_cuda and value.dtype == torch.float32


def divide_within(graph: Graph, fits: Callable[[Tensor], bool] = is_real_on_gpu) -> int:
    """Let a product that a whole number divides have it as a factor; how many there were.

    After whatever looks for products: no other pass knows the op.
    """
    found = 0
    for node in graph.find_nodes(op="call_function", target=aten.div.Tensor):
        product, count = node.args
        if not isinstance(product, Node) or type(count) is not int or count <= 0 or not _is_alone(product):
            continue
        if not fits(product.meta["val"]) or node.meta["val"].dtype != product.meta["val"].dtype:
            continue
        with graph.inserting_before(product):
            made = call(graph, torch.ops.eachgrad.mean_product.default, *product.args[:2], count)
        node.replace_all_uses_with(made)
        graph.erase_node(node)
        graph.erase_node(product)
        found += 1
    return found


def _is_alone(product: Node) -> bool:
    """Whether it is a product with one reader, and of what the op makes of its factors: float32 of sixteen bits."""
    if product.target not in _PRODUCTS or len(product.users) != 1:
        return False
    factors: Any = [a.meta["val"] for a in product.all_input_nodes]
    wide = {torch.float32} if product.target is aten.mm.default else {torch.bfloat16, torch.float16}
    return {t.dtype for t in factors} <= wide
