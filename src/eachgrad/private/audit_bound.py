"""What right guesses prove: a lower bound on epsilon from one run (Steinke, Nasr, Jagielski 2023, theorem 5.2).

Each of m canaries is in the data or not by its own fair coin, and r of the coins are guessed from what the run gave away.
For a run that is (epsilon, 0)-private each coin is guessed right with a chance of at most a = e^epsilon / (1 + e^epsilon),
whatever is known of the others, so that the right ones are no more than W ~ Binomial(r, a). With delta this fails for F of
the coins, which then count as right, and all that is known of F is that its mean over all runs is 2 m delta at most:

    P[v or more are right | what was given away] <= P[W + F >= v] <= tail + E[F | ...] worst
    tail = P[W >= v],  worst = max over f of P[v - f <= W < v] / f

Here r is chosen after the run, so that F may be large just where `worst` is. But whatever the choice, if every (r, v) at
which a claim is rejected has tail <= T and worst <= M, an honest claim is rejected with a chance of T + 2 m delta M at most.
With y^2 = 2 m delta, T = p / (1 + y) and M = p / (y (1 + y)) make that p.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import betaincinv, expit, logit
from scipy.stats import binom

# Beyond it a bound says nothing more, and a chance of a wrong guess of e^-50 is still a number.
_LARGEST = 50.0
_TOLERANCE = 1e-4


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The smallest false-alarm rate at which so many right guesses reject the claim (epsilon, delta)."""
    if not correct:
        return 1.0
    a, y = expit(epsilon), math.sqrt(2 * canaries * delta)
    below = np.cumsum(binom.pmf(np.arange(correct - 1, -1, -1), guesses, a))  # P[v - f <= W < v] for f = 1 ... v
    worst = float(np.max(below / np.arange(1, correct + 1)))
    return min(1.0, (1 + y) * max(float(binom.sf(correct - 1, guesses, a)), y * worst))


def lower_bound(canaries: int, guesses: int, correct: int, delta: float, confidence: float) -> float:
    """The largest epsilon that so many right guesses rule out; an honest claim is above it with this confidence."""
    low, high = 0.0, _LARGEST
    if p_value(canaries, guesses, correct, low, delta) >= 1 - confidence:
        return 0.0
    while high - low > _TOLERANCE:
        middle = (low + high) / 2
        if p_value(canaries, guesses, correct, middle, delta) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def rough_bounds(guesses: np.ndarray, correct: np.ndarray, confidence: float) -> np.ndarray:
    """The same with delta = 0 for many numbers of guesses at a time; the right ones need not be whole numbers."""
    accuracy = betaincinv(np.maximum(correct, 1e-9), guesses - correct + 1, 1 - confidence)
    return np.maximum(logit(np.minimum(accuracy, 1 - 1e-12)), 0.0)
