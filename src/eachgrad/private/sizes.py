"""How many samples are computed at a time."""

from __future__ import annotations

import math

from eachgrad.private import checks

# Pieces are no smaller, or where the samples lie may not be seen: some of them may have no gradient.
FEWEST = 8

# What a piece costs beside its samples, as a share of a step: its sums are added to the others', and the host is waited for.
PIECE = 0.03


def sizes(given: int | None, n: int, batch_size: int, by_graph: bool, varies: bool) -> tuple[int, int]:
    """The most samples in a physical batch, and the number that its size is a multiple of.

    `given` is max_physical_batch; n the samples of the data set; `varies`: whether steps draw other numbers of them.
    """
    if given is not None:
        checks.check_size("max_physical_batch", given)
    if by_graph:
        return best_piece(batch_size, min(n, given or n), varies), 1
    # A size that is new is measured, at about the price of two backwards; a sixteenth of a batch is filled up at worst.
    return min(n, given or n), 1 << max(0, (batch_size // 16).bit_length() - 1)


def best_piece(batch_size: int, most: int, varies: bool) -> int:
    """The size of the one graph, to which every piece is filled up, with the least to compute a step.

    For 16 samples expected, one piece of up to 32 would compute 2.0 times as many, two or three pieces of 8 1.25 times.
    """
    if not varies:
        return math.ceil(batch_size / math.ceil(batch_size / most))
    largest = min(most, math.ceil(batch_size + 4 * math.sqrt(batch_size)))
    return min(
        _grid(largest, max(FEWEST, batch_size // 64)), key=lambda m: _pieces(batch_size, m) * (m + PIECE * batch_size)
    )


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


def _chance_above(n: int, expected: int) -> float:
    """The chance that more than n samples are drawn, by the Gaussian that Poisson's distribution is near to."""
    return 0.5 * math.erfc((n + 0.5 - expected) / math.sqrt(2 * expected))
