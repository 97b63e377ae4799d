"""audit: what a private run gives away, measured on canaries in one run of it, against what it claims."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from eachgrad.private import accounting
from eachgrad.private.audit_bound import lower_bound, p_value, rough_bounds
from eachgrad.private.audit_canaries import Scores, places, planted, room
from eachgrad.private.checks import check_size
from eachgrad.private.errors import PrivacyError
from eachgrad.private.run import Run

# So many show an epsilon of 7 at delta 1e-5, and more of them little more. Half of the noise takes 50,000 (docs/audit.md).
CANARIES = 20_000


@dataclass(frozen=True)
class Audit:
    """What an audit has shown of a run."""

    epsilon: float  # it is at least this, with this confidence
    claimed: float  # by the accountant, for the steps that were audited
    delta: float
    confidence: float
    p_value: float  # how probable so many right guesses are at most, if the claim is true
    canaries: int
    guesses: int
    correct: int
    steps: int

    @property
    def violated(self) -> bool:
        """Whether the run gives away more than it claims, with this confidence."""
        return self.epsilon > self.claimed

    @property
    def verdict(self) -> str:
        if self.violated:
            return "the run gives away more than it claims: its clipping, noise, sampling or accounting is broken"
        return "nothing was found against the claim, which does not prove it"

    def __str__(self) -> str:
        return "\n".join(
            [
                f"epsilon is at least {self.epsilon:.4g} at delta {self.delta:g}, with {100 * self.confidence:.4g}% "
                f"confidence; claimed: {self.claimed:.4g}",
                f"{self.correct} of {self.guesses} guesses were right, of {self.canaries} canaries in {self.steps} steps; "
                f"the claim allows that with a probability of {self.p_value:.2g} at most",
                self.verdict,
            ]
        )


def audit(
    run: Run,
    *,
    canaries: int | None = None,
    steps: int | None = None,
    delta: float | None = None,
    confidence: float = 0.95,
    canary_norm: float = 100.0,
    seed: int | None = None,
) -> Audit:
    """A lower bound on the epsilon of a run that has not begun, from `steps` of its steps (all of them), which it takes.

    Each canary is added to the data or not by a coin. Its gradient is `canary_norm` times the clipping bound long and points
    at one number of the parameters that is its own; the run draws, clips, adds up and noises it as any sample. Afterwards the
    coins are guessed from the gradients that the run has put into `p.grad`.

    The run is used up, and its model has been trained on canaries: make both for the audit. `canaries` is at most half of the
    numbers of the parameters (20,000, or as many as fit). `delta` is the run's. `seed` fixes coins and places, for tests.
    """
    _check_run(run)
    steps = run.settings.steps if steps is None else steps
    delta = run.settings.target_delta if delta is None else delta
    _check_options(run, steps, delta, confidence, canary_norm)
    count = _count(run, canaries)
    claimed = accounting.epsilon((run.settings.spent(steps),), delta, run.settings.accountant)
    _check_reach(count, claimed, delta, confidence)
    chance = random.SystemRandom() if seed is None else random.Random(seed)
    coins = np.array([chance.random() < 0.5 for _ in range(count)])
    # As many places again stay empty: they show what the scores of canaries look like that are not in the data.
    scores = Scores(run, places(run, 2 * count, chance), count)
    run.lending.stop()  # gradients are read when the step is over
    with planted(run, scores, np.flatnonzero(coins).tolist(), canary_norm * run.rule.sensitivity):
        for batch in run.loader.take(steps):
            scores.begin()
            run.step(batch)
            scores.end()
    guessed, correct = _guessed(scores.total.numpy(), coins, confidence)
    epsilon = lower_bound(count, guessed, correct, delta, confidence)
    chance_of_that = p_value(count, guessed, correct, claimed, delta)
    return Audit(epsilon, claimed, delta, confidence, chance_of_that, count, guessed, correct, steps)


def _guessed(scores: np.ndarray, coins: np.ndarray, confidence: float) -> tuple[int, int]:
    """How many coins were guessed, and how many of them right; the scores after the last coin's are of empty places."""
    m = len(coins)
    order = np.argsort(-scores[:m], kind="stable")
    high, low = guesses(scores[:m], scores[m:], confidence)
    return high + low, int(coins[order[:high]].sum() + (~coins[order[m - low :]]).sum())


