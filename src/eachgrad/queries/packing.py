"""Pack: small gradients side by side, with one norm and one sum for all of them.

A transformer has two biases or norms for every matrix. Each is a few thousand numbers a sample, and an op for each of them
takes longer to start than to run: of GPT-2's 148 parameters 99 are such.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eachgrad.blocks import Dense
from eachgrad.blocks.arithmetic import accumulation_dtype, squared_norms, sum_of
from eachgrad.gradient import Gradient

SMALL = 1 << 13  # numbers of a gradient that is not worth an op of its own


def key_of(gradient: Gradient) -> tuple[torch.device, torch.dtype] | None:
    """What gradients in one pack have in common; None: this one goes by itself."""
    block = gradient.checked()
    if not isinstance(block, Dense) or gradient.has_norms or gradient.parameter.numel() > SMALL:
        return None
    value = block.value
    if value.dtype.is_complex or value.requires_grad or gradient.parameter.dtype.is_complex:
        return None
    return value.device, value.dtype


@dataclass
class Pack:
    gradients: list[Gradient] = field(default_factory=list)
    value: Tensor | None = None  # (B, n), when all are there

    def join(self) -> Tensor:
        if self.value is None:
            blocks = [gradient.checked() for gradient in self.gradients]
            parts = [block.dense() for block in blocks if block is not None]
            self.value = torch.cat([part.reshape(len(part), -1) for part in parts], 1)
        return self.value

    def squares(self) -> Tensor:
        """(B,), in float32 or better."""
        return squared_norms(self.join())

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        """sum_i c[i] g[i] of each, or of the samples in `index` alone; see `Gradient.weighted_sum`."""
        value = self.join() if index is None else self.join()[index.to(self.join().device)]
        found = sum_of(c.to(value.device), value) if c.numel() else value.new_zeros(value.shape[1])
        parts = found.split([gradient.parameter.numel() for gradient in self.gradients])
        answer = {}
        for gradient, part in zip(self.gradients, parts, strict=True):
            dtype = gradient.parameter.dtype
            answer[gradient.name] = part.view(gradient.parameter.shape).to(accumulation_dtype(dtype) if wide else dtype)
        return answer
