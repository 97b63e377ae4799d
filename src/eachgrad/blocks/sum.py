"""Sum: several uses of one parameter, with the cross terms between them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks.arithmetic import squared_norms
from eachgrad.blocks.base import Block, Dense, Fold, Shared, recomputed
from eachgrad.blocks.outer import Outer
from eachgrad.blocks.rows import Rows


@dataclass(frozen=True)
class Sum(Block):
    """g[i] = sum over the parts: tied weights, modules used twice, recurrence."""

    parts: tuple[Block, ...]

    def dense(self) -> Tensor:
        return reduce(torch.add, (part.dense() for part in self.parts))

    def tensors(self) -> list[Tensor]:
        return [t for part in self.parts for t in part.tensors()]

    def fold(self, fold: Fold) -> Sum:
        return Sum(tuple(part.fold(fold) for part in self.parts))

    def take(self, index: Tensor) -> Sum:
        return Sum(tuple(part.take(index) for part in self.parts))

    def weighted_sum(self, c: Tensor) -> Tensor:
        return reduce(torch.add, (part.weighted_sum(c) for part in self.parts))

    def mean(self, c: Tensor) -> Tensor:
        return reduce(torch.add, (part.mean(c) for part in self.parts))

    def weighted_sums(self, c: Tensor) -> Tensor:
        return reduce(torch.add, (part.weighted_sums(c) for part in self.parts))

    def sizes(self) -> tuple[int, int, int]:
        return self.parts[0].sizes()

    def slice(self, start: int, stop: int) -> Tensor:
        return reduce(torch.add, (part.slice(start, stop) for part in self.parts))

    def dot(self, directions: Tensor) -> Tensor:
        return reduce(torch.add, (part.dot(directions) for part in self.parts))

    def dot_by_position(self, direction: Tensor) -> Tensor | None:
        found = [part.dot_by_position(direction) for part in self.parts]
        known = [shares for shares in found if shares is not None]
        return torch.cat(known, 1) if len(known) == len(found) else None

    def compressed(self, left: Tensor, right: Tensor) -> Tensor:
        return reduce(torch.add, (part.compressed(left, right) for part in self.parts))

    def cost(self) -> plan.Cost:
        return reduce(operator.add, (part.cost() for part in self.parts))

    def kept(self) -> Block:
        return add(part.kept() if part.cost().is_small else part for part in self.parts)

    def read_once(self) -> Block:
        return add(part.read_once() if part.cost().is_small else part for part in self.parts)

    def measured(self, shared: Shared | None = None) -> tuple[Tensor, Tensor | None]:
        found = [part.measured(shared) for part in self.parts]
        total = bound = reduce(torch.add, (squares for squares, _ in found))
        # Roundings of several parts add up as their sizes do.
        sizes = [spread.sqrt() for _, spread in found if spread is not None]
        spread = reduce(torch.add, sizes).square() if sizes else None
        # Rows know how to meet the others without a dense table.
        parts = sorted(self.parts, key=lambda part: not isinstance(part, Rows))
        for k, part in enumerate(parts):
            for other in parts[k + 1 :]:
                total = total + 2 * part.dots(other)
        return recomputed(total, bound, lambda index: squared_norms(self.take(index).dense())), spread


def add(blocks: Iterable[Block]) -> Block:
    """One block for the sum of several, joining those of the same kind."""
    blocks = list(blocks)
    if len(blocks) == 1:  # as for most parameters
        return blocks[0]
    parts: list[Block] = []
    for block in blocks:
        for k, part in enumerate(parts):
            joined = _join(part, block)
            if joined is not None:
                parts[k] = joined
                break
        else:
            parts.append(block)
    return parts[0] if len(parts) == 1 else Sum(tuple(parts))


def _join(a: Block, b: Block) -> Block | None:
    if isinstance(a, Dense) and isinstance(b, Dense):
        return Dense(a.value + b.value)
    if isinstance(a, Outer) and isinstance(b, Outer) and a.matrix == b.matrix:
        return a.concatenate(b)
    if isinstance(a, Rows) and isinstance(b, Rows):
        return a.concatenate(b)
    return None
