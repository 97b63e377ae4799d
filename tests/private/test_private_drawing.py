"""The next step's samples are drawn while the device is at this one: the same ones as without, wherever a run goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from private_runs import N, fixed, make, parameters_of, train

from eachgrad.private.noise import Fixed, Source
from eachgrad.private.sampling import Poisson, Shuffled
from oracle import assert_same


def sampler(seed: int = 0) -> Poisson:
    return Poisson(200, 0.1, Fixed(fixed(seed)))


def test_what_is_drawn_ahead_is_what_comes_next():
    plain, ahead = sampler(), sampler()
    for k in range(20):
        for _ in range(k % 3):
            ahead.prepare()
        assert ahead.draw() == plain.draw()
        assert torch.equal(ahead.source.state()["root"], plain.source.state()["root"])
        assert all(torch.equal(a, plain.source.state()["each"][d]) for d, a in ahead.source.state()["each"].items())


def test_what_was_drawn_out_of_another_number_is_drawn_again():
    found = Poisson(50, 1.0, Source())
    found.prepare()
    found.n = 70
    assert found.draw() == list(range(70))
    found.prepare()
    found.n = 50
    assert found.draw() == list(range(50))


def test_what_was_drawn_before_a_load_is_forgotten():
    found, other = sampler(), sampler(1)
    state = copy.deepcopy(found.source.state())
    want = found.draw()
    other.prepare()
    other.source.restore(state)
    other.forget()
    assert other.draw() == want


def test_shuffled_batches_are_not_drawn_ahead():
    source = Fixed(fixed())
    found = Shuffled(10, 4, source)
    before = source.state()["root"].clone()
    found.prepare()
    assert torch.equal(source.state()["root"], before)
    assert sorted(found.draw() + found.draw() + found.draw()) == list(range(10))


@pytest.mark.parametrize("options", [{}, {"max_physical_batch": 5}, {"sampling": "shuffled", "batch_size": N}], ids=str)
def test_loops_that_are_broken_off_draw_what_one_loop_draws(options):
    whole, broken = train(make(generator=fixed(), **options)), make(generator=fixed(), **options)
    while broken.remaining:
        for batch in broken.loader:
            broken.step(batch)
            break
    assert broken.totals() == whole.totals()
    assert_same(parameters_of(broken), parameters_of(whole), 0.0)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_state_after_a_step_is_that_of_its_own_draw(workers):
    run, same = make(generator=fixed(), num_workers=workers), make(generator=fixed())
    for batch in run.loader:
        run.step(batch)
        assert [i for piece in batch._pieces for i in piece] == same.loader.sampler.draw()
        want = same.loader.sampler.source.state()
        assert torch.equal(run.generators["root"], want["root"])
        assert all(torch.equal(value, want["each"][device]) for device, value in run.generators["each"].items())


def test_a_run_that_is_loaded_back_draws_again_what_it_had_drawn_ahead():
    run = train(make(generator=fixed()), 3)
    state, parameters = copy.deepcopy(run.state_dict()), copy.deepcopy(run.model.state_dict())
    batch = next(iter(run.loader))
    want = batch._pieces
    run.step(batch)  # and has drawn the fifth
    run.load_state_dict(state)
    run.model.load_state_dict(parameters)
    assert next(iter(run.loader))._pieces == want
