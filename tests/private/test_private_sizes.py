"""The size of the pieces that a compiled run computes: as little as can be is filled up."""

from __future__ import annotations

import math

import pytest
import torch
from private_runs import fixed, make

from eachgrad.private.sizes import FEWEST, PIECE, best_piece


def computed(batch_size: int, m: int, draws: torch.Tensor) -> float:
    """Samples computed a step, and the price of its pieces, over the batch size."""
    pieces = (draws / m).ceil().mean()
    return float(pieces * (m + PIECE * batch_size) / batch_size)


@pytest.mark.parametrize("batch_size", [1, 5, 16, 64, 512, 4096])
@pytest.mark.parametrize("share", [0.3, 1.0, 10.0])
def test_no_other_size_computes_much_less(batch_size, share):
    torch.manual_seed(0)
    draws = torch.poisson(torch.full((20_000,), float(batch_size)))
    most = max(1, round(share * batch_size))
    found = best_piece(batch_size, most, varies=True)
    assert 1 <= found <= most
    least = min(FEWEST, most)
    others = {max(least, round(most * k / 40)) for k in range(1, 41)}
    assert computed(batch_size, found, draws) <= 1.03 * min(computed(batch_size, m, draws) for m in others)


def test_batches_of_one_size_are_divided_evenly():
    assert best_piece(100, 32, varies=False) == 25
    assert best_piece(100, 1000, varies=False) == 100
    assert best_piece(7, 2, varies=False) == 2


def test_what_the_user_allows_is_never_exceeded():
    run = make(compile=True, max_physical_batch=5, generator=fixed())
    assert run.loader.largest <= 5
    assert run.engine.pad_to == run.loader.largest
    for batch in run.loader.take(2):
        assert max(batch.sizes, default=0) <= 5
        run.step(batch)


def test_many_samples_are_soon_decided():
    assert best_piece(1_000_000, 10**9, varies=True) < 1_000_000 + 4 * math.sqrt(1_000_000) + 1
