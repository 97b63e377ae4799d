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


def sizes_of(pad_to: int | Sequence[int]) -> tuple[int, ...]:
    """The sizes that batches are filled up to, in order."""
    sizes = (pad_to,) if isinstance(pad_to, int) else tuple(pad_to) if isinstance(pad_to, Sequence) else ()
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"pad_to is a positive number of samples, or several, not {pad_to!r}")
    return tuple(sorted(set(sizes)))


def check(queries: Mapping[str, Query]) -> None:
    """Raise for questions whose answer depends on the samples that are added."""
    for name, query in queries.items():
        if not query.pads:
            raise ValueError(
                f"{name}: {type(query).__name__} has no answer over batches that are filled up: ask it without pad_to, or "
                "in another compile"
            )


def padded(batch: tuple, sizes: tuple[int, ...], dim: int) -> Padding:
    """Fill up every tensor of the batch that has B entries along `dim`, as the first one has, to the next of the sizes."""
    given = [t for t in tensors_in(batch) if t.ndim > dim]
    if not given:
        raise ValueError(f"pad_to fills up the tensors of a batch along dimension {dim}, and none has that dimension")
    B, device = given[0].shape[dim], given[0].device
    if not 0 < B <= sizes[-1]:
        raise ValueError(
            f"a batch of {B} samples is not between 1 and pad_to={sizes[-1]}: split a larger one, skip an empty one"
        )
    size = next(size for size in sizes if size >= B)
    places = torch.arange(size, device=device)
    weights, index = (places < B).to(torch.float32), places.clamp(max=B - 1)

    def fill(t: Any) -> Any:
        if not isinstance(t, Tensor) or t.ndim <= dim or t.shape[dim] != B or size == B:
            return t
        return t.index_select(dim, index.to(t.device))

    return Padding(tree_map(fill, batch), weights, B, size)
