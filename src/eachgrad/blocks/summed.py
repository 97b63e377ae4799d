"""Summed: gradients of a bias that are not formed before somebody asks, so that those of many layers are formed together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from eachgrad.blocks.arithmetic import are_many, over_positions
from eachgrad.blocks.base import Block, Dense
from eachgrad.kernels.launching import is_unwatched
from eachgrad.kernels.many_positions import fits, position_sums_of_many


class Summed(Dense):
    """g[i] = sum_t terms[i,t], of shape (p,). Until it is formed it holds its terms."""

    terms: Tensor | None  # (B, T, p), None once the sums are formed

    def __init__(self, terms: Tensor):
        self.terms = terms
        self._formed: Tensor | None = None

    @property
    def value(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self._formed is None:
            assert self.terms is not None
            self.become(over_positions(self.terms)[0])
            assert self._formed is not None
        return self._formed

    def become(self, value: Tensor) -> None:
        """The sums are there."""
        self._formed, self.terms = value, None


def can_wait(terms: Tensor) -> bool:
    """Whether sums of these (B, T, p) are worth a kernel, and one that many share: eagerly, where it is the host's time."""
    return is_unwatched(terms) and fits(terms) and are_many(terms) and not terms.is_neg()


def form(blocks: Iterable[Block]) -> None:
    """Form the sums of all these that wait, with as few launches as there are sizes."""
    kinds: dict[tuple, list[tuple[Summed, Tensor]]] = {}
    for block in blocks:
        if isinstance(block, Summed) and block.terms is not None:
            t = block.terms
            kinds.setdefault((t.shape[:2], t.dtype, t.device), []).append((block, t))
    for some in kinds.values():
        if len(some) == 1:
            some[0][0].value  # noqa: B018
            continue
        with torch.no_grad():
            sums = position_sums_of_many([terms for _, terms in some])
        for (block, _), value in zip(some, sums, strict=True):
            block.become(value)
