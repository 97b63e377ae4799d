"""Whether a compiled step's first answers are the eager ones.

A compiler may be wrong, too: torch's gradient of multilabel_margin_loss is another one once it is compiled (torch 2.13).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from eachgrad.blocks.arithmetic import has_short_products
from eachgrad.dtypes import SIXTEEN_BITS
from eachgrad.queries import Answer

# Of the size of an answer. Sixteen bits round elsewhere once they are compiled: a quarter of a parameter's sum was seen.
CLOSE, ROUGH = 1e-3, 0.5
# How far from float32 compiled answers in sixteen bits may be: so many times as far as eager ones, or so much of their size.
FARTHER, SMALL = 3.0, 0.03
ENOUGH = 8  # numbers, from which on it is no chance that the eager ones are near
# One parameter's part of an answer may be off by so much of all, whatever its own size is: there are such that are rounding
# alone, as the gradient of the bias of keys in attention, which is zero. In float32, and in sixteen bits.
LEAST, LEAST_ROUGH = 3e-5, 3e-3


def is_rough(args: tuple, graph: Graph) -> bool:
    """Whether numbers of few bits are multiplied in a step with these arguments, traced to this graph."""
    tensors = [a for a in args if isinstance(a, Tensor)]
    kinds = {a.device.type for a in tensors}
    # Also in the middle of it: autocast may be on in the loss function alone.
    made = [node.meta.get("val") for node in graph.nodes]
    few = any(isinstance(a, Tensor) and a.dtype in SIXTEEN_BITS for a in (*tensors, *made))
    return few or ("cuda" in kinds and has_short_products()) or any(torch.is_autocast_enabled(kind) for kind in kinds)


def difference(found: Answer, wanted: Answer, rough: bool) -> str:
    """The first answer that is another one, and by how much; nothing if all agree."""
    for name, value in vars(wanted).items():
        numbers = _numbers(name, vars(found)[name], value)
        if any(a.shape != b.shape or bool((a.isfinite() != b.isfinite()).any()) for _, a, b in numbers):
            return f"{name} in its shape, or in which numbers are finite"
        for part in _parts(numbers):
            # Of sixteen bits float32 is the judge, part by part.
            if part.far > (ROUGH * part.all if rough else CLOSE * part.size + LEAST * part.all):
                return f"{part.name} by {part.far / max(part.size, 1e-30):.2g} of its size"
    return ""


def farther(found: Answer, eager: Answer, exact: Answer) -> str | None:
    """The first answer that is farther from the exact one than rounding accounts for, by what it does to the eager one.

    None where nothing could be told: there are few numbers, or none but zeros.
    """
    told = False
    for name, value in vars(exact).items():
        mine, theirs = (_parts(_numbers(name, vars(some)[name], value)) for some in (found, eager))
        for part, usual in zip(mine, theirs, strict=True):
            if part.numel < ENOUGH or not part.all:
                continue
            if part.far > max(SMALL * part.size, FARTHER * usual.far, LEAST_ROUGH * part.all):
                far, other = (some.far / max(part.size, 1e-30) for some in (part, usual))
                return f"{part.name} by {far:.2g} of its size in float32, the eager ones by {other:.2g}"
            told = True
    return "" if told else None


def speaks(answer: Answer) -> bool:
    """Whether an answer says anything: beside the losses not all is zero."""
    asked = {name: value for name, value in vars(answer).items() if name != "losses"}
    return any(isinstance(t, Tensor) and bool(t.any()) for t in tree_leaves(asked))


class _Part(NamedTuple):
    """An answer, or one parameter's part of it, beside another one."""

    name: str
    far: float  # how far they are from each other
    size: float  # of the other one
    all: float  # the size of the whole answer
    numel: int


def _numbers(name: str, found: Any, wanted: Any) -> list[tuple[str, Tensor, Tensor]]:
    """What can be compared of two answers, one beside the other."""
    pairs = zip(tree_leaves(found), tree_flatten_with_path(wanted)[0], strict=True)
    kept = [
        (path, a, b) for a, (path, b) in pairs if isinstance(b, Tensor) and (b.is_floating_point() or b.is_complex())
    ]
    return [(name + keystr(path), a, b) for path, a, b in kept]


def _parts(numbers: list[tuple[str, Tensor, Tensor]]) -> list[_Part]:
    """The answer as a whole, and each part of it if there are several."""
    far, size = [_size(a - b) for _, a, b in numbers], [_size(b) for _, _, b in numbers]
    names, counts, whole = [name for name, _, _ in numbers], [b.numel() for _, _, b in numbers], math.hypot(*size)
    each = [_Part(name, f, s, whole, n) for name, f, s, n in zip(names, far, size, counts, strict=True)]
    if len(each) < 2:
        return each
    return [_Part(names[0].partition("[")[0], math.hypot(*far), whole, whole, sum(counts)), *each]


def _size(t: Tensor) -> float:
    """The norm of all numbers that are finite."""
    return float(torch.linalg.vector_norm(t.detach().nan_to_num(0.0, 0.0, 0.0))) if t.numel() else 0.0
