"""Epsilon, by the dp-accounting package: what a history of steps has spent, and the noise that a target asks for.

Two data sets are neighbours if one has one sample more than the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from numbers import Real
from typing import Any

import dp_accounting
from absl import logging
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

ACCOUNTANTS = {"pld": PLDAccountant, "rdp": RdpAccountant}
SAMPLINGS = ("poisson", "shuffled")

# The noise for a target is searched on a grid ten times as coarse, in a tenth of the time. That gave a larger epsilon, by
# 0.1% at most, in all that was tried, down to q = 0.001 and 100,000 steps; the last word is the fine grid's.
_SEARCH: dict[str, Callable[[], Any]] = {
    "pld": partial(PLDAccountant, value_discretization_interval=1e-3),
    "rdp": RdpAccountant,
}
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Spent:
    """Some steps of one kind: a sum of clipped gradients with Gaussian noise, over samples drawn at a rate."""

    rate: float  # probability that a step takes a given sample; shuffled: 1 / steps of an epoch
    noise_multiplier: float  # standard deviation of the noise over the most that one sample adds
    steps: int
    sampling: str = "poisson"

    def event(self) -> dp_accounting.DpEvent:
        """The steps in the words of dp-accounting."""
        noise = dp_accounting.GaussianDpEvent(self.noise_multiplier)
        if self.sampling == "poisson":
            return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(self.rate, noise), self.steps)
        # Every sample is taken once in each epoch that has begun, at a place that counts for nothing.
        return dp_accounting.SelfComposedDpEvent(noise, math.ceil(self.steps * self.rate - 1e-9))


History = tuple[Spent, ...]


def add(history: History, more: Spent) -> History:
    """The history with more steps at its end."""
    if history and replace(history[-1], steps=0) == replace(more, steps=0):
        return (*history[:-1], replace(more, steps=history[-1].steps + more.steps))
    return (*history, more)


def epsilon(history: History, delta: float, accountant: str) -> float:
    """The epsilon that has been spent at this delta; inf where some step had no noise."""
    check_delta(delta)
    return _epsilon(tuple(some for some in history if some.steps), float(delta), accountant)


@lru_cache(maxsize=64)
def _epsilon(history: History, delta: float, accountant: str) -> float:
    if not history:
        return 0.0
    with _quiet():
        total = ACCOUNTANTS[accountant]()
        for some in history:
            total.compose(some.event())
        return float(total.get_epsilon(delta))


def noise_for(target: float, delta: float, planned: Spent, before: History, accountant: str) -> float:
    """The smallest noise multiplier with which the planned steps, after those before, stay within the target."""
    floor = epsilon(before, delta, accountant)
    if floor >= target:
        raise ValueError(
            f"target_epsilon={target:g}, and the history given has spent {floor:.4g} already: nothing is left to spend"
        )

    def event(noise: float) -> dp_accounting.DpEvent:
        steps = (*before, replace(planned, noise_multiplier=noise))
        return dp_accounting.ComposedDpEvent([some.event() for some in steps])

    with _quiet():
        low, high = _bracket(lambda noise: _SEARCH[accountant]().compose(event(noise)).get_epsilon(delta) <= target)
        if low == high:
            raise ValueError(
                f"no noise multiplier up to {high:g} keeps {planned.steps} steps within epsilon={target:g} at "
                f"delta={delta:g}: ask for a larger epsilon, fewer steps or a smaller batch_size"
            )
        bracket = dp_accounting.ExplicitBracketInterval(low, high)
        found = dp_accounting.calibrate_dp_mechanism(
            _SEARCH[accountant], event, target, delta, bracket, tol=_TOLERANCE * low
        )
    while epsilon((*before, replace(planned, noise_multiplier=float(found))), delta, accountant) > target:
        found *= 1 + _TOLERANCE
    return float(found)


def _bracket(enough: Callable[[float], bool]) -> tuple[float, float]:
    """Two noise multipliers, a factor of two apart, of which the larger is enough; twice the same if none is."""
    high = 1.0
    while not enough(high):
        high *= 2
        if high > 1e6:
            return high, high
    while enough(high / 2):
        high /= 2
    return high / 2, high


@contextmanager
def _quiet() -> Iterator[None]:
    """The RDP accountant warns of every order it leaves out; what is left is a valid bound all the same."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def check_delta(delta: Any) -> None:
    if not isinstance(delta, Real) or not 0 < float(delta) < 1:
        raise ValueError(f"delta is a number between 0 and 1, not {delta!r}")


def to_plain(history: History) -> list[list[Any]]:
    """The history as lists, for a file."""
    return [[some.rate, some.noise_multiplier, some.steps, some.sampling] for some in history]


def from_plain(rows: Sequence[Sequence[Any]]) -> History:
    """The history of a file; rows that are none are refused."""
    found = tuple(Spent(*row) for row in rows)
    for some in found:
        if not (0 < some.rate <= 1 and some.noise_multiplier >= 0 and some.steps >= 0 and some.sampling in SAMPLINGS):
            raise ValueError(f"{some} is no part of a history: the file is damaged, or of another program")
    return found
