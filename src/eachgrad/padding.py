"""Batches of any size, as batches of one: filled up with copies of a sample whose loss does not count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from eachgrad.graph import tensors_in
from eachgrad.queries import Answer, Query

# Fewer samples are filled up where any number may come: where the samples lie may not be seen if some of a few have no
# gradient. One always is, as a compiler takes it for a special case, and cut again where it can be (alone.py).
FEWEST = 8

STEPS = 4  # sizes between one and its double, where each has a graph of its own


@dataclass(frozen=True)
class Sizes:
    """The sizes that batches are filled up to: those given, or multiples of `unit`."""

    given: tuple[int, ...] = ()
    unit: int = 1
    few: bool = False  # of the multiples, a few for each power of two
    exact: bool = False  # nothing is filled up: each size has its graph
    fewest: int = FEWEST  # where any number may come
    usual: int = 0  # what most have, where that is known

    @property
    def are_open(self) -> bool:
        """Whether one graph is for all of them."""
        return not self.given and not self.few and not self.exact

    def fit(self, B: int) -> int:
        """The size for a batch of B samples."""
        if not self.given and B:
            return B if self.exact else self._up(max(B, self.fewest))
        if not self.given:
            raise ValueError("a batch without samples has no answer: skip an empty one")
        if not 0 < B <= self.given[-1]:
            raise ValueError(
                f"a batch of {B} samples is not between 1 and pad_to={self.given[-1]}: split a larger one, skip an empty one"
            )
        return next(size for size in self.given if size >= B)

    def _up(self, B: int) -> int:
        step = max(1, 1 << (B - 1).bit_length() >> STEPS.bit_length()) if self.few else 1
        step = -(-step // self.unit) * self.unit
        return -(-B // step) * step


@dataclass(frozen=True)
class Padding:
    """A batch filled up to `size` samples, and the weight of each one's loss: 1, or 0 for those that were added."""

    batch: tuple
    weights: Tensor  # (size,)
    samples: int  # that were there before
    size: int

    def undo(self, answer: Answer, queries: Mapping[str, Query]) -> Answer:
        """The answer about the samples that were there before."""
        found = {n: queries[n].unpadded(v, self.samples, self.size) for n, v in vars(answer).items() if n in queries}
        return Answer(**found, losses=answer.losses[: self.samples])


def sizes_of(
    pad_to: int | Sequence[int] | None, dynamic: bool | int, fewest: int = FEWEST, usual: int | None = None
) -> Sizes | None:
    """The sizes that batches are filled up to; None where each has its own."""
    if isinstance(fewest, bool) or not isinstance(fewest, int) or fewest < 2:
        raise ValueError(
            f"fewest is a number of samples, at least 2, not {fewest!r}: for a compiler one is a special case"
        )
    if usual is not None and (isinstance(usual, bool) or not isinstance(usual, int) or usual < 1 or not dynamic):
        raise ValueError(
            f"usual is what most batches have where dynamic allows for any, a number of samples, not {usual!r}"
        )
    if not isinstance(dynamic, int) or dynamic < 0:
        raise ValueError(f"dynamic is True, or a number that sizes are multiples of, not {dynamic!r}")
    if pad_to is None:
        return Sizes(unit=int(dynamic), fewest=fewest, usual=usual or 0) if dynamic else None
    if dynamic:
        raise ValueError("pad_to has the sizes of batches, and dynamic allows for all: pass one of them")
    sizes = (pad_to,) if isinstance(pad_to, int) else tuple(pad_to) if isinstance(pad_to, Sequence) else ()
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"pad_to is a positive number of samples, or several, not {pad_to!r}")
    return Sizes(tuple(sorted(set(sizes))))


def check(queries: Mapping[str, Query]) -> None:
    """Raise for questions whose answer depends on the samples that are added."""
    for name, query in queries.items():
        if not query.pads:
            raise ValueError(
                f"{name}: {type(query).__name__} has no answer over batches that are filled up: ask it without pad_to and "
                "dynamic, or in another compile"
            )


def padded(batch: tuple, sizes: Sizes, dim: int) -> Padding:
    """Fill up every tensor of the batch that has B entries along `dim`, as the first one has, to the next of the sizes."""
    given = [t for t in tensors_in(batch) if t.ndim > dim]
    if not given:
        raise ValueError(
            f"pad_to and dynamic fill up the tensors of a batch along dimension {dim}, and none has that dimension"
        )
    B, device = given[0].shape[dim], given[0].device
    size = sizes.fit(B)
    weights = torch.ones(size, dtype=torch.float32, device=device)
    weights[B:] = 0.0

    def fill(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.ndim <= dim or t.shape[dim] != B:
            return t
        filled = t if size == B else t.index_select(dim, torch.arange(size, device=t.device).clamp(max=B - 1))
        return opened(filled.contiguous(), dim) if sizes.are_open else filled  # strides would be open as well

    return Padding(tree_map(fill, batch), opened(weights, 0) if sizes.are_open else weights, B, size)


def opened(t: Tensor, dim: int) -> Tensor:
    """A tensor that a compiler makes one graph of for any size along `dim`, where it can; the one given is left as it is."""
    t = t.view_as(t)
    torch._dynamo.maybe_mark_dynamic(t, dim)
    return t
