"""joined: torch.cat along the last dimension, as an op that a compiler leaves alone.

A compiler writes each part of a concatenation by a kernel of its own: 49 of them for the biases and norms of GPT-2 small,
where torch's own code is one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eachgrad.kernels.library import library


def plain(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, -1)


library.define("joined(Tensor[] parts) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("joined", plain, "CPU")
library.impl("joined", plain, "CUDA")


@torch.library.register_fake("eachgrad::joined", lib=library)
def _(parts: list[Tensor]) -> Tensor:
    return parts[0].new_empty((*parts[0].shape[:-1], sum(part.shape[-1] for part in parts)))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """(..., n_k) side by side, of one dtype: (..., sum of n_k)."""
    return torch.ops.eachgrad.joined(list(parts))
