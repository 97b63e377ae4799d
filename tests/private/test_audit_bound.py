"""What guesses prove: the bound is the theorem's, it holds as often as it says, and it is nearly met."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest

from eachgrad.private.audit import guesses
from eachgrad.private.audit_bound import lower_bound, p_value, rough_bounds

CONFIDENCE = 0.95
bound = lru_cache(maxsize=None)(lower_bound)


# Of honest runs, 5% may be above their epsilon. Of 4,000, that is 200 with a standard deviation of 14: more than 255 has a
# chance of 1e-4.
RUNS, ALLOWED = 4000, 255


def chance(n: int, a: float, low: int, high: int) -> float:
    """P[low <= Binomial(n, a) < high], term by term."""
    return math.fsum(math.comb(n, k) * a**k * (1 - a) ** (n - k) for k in range(max(low, 0), high))


@pytest.mark.parametrize("delta", [0.0, 1e-5, 3e-4])
@pytest.mark.parametrize(("m", "r", "v", "epsilon"), [(40, 40, 33, 1.0), (200, 25, 25, 2.5), (90, 60, 40, 0.1)])
def test_the_p_value_is_the_one_of_the_theorem_for_guesses_that_are_chosen_afterwards(m, r, v, epsilon, delta):
    a, y = math.exp(epsilon) / (1 + math.exp(epsilon)), math.sqrt(2 * m * delta)
    tail, worst = chance(r, a, v, r + 1), max(chance(r, a, v - f, v) / f for f in range(1, v + 1))
    found = p_value(m, r, v, epsilon, delta)
    assert found == pytest.approx((1 + y) * max(tail, y * worst), rel=1e-9)
    # For a number of guesses that is fixed beforehand this would do; without delta there is no difference.
    assert found >= tail + 2 * m * delta * worst - 1e-12
    if not delta:
        assert found == pytest.approx(tail, rel=1e-9)


def test_a_choice_of_guesses_that_looks_for_failures_is_covered():
    """Half of the delta goes to 60 coins at once, on which the guesses then concentrate: an honest claim stands."""
    numbers, m, epsilon, delta = np.random.default_rng(0), 600, 1.0, 0.02
    a, alarms = 1 / (1 + math.exp(-epsilon)), 0
    for told in numbers.random(RUNS) < delta:
        r = 60 if told else m
        right = r if told else int(numbers.binomial(r, a))
        alarms += bound(m, r, right, delta, CONFIDENCE) > epsilon
    assert alarms <= ALLOWED


@pytest.mark.parametrize("delta", [0.0, 1e-6, 1e-4])
@pytest.mark.parametrize(("m", "r", "v"), [(1000, 100, 75), (1000, 1000, 1000), (20_000, 300, 299), (5000, 5000, 3000)])
def test_more_epsilon_allows_more_so_that_the_bound_is_where_the_claim_begins_to_hold(m, r, v, delta):
    found = bound(m, r, v, delta, CONFIDENCE)
    below = [p_value(m, r, v, epsilon, delta) for epsilon in np.linspace(0.0, found, 40)]
    assert below == sorted(below)
    assert below[-1] < 1 - CONFIDENCE <= p_value(m, r, v, found + 2e-4, delta)


def test_guesses_that_are_right_by_chance_prove_nothing():
    assert bound(1000, 100, 50, 0.0, CONFIDENCE) == 0.0
    assert bound(1000, 10, 0, 0.0, CONFIDENCE) == 0.0
    assert bound(1000, 1000, 1000, 0.1, CONFIDENCE) == 0.0


def test_the_rough_bound_is_the_one_without_delta():
    r, v = np.array([10, 300, 1000, 50]), np.array([10, 280, 600, 20])
    want = [bound(1000, int(a), int(b), 0.0, CONFIDENCE) for a, b in zip(r, v, strict=True)]
    np.testing.assert_allclose(rough_bounds(r, v, CONFIDENCE), want, atol=2e-4)


@pytest.mark.parametrize(("epsilon", "m"), [(0.5, 5000), (1.0, 500), (3.0, 5000)])
def test_randomised_response_is_covered_and_nearly_met(epsilon, m):
    """Each coin is told truly with probability e^epsilon / (1 + e^epsilon): no epsilon-private run tells more."""
    right = np.random.default_rng(0).binomial(m, 1 / (1 + math.exp(-epsilon)), RUNS)
    found = np.array([bound(m, m, int(v), 0.0, CONFIDENCE) for v in right])
    assert 0.5 * RUNS * (1 - CONFIDENCE) < (found > epsilon).sum() <= ALLOWED
    if m == 5000:
        assert np.median(found) > 0.85 * epsilon


@pytest.mark.parametrize("kind", ["each", "all"])
def test_randomised_response_that_sometimes_tells_the_truth_is_covered(kind):
    """With probability delta a coin, or all of them at once, are told as they are: (epsilon, delta)-private."""
    numbers, m, epsilon = np.random.default_rng(0), 400, 1.0
    delta = 2e-3 if kind == "each" else 0.04
    told = numbers.random((RUNS, m if kind == "each" else 1)) < delta
    right = (told | (numbers.random((RUNS, m)) < 1 / (1 + math.exp(-epsilon)))).sum(1)
    found = np.array([bound(m, m, int(v), delta, CONFIDENCE) for v in right])
    assert (found > epsilon).sum() <= ALLOWED
    if kind == "all":  # where the correction is left out, this one is caught red-handed
        assert sum(bound(m, m, int(v), 0.0, CONFIDENCE) > epsilon for v in right) > ALLOWED


@pytest.mark.parametrize("epsilon", [0.7, 2.0])
def test_the_choice_of_guesses_keeps_the_coverage(epsilon):
    """Coins with Laplace noise are epsilon-private, and most scores are worth exactly epsilon: no room to cheat unseen."""
    numbers, m, found = np.random.default_rng(1), 2000, []
    for _ in range(500):
        coins = numbers.random(m) < 0.5
        scores = coins + numbers.laplace(0, 1 / epsilon, m)
        high, low = guesses(scores, numbers.laplace(0, 1 / epsilon, m), CONFIDENCE)
        order = np.argsort(-scores)
        right = coins[order[:high]].sum() + (~coins[order[m - low :]]).sum()
        found.append(bound(m, high + low, int(right), 0.0, CONFIDENCE))
    # Of 500, 25 are expected at most, with a standard deviation of 4.9: more than 45 has a chance of 1e-4.
    assert (np.array(found) > epsilon).sum() <= 45
    assert np.median(found) > 0.6 * epsilon
