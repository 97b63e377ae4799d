"""How far a sample may move the sum: the kinds of clipping, each with its question to eachgrad and its sensitivity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from eachgrad import clipped_sum, norms
from eachgrad.queries import Query
from eachgrad.selection import grouped


@dataclass(frozen=True)
class Flat:
    """Each sample's gradient is scaled down to the norm `max_norm` at most."""

    max_norm: float | None = None  # None: max_grad_norm of make_private


@dataclass(frozen=True)
class PerGroup:
    """Each sample's gradient is clipped group by group; one sample moves the sum by sqrt(sum of max_norm^2)."""

    groups: str | Mapping[str, Iterable[str]] = "parameter"  # {group: names or globs}, or each parameter by itself
    max_norm: float | Mapping[str, float] | None = None  # one number is shared equally: it bounds all groups together


@dataclass(frozen=True)
class Normalised:
    """Each sample's gradient g becomes max_norm g / (|g| + gamma), which is always shorter than max_norm."""

    gamma: float = 0.01
    max_norm: float | None = None


@dataclass(frozen=True)
class Adaptive:
    """`max_norm` follows a quantile of the norms, by a noisy count of the samples below it (Andrew et al. 2021).

    After each step it is multiplied by exp(-rate (share below - quantile)). The count has noise of its own, `count_noise`,
    and the sum a little more than without it, so that both together have the noise multiplier of the run.
    """

    quantile: float = 0.5
    rate: float = 0.2
    # Standard deviation; None: a twentieth of batch_size, or twice the noise multiplier if that is more.
    count_noise: float | None = None
    max_norm: float | None = None  # at the first step


Clipping = Flat | PerGroup | Normalised | Adaptive
_NAMES = {"flat": Flat, "per_group": PerGroup, "normalised": Normalised, "adaptive": Adaptive}


class Rule:
    """The clipping of one run: the question that is asked, what one sample can add, and what it learns from a step."""

    def __init__(self, kind: Clipping, bounds: float | dict[str, float], groups: dict[str, list[str]] | None):
        self.kind, self.bounds, self.groups = kind, bounds, groups

    @property
    def sensitivity(self) -> float:
        """The most by which one sample moves the sum."""
        if isinstance(self.bounds, dict):
            return math.sqrt(sum(bound**2 for bound in self.bounds.values()))
        return self.bounds

    @property
    def adaptive(self) -> Adaptive | None:
        return self.kind if isinstance(self.kind, Adaptive) else None

    @property
    def unit(self) -> float:
        """The length that losses are divided by, so that a bound that moves is always 1 in the question: one graph."""
        return self.bounds if self.adaptive is not None else 1.0  # pyright: ignore[reportReturnType]

    def queries(self, nonfinite: str) -> dict[str, Query]:
        """What is asked of every piece of a batch, in units: the sum, and the norms that it was clipped by."""
        # Rounded to sixteen bits, one sample could move a sum by more than its bound.
        options: dict[str, Any] = {"nonfinite": nonfinite, "wide": True}
        if isinstance(self.kind, Normalised):
            options |= {"normalise": True, "gamma": self.kind.gamma}
        bounds = 1.0 if self.adaptive is not None else self.bounds
        asked: dict[str, Query] = {"grad": clipped_sum(bounds, self.groups, **options)}
        if self.groups is None:
            return asked | {"norms": norms()}
        return asked | {f"norms_{k}": norms().select(names) for k, names in enumerate(self.groups.values())}

    def clipped(self, answer: Any) -> tuple[Tensor, Tensor]:
        """Which samples were scaled down, and which are not finite and were left out: (B,) each, as booleans."""
        if self.groups is None:
            assert not isinstance(self.bounds, dict)
            return answer.norms * self.unit > self.bounds, ~answer.norms.isfinite()
        assert isinstance(self.bounds, dict)
        each = [getattr(answer, f"norms_{k}") for k in range(len(self.groups))]
        each = [norm.to(each[0].device) for norm in each]
        over = [norm > bound for norm, bound in zip(each, self.bounds.values(), strict=True)]
        return torch.stack(over).any(0), ~torch.stack(each).isfinite().all(0)

    def sum_noise(self, noise_multiplier: float) -> float:
        """The noise multiplier of the sum itself, with which the run's holds for all that a step gives away."""
        if self.adaptive is None or not noise_multiplier:
            return noise_multiplier
        assert self.adaptive.count_noise is not None
        # A sample moves the count, of plus or minus a half for each, by a half.
        return (noise_multiplier**-2 - (2 * self.adaptive.count_noise) ** -2) ** -0.5

    def learn(self, below: float, batch_size: int) -> None:
        """Take over the noisy sum of +1/2 for each sample below the bound and -1/2 for each above."""
        assert self.adaptive is not None
        assert not isinstance(self.bounds, dict)
        share = 0.5 + below / batch_size
        # The noise may lead far out in one step; e^2 either way is more than any step needs.
        step = min(2.0, max(-2.0, self.adaptive.rate * (share - self.adaptive.quantile)))
        self.bounds = self.bounds * math.exp(-step)

    def __str__(self) -> str:
        kind = type(self.kind).__name__
        if isinstance(self.bounds, dict):
            return f"{kind}, {len(self.bounds)} groups, max_norm {self.sensitivity:.4g} together"
        return f"{kind}, max_norm {self.bounds:.4g}"


