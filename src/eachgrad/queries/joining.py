"""Small gradients side by side: one norm, one sum and one mean for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eachgrad.blocks import Block, Dense, Summed, arithmetic, form
from eachgrad.blocks.arithmetic import accumulation_dtype, cast, sum_of
from eachgrad.gradient import Gradient, total
from eachgrad.kernels.joined import joined

SMALL = 1 << 13  # numbers of a gradient that is not worth an op of its own
FEW = 8  # gradients that are not worth a copy side by side: an MLP's three took 1.47 times a plain step's memory, not 1.22


@dataclass
class Joined:
    """Small gradients side by side."""

    gradients: list[Gradient] = field(default_factory=list)
    value: Tensor | None = None  # (B, n), when all are there
    reads: list[str] = field(default_factory=list)  # what each of several questions takes from them
    _block: Block | None = None

    def add(self, gradient: Gradient) -> None:
        self.gradients.append(gradient)

    def restore(self, gradients: list[Gradient]) -> None:
        """Hold these again; of their norms none is in doubt."""
        self.gradients = gradients

    def join(self) -> Tensor:
        if self.value is None:
            values = values_of(self.gradients)
            parts = [value if value.ndim == 2 else value.reshape(len(value), -1) for value in values]
            self.value = joined(parts) if arithmetic.on_gpu(parts[0]) else torch.cat(parts, 1)
        return self.value

    def squares(self) -> Tensor:
        if len(self.gradients) < FEW:
            return total([gradient.squared_norms() for gradient in self.gradients])
        return self._side_by_side().squared_norms()

    def means(self) -> dict[str, Tensor]:
        """(1/B) sum_i g[i] of each; see `Gradient.mean`."""
        if len(self.gradients) < FEW:
            return {gradient.name: gradient.mean() for gradient in self.gradients}
        value, block = self.join(), self._side_by_side()
        c = torch.ones(len(value), dtype=accumulation_dtype(value.dtype), device=value.device) / max(1, len(value))
        return self._split(block.mean(c), wide=False)

    def _side_by_side(self) -> Block:
        """All of them as one; norms and a mean are read off together."""
        if self._block is None:
            block = Dense(self.join())
            both = "norms" in self.reads and self.reads.count("mean") == 1  # two would be given one tensor
            self._block = block.read_once() if both else block
        return self._block

    def spread(self) -> Tensor | None:
        return None

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        if len(self.gradients) < FEW:
            return one_by_one(self.gradients, c, index, wide)
        value = self.join() if index is None else self.join()[index.to(self.join().device)]
        found = sum_of(c.to(value.device), value) if c.numel() else value.new_zeros(value.shape[1])
        return self._split(found, wide)

    def _split(self, found: Tensor, wide: bool) -> dict[str, Tensor]:
        parts = found.split([gradient.parameter.numel() for gradient in self.gradients])
        return in_dtype(self.gradients, list(parts), wide)


def small_key_of(gradient: Gradient, held: bool = False) -> tuple[type[Joined], torch.device, torch.dtype] | None:
    """What small gradients in one pack have in common; None: this one goes by itself.

    `held`: it is kept until all have come, and may be formed then.
    """
    block = gradient.checked()
    if held and isinstance(block, Summed) and block.terms is not None and gradient.parameter.numel() <= SMALL:
        return Joined, block.terms.device, torch.float32
    if not isinstance(block, Dense) or gradient.parameter.numel() > SMALL or not is_plain(gradient, block.value):
        return None
    return Joined, block.value.device, block.value.dtype


def is_plain(gradient: Gradient, value: Tensor) -> bool:
    """Whether these are real numbers that are not to be differentiated."""
    return not (value.dtype.is_complex or value.requires_grad or gradient.parameter.dtype.is_complex)


def one_by_one(gradients: list[Gradient], c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
    """The sums of gradients, each of which is free when its sum is there."""
    answer = {}
    while gradients:
        gradient = gradients.pop(0)
        taken = gradient if index is None else gradient.take(index)
        answer[gradient.name] = taken.weighted_sum(c, wide)
    return answer


def values_of(gradients: list[Gradient]) -> list[Tensor]:
    """(B, *shape) of each."""
    blocks = [block for gradient in gradients if (block := gradient.checked()) is not None]
    form(blocks)
    return [block.dense() for block in blocks]


def in_dtype(gradients: list[Gradient], sums: list[Tensor], wide: bool) -> dict[str, Tensor]:
    """{name: sum}, each in the shape and the dtype of its parameter, or in float32 or better."""
    answer = {}
    for gradient, value in zip(gradients, sums, strict=True):
        dtype = gradient.parameter.dtype
        dtype = accumulation_dtype(dtype) if wide else dtype
        value = value if value.shape == gradient.parameter.shape else value.view(gradient.parameter.shape)
        answer[gradient.name] = cast(value, dtype)
    return answer
