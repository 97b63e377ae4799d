"""Normalisation layers: the input is normalised once more, without the parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block, Dense
from eachgrad.blocks.arithmetic import are_many, is_traced, on_gpu, over_positions
from eachgrad.kernels.channel_sums import channel_sums
from eachgrad.kernels.launching import is_unwatched
from eachgrad.kernels.library import DTYPES
from eachgrad.kernels.norm_sums import norm_sums
from eachgrad.rules.registry import Arguments, composite, rule


def is_fused(g: Tensor, input: Tensor) -> bool:
    """Whether a compiler is to find the op's own statistics here: the call is the forward's, word for word."""
    # With no compiler they would be computed again, and what is normalised by three kernels instead of one.
    return on_gpu(g) and is_traced(g) and not _is_followed(g, input)


def _is_followed(*values: Tensor) -> bool:
    return any(t.requires_grad for t in values)


def _all_but_normalised(g: Tensor, arguments: Arguments) -> int:
    return g.ndim - len(arguments["normalized_shape"])


def _over_positions(shape: Sequence[int], *values: Tensor) -> list[Dense]:
    """Sum one or two (B, ..., *shape) over everything between the sample and the parameter's own dimensions."""
    if not (values[0].ndim == 3 and len(shape) == 1):
        values = tuple(value.reshape(len(value), -1, *shape) for value in values)
    return [Dense(total) for total in over_positions(*values)]


def _rows(value: Tensor, shape: Sequence[int]) -> Tensor:
    """(B, ..., *shape) -> (B, T, n)."""
    return value if value.ndim == 3 and len(shape) == 1 else value.reshape(len(value), -1, math.prod(shape))


def _are_many(shape: Sequence[int], *values: Tensor) -> bool:
    return on_gpu(values[0]) and are_many(*(_rows(value, shape) for value in values))


def _sums(shape: Sequence[int], g: Tensor, x: Tensor, mean: Tensor | None, scale: Tensor) -> tuple[Dense, Dense]:
    """What the bias and the weight of a norm of x get, by a kernel."""
    B, g, x = len(g), _rows(g, shape), _rows(x, shape)
    scale = scale.reshape(B, -1, 1).to(torch.float32)
    mean = None if mean is None else mean.reshape(B, -1, 1).to(torch.float32)
    of_bias, of_weight = (Dense(total.view(B, *shape)) for total in norm_sums(g, x, mean, scale))
    return of_bias, of_weight


def _over_channels(value: Tensor) -> Dense:
    """Sum (B, C, ...) over everything after the channels."""
    return Dense(value.flatten(2).sum(2) if value.ndim > 2 else value)


_LAYER_NORM = ("NativeLayerNormBackward0", "result1", "result2")  # mean, and one over the deviation


@rule(F.layer_norm, torch.layer_norm, lead=_all_but_normalised, values=False, saved=_LAYER_NORM)
def _layer_norm(
    g: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
    saved: tuple[Tensor, ...] | None = None,
) -> dict[str, Block]:
    wide = input.to(torch.promote_types(input.dtype, g.dtype)) if on_gpu(g) else input
    many = not _is_followed(g, input) and _are_many(normalized_shape, g, wide)
    if many or is_fused(g, input):
        mean, scale = saved or torch.native_layer_norm(wide, normalized_shape, weight, bias, eps)[1:]
        if many:
            of_bias, of_weight = _sums(normalized_shape, g, wide, mean, scale)
            return {"weight": of_weight, "bias": of_bias}
        normal = (wide - mean) * scale
    else:
        normal = F.layer_norm(wide, normalized_shape, None, None, eps)
    of_bias, of_weight = _over_positions(normalized_shape, g, g * normal)
    return {"weight": of_weight, "bias": of_bias}


@rule(F.rms_norm, torch.rms_norm, lead=_all_but_normalised, values=False, saved=("FusedRmsNormBackward0", "result1"))
def _rms_norm(
    g: Tensor,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    saved: tuple[Tensor, ...] | None = None,
) -> dict[str, Block]:
    if eps is not None and not _is_followed(g, input) and _are_many(normalized_shape, g, input):
        own = weight if weight is not None and weight.dtype == input.dtype else None
        (scale,) = saved or torch.ops.aten._fused_rms_norm(input, list(normalized_shape), own, eps)[1:]
        return {"weight": _sums(normalized_shape, g, input, None, scale)[1]}
    normal = F.rms_norm(input, normalized_shape, None, eps)
    return {"weight": _over_positions(normalized_shape, g * normal)[0]}


_GROUP_NORM = ("NativeGroupNormBackward0", "result1", "result2")


@rule(F.group_norm, torch.group_norm, values=False, saved=_GROUP_NORM)
def _group_norm(
    g: Tensor,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
    saved: tuple[Tensor, ...] | None = None,
) -> dict[str, Block]:
    suits = g.ndim > 2 and {g.dtype, input.dtype} <= {*DTYPES} and not _is_followed(g, input)
    if saved is not None and suits and is_unwatched(g):
        of_bias, of_weight = channel_sums(g.flatten(2), input.flatten(2), *saved)
        return {"weight": Dense(of_weight), "bias": Dense(of_bias)}
    wide = input.to(torch.promote_types(input.dtype, g.dtype)) if on_gpu(g) else input
    if is_fused(g, input):
        wide = wide.contiguous()  # or a GPU's op refuses it
        B, C, size = *input.shape[:2], math.prod(input.shape[2:])
        _, mean, scale = torch.native_group_norm(wide, weight, bias, B, C, size, num_groups, eps)
        grouped = wide.reshape(B, num_groups, -1)
        normal = ((grouped - mean[..., None]) * scale[..., None]).view_as(wide)
    else:
        normal = F.group_norm(wide, num_groups, None, None, eps)
    return {"weight": _over_channels(g * normal), "bias": _over_channels(g)}


@rule(F.instance_norm, values=False)
def _instance_norm(
    g: Tensor,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Block]:
    if use_input_stats:
        normal = F.instance_norm(input, eps=eps)
    else:
        normal = F.batch_norm(input, running_mean, running_var, eps=eps)
    return {"weight": _over_channels(g * normal), "bias": _over_channels(g)}


@rule(F.batch_norm, values=False)
def _batch_norm(
    g: Tensor,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> dict[str, Block]:
    if training:  # reached with a batch of one only: the capture refuses it otherwise
        normal = F.batch_norm(input, None, None, training=True, eps=eps)
    else:
        normal = F.batch_norm(input, running_mean, running_var, eps=eps)
    return {"weight": _over_channels(g * normal), "bias": _over_channels(g)}


@composite(torch.batch_norm)
def _torch_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
