"""How many samples are computed at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from eachgrad.padding import FEWEST
from eachgrad.private import checks

# What a piece costs beside its samples, as a share of a step: its sums are added to the others', and the host is waited for.
PIECE = 0.03

LEVELS = 64  # of a batch, in which the numbers of samples are told apart where there are sizes to choose from
WORTH = 1.01  # what a step must cost without a size, at least, for that to have a graph
MANY = 16  # pieces, from which on filling up one of them is nothing

PARTS = 32  # of a batch, up to which a piece is filled up: 1.5% on average, with a CUDA graph for each size that comes


@dataclass(frozen=True)
class Pieces:
    """The sizes of the physical batches that the samples of a step are computed in."""

    sizes: tuple[int, ...]  # those of the graphs; one, the most there may be, where there are none
    width: int = 1  # without graphs: what a piece is filled up to a multiple of, so that few sizes have to be measured
    unit: int = 1  # what all sizes are multiples of, if there are several
    price: float = 0.0  # of a piece beside its samples, in samples
    multiple: int = 0  # with a graph of any size: what it takes multiples of, up to the one size that there is
    fewest: int = FEWEST  # and what fewer samples are filled up to
    expected: int = 0  # and how many a step has
    _known: dict[int, list[int]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def largest(self) -> int:
        return max(self.sizes)

    @property
    def options(self) -> dict[str, Any]:
        """Those of `eachgrad.compile`."""
        if not self.multiple:
            return {"pad_to": self.sizes}
        usual = min(self.expected or self.largest, self.largest)
        return {"dynamic": self.multiple, "fewest": self.fewest, "usual": usual}

    @property
    def several(self) -> int:
        """The most samples of a piece, if a step has several: fewer where most steps have one.

        Their sums need memory as well, and have it in that of the larger graphs. More than two pieces are rare: two have 1.6
        times the samples that one has.
        """
        if not self.multiple or self.largest < self.expected:
            return self.largest if self.multiple else 0
        most = max(-(-(self.largest + 1) // 2), 8 * self.largest // 10)
        return -(-most // self.multiple) * self.multiple

    def filled(self, samples: int) -> int:
        """What a piece of so many samples is filled up to; a graph does that by itself."""
        return min(self.largest, -(-samples // self.width) * self.width)

    def split(self, samples: int) -> list[int]:
        """The samples in each piece, so that the least is computed; all pieces but the last are full."""
        found = []
        for size in self._sizes_for(-(-samples // self.unit)) if len(self.sizes) > 1 else self._alike(samples):
            found.append(min(size, samples))
            samples -= found[-1]
        return found

    def _alike(self, samples: int) -> list[int]:
        many = -(-samples // self.largest)
        if not self.multiple or not many:
            return [self.largest] * many
        many = 1 if many == 1 else -(-samples // self.several)
        each, more = divmod(-(-samples // self.multiple), many)
        return [(each + (k < more)) * self.multiple for k in range(many)]

    def _sizes_for(self, level: int) -> list[int]:
        """The sizes of the pieces for so many units, the largest first."""
        if level not in self._known:
            last, sizes = cheapest(level, self.sizes, self.unit, self.price)[1], []
            rest = level
            while rest > 0:
                sizes.append(last[rest])
                rest -= last[rest] // self.unit
            self._known[level] = sorted(sizes, reverse=True)
        return self._known[level]


def pieces(given: int | None, n: int, batch_size: int, graphs: int | str, varies: bool) -> Pieces:
    """The physical batches of a run with so many graphs, 0 for none, or with one for "any" size.

    `given` is max_physical_batch; n the samples of the data set; `varies`: whether steps draw other numbers of them.
    """
    if given is not None:
        checks.check_size("max_physical_batch", given)
    most = min(n, given or n)
    if graphs == "any" and varies and most >= _fewest(batch_size):
        return any_pieces(batch_size, min(most, _largest(batch_size, n) if given else _usual(batch_size)))
    if graphs:
        return best_pieces(batch_size, most, varies, graphs if isinstance(graphs, int) else 1)
    # A size that is new is measured, at about the price of two backwards; a sixteenth of a batch is filled up at worst.
    return Pieces((most,), 1 << max(0, (batch_size // 16).bit_length() - 1))


def _usual(batch_size: int) -> int:
    """The most samples of one piece, where any number has a graph: what a step expects and 1.5 standard deviations more.

    16 of 17 steps have one piece then; with one deviation five of six, with none four of seven. The memory is that of the
    largest one: of few samples no more than half are added.
    """
    return batch_size + min(math.isqrt(9 * batch_size // 4), batch_size // 2)


def any_pieces(batch_size: int, most: int) -> Pieces:
    """Pieces of any size up to the most that there may be."""
    most = max(_fewest(batch_size), most)
    multiple = 1 << (max(1, min(batch_size // PARTS, most // 4)).bit_length() - 1)
    return Pieces((most // multiple * multiple,), multiple=multiple, fewest=_fewest(batch_size), expected=batch_size)


def _fewest(batch_size: int) -> int:
    """What pieces are filled up to, where any number of samples has a graph: less is drawn seldom."""
    return max(2, min(FEWEST, batch_size // 2))


def best_pieces(batch_size: int, most: int, varies: bool, graphs: int) -> Pieces:
    """So many sizes, or fewer, with the least to compute a step.

    For 16 samples expected, pieces of 8 compute 1.29 times as many, with the price of pieces; of 8 or 11 1.14 times, of 8,
    10 or 14 1.10 times.
    """
    first, price = best_piece(batch_size, most, varies), PIECE * batch_size
    unit = max(1, batch_size // LEVELS)
    grid = sorted({size // unit * unit for size in _grid(_largest(batch_size, most), max(FEWEST, unit))} - {0})
    if graphs == 1 or not varies or first * MANY <= batch_size or not grid:
        return Pieces((first,), price=price)
    chances = _chances(batch_size, unit)

    def expected(sizes: Sequence[int]) -> float:
        costs, _ = cheapest(len(chances) - 1, sizes, unit, price)
        return sum(chance * cost for chance, cost in zip(chances, costs, strict=True))

    best: list[int] = []
    for _ in range(graphs):
        best.append(min(grid, key=lambda size: expected([*best, size])))
    for k in [*range(len(best))] * 2:  # the first ones were chosen without the last
        others = best[:k] + best[k + 1 :]
        best[k] = min(grid, key=lambda size: expected([*others, size]))
    for size in sorted(set(best)):  # each one has to be compiled
        others = [other for other in best if other != size]
        best = others if others and expected(others) <= WORTH * expected(best) else best
    alone = _pieces(batch_size, first) * (first + price)
    if len(set(best)) == 1 or alone <= WORTH * expected(best):
        return Pieces((first,), price=price)
    return Pieces(tuple(sorted(set(best))), unit=unit, price=price)


def cheapest(levels: int, sizes: Sequence[int], unit: int, price: float) -> tuple[list[float], list[int]]:
    """For 0, 1, ... units of samples: the cost of the pieces for them, and the size of one of these."""
    costs, last = [0.0], [0]
    for level in range(1, levels + 1):
        cost, size = min((costs[max(0, level - size // unit)] + size + price, size) for size in sizes)
        costs.append(cost)
        last.append(size)
    return costs, last


def best_piece(batch_size: int, most: int, varies: bool) -> int:
    """The size of the one graph, to which every piece is filled up, with the least to compute a step.

    For 16 samples expected, one piece of up to 32 would compute 2.0 times as many, two or three pieces of 8 1.25 times.
    """
    if not varies:
        return math.ceil(batch_size / math.ceil(batch_size / most))
    return min(
        _grid(_largest(batch_size, most), max(FEWEST, batch_size // 64)),
        key=lambda m: _pieces(batch_size, m) * (m + PIECE * batch_size),
    )


def _largest(batch_size: int, most: int) -> int:
    return min(most, math.ceil(batch_size + 4 * math.sqrt(batch_size)))


def _grid(largest: int, least: int) -> list[int]:
    """Sizes from the largest one down to the least, a few percent apart; with 64 pieces and more, filling up is nothing."""
    found = [largest]
    while math.floor(found[-1] * 0.95) >= least:
        found.append(math.floor(found[-1] * 0.95))
    return found


def _pieces(expected: int, m: int) -> float:
    """How many pieces of m samples a step has on the average: the sum of the chances that there is a 1st, a 2nd, ..."""
    most = math.ceil((expected + 8 * math.sqrt(expected) + 8) / m)
    return sum(_chance_above(k * m, expected) for k in range(most))


def _chances(expected: int, unit: int) -> list[float]:
    """The chances that 0, 1, ... units of samples are drawn, the last one begun."""
    levels = math.ceil((expected + 8 * math.sqrt(expected) + 8) / unit)
    above = [1.0, *(_chance_above(level * unit, expected) for level in range(levels + 1))]
    return [a - b for a, b in pairwise(above)]


def _chance_above(n: int, expected: int) -> float:
    """The chance that more than n samples are drawn, by the Gaussian that Poisson's distribution is near to."""
    return 0.5 * math.erfc((n + 0.5 - expected) / math.sqrt(2 * expected))
