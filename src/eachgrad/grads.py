"""PerSampleGrads: a block per parameter, and the queries over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eachgrad.blocks import Block
from eachgrad.blocks.base import real_dtype

if TYPE_CHECKING:
    from eachgrad.receipt import Receipt, Record
    from eachgrad.use import Use


@dataclass(frozen=True)
class Gradient:
    """The B gradients of one parameter, in whatever form they came."""

    name: str
    parameter: Tensor
    block: Block | None  # None: the loss does not depend on the parameter
    batch_size: int
    guards: tuple[Use, ...] = field(default=(), repr=False)  # what must not have changed since

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch_size, *self.parameter.shape))

    def dense(self) -> Tensor:
        """The gradients themselves, (B, *shape), in the parameter's dtype."""
        if self.block is None:
            return self.parameter.detach().new_zeros(self.shape)
        self._check()
        return self.block.dense().to(self.parameter.dtype)

    def squared_norms(self) -> Tensor:
        """(B,), in float32 or better."""
        if self.block is None:
            dtype = real_dtype(self.parameter.dtype)
            return torch.zeros(self.batch_size, dtype=dtype, device=self.parameter.device)
        self._check()
        return self.block.squared_norms().to(real_dtype(self.parameter.dtype))

    def norms(self) -> Tensor:
        """(B,), in float32 or better."""
        return self.squared_norms().sqrt()

    def weighted_sum(self, c: Tensor) -> Tensor:
        """sum_i c[i] g[i], (*shape), in the parameter's dtype."""
        if c.shape != (self.batch_size,):
            raise ValueError(f"one weight per sample is ({self.batch_size},), not {tuple(c.shape)}")
        if self.block is None:
            return torch.zeros_like(self.parameter)
        self._check()
        return self.block.weighted_sum(c).to(self.parameter.dtype)

    def _check(self) -> None:
        for use in self.guards:
            use.check_versions()

    def __repr__(self) -> str:
        kind = "unused" if self.block is None else type(self.block).__name__
        return f"Gradient({self.name!r}, {tuple(self.shape)}, {kind})"


class PerSampleGrads(Mapping[str, Gradient]):
    """The gradients of B samples: a mapping of parameter name to Gradient, and queries over all of them."""

    def __init__(self, gradients: dict[str, Gradient], batch_size: int, record: Record):
        self._gradients = gradients
        self.batch_size = batch_size
        self._record = record

    def __getitem__(self, name: str) -> Gradient:
        return self._gradients[self._record.canonical(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._gradients)

    def __len__(self) -> int:
        return len(self._gradients)

    def __repr__(self) -> str:
        return f"PerSampleGrads(B={self.batch_size}, {len(self)} parameters)"

    def dense(self) -> dict[str, Tensor]:
        """Every gradient of every sample: {name: (B, *shape)}."""
        return {name: gradient.dense() for name, gradient in self.items()}

    def norms(self, by: str | None = None) -> Tensor | dict[str, Tensor]:
        """The norm of each sample's gradient, (B,); with by="parameter", {name: (B,)}."""
        if by == "parameter":
            return {name: gradient.norms() for name, gradient in self.items()}
        if by is not None:
            raise ValueError(f'norms(by=...) is None or "parameter", not {by!r}')
        return self._squared_norms().sqrt()

    def weighted_sum(self, c: Tensor) -> dict[str, Tensor]:
        """sum_i c[i] g[i] for each parameter, {name: (*shape)}."""
        return {name: gradient.weighted_sum(c) for name, gradient in self.items()}

    def clipped_sum(self, max_norm: float) -> dict[str, Tensor]:
        """sum_i g[i] min(1, max_norm / |g[i]|), {name: (*shape)}; the norm is over all parameters."""
        if not max_norm > 0:
            raise ValueError(f"max_norm is a positive number, not {max_norm}")
        norms = self._squared_norms().sqrt()
        return self.weighted_sum((max_norm / norms).clamp(max=1.0))

    def receipt(self) -> Receipt:
        """What was covered, and how far the sum over samples is from PyTorch's own derivative."""
        return self._record.receipt(self)

    def _squared_norms(self) -> Tensor:
        parts = [gradient.squared_norms() for gradient in self.values()]
        if not parts:
            return torch.zeros(self.batch_size)
        dtype = max((p.dtype for p in parts), key=lambda d: torch.finfo(d).bits)
        return torch.stack([p.to(device=parts[0].device, dtype=dtype) for p in parts]).sum(0)
