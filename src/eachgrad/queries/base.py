"""What a question is, and how it is answered.

A question is asked of gradients that are there (`PerSampleGrads`), or before the backward, and is answered
parameter by parameter, as their gradients become known. Several batches in a row are answered as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eachgrad import plan
from eachgrad.blocks.arithmetic import accumulation_dtype, cast, real_dtype
from eachgrad.gradient import Gradient, total
from eachgrad.queries.packing import Holders
from eachgrad.selection import matching


@dataclass(frozen=True)
class Over:
    """The parameters a question is about, and what is known of their gradients' cost."""

    parameters: Mapping[str, Tensor]
    aliases: Mapping[str, str]
    budget: int | None = None  # bytes that may be held until norms are known

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an answer that no parameter takes part in."""
        return max((real_dtype(p.dtype) for p in self.parameters.values()), key=lambda d: torch.finfo(d).bits)

    def select(self, patterns: Iterable[str]) -> Over:
        patterns = list(patterns)
        wanted = {name for p in patterns for name in matching(p, self.parameters, self.aliases)}
        if not wanted:
            raise ValueError(
                f"no parameter matches {', '.join(map(repr, patterns))}; there are {', '.join(self.parameters)}"
            )
        return replace(self, parameters={name: p for name, p in self.parameters.items() if name in wanted})


@dataclass(frozen=True)
class Query:
    """A question. `select` asks it about some parameters alone."""

    patterns: tuple[str, ...] | None = field(default=None, kw_only=True)
    holds: ClassVar[bool] = False  # whether gradients are held until all are known
    pads: ClassVar[bool] = False  # whether samples of gradient zero can be added and taken away again

    def select(self, pattern: str | Iterable[str]) -> Query:
        """The same question about the parameters whose names match a glob, or one of several."""
        return replace(self, patterns=(pattern,) if isinstance(pattern, str) else tuple(pattern))

    def start(self, over: Over) -> Running:
        raise NotImplementedError

    def unpadded(self, answer: Any, samples: int, size: int) -> Any:
        """The answer about the first `samples` of `size` samples, the others having no gradient."""
        return tree_map(lambda t: t[:samples], answer)


class Running:
    """A question that is being answered.

    A batch is `begin`, `add` for each parameter, `end`; what `add` has gathered counts only once the batch has
    ended. Between them `again` may name parameters whose gradients are to be added a second time.
    """

    reads: ClassVar[str] = ""  # what it takes from each gradient, if others may take theirs at the same time

    def __init__(self, over: Over):
        self.over = over
        self.samples = 0  # of the batches that have ended
        self.batch_size = 0
        self.holders = Holders()  # of the batch, which all that is asked together shares

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        self.batch_size = batch_size

    def keeps(self, name: str) -> bool:
        """Whether the gradients of a parameter are to be formed before they are added."""
        return False

    def add(self, gradient: Gradient) -> None:
        raise NotImplementedError

    def again(self) -> set[str]:
        return set()

    def end(self) -> None:
        self.samples += self.batch_size

    def answer(self) -> Any:
        raise NotImplementedError


class PerSample(Running):
    """One row per sample: summed over parameters, joined over batches."""

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.parts: dict[str, list[Tensor]] = {}

    def __init__(self, over: Over):
        super().__init__(over)
        self.batches: dict[str, list[Tensor]] = {}

    def row(self, gradient: Gradient) -> Tensor:  # (B, ...)
        raise NotImplementedError

    def key(self, name: str) -> str:
        """Under which name the rows of a parameter are added up."""
        return ""

    def add(self, gradient: Gradient) -> None:
        self.gather(self.key(gradient.name), self.row(gradient))

    def gather(self, key: str, value: Tensor) -> None:
        parts = self.parts.setdefault(key, [])
        parts[:] = [total([*parts, value])] if parts else [value]

    def end(self) -> None:
        for key, (value,) in self.parts.items():
            self.batches.setdefault(key, []).append(value)
        super().end()

    def joined(self) -> dict[str, Tensor]:
        return {key: torch.cat(values) if len(values) > 1 else values[0] for key, values in self.batches.items()}


class PerParameter(Running):
    """One tensor per parameter, added up over batches."""

    def __init__(self, over: Over):
        super().__init__(over)
        self.sums: dict[str, Tensor] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def begin(self, batch_size: int, costs: Mapping[str, plan.Cost]) -> None:
        super().begin(batch_size, costs)
        self.batch: dict[str, Tensor] = {}

    def end(self) -> None:
        for name, value in self.batch.items():
            self.dtypes[name] = value.dtype
            dtype = accumulation_dtype(value.dtype)  # many batches of sixteen bits would not add up
            wide = cast(value, dtype)
            self.sums[name] = self.joined(self.sums[name], wide) if name in self.sums else wide
        self.batch = {}
        super().end()

    def joined(self, earlier: Tensor, value: Tensor) -> Tensor:
        """What all batches give, from what the earlier ones gave and this one does."""
        return earlier + value

    def in_order(self, divisor: float | None = None) -> dict[str, Tensor]:
        found = {name: self.sums[name] for name in self.over.parameters if name in self.sums}
        if divisor is not None:
            found = {name: value / divisor for name, value in found.items()}
        dtypes = self.dtypes
        return {name: cast(v, dtypes[name]) for name, v in found.items()}
