"""Rows: the gradient of a table of which each sample reads a few rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks.arithmetic import accumulation_dtype, cast, dots, real_dtype
from eachgrad.blocks.base import Block, Dense, Fold, Shared
from eachgrad.blocks.outer import Outer


@dataclass(frozen=True)
class Rows(Block):
    """g[i][index[i,t]] += value[i,t], of shape (V, d): embeddings and gathers of whole rows."""

    index: Tensor  # (B, T), integer; -1 where a sample has fewer than T, with value 0
    value: Tensor  # (B, T, d)
    size: int  # V
    by_frequency: bool = False  # divide each value by how often the sample reads its row

    def dense(self) -> Tensor:
        B, T, d = self.value.shape
        out = self.value.new_zeros(B * self.size, d)
        return out.index_add(0, self._keys(), self._values().reshape(B * T, d)).view(B, self.size, d)

    def fold(self, fold: Fold) -> Rows:
        index = fold.join(self.index + 1).flatten(1, 2) - 1
        return replace(self, index=index, value=fold.join(self.value).flatten(1, 2))

    def take(self, index: Tensor) -> Rows:
        return replace(self, index=self.index[index], value=self.value[index])

    def weighted_sum(self, c: Tensor) -> Tensor:
        dtype = accumulation_dtype(self.value.dtype)
        value = self._values() * cast(c, dtype)[:, None, None]
        out = value.new_zeros(self.size, value.shape[-1])
        return out.index_add(0, self.index.clamp(min=0).flatten(), value.flatten(0, 1))

    def cost(self) -> plan.Cost:
        B, T, d = self.value.shape
        return plan.rows(B, T, self.size, d, self.value.element_size())

    def measured(self, shared: Shared | None = None) -> tuple[Tensor, Tensor | None]:
        sums, owner, _, _ = self._runs()
        squares = torch.linalg.vector_norm(sums, dim=1).square()
        zeros = squares.new_zeros(len(self.index), dtype=real_dtype(sums.dtype))
        return zeros.index_add(0, owner, squares), None

    def sizes(self) -> tuple[int, int, int]:
        return len(self.index), self.size, self.value.shape[2]

    def slice(self, start: int, stop: int) -> Tensor:
        d = self.value.shape[2]
        first, last = start // d, -(-stop // d)
        inside = (self.index >= first) & (self.index < last)
        index = torch.where(inside, self.index - first, 0)
        value = torch.where(inside[..., None], self._values(), self.value.new_zeros(()))
        return Rows(index, value, last - first).dense().flatten(1)[:, start - first * d : stop - first * d]

    def dot(self, directions: Tensor) -> Tensor:
        index, value = self.index.clamp(min=0), self._values()
        return torch.stack([dots(value, v[index]) for v in directions], 1)

    def dot_by_position(self, direction: Tensor) -> Tensor:
        index = self.index.clamp(min=0).flatten()
        return dots(self._values().flatten(0, 1), direction[index]).view(self.index.shape)

    def gram(self, other: Block) -> Tensor:
        if not isinstance(other, Rows):
            return super().gram(other)
        # Only rows that are read count.
        rows = torch.cat([self.index.flatten(), other.index.flatten()]).clamp(min=0).unique()
        mine = self._among(rows)
        return Block.gram(mine, mine if other is self else other._among(rows))

    def sum_of_squares(self, center: Tensor | None = None) -> Tensor:
        sums, _, row, present = self._runs()
        zeros = torch.zeros(self.size, sums.shape[1], dtype=real_dtype(sums.dtype), device=sums.device)
        if center is None:
            return zeros.index_add(0, row, sums.abs().square()).flatten()
        # A sample that does not read a row is at zero there.
        squares = (sums - center[row]).abs().square() * present[:, None]
        absent = len(self.index) - zeros[:, 0].index_add(0, row, present)
        return zeros.index_add(0, row, squares).add(absent[:, None] * center.abs().square()).flatten()

    def compressed(self, left: Tensor, right: Tensor) -> Tensor:
        if left.shape[1] != self.size:
            return super().compressed(left, right)
        return left.mT[self.index.clamp(min=0)].mT @ (self._values().to(right.dtype) @ right.mT)

    def support(self) -> tuple[Block, Tensor | None]:
        rows, d = self.index.clamp(min=0).unique(), self.value.shape[2]
        places = rows[:, None] * d + torch.arange(d, device=rows.device)
        return self._among(rows), places.flatten()

    def dots(self, other: Block) -> Tensor:
        if isinstance(other, Outer) and other.shape is None:
            # Tied embedding and head: <value[t], sum_s left[s, index[t]] right[s]>.
            index = self.index.clamp(min=0)[:, None].expand(-1, other.left.shape[1], -1)
            left = other.left.gather(2, index)  # (B, S, T)
            return dots(self._values(), left.mT.to(other.right.dtype) @ other.right)
        if isinstance(other, Dense):
            sample = torch.arange(len(self.index), device=self.index.device)[:, None]
            return dots(self._values(), other.value[sample, self.index.clamp(min=0)])
        return super().dots(other)

    def concatenate(self, other: Rows) -> Rows:
        """The sum of two uses of one table: their look-ups one after another."""
        dtype = torch.promote_types(self.value.dtype, other.value.dtype)
        value = torch.cat([self._values().to(dtype), other._values().to(dtype)], 1)
        return Rows(torch.cat([self.index, other.index], 1), value, self.size)

    def _among(self, rows: Tensor) -> Rows:
        """The same gradients of the table made up of these rows alone, sorted."""
        return Rows(torch.searchsorted(rows, self.index.clamp(min=0).contiguous()), self._values(), len(rows))

    def _runs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One entry per row that a sample reads, up to B T: sum (d,), sample, row, and 1 (0 where there are fewer)."""
        # Sort by (sample, row), sum each run: no (B, V, d) buffer and no T x T mask.
        B, T, d = self.value.shape
        ordered, order = self._keys().sort()
        starts = torch.cat([ordered.new_zeros(1, dtype=torch.bool)[: len(ordered)], ordered[1:] != ordered[:-1]])
        run = starts.cumsum(0)
        dtype = accumulation_dtype(self.value.dtype)
        sums = self.value.new_zeros(B * T, d, dtype=dtype)
        sums = sums.index_add(0, run, cast(self._values().reshape(B * T, d)[order], dtype))
        key = torch.zeros_like(run).scatter(0, run, ordered)
        present = torch.zeros(B * T, dtype=real_dtype(dtype), device=run.device).index_fill(0, run, 1.0)
        return sums, key // self.size, key % self.size, present

    def _keys(self) -> Tensor:
        """(B T,): one number per sample and row of the table."""
        sample = torch.arange(len(self.index), device=self.index.device)[:, None]
        return (self.index.clamp(min=0) + self.size * sample).flatten()

    def _values(self) -> Tensor:
        if not self.by_frequency:
            return self.value
        sample = torch.arange(len(self.index), device=self.index.device)[:, None]
        # Missing entries count apart from the rows of the table.
        key = (self.index + 1 + (self.size + 1) * sample).flatten()
        _, inverse, counts = key.unique(return_inverse=True, return_counts=True)
        return self.value / counts[inverse].view(*self.index.shape, 1).to(self.value.dtype)
