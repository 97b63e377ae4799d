"""Look-ups of whole rows: embedding and indexing of a parameter by a sample's ids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block, Rows
from eachgrad.rules.registry import Arguments, NoRule, composite, rule


def _as_many_as_ids(g: Tensor, arguments: Arguments) -> int:
    return arguments["input"].ndim


@rule(F.embedding, lead=_as_many_as_ids, values=False)
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
def _getitem(input: Tensor, index: Any) -> Tensor:
    if isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32):
        return _rows(input, torch.where(index < 0, index + len(input), index))
    return NotImplemented


@composite(torch.index_select, torch.Tensor.index_select)
def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    return _rows(input, index) if dim % input.ndim == 0 else NotImplemented


def _rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index], as an embedding of flat rows."""
    return F.embedding(index, table.reshape(len(table), -1)).reshape(*index.shape, *table.shape[1:])


@composite(
    torch.sparse.mm, torch.mm, torch.Tensor.mm, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
)  # fmt: skip
def _sparse_mm(input: Tensor, other: Tensor, *rest: Any) -> Tensor:
    """A sparse matrix times a table: the rows that its entries name, weighted and added up."""
    if input.layout is torch.strided or input.ndim != 2 or other.layout is not torch.strided or other.ndim != 2 or rest:
        return NotImplemented
    entries = input.to_sparse_coo().coalesce()
    row, column = entries.indices()
    rows = F.embedding(column, other) * entries.values().unsqueeze(1)
    return rows.new_zeros(len(input), other.shape[1]).index_add(0, row, rows)


@composite(F.embedding_bag)
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up, then reduce each bag: a bag without entries is zero, and padding takes no part."""
    if scale_grad_by_freq:
        raise NoRule(
            "with scale_grad_by_freq PyTorch's gradient on the CPU divides by the counts of other ids, so that there is none "
            "to agree with. Use Embedding with scale_grad_by_freq and sum or average its rows."
        )
    if input.ndim == 2:
        bag = torch.arange(len(input), device=input.device).repeat_interleave(input.shape[1])
        bags, input = len(input), input.reshape(-1)
    else:
        assert offsets is not None
        ends = offsets if include_last_offset else torch.cat([offsets, offsets.new_tensor([len(input)])])
        bags = len(ends) - 1
        bag = torch.arange(bags, device=input.device).repeat_interleave(ends.diff())
    rows = F.embedding(input, weight, padding_idx, max_norm, norm_type)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    keep = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        keep = input != padding_idx % len(weight)
    index = bag[keep].unsqueeze(1).expand(-1, rows.shape[1])
    rows = rows[keep]
    zeros = rows.new_zeros(bags, rows.shape[1])
    if mode == "max":
        # The first of equal entries has the maximum, as in PyTorch; amax would divide its gradient among them.
        with torch.no_grad():
            largest = zeros.scatter_reduce(0, index, rows, "amax", include_self=False)
            place = torch.arange(len(rows), device=rows.device).unsqueeze(1).expand_as(rows)
            place = place.masked_fill(rows != largest[bag[keep]], len(rows))
            none = index.new_full(zeros.shape, len(rows))
            first = none.scatter_reduce(0, index, place, "amin")
        return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).gather(0, first)
    return zeros.scatter_reduce(0, index, rows, mode, include_self=False)
