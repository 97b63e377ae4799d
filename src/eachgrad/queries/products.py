"""Products of the gradients: with directions, with each other, with a random matrix; and the gradients themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.gradient import Gradient, total
from eachgrad.projection import check_projection, project
from eachgrad.queries.base import Over, PerSample, Query, Running


@dataclass(frozen=True)
class Dot(Query):
    direction: Mapping[str, Tensor]
    positions: bool = False
    pads = True

    def start(self, over: Over) -> Running:
        direction = check_direction(self.direction, over)
        return RunningShares(over, direction) if self.positions else RunningDot(over, direction)


def check_direction(direction: Mapping[str, Tensor], over: Over) -> dict[str, Tensor]:
    """The direction by the names that named_parameters() has, if it fits the parameters."""
    counts, found = {}, {}
    for name, v in direction.items():
        known = over.aliases.get(name, name)
        if known not in over.parameters:
            raise ValueError(
                f"the direction names {name!r}, which is none of the parameters {', '.join(over.parameters)}"
            )
        shape = over.parameters[known].shape
        if v.shape[max(0, v.ndim - len(shape)) :] != shape or v.ndim - len(shape) > 1:
            raise ValueError(
                f"the direction of {name!r} is {tuple(shape)} or (K, *{tuple(shape)}), not {tuple(v.shape)}"
            )
        counts[name] = len(v) if v.ndim > len(shape) else None
        found[known] = found[known] + v if known in found else v
    if len(set(counts.values())) > 1:
        raise ValueError(f"give the same number of directions for every name, not {counts} (None: one, without a K)")
    return found


class RunningDot(PerSample):
    def __init__(self, over: Over, direction: dict[str, Tensor]):
        super().__init__(over)
        self.direction = direction

    def add(self, gradient: Gradient) -> None:
        if gradient.name in self.direction:
            super().add(gradient)

    def row(self, gradient: Gradient) -> Tensor:
        return gradient.dot(self.direction[gradient.name])

    def answer(self) -> Tensor:
        found = self.joined()
        return found[""] if found else torch.zeros(self.samples, dtype=self.over.dtype)


class RunningShares(PerSample):
    """The same position by position; complete only if every parameter has them, and as many as the others."""

    def __init__(self, over: Over, direction: dict[str, Tensor]):
        super().__init__(over)
        self.direction = direction

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.shares: dict[str, Tensor | None] = {}

    def add(self, gradient: Gradient) -> None:
        if gradient.name in self.direction:
            self.shares[gradient.name] = gradient.dot_by_position(self.direction[gradient.name])

    def again(self) -> set[str]:
        self._check()
        return set()

    def _check(self) -> None:
        lost = [name for name, value in self.shares.items() if value is None]
        if lost:
            raise ValueError(
                f"the gradients of {', '.join(map(repr, lost))} are sums over positions, or zero: they have none. Leave "
                "them out with select(), or out of the direction."
            )
        counts = {name: value.shape[1] for name, value in self.shares.items() if value is not None}
        if len(set(counts.values())) > 1:
            raise ValueError(f"positions differ in number: {counts}. Choose among the parameters with select().")
        earlier = {rows[0].shape[1] for rows in self.batches.values()}
        if earlier and earlier != set(counts.values()):
            raise ValueError(
                f"the batches differ in the number of positions: {earlier.pop()}, then {counts}. Pad them to one length, or "
                "ask each for itself."
            )

    def end(self) -> None:
        shares = [value for value in self.shares.values() if value is not None]
        if shares:
            self.parts[""] = [total(shares)]
        super().end()

    def answer(self) -> Tensor:
        found = self.joined()
        return found[""] if found else torch.zeros(self.samples, 0, dtype=self.over.dtype)


@dataclass(frozen=True)
class Project(Query):
    dim: int
    seed: int = 0
    kind: str = "gaussian"
    pads = True

    def start(self, over: Over) -> Running:
        check_projection(self.dim, self.kind)
        return RunningProject(over, self)


class RunningProject(PerSample):
    def __init__(self, over: Over, query: Project):
        super().__init__(over)
        self.query = query

    def row(self, gradient: Gradient) -> Tensor:
        return project(gradient, self.query.dim, self.query.seed, self.query.kind)

    def answer(self) -> Tensor:
        found = self.joined()
        return found[""] if found else torch.zeros(self.samples, self.query.dim)


@dataclass(frozen=True)
class Gram(Query):
    other: Mapping[str, Gradient] | None = None

    def start(self, over: Over) -> Running:
        if self.other is not None and set(over.parameters) != set(self.other):
            only = sorted(set(over.parameters) ^ set(self.other))
            raise ValueError(
                f"gram is of the same parameters; only one side has {only}. Choose the same on both sides with select()."
            )
        return RunningGram(over, self.other)


class RunningGram(PerSample):
    def __init__(self, over: Over, other: Mapping[str, Gradient] | None):
        super().__init__(over)
        self.other = other

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        if self.samples and self.other is None:
            raise ValueError(
                "the Gram matrix of several batches needs the products between them: keep the PerSampleGrads of each, "
                "and ask grads.gram(other)"
            )
        super().begin(batch_size, costs)

    def row(self, gradient: Gradient) -> Tensor:
        return gradient.gram(gradient if self.other is None else self.other[gradient.name])

    def answer(self) -> Tensor:
        found = self.joined()
        return found[""] if found else torch.zeros(self.samples, self.samples)


@dataclass(frozen=True)
class AllGradients(Query):
    pads = True

    def start(self, over: Over) -> Running:
        return RunningDense(over)


class RunningDense(PerSample):
    def row(self, gradient: Gradient) -> Tensor:
        return gradient.dense()

    def key(self, name: str) -> str:
        return name

    def answer(self) -> dict[str, Tensor]:
        found = self.joined()
        return {name: found[name] for name in self.over.parameters}
