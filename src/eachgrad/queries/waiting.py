"""Norms by factors, asked for alone: the factors of a few layers wait for each other, and are let go.

A kernel takes as long for one layer as for a bit more than one, and the host waits for the device before it goes on: four
layers at a time are one launch and one such wait. All layers together would be, too, but what they are made of is as much as
a whole forward keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks.arithmetic import is_traced
from eachgrad.blocks.base import Rough
from eachgrad.gradient import Gradient, total
from eachgrad.kernels.gram import MOST, gram_parts_of_many
from eachgrad.queries.joining import Joined
from eachgrad.queries.packing import Apart, Crossed, outer_of

SHARE = 8  # factors that wait are at most this part of those of all parameters


class Measuring(Protocol):
    """A pack that is asked for norms alone."""

    def add(self, gradient: Gradient) -> None: ...

    def squares(self) -> Tensor:
        """(B,), in float32 or better."""
        ...


def pack_for_norms(kind: type[Joined] | type[Apart] | type[Crossed], gradient: Gradient, room: int | None) -> Measuring:
    """A pack for the norms of gradients such as this one; `room`: the bytes that it may hold, None for any."""
    # A compiler holds nothing that nobody reads, and lets a few wait by itself (launches.py).
    return Passing(room) if kind is Crossed and not is_traced(outer_of(gradient).left) else kind()


def room_of(costs: Mapping[str, plan.Cost], budget: int | None) -> int | None:
    """The bytes of factors that may wait; None: all are there anyway, and nothing is said."""
    if not costs:
        return budget
    share = sum(cost.factors for cost in costs.values()) // SHARE
    return share if budget is None else min(share, budget)


class Passing:
    """Gradients by their factors, of which at most MOST are held."""

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self.waiting: list[Gradient] = []
        self.bytes = 0
        self.found: list[Tensor] = []  # (B,) each

    def add(self, gradient: Gradient) -> None:
        size = sum(t.nbytes for t in outer_of(gradient).factors())
        if self.room is not None and self.bytes + size > self.room:
            self._let_go()
        self.waiting.append(gradient)
        self.bytes += size
        # Nobody waits for one that will not fit, if it is as large.
        if len(self.waiting) == MOST or (self.room is not None and self.bytes + size > self.room):
            self._let_go()

    def squares(self) -> Tensor:
        self._let_go()
        return total(self.found)

    def _let_go(self) -> None:
        """Find the norms of what is waiting."""
        some, self.waiting, self.bytes = self.waiting, [], 0
        # Another question may have found some since they came.
        self.found += [gradient.squared_norms() for gradient in some if gradient.has_norms or len(some) == 1]
        rest = [gradient for gradient in some if not gradient.has_norms]
        if rest:
            self.found.append(_squares(rest))


def _squares(gradients: list[Gradient]) -> Tensor:
    """The squared norms of all together, (B,); what each has in them is noted, for other questions."""
    fresh: dict[torch.Size, list[Gradient]] = {}
    for gradient in gradients:
        if gradient.rough is None:
            fresh.setdefault(outer_of(gradient).left.shape[:2], []).append(gradient)
    for some in fresh.values():
        blocks = [outer_of(gradient) for gradient in some]
        sums = gram_parts_of_many([b.left for b in blocks], [b.right for b in blocks]).sum(3)  # (n, 2, B)
        squares, bounds = sums.unbind(1)
        for n, (gradient, block) in enumerate(zip(some, blocks, strict=True)):
            gradient.note_rough(Rough(squares[n], bounds[n], block.exact, block.unit))
    rough = [gradient.rough for gradient in gradients if gradient.rough is not None]

    def exact(index: Tensor) -> Tensor:
        return total([one.exact(index) for one in rough])

    # As in Crossed: what rounding leaves is a share of all terms together. The norm that they are part of is no smaller.
    found, bound = (total([getattr(one, name) for one in rough]) for name in ("total", "bound"))
    return Rough(found, bound, exact, rough[0].unit).settled()[0]
