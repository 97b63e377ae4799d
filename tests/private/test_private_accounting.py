"""Epsilon: the same as dp-accounting's, within the bounds of Opacus' accountant, and never above its target."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from private_runs import N, make, train

from eachgrad.private import Adaptive, Spent
from eachgrad.private.accounting import add, epsilon, from_plain, noise_for, to_plain

# rate, noise multiplier, steps, delta, and between which bounds epsilon lies by the PRV accountant of Opacus 1.6.0, whose
# stated error is 0.01 (benchmarks/private_accounting.py)
OPACUS = [
    (0.001, 0.6, 10_000, 1e-6, 3.14189, 3.16250), (0.001, 0.8, 100_000, 1e-6, 2.90434, 2.92462),
    (0.001, 1.1, 50_000, 1e-5, 0.94313, 0.96326), (0.004, 0.7, 5_000, 1e-5, 3.69564, 3.71620),
    (0.004, 1.0, 20_000, 1e-5, 3.17572, 3.19609), (0.01, 0.5, 500, 1e-5, 10.27219, 10.29382),
    (0.01, 0.8, 3_000, 1e-5, 5.23167, 5.25233), (0.01, 1.0, 10_000, 1e-5, 6.17739, 6.19804),
    (0.01, 2.0, 10_000, 1e-6, 2.43662, 2.45685), (0.02, 1.1, 2_500, 1e-5, 5.29944, 5.32003),
    (0.05, 0.9, 400, 1e-4, 7.09931, 7.12038), (0.05, 1.5, 1_000, 1e-5, 5.52450, 5.54511),
    (0.1, 0.7, 50, 1e-4, 8.92937, 8.95095), (0.1, 1.0, 200, 1e-4, 8.59660, 8.61784),
    (0.1, 2.5, 500, 1e-4, 3.56919, 3.58971), (0.1781, 2.86, 300, 1e-4, 4.40147, 4.42209),
    (0.25, 2.0, 100, 1e-3, 4.60136, 4.62228), (0.25, 5.0, 800, 1e-5, 6.68957, 6.71025),
    (0.5, 3.0, 60, 1e-3, 4.50116, 4.52203), (0.5, 8.0, 500, 1e-5, 6.52048, 6.54113),
]  # fmt: skip


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "lower", "upper"), OPACUS)
def test_epsilon_is_within_the_bounds_of_opacus(rate, noise, steps, delta, lower, upper):
    assert lower <= epsilon((Spent(rate, noise, steps),), delta, "pld") <= upper


def poisson(rate: float, noise: float) -> dp_accounting.DpEvent:
    return dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))


@pytest.mark.parametrize(("name", "accountant"), [("pld", PLDAccountant), ("rdp", RdpAccountant)])
def test_a_run_reports_what_dp_accounting_says(name, accountant):
    run = train(make(accountant=name, noise_multiplier=1.3))
    direct = accountant().compose(poisson(12 / N, 1.3), 10)
    for delta in (1e-3, 1e-5):
        assert run.epsilon(delta) == direct.get_epsilon(delta)


def test_steps_of_several_kinds_are_composed():
    history = (Spent(0.1, 1.0, 20), Spent(0.05, 2.0, 30))
    direct = PLDAccountant().compose(poisson(0.1, 1.0), 20).compose(poisson(0.05, 2.0), 30)
    assert epsilon(history, 1e-4, "pld") == direct.get_epsilon(1e-4)


def test_a_history_grows_by_one_entry_for_each_kind():
    history = ()
    for some in (Spent(0.1, 1.0, 2), Spent(0.1, 1.0, 3), Spent(0.2, 1.0, 1)):
        history = add(history, some)
    assert history == (Spent(0.1, 1.0, 5), Spent(0.2, 1.0, 1))
    assert from_plain(to_plain(history)) == history
    with pytest.raises(ValueError, match="no part of a history"):
        from_plain([[2.0, 1.0, 3, "poisson"]])


def test_nothing_done_costs_nothing_and_no_noise_costs_everything():
    assert make().epsilon() == 0.0
    assert train(make(noise_multiplier=0.0)).epsilon() == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(("rate", "steps", "target", "delta"), [(0.2, 40, 0.5, 1e-3), (0.01, 3000, 8.0, 1e-5)])
def test_a_target_is_met_and_not_exceeded(accountant, rate, steps, target, delta):
    planned = Spent(rate, 0.0, steps)
    found = noise_for(target, delta, planned, (), accountant)
    assert 0.995 * target <= epsilon((Spent(rate, found, steps),), delta, accountant) <= target


def test_a_run_spends_its_target():
    run = train(make(target_epsilon=2.0, epochs=2, accountant="pld"))
    assert run.settings.steps == 10
    assert 0.995 * 2.0 <= run.epsilon() <= 2.0


def test_a_target_counts_what_was_spent_before():
    before = (Spent(0.2, 1.0, 10),)
    spent = epsilon(before, 1e-3, "rdp")
    run = train(make(target_epsilon=spent + 1.0, history=before))
    assert 0.995 * (spent + 1.0) <= run.epsilon() <= spent + 1.0
    assert epsilon(run.own, 1e-3, "rdp") < spent + 1.0
    with pytest.raises(ValueError, match="nothing is left to spend"):
        make(target_epsilon=spent / 2, history=before)


def test_shuffled_steps_count_one_unamplified_sum_for_each_pass():
    run = make(sampling="shuffled", steps=12, accountant="pld")  # 5 steps a pass: three passes begin
    for steps, passes in ((5, 1), (5, 2), (2, 3)):
        train(run, steps)
        direct = PLDAccountant().compose(dp_accounting.GaussianDpEvent(1.0), passes)
        assert run.epsilon() == pytest.approx(direct.get_epsilon(1e-3), rel=1e-9)


def test_adaptive_clipping_spends_what_its_noise_multiplier_says():
    """Sum and count are one Gaussian mechanism: their noise multipliers add up to that of the run."""
    run = train(make(clipping=Adaptive(count_noise=3.0), noise_multiplier=1.5, accountant="pld"))
    of_sum, of_count = run.rule.sum_noise(1.5), 2 * 3.0
    assert (of_sum**-2 + of_count**-2) ** -0.5 == pytest.approx(1.5, rel=1e-12)
    assert run.epsilon() == PLDAccountant().compose(poisson(12 / N, 1.5), 10).get_epsilon(1e-3)
