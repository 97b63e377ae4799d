"""Ops that are answered by the loop over samples alone: exact for any layout, B times the op's cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block
from eachgrad.rules.registry import NeedsLoop, rule

_OPS: list[Callable] = [
    torch.Tensor.__getitem__, torch.gather, torch.Tensor.gather, torch.take, torch.Tensor.take, torch.take_along_dim,
    torch.Tensor.take_along_dim, torch.index_select, torch.Tensor.index_select, torch.cdist, F.cosine_similarity,
    F.pairwise_distance, torch.baddbmm, torch.Tensor.baddbmm, torch.addbmm, torch.addmv, torch.addr, torch.outer,
    torch.inner, torch.dot, torch.kron, torch.cross, torch.linalg.cross, torch.cat, torch.stack, torch.hstack,
    torch.vstack, torch.index_add, torch.Tensor.index_add, torch.index_copy,
    torch.Tensor.index_copy, torch.scatter, torch.Tensor.scatter, torch.scatter_add, torch.Tensor.scatter_add,
    torch.chain_matmul, torch.linalg.multi_dot, torch.linalg.solve, F.kl_div, F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    F.huber_loss, torch.dist, torch.renorm, F.grid_sample, torch.polar, torch.complex,
]  # fmt: skip
# Experts of one layer in one product; private, or not there, in some versions of torch.
_OPS += [op for op in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if op is not None]


@rule(*_OPS, samples=())
def _by_loop(g: Tensor, *args: Any, **kwargs: Any) -> dict[str, Block]:
    raise NeedsLoop