def rule_for(
    clipping: str | Clipping, max_grad_norm: float | None, names: Iterable[str], aliases: Mapping[str, str]
) -> Rule:
    """The clipping of a run, checked; `names` are the parameters it is about."""
    if isinstance(clipping, str):
        if clipping not in _NAMES:
            raise ValueError(
                f"clipping is one of {', '.join(map(repr, _NAMES))} or Flat(...) and the like, not {clipping!r}"
            )
        clipping = _NAMES[clipping]()
    if not isinstance(clipping, Clipping):
        raise TypeError(f"clipping is a name or Flat(...) and the like, not {type(clipping).__name__}")
    if clipping.max_norm is not None and max_grad_norm is not None:
        raise ValueError(f"max_grad_norm={max_grad_norm} and {clipping} both set the bound: pass one of them")
    bound = clipping.max_norm if clipping.max_norm is not None else max_grad_norm if max_grad_norm is not None else 1.0
    if isinstance(clipping, PerGroup):
        groups = grouped(clipping.groups, names, aliases)
        return Rule(clipping, _shares(bound, groups), groups)
    _check_bound(bound)
    assert not isinstance(bound, Mapping)
    if isinstance(clipping, Normalised) and not 0 < clipping.gamma < math.inf:
        raise ValueError(f"gamma is a positive number, not {clipping.gamma!r}")
    if isinstance(clipping, Adaptive):
        _check_adaptive(clipping)
    return Rule(clipping, float(bound), None)


def with_count_noise(rule: Rule, noise_multiplier: float, batch_size: int) -> Rule:
    """The rule with the noise of its count settled, now that the noise multiplier is known."""
    kind = rule.adaptive
    if kind is None:
        return rule
    noise = kind.count_noise if kind.count_noise is not None else max(batch_size / 20, 2 * noise_multiplier)
    if not 2 * noise > noise_multiplier:
        raise ValueError(
            f"Adaptive(count_noise={noise:g}) spends more than a noise multiplier of {noise_multiplier:g} allows: it must be "
            f"above {noise_multiplier / 2:g}; leave it out for a default"
        )
    return Rule(replace(kind, count_noise=noise), rule.bounds, rule.groups)


def _shares(bound: float | Mapping[str, float], groups: dict[str, list[str]]) -> dict[str, float]:
    if isinstance(bound, Mapping):
        if set(bound) != set(groups):
            raise ValueError(f"max_norm has bounds for {sorted(bound)}, and the groups are {sorted(groups)}")
        for one in bound.values():
            _check_bound(one)
        return {group: float(bound[group]) for group in groups}
    _check_bound(bound)
    return dict.fromkeys(groups, float(bound) / math.sqrt(len(groups)))


def _check_bound(bound: Any) -> None:
    if isinstance(bound, bool) or not isinstance(bound, Real) or not 0 < float(bound) < math.inf:
        raise ValueError(f"max_grad_norm is a positive number, not {bound!r}")


def _check_adaptive(kind: Adaptive) -> None:
    if not 0 < kind.quantile < 1:
        raise ValueError(f"Adaptive(quantile=...) lies between 0 and 1, not {kind.quantile!r}")
    if not 0 < kind.rate < math.inf:
        raise ValueError(f"Adaptive(rate=...) is a positive number, not {kind.rate!r}")
    if kind.count_noise is not None and not 0 < kind.count_noise < math.inf:
        raise ValueError(f"Adaptive(count_noise=...) is a positive number, not {kind.count_noise!r}")