def guesses(scores: np.ndarray, empty: np.ndarray, confidence: float) -> tuple[int, int]:
    """How many of the highest scores are guessed to be in the data, and how many of the lowest are not.

    So many that the bound is best if as many are wrong as the scores (E,) of empty places say. No coin is looked at, so that
    the bound holds for the choice as for any.
    """
    m = len(scores)
    steps = int(math.log(max(m / 20, 1)) / math.log(1.5)) + 1
    sizes = np.unique((m / 2 * 1.5 ** -np.arange(steps)).astype(int).clip(1))
    absent, spread = _absent(-scores, -empty, sizes)
    right_high = np.append(0, (sizes - absent - spread).clip(0))
    absent, spread = _absent(scores, empty, sizes)
    right_low = np.append(0, (absent.clip(max=sizes) - spread).clip(0))
    sizes = np.append(0, sizes)
    total, right = sizes[:, None] + sizes, right_high[:, None] + right_low
    high, low = np.unravel_index(np.argmax(rough_bounds(total, right, confidence)), total.shape)
    return (int(sizes[high]), int(sizes[low])) if high or low else (int(sizes[1]), 0)


def _absent(scores: np.ndarray, empty: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """How many of the lowest scores, for each size, belong to canaries that are not in the data, and its deviation.

    Without the deviation, a tail that is lucky at the empty places would be chosen.
    """
    scores, half = np.sort(scores), len(scores) / 2  # half of the canaries are not in the data
    limits = scores[sizes - 1]
    share = (1 + np.searchsorted(np.sort(empty), limits, "right")) / (1 + len(empty))
    within = np.searchsorted(scores, limits, "right")  # more than the size where scores are equal
    return half * share * sizes / within, np.sqrt(half * share)


def _count(run: Run, canaries: int | None) -> int:
    most = room(run) // 2
    if canaries is None:
        canaries = max(1, min(CANARIES, most))
    check_size("canaries", canaries)
    if canaries > most:
        raise ValueError(
            f"canaries={canaries}, and the parameters that are clipped together have {room(run)} numbers: each canary takes "
            f"one, and as many stay empty. Pass {most} at most, or audit a larger model with the same settings"
        )
    return canaries


def _check_run(run: Any) -> None:
    if not isinstance(run, Run):
        raise TypeError(f"run is what make_private returns, not {type(run).__name__}")
    if run.engine.loss_fn is None:
        raise PrivacyError(
            "this run has no loss_fn, and an audit takes its steps by run.step: pass loss_fn to make_private"
        )
    if run.spent or run.before:
        steps = sum(some.steps for some in run.history)
        raise PrivacyError(
            f"this run has {steps} steps behind it: an audit is for one that has not begun, with canaries from its first "
            "step on. Call make_private again, on a copy of the model and without history"
        )
    if run.path is not None:
        raise PrivacyError(
            f"this run is saved to {run.path}, and an audit trains on canaries: call make_private without checkpoint for it"
        )
    if run.settings.sampling != "poisson":
        raise PrivacyError(
            f"this run has {run.settings.sampling} batches, and canaries are drawn by Poisson sampling: audit a run with "
            'sampling="poisson"'
        )
    if not run.settings.noise_multiplier:
        raise PrivacyError("this run has no noise and claims nothing, epsilon is inf: there is nothing to audit")


def _check_options(run: Run, steps: Any, delta: Any, confidence: Any, canary_norm: Any) -> None:
    check_size("steps", steps)
    if steps > run.settings.steps:
        raise ValueError(f"steps={steps}, and the run has {run.settings.steps}: pass that at most")
    accounting.check_delta(delta)
    if isinstance(confidence, bool) or not isinstance(confidence, (int, float)) or not 0.5 <= confidence < 1:
        raise ValueError(f"confidence is a number from 0.5 to below 1, such as 0.95, not {confidence!r}")
    if isinstance(canary_norm, bool) or not isinstance(canary_norm, (int, float)) or not 1 <= canary_norm < math.inf:
        raise ValueError(f"canary_norm is a finite number of clipping bounds, 1 or more, not {canary_norm!r}")


def _check_reach(count: int, claimed: float, delta: float, confidence: float) -> None:
    """An audit that could not fail is none."""
    reach = lower_bound(count, count, count, delta, confidence)
    if reach <= claimed:
        raise ValueError(
            f"{count} canaries show an epsilon of {reach:.3g} at delta {delta:g} at most, every guess being right, and the "
            f"run claims {claimed:.4g}: pass fewer steps, more canaries or, if 2 canaries delta = {2 * count * delta:.2g} is "
            "not far below 1, a smaller delta"
        )
