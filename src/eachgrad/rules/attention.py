"""Attention with a parameter among its arguments: a learned bias, learned queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.rules.registry import composite


@composite(F.scaled_dot_product_attention)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row that is masked whole gives zeros, as in torch's own.
    weights = torch._safe_softmax(scores, -1)  # pyright: ignore[reportPrivateImportUsage]
    return F.dropout(weights, dropout_p) @ value
