"""What every representation of B gradients answers, with a dense default for each query."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from eachgrad import doubts, plan
from eachgrad.blocks import arithmetic
from eachgrad.blocks.arithmetic import (
    cast,
    dots,
    inner,
    matrix_sizes,
    products,
    real_dtype,
    squared_norms,
    sum_of,
)
from eachgrad.dtypes import accumulation_dtype
from eachgrad.kernels.library import DTYPES
from eachgrad.kernels.squares_and_mean import squares_and_mean

# Largest (B, n) slice of dense gradients that a query makes at a time, in elements: 16 MiB in float32.
# A choice of memory, not of speed.
TILE = 1 << 22


@dataclass(frozen=True)
class Fold:
    """How N rows make up B samples: `index[i]` are the rows of sample i, -1 where it has fewer."""

    index: Tensor  # (B, m)
    kind: str  # "outer": row = i * m + j;  "inner": row = j * B + i;  "ragged": look at the index

    def join(self, rows: Tensor) -> Tensor:
        """(N, *rest) -> (B, m, *rest); rows that a sample lacks are zero."""
        B, m = self.index.shape
        if self.kind == "outer":
            return rows.reshape(B, m, *rows.shape[1:])
        if self.kind == "inner":
            return rows.reshape(m, B, *rows.shape[1:]).transpose(0, 1)
        present = (self.index >= 0).view(B, m, *[1] * (rows.ndim - 1))
        return torch.where(present, rows[self.index.clamp(min=0)], rows.new_zeros(()))


def place_of(t: Tensor) -> tuple:
    """Where the numbers of a tensor lie, and how: the same for two tensors that are the same. Also while tracing."""
    return t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride(), t.dtype


class Shared:
    """What several parameters' norms have in common: the Grams of a few tensors, by where these lie in memory.

    Layers with the same input (q, k and v; gate and up) share its Gram, recurrent weights that of their gradient.
    """

    def __init__(self, tensors: int = 2):
        self.tensors = tensors
        self._found: dict[tuple, tuple[Tensor, dict[tuple[int, int], Tensor]]] = {}

    def gram(self, t: Tensor, start: int, end: int) -> Tensor:
        """Inner products of the positions start to end of (n, T, d) with those up to end: (n, end - start, end)."""
        if t.requires_grad:  # the same numbers may have other derivatives: h and h.detach()
            return t[:, start:end] @ t[:, :end].mH
        key = place_of(t)
        # The tensor is held as well: nothing else can come to lie where it does. The last one asked for stays longest.
        self._found[key] = self._found.pop(key, (t, {}))
        while len(self._found) > self.tensors:
            del self._found[next(iter(self._found))]
        strips = self._found[key][1]
        if (start, end) not in strips:
            whole = not start and end == t.shape[1]
            rows, columns = (t, t) if whole else (t[:, start:end], t[:, :end])
            strips[start, end] = products(rows, columns.mH)
        return strips[start, end]


Measured = tuple[Tensor, Tensor | None]  # as `Block.measured` has it


@dataclass(frozen=True)
class Rough:
    """Squared norms that are sums of terms, before those whose terms cancel are computed again."""

    total: Tensor  # (B,)
    bound: Tensor  # (B,), the sizes of the terms
    exact: Callable[[Tensor], Tensor]  # of the samples in an index
    unit: float  # how far rounding may move a weighted sum's share, in these sizes; 0: it does not

    def settled(self) -> Measured:
        return recomputed(self.total, self.bound, self.exact), self.bound * self.unit**2 if self.unit else None


class Block:
    """B gradients of one parameter. `dense` and `fold` are required; the queries may be cheaper."""

    def dense(self) -> Tensor:  # (B, *shape)
        raise NotImplementedError

    def fold(self, fold: Fold) -> Block:
        """The gradients of B samples, from those of the N rows that make them up."""
        raise NotImplementedError

    def take(self, index: Tensor) -> Block:
        """The gradients of the samples in `index` alone."""
        return Dense(self.dense()[index])

    def weighted_sum(self, c: Tensor) -> Tensor:  # sum_i c[i] g[i] -> (*shape)
        return sum_of(c, self.dense())

    def mean(self, c: Tensor) -> Tensor:
        """sum_i c[i] g[i] where every c is 1/B."""
        return self.weighted_sum(c)

    def weighted_sums(self, c: Tensor) -> Tensor:  # c (K, B) -> (K, *shape)
        return torch.stack([self.weighted_sum(row) for row in c])

    def cost(self) -> plan.Cost:
        """What the block holds, and what its answers cost."""
        return plan.dense(*self.sizes(), 8)

    def factors(self) -> tuple[Tensor, ...]:
        """The tensors that it holds and that other parameters' blocks may hold as well."""
        return ()

    def tensors(self) -> list[Tensor]:
        """All that its answers are computed from."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def squared_norms(self, shared: Shared | None = None) -> Tensor:
        """(B,), with all the digits of the dtype; `shared` is what other parameters' norms have found before."""
        return self.measured(shared)[0]

    def measured(self, shared: Shared | None = None) -> tuple[Tensor, Tensor | None]:
        """The squared norms, and the squares of how far rounding may move a weighted sum's share; None: it does not."""
        return squared_norms(self.dense()), None

    def roughly(self, shared: Shared | None = None) -> Rough | Measured:
        """The same, or what it is put together from where terms may cancel: `settled` looks at many at once."""
        return self.measured(shared)

    def dots(self, other: Block) -> Tensor:
        """<g[i], h[i]> of two blocks of the same parameter, real part: (B,)."""
        return dots(self.dense(), other.dense())

    def sizes(self) -> tuple[int, int, int]:
        """B, and the rows and columns of one gradient seen as a matrix."""
        return matrix_sizes(self.dense())

    def slice(self, start: int, stop: int) -> Tensor:
        """Numbers start to stop of each flattened gradient: (B, stop - start)."""
        value = self.dense()
        return value.reshape(len(value), -1)[:, start:stop]

    def tiles(self) -> Iterator[tuple[int, Tensor]]:
        """The flattened gradients slice by slice, (start, (B, n)), in float32 or better; whole rows at a time."""
        B, rows, columns = self.sizes()
        step = columns * max(1, TILE // max(1, B * columns))
        for start in range(0, rows * columns, max(1, step)):
            value = self.slice(start, min(start + step, rows * columns))
            yield start, cast(value, accumulation_dtype(value.dtype))

    def dot(self, directions: Tensor) -> Tensor:
        """<g[i], v[k]> for K directions (K, *shape), real part: (B, K)."""
        flat = directions.reshape(len(directions), -1)
        total = flat.new_zeros(self.sizes()[0], len(flat), dtype=real_dtype(flat.dtype))
        for start, value in self.tiles():
            total = total + inner(value, flat[:, start : start + value.shape[1]])
        return total

    def dot_by_position(self, direction: Tensor) -> Tensor | None:
        """<g[i], v> for one direction (*shape), as T positions share in it: (B, T); None if they are summed already."""
        return None

    def gram(self, other: Block) -> Tensor:
        """<g[i], h[j]> of two blocks of the same parameter, real part: (B, B')."""
        if other.sizes()[0] > self.sizes()[0]:
            return other.gram(self).mT
        parts = (inner(x, x if other is self else other.slice(k, k + x.shape[1])) for k, x in self.tiles())
        return reduce(torch.add, parts)  # nothing is kept but the sum

    def sum_of_squares(self, center: Tensor | None = None) -> Tensor:
        """sum_i |g[i] - center|^2, element by element, flattened: (P,)."""
        parts = []
        for start, value in self.tiles():
            if center is not None:
                value = value - center.flatten()[start : start + value.shape[1]]
            parts.append(value.abs().square().sum(0))
        return torch.cat(parts)

    def compressed(self, left: Tensor, right: Tensor) -> Tensor:
        """left g[i] right^T for left (a, p) and right (b, d), the gradient seen as (p, d): (B, a, b)."""
        B, p, d = self.sizes()[0], left.shape[1], right.shape[1]
        step = max(1, TILE // max(1, B * d))
        total = left.new_zeros(B, len(left), len(right))
        for row in range(0, p, step):
            part = left[:, row : row + step]
            value = self.slice(row * d, (row + part.shape[1]) * d).reshape(B, -1, d).to(left.dtype)
            total = total + part @ (value @ right.mT)
        return total

    def kept(self) -> Block:
        """The gradients themselves, formed once for several queries in a row."""
        return Dense(self.dense())

    def read_once(self) -> Block:
        """The gradients themselves, formed for their norms and their mean, which a GPU reads off them together."""
        value = self.dense()
        large = value[:1].numel() >= arithmetic.LARGE
        if not (large and arithmetic.on_gpu(value)) or value.dtype not in DTYPES or value.requires_grad:
            return Dense(value)
        squares, mean = squares_and_mean(value)
        return Read(value, squares=squares, average=mean)

    def support(self) -> tuple[Block, Tensor | None]:
        """A block of the numbers that some sample does not leave at zero, and their places (None: all)."""
        return self, None


@dataclass(frozen=True)
class Dense(Block):
    """The gradients themselves."""

    value: Tensor  # (B, *shape)
    how: str = field(default="", compare=False)  # "by vmap", "by a loop": one derivative of an op for each sample

    def cost(self) -> plan.Cost:
        return plan.dense(*self.sizes(), self.value.element_size())

    def dense(self) -> Tensor:
        return self.value

    def kept(self) -> Dense:
        return self

    def take(self, index: Tensor) -> Dense:
        return Dense(self.value[index])

    def fold(self, fold: Fold) -> Dense:
        return Dense(fold.join(self.value).sum(1))

    def weighted_sums(self, c: Tensor) -> Tensor:
        return sum_of(c, self.value)


@dataclass(frozen=True)
class Read(Dense):
    """The gradients themselves, with what has been read off them."""

    squares: Tensor = field(kw_only=True)  # (B,)
    average: Tensor = field(kw_only=True)  # (*shape)

    def measured(self, shared: Shared | None = None) -> tuple[Tensor, Tensor | None]:
        return self.squares, None

    def mean(self, c: Tensor) -> Tensor:
        return self.average


# A traced step does not compute these again: below this share the norm would be off by more than 1e-5.
_DOUBTFUL = {torch.float32: 2e-2, torch.float64: 1e-8}


def recomputed(total: Tensor, bound: Tensor, exact: Callable[[Tensor], Tensor]) -> Tensor:
    """`total`, (B,), with the samples replaced by `exact(index)` whose terms, of size `bound`, cancel.

    A sum of terms is off by about their size times the machine's precision: float32 loses its fourth digit
    where they cancel to a thousandth. Down to a tenth a norm was off by 2e-6 at most in built cases.
    """
    if doubts.note(lambda: (total < _doubtful(total) * bound).any()):
        return total
    index = (total < _share(total) * bound).nonzero().squeeze(1)
    return total.index_copy(0, index, exact(index).to(total.dtype)) if len(index) else total


def settled(some: Sequence[Rough]) -> list[Measured]:
    """Each of them settled, with one look at all that are of a kind: the host waits for a GPU once."""
    kinds: dict[tuple, list[int]] = {}
    for n, rough in enumerate(some):
        kinds.setdefault((rough.total.shape, rough.total.dtype, rough.total.device, rough.unit), []).append(n)
    found: dict[int, Measured] = {}
    for places in kinds.values():
        found.update(zip(places, _settled([some[n] for n in places]), strict=True))
    return [found[n] for n in range(len(some))]


def _settled(some: list[Rough]) -> list[Measured]:
    if len(some) == 1:
        return [some[0].settled()]
    totals, bounds = torch.stack([rough.total for rough in some]), torch.stack([rough.bound for rough in some])
    unit = some[0].unit
    spreads = (bounds * unit**2).unbind() if unit else [None] * len(some)
    if doubts.note(lambda: (totals < _doubtful(totals) * bounds).any()):
        return list(zip(totals.unbind(), spreads, strict=True))
    cancels = (totals < _share(totals) * bounds).any(1).tolist()
    squares = [r.settled()[0] if again else row for r, row, again in zip(some, totals.unbind(), cancels, strict=True)]
    return list(zip(squares, spreads, strict=True))


def _share(total: Tensor) -> float:
    """Below which share of its terms a sum is computed again."""
    return 0.1 if total.dtype == torch.float32 else 1e-5


def _doubtful(total: Tensor) -> float:
    """The same where that cannot be decided now: what is only postponed is decided as ever."""
    return _share(total) if doubts.are_postponed() else _DOUBTFUL[total.dtype]
