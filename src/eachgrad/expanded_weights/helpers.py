"""Pieces for autograd.Functions that fill in `grad_sample`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from eachgrad.expanded_weights.tensor import ExpandedWeight

R = TypeVar("R")


def standard_kwargs(kwarg_names: Sequence[str], flat: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
    """Positional and keyword arguments again, of a flat sequence that ends with the keyword values."""
    cut = len(flat) - len(kwarg_names)
    return tuple(flat[:cut]), dict(zip(kwarg_names, flat[cut:], strict=True))


def forward_helper(func: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What `func` returns for the original weights, once the call has been checked."""
    x = check_input(args, kwargs)
    check_weights(x, [*args, *kwargs.values()])

    def plain(value: Any) -> Any:
        return value if value is x or not isinstance(value, Tensor) else unpack_expanded_weight_or_tensor(value)

    return func(*map(plain, args), **{name: plain(value) for name, value in kwargs.items()})


def check_input(args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """The op's input, by position or keyword, which has to be a tensor with at least one sample."""
    x = args[0] if args else kwargs.get("input")
    if isinstance(x, ExpandedWeight):
        raise RuntimeError(
            "Expanded Weights do not support inputs that are also ExpandedWeights. "
            "Give the samples as an ordinary tensor."
        )
    if not isinstance(x, Tensor):
        raise RuntimeError(f"Expanded Weights requires a Tensor as the first input, got {type(x).__name__}.")
    if x.ndim == 0:
        raise RuntimeError("Expanded Weights requires a batch dimension but got an input of size 0 ().")
    if x.shape[0] == 0:
        raise RuntimeError(f"0 is not a valid batch size for Expanded Weights: input {tuple(x.shape)}.")
    return x


def check_weights(x: Tensor, values: Iterable[Any]) -> None:
    """Raise unless the ExpandedWeights among `values` agree with each other and with `x`."""
    weights = [v for v in values if isinstance(v, ExpandedWeight)]
    batch_dim = 0 if is_batch_first(weights) else 1
    if weights and x.ndim <= batch_dim:
        raise RuntimeError(
            f"Expanded Weights with batch_first=False have samples along dimension 1: input {tuple(x.shape)}."
        )
    for weight in weights:
        n, B = x.shape[batch_dim], weight.batch_size
        if n != B and not (weight.allow_smaller_batches and n < B):
            raise RuntimeError(
                f"Expected ExpandedWeights to have batch size matching input but the weight has {B}, and the "
                f"input {tuple(x.shape)} has {n} along dimension {batch_dim}."
            )
    if len({weight.loss_reduction for weight in weights}) > 1:
        raise RuntimeError("Expected ExpandedWeights to all have the same loss_reduction, got sum and mean.")


def is_batch_first(expanded_args_and_kwargs: Iterable[Any]) -> bool:
    """Whether the ExpandedWeights among the values have samples along dimension 0; all must agree."""
    flags = {v.batch_first for v in expanded_args_and_kwargs if isinstance(v, ExpandedWeight)}
    if len(flags) > 1:
        raise RuntimeError("Expected ExpandedWeights to all have the same batch_first, got True and False.")
    return flags != {False}


def unpack_expanded_weight_or_tensor(value: Any, func: Callable[[Tensor], R] = lambda t: t) -> R | None:
    """`func` of the original weight, or of a tensor without gradient; None if `value` is no tensor."""
    if isinstance(value, ExpandedWeight):
        return func(value.orig_weight)
    if not isinstance(value, Tensor):
        return None
    if value.requires_grad:
        raise RuntimeError(
            "Expanded Weights does not support a mixture of ExpandedWeight parameters and normal Parameters: "
            f"a tensor {tuple(value.shape)} requires grad. Make it an ExpandedWeight, or detach it."
        )
    return func(value)


def maybe_scale_by_batch_size(grad_sample: Tensor, expanded_weight: ExpandedWeight) -> Tensor:
    """The gradients of a summed loss: those of a mean are B times too small."""
    return grad_sample * expanded_weight.batch_size if expanded_weight.loss_reduction == "mean" else grad_sample


@torch.no_grad()
def set_grad_sample_if_exists(maybe_expanded_weight: Any, per_sample_grad_fn: Callable[[Tensor], Tensor]) -> None:
    """Add `per_sample_grad_fn(original)` (n <= B, *shape) to the original weight's `grad_sample`."""
    if not isinstance(maybe_expanded_weight, ExpandedWeight):
        unpack_expanded_weight_or_tensor(maybe_expanded_weight)
        return
    weight, original = maybe_expanded_weight, maybe_expanded_weight.orig_weight
    value = maybe_scale_by_batch_size(per_sample_grad_fn(original), weight)
    missing = weight.batch_size - len(value)
    if missing < 0:
        raise RuntimeError(f"{len(value)} rows of gradients for ExpandedWeights of {weight.batch_size} samples.")
    if missing:
        value = torch.cat([value, value.new_zeros(missing, *value.shape[1:])])
    before = getattr(original, "grad_sample", None)
    original.grad_sample = value if before is None else before + value  # type: ignore[attr-defined]


def sum_over_all_but_batch_and_last_n(tensor: Tensor, n_dims: int) -> Tensor:
    """(B, ..., *last n) -> (B, *last n)."""
    between = tuple(range(1, tensor.ndim - n_dims))
    return tensor.sum(between) if between else tensor
