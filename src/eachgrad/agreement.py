"""Whether a compiled step's first answers are the eager ones.

A compiler may be wrong, too: torch's gradient of multilabel_margin_loss is another one once it is compiled (torch 2.13).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils._pytree import tree_leaves

from eachgrad.blocks.arithmetic import has_short_products
from eachgrad.queries import Answer

# Of the size of an answer. Sixteen bits round elsewhere once they are compiled: a quarter of a parameter's sum was seen.
CLOSE, ROUGH = 1e-3, 0.5
# How far from float32 compiled answers in sixteen bits may be: so many times as far as eager ones, or so much of their size.
FARTHER, SMALL = 3.0, 0.03
ENOUGH = 8  # numbers, from which on it is no chance that the eager ones are near


def is_rough(args: tuple, graph: Graph) -> bool:
    """Whether numbers of few bits are multiplied in a step with these arguments, traced to this graph."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    kinds = {a.device.type for a in tensors}
    # Also in the middle of it: autocast may be on in the loss function alone.
    made = [node.meta.get("val") for node in graph.nodes]
    few = any(isinstance(a, Tensor) and a.dtype in (torch.float16, torch.bfloat16) for a in (*tensors, *made))
    return few or ("cuda" in kinds and has_short_products()) or any(torch.is_autocast_enabled(kind) for kind in kinds)


def difference(found: Answer, wanted: Answer, rough: bool) -> str:
    """The first answer that is another one, and by how much; nothing if all agree."""
    for name, value in vars(wanted).items():
        numbers = _numbers(vars(found)[name], value)
        if any(a.shape != b.shape or bool((a.isfinite() != b.isfinite()).any()) for a, b in numbers):
            return f"{name} in its shape, or in which numbers are finite"
        far, size = _apart(numbers)
        if far > (ROUGH if rough else CLOSE) * size:
            return f"{name} by {far / max(size, 1e-30):.2g} of its size"
    return ""


def farther(found: Answer, eager: Answer, exact: Answer) -> str | None:
    """The first answer that is farther from the exact one than rounding accounts for, by what it does to the eager one.

    None where nothing could be told: there are few numbers, or none but zeros.
    """
    told = False
    for name, value in vars(exact).items():
        mine, theirs = (_numbers(vars(some)[name], value) for some in (found, eager))
        (far, size), (usual, _) = _apart(mine), _apart(theirs)
        if sum(b.numel() for _, b in mine) < ENOUGH or not size:
            continue
        if far > max(SMALL * size, FARTHER * usual):
            return f"{name} by {far / size:.2g} of its size in float32, the eager ones by {usual / size:.2g}"
        told = True
    return "" if told else None


def _numbers(found: Any, wanted: Any) -> list[tuple[Tensor, Tensor]]:
    """What can be compared of two answers, one beside the other."""
    pairs = zip(tree_leaves(found), tree_leaves(wanted), strict=True)
    return [(a, b) for a, b in pairs if isinstance(b, Tensor) and (b.is_floating_point() or b.is_complex())]


def _apart(numbers: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """How far the first ones are from the second, and how large these are."""
    return _size([a - b for a, b in numbers]), _size([b for _, b in numbers])


def _size(parts: list[Tensor]) -> float:
    """The norm of all numbers that are finite on both sides."""
    squares = [
        torch.linalg.vector_norm(t.detach().nan_to_num(0.0, 0.0, 0.0)).double().cpu() ** 2 for t in parts if t.numel()
    ]
    return float(sum(squares)) ** 0.5 if squares else 0.0
