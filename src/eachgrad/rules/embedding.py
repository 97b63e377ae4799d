"""Look-ups of whole rows: embedding and indexing of a parameter by a sample's ids."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block, Rows
from eachgrad.rules.registry import Arguments, composite, rule


def _as_many_as_ids(g: Tensor, arguments: Arguments) -> int:
    return arguments["input"].ndim


@rule(F.embedding, lead=_as_many_as_ids)
def _embedding(
    g: Tensor,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> dict[str, Block]:
    ids, value = input.reshape(len(input), -1), g.reshape(len(g), -1, g.shape[-1])
    if padding_idx is not None:
        value = value.masked_fill((ids == padding_idx % len(weight)).unsqueeze(-1), 0)
    return {"weight": Rows(ids, value, len(weight), by_frequency=scale_grad_by_freq)}


@composite(torch.embedding)
def _torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    padding = padding_idx if padding_idx >= 0 else None
    return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


@composite(torch.Tensor.__getitem__)
def _getitem(input: Tensor, index: object) -> Tensor:
    if isinstance(index, Tensor) and input.ndim == 2 and index.dtype in (torch.int64, torch.int32):
        return F.embedding(index % len(input), input)
    return NotImplemented


@composite(torch.index_select, torch.Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    if input.ndim == 2 and dim in (0, -2):
        return F.embedding(index, input)
    return NotImplemented
