"""Ops that are answered by the loop over samples alone: exact for any layout, B times the op's cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block
from eachgrad.rules.registry import NeedsLoop, composite, rule

# Functions of torch; those that are methods too are answered as methods.
_NAMES = """
gather take take_along_dim index_select cdist baddbmm addbmm addmv addr outer ger inner dot vdot kron cross cat concat
concatenate stack hstack vstack dstack column_stack row_stack block_diag index_add index_copy index_fill index_put
index_reduce scatter scatter_add scatter_reduce select_scatter slice_scatter diagonal_scatter put
chain_matmul cholesky_solve lu_solve dist renorm polar complex stft cosine_similarity
pairwise_distance triplet_margin_loss cosine_embedding_loss hinge_embedding_loss margin_ranking_loss poisson_nll_loss kl_div
""".split()
_OPS: list[Callable] = [
    torch.Tensor.__getitem__, torch.linalg.cross, torch.linalg.multi_dot, torch.linalg.solve, torch.linalg.solve_triangular,
    torch.linalg.lu_solve, torch.linalg.vecdot, F.cosine_similarity, F.pairwise_distance, F.kl_div,
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.soft_margin_loss, F.grid_sample,
]  # fmt: skip
_OPS += [getattr(owner, name) for name in _NAMES for owner in (torch, torch.Tensor) if hasattr(owner, name)]
# Experts of one layer in one product; private, or not there, in some versions of torch.
_OPS += [op for op in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if op is not None]


@rule(*_OPS, samples=())
def _by_loop(g: Tensor, *args: Any, **kwargs: Any) -> dict[str, Block]:
    raise NeedsLoop


_IN_PLACE = "addmm_ index_add_ index_copy_ index_put_ scatter_ scatter_add_".split()


def _out_of_place(name: str) -> Callable[..., Tensor]:
    """A method that changes its tensor, computed apart: what is overwritten must not be what a use has kept."""
    plain = getattr(torch.Tensor, name.rstrip("_"))
    return lambda input, *args, **kwargs: input.copy_(plain(input.clone(), *args, **kwargs))


for _name in _IN_PLACE:
    composite(getattr(torch.Tensor, _name))(_out_of_place(_name))
