"""Mean, second moment and variance over samples, and the noise scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.blocks import arithmetic
from eachgrad.gradient import Gradient, total
from eachgrad.moments import Moments, Noise, NoiseScale
from eachgrad.queries.base import Over, PerParameter, Query, Running
from eachgrad.queries.joining import Joined, small_key_of


@dataclass(frozen=True)
class Mean(Query):
    pads = True

    def start(self, over: Over) -> Running:
        return RunningMean(over)

    def unpadded(self, answer: Any, samples: int, size: int) -> Any:
        return {name: value * (size / samples) for name, value in answer.items()}


class RunningMean(PerParameter):
    reads = "mean"

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.packs: dict[Any, Joined] = {}

    def add(self, gradient: Gradient) -> None:
        # A CPU starts an op as fast as it copies what the op would read.
        key = small_key_of(gradient) if arithmetic.on_gpu(gradient.parameter) else None
        if key is None:
            self.batch[gradient.name] = gradient.mean()
        else:
            self.packs.setdefault(key, Joined()).add(gradient)

    def again(self) -> set[str]:
        self.packs = {key: self.holders.shared(pack, self.reads) for key, pack in self.packs.items()}
        return set()

    def end(self) -> None:
        for pack in self.packs.values():
            self.batch |= pack.means()
        self.packs = {}
        super().end()

    def joined(self, earlier: Tensor, value: Tensor) -> Tensor:
        share = self.batch_size / (self.samples + self.batch_size)
        return earlier * (1 - share) + value * share  # not by a difference, which of large numbers is none

    def answer(self) -> dict[str, Tensor]:
        return self.in_order()


@dataclass(frozen=True)
class SecondMoment(Query):
    pads = True

    def start(self, over: Over) -> Running:
        return RunningSecond(over)

    def unpadded(self, answer: Any, samples: int, size: int) -> Any:
        return {name: value * (size / samples) for name, value in answer.items()}


class RunningSecond(PerParameter):
    def add(self, gradient: Gradient) -> None:
        self.batch[gradient.name] = gradient.sum_of_squares()

    def answer(self) -> dict[str, Tensor]:
        return self.in_order(self.samples)


@dataclass(frozen=True)
class Variance(Query):
    unbiased: bool = True

    def start(self, over: Over) -> Running:
        return RunningVariance(over, self.unbiased)


class RunningVariance(Running):
    def __init__(self, over: Over, unbiased: bool):
        super().__init__(over)
        self.unbiased = unbiased
        self.moments: dict[str, Moments] = {}

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.batch: dict[str, Moments] = {}

    def add(self, gradient: Gradient) -> None:
        mean = gradient.mean()
        self.batch[gradient.name] = Moments(self.batch_size, mean, gradient.sum_of_squares(mean))

    def end(self) -> None:
        for name, value in self.batch.items():
            self.moments[name] = self.moments[name] + value if name in self.moments else value
        super().end()

    def answer(self) -> dict[str, Tensor]:
        if self.samples <= self.unbiased:
            raise ValueError(
                f"an unbiased variance needs two samples at least, not {self.samples}: ask a larger batch, or pass "
                "unbiased=False"
            )
        return {name: self.moments[name].squares / (self.samples - self.unbiased) for name in self.over.parameters}


@dataclass(frozen=True)
class GradientNoise(Query):
    def start(self, over: Over) -> Running:
        return RunningNoise(over)


class RunningNoise(Running):
    def __init__(self, over: Over):
        super().__init__(over)
        self.noise = Noise()

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.squares: list[Tensor] = []
        self.dots: list[Tensor] = []
        self.sums: dict[str, Tensor] = {}

    def add(self, gradient: Gradient) -> None:
        ones = torch.ones(self.batch_size)
        self.sums[gradient.name] = gradient.weighted_sum(ones)
        self.squares.append(gradient.squared_norms())
        self.dots.append(gradient.dot(self.sums[gradient.name]))

    def end(self) -> None:
        none = [torch.zeros(self.batch_size)]
        self.noise.add(total(self.squares or none), total(self.dots or none), self.sums)
        super().end()

    def answer(self) -> NoiseScale:
        return self.noise.scale()
