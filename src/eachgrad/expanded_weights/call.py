"""A temporary door: functional_call with ExpandedWeights in the place of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from eachgrad.expanded_weights.tensor import ExpandedWeight


def call_for_per_sample_grads(
    module: nn.Module,
    *,
    batch_size: int | None = None,
    loss_reduction: str = "sum",
    batch_first: bool = True,
) -> Callable[..., Any]:
    """`module.forward` whose backward fills in `grad_sample` (B, *shape) of every trainable parameter."""
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction!r}")
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"Module passed must be nn.Module, got {type(module).__name__}")
    if not (batch_size is None or isinstance(batch_size, int)):
        raise RuntimeError(f"Batch size passed must be None or an integer, got {type(batch_size).__name__}")
    if batch_size is not None and batch_size < 1:
        raise RuntimeError(f"Batch size must be positive, got {batch_size}")
    for name, parameter in module.named_parameters():
        if getattr(parameter, "grad_sample", None) is not None:
            raise RuntimeError(f"grad_sample of {name} is set: results would be incorrect for multiple calls")

    def call(*args: Any, **kwargs: Any) -> Any:
        B = _batch_size(args, kwargs, 0 if batch_first else 1) if batch_size is None else batch_size

        def expanded(parameter: Tensor) -> Tensor:
            if not parameter.requires_grad:
                return parameter
            weight = ExpandedWeight(parameter, B, loss_reduction)
            weight.set_batch_first(batch_first)
            return weight

        parameters = {name: expanded(parameter) for name, parameter in module.named_parameters()}
        return torch.func.functional_call(module, parameters, args, kwargs)

    return call


def _batch_size(args: tuple, kwargs: dict, dim: int) -> int:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.ndim > dim]
    if not tensors:
        raise RuntimeError("ExpandedWeights cannot compute the batch size from the inputs; give batch_size")
    B = tensors[0].shape[dim]
    for t in tensors[1:]:
        if t.shape[dim] != B:
            raise RuntimeError(
                f"found at least one input with batch size {B} and one with batch size {t.shape[dim]}"
            )
    return B
