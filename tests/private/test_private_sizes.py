"""The size of the pieces that a compiled run computes: as little as can be is filled up."""

from __future__ import annotations

import math

import pytest
import torch
from private_runs import fixed, make

from eachgrad.private.sizes import FEWEST, PIECE, Pieces, best_piece, best_pieces, pieces


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
    assert run.loader.divided.largest <= 5
    assert run.engine.pieces is run.loader.divided
    for batch in run.loader.take(2):
        assert max(batch.sizes, default=0) <= 5
        run.step(batch)


def test_many_samples_are_soon_decided():
    assert best_piece(1_000_000, 10**9, varies=True) < 1_000_000 + 4 * math.sqrt(1_000_000) + 1


def cost(found: Pieces, batch_size: int, draws: torch.Tensor) -> float:
    """As `computed`, for several sizes."""
    total = 0.0
    for n, times in zip(*draws.int().unique(return_counts=True), strict=True):
        for samples in found.split(int(n)):
            total += (min(size for size in found.sizes if size >= samples) + PIECE * batch_size) * int(times)
    return total / len(draws) / batch_size


@pytest.mark.parametrize("batch_size", [1, 5, 16, 64, 512, 4096, 1_000_000])
@pytest.mark.parametrize("share", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("graphs", [2, 3])
def test_more_sizes_never_compute_more(batch_size, share, graphs):
    torch.manual_seed(0)
    draws = torch.poisson(torch.full((3_000,), float(batch_size), dtype=torch.float64))
    most = max(1, round(share * batch_size))
    one, some = (best_pieces(batch_size, most, varies=True, graphs=k) for k in (1, graphs))
    assert len(some.sizes) <= graphs
    assert some.largest <= most
    assert cost(some, batch_size, draws) <= 1.01 * cost(one, batch_size, draws)


def test_sixteen_samples_by_two_and_three_sizes():
    """The best of all pairs and triples, which a search over all of them has found."""
    torch.manual_seed(0)
    draws = torch.poisson(torch.full((20_000,), 16.0))
    costs = [cost(best_pieces(16, 1000, True, graphs), 16, draws) for graphs in (1, 2, 3)]
    assert [round(c, 2) for c in costs] == [1.29, 1.14, 1.10]


@pytest.mark.parametrize(
    "found",
    [Pieces((8,)), Pieces((8, 11), price=0.5), Pieces((8, 24, 512), unit=8, price=15.0), Pieces((72,), multiple=2)],
    ids=str,
)
def test_every_sample_is_in_one_piece(found):
    for samples in range(3 * found.largest):
        sizes = found.split(samples)
        assert sum(sizes) == samples
        assert all(0 < size <= found.largest for size in sizes)
        assert all(size in found.sizes or found.multiple for size in sizes[:-1])  # full, but for the last
        assert all(size % (found.multiple or 1) == 0 for size in sizes[:-1])


def test_one_size_is_left_as_it_was():
    for n in (0, 1, 7, 8, 9, 30):
        assert Pieces((8,)).split(n) == [min(8, n - k) for k in range(0, n, 8)]
    assert best_pieces(100, 32, varies=False, graphs=3).sizes == (25,)
    assert pieces(32, 1000, 100, graphs=0, varies=True) == Pieces((32,), width=4)


def test_a_run_with_graphs_of_several_sizes_is_the_one_without():
    """The same draws and noise, and a graph for every size that was needed."""
    eager, found = make(generator=fixed(), steps=12), make(generator=fixed(), steps=12, compile=True, graphs=2)
    assert len(found.loader.divided.sizes) == 2
    used = set()
    for run in (eager, found):
        for batch in run.loader:
            run.step(batch)
            if run is found:
                used |= {min(size for size in run.engine.pieces.sizes if size >= n) for n in batch.sizes}
    for a, b in zip(eager.model.parameters(), found.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert used == set(found.loader.divided.sizes)
    assert not found.engine.ask.reasons()
    assert len(found.engine.ask.graphs) == 2


def test_graphs_are_counted():
    with pytest.raises(ValueError, match="graphs"):
        make(compile=True, graphs=0)


@pytest.mark.parametrize(
    ("batch_size", "given", "largest", "multiple"),
    [(4, None, 6, 1), (4, 3, 3, 1), (16, None, 22, 1), (64, None, 76, 2), (512, None, 544, 16), (16, 12, 12, 1),
     (16, 1000, 32, 1), (64, 10, 10, 2), (1, None, 2, 1), (5, None, 7, 1), (1000, 999, 992, 16)],
)  # fmt: skip
def test_one_graph_for_any_size(batch_size, given, largest, multiple):
    found = pieces(given, 10_000, batch_size, "any", varies=True)
    fewest = max(2, min(FEWEST, batch_size // 2))
    assert found == Pieces((largest,), multiple=multiple, fewest=fewest, expected=batch_size)
    assert found.options == {"dynamic": multiple, "fewest": fewest, "usual": min(batch_size, largest)}
    torch.manual_seed(0)
    draws = [*map(int, torch.poisson(torch.full((5_000,), float(batch_size))))]
    computed = sum(-(-max(fewest, n) // multiple) * multiple for draw in draws for n in found.split(draw))
    if batch_size >= 4:
        assert computed <= (1.05 if given else 1.03) * sum(draws)
        many = 1.25 if batch_size >= 8 else 1.4
        assert given or sum(len(found.split(draw)) for draw in draws) <= many * len(draws)


def test_few_samples_at_a_time_have_a_graph_of_their_size():
    assert pieces(5, 1000, 16, "any", varies=True) == best_pieces(16, 5, varies=True, graphs=1)
    assert pieces(None, 1000, 16, "any", varies=False) == Pieces((16,), price=PIECE * 16)


@pytest.mark.parametrize("batch_size", [3, 20])
def test_a_run_with_one_graph_for_any_size_is_the_one_without(batch_size):
    options = {"generator": fixed(), "steps": 40, "batch_size": batch_size}
    eager, found = make(**options), make(**options | {"generator": fixed()}, compile=True)
    assert found.loader.divided.multiple == 1
    for run in (eager, found):
        for batch in run.loader:
            run.step(batch)
    for a, b in zip(eager.model.parameters(), found.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert not found.engine.ask.reasons()
    (graph,) = found.engine.ask.graphs
    (step,) = graph.step.values()
    assert len(step.checked) > 2
    assert ((1, False) in step.checked) == (batch_size == 3)  # one sample as one; few are filled up to 8 of 20


@pytest.mark.parametrize(
    ("batch_size", "given"), [(1, None), (4, None), (5, None), (16, None), (64, None), (512, None), (64, 10)]
)
def test_several_pieces_are_smaller_than_one(batch_size, given):
    """All samples in pieces that are alike; the sums of several have room beside graphs of so many samples."""
    found = pieces(given, 10_000, batch_size, "any", varies=True)
    assert found.several % found.multiple == 0
    assert (found.several < 0.9 * found.largest) == (given is None and batch_size > 1)
    for samples in range(4 * batch_size):
        sizes = found.split(samples)
        assert sum(sizes) == samples
        assert len(sizes) <= 1 or max(sizes) <= found.several
        assert len(sizes) == 0 or max(sizes) - min(sizes) < 2 * found.multiple
    assert Pieces((8,)).several == 0


@pytest.mark.parametrize(("given", "largest", "many"), [(None, 22, 1.06), (16, 16, 1.46)])
def test_pieces_of_a_step_are_as_documented(given, largest, many):
    """With 16 samples expected."""
    found = pieces(given, 10_000, 16, "any", varies=True)
    assert found.largest == largest
    chances = [math.exp(n * math.log(16) - 16 - math.lgamma(n + 1)) for n in range(80)]
    assert sum(chance * len(found.split(n)) for n, chance in enumerate(chances)) == pytest.approx(many, abs=0.006)
    assert pieces(None, 10_000, 256, "any", varies=True).largest == 280
