"""The ops that take an ExpandedWeight: one autograd.Function per family, all on the rule table.

The gradient of the input is PyTorch's own, from a second run of the op; those of the weights come from
the op's rule, a row per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from eachgrad.expanded_weights.helpers import (
    check_input,
    forward_helper,
    is_batch_first,
    set_grad_sample_if_exists,
    standard_kwargs,
)
from eachgrad.expanded_weights.tensor import ExpandedWeight, implements_per_sample_grads
from eachgrad.rules import RULES
from eachgrad.rules.registry import Arguments


class PerSampleGrad(torch.autograd.Function):
    """An op with a rule; a family adds why it may refuse a call, and what backward does not need."""

    @staticmethod
    def refusal(arguments: Arguments) -> str | None:
        """Why a call with these arguments has no samples to tell apart, or None."""

    @staticmethod
    def unneeded(arguments: Arguments) -> tuple[str, ...]:
        """Names of arguments that backward must do without."""
        return ()

    @classmethod
    def forward(cls, ctx: Any, names: tuple[str, ...], func: Callable, *flat: Any) -> Tensor:
        args, kwargs = standard_kwargs(names, flat)
        x = check_input(args, kwargs)
        arguments = _by_name(func, args, kwargs)
        batch_dim = 0 if is_batch_first(flat) else 1
        reason = cls.refusal(arguments) or _layout_refusal(func, x, arguments, batch_dim)
        if reason is not None:
            raise RuntimeError(f"Expanded Weights cannot handle this call of {func.__name__}: {reason}.")
        out = forward_helper(func, args, kwargs)

        unneeded = cls.unneeded(arguments)
        kept = {name: value for name, value in arguments.items() if name not in unneeded}
        ctx.func, ctx.batch_dim, ctx.autocast = func, batch_dim, _autocast_now(x.device.type)
        ctx.place, ctx.count = 2 + (0 if args else names.index("input")), 2 + len(flat)
        ctx.weights = {name: value for name, value in kept.items() if isinstance(value, ExpandedWeight)}
        ctx.options = {name: value for name, value in kept.items() if not isinstance(value, Tensor)}
        saved = {n: v for n, v in kept.items() if isinstance(v, Tensor) and n not in ctx.weights}
        if ctx.needs_input_grad[ctx.place]:  # nothing else reads the values of the weights
            saved |= {name: weight.orig_weight for name, weight in ctx.weights.items()}
        ctx.saved_names = tuple(saved)
        ctx.save_for_backward(*saved.values())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = dict(zip(ctx.saved_names, ctx.saved_tensors, strict=True))
        tensors = {name: weight.orig_weight for name, weight in ctx.weights.items()} | saved
        arguments = ctx.options | {name: t.detach() for name, t in tensors.items()}
        grads: list[Tensor | None] = [None] * ctx.count
        with ctx.autocast():
            if ctx.needs_input_grad[ctx.place]:
                grads[ctx.place] = _input_gradient(ctx.func, arguments, g)
            blocks = _blocks(ctx.func, arguments, g, ctx.batch_dim)
        for name, weight in ctx.weights.items():
            block = blocks[name]
            set_grad_sample_if_exists(weight, lambda w, block=block: block.dense().to(w.dtype))
        return tuple(grads)


def _by_name(func: Callable, args: tuple, kwargs: dict[str, Any]) -> Arguments:
    """The arguments that the call gives, by the names of the op's rule."""
    bound = RULES[func].signature.bind(None, *args, **kwargs).arguments
    return dict(list(bound.items())[1:])


def _layout_refusal(func: Callable, x: Tensor, arguments: Arguments, batch_dim: int) -> str | None:
    if 0 < batch_dim < x.ndim and RULES[func].lead(x, arguments) <= batch_dim:
        return f"its samples cannot lie along dimension {batch_dim} of the input {tuple(x.shape)}"
    return None


def _autocast_now(device: str) -> Callable[[], AbstractContextManager]:
    """Enters the present autocast state again: backward runs in another."""
    if not torch.amp.is_autocast_available(device):
        return nullcontext
    return partial(torch.autocast, device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))


def _input_gradient(func: Callable, arguments: Arguments, g: Tensor) -> Tensor:
    with torch.enable_grad():
        x = arguments["input"].detach().requires_grad_()
        return torch.autograd.grad(func(**(arguments | {"input": x})), x, g)[0]


def _blocks(func: Callable, arguments: Arguments, g: Tensor, batch_dim: int) -> dict[str, Any]:
    rule = RULES[func]
    to_front = {name: arguments[name].movedim(batch_dim, 0) for name in rule.samples}
    return rule.function(g.movedim(batch_dim, 0), **(arguments | to_front))


@implements_per_sample_grads(F.linear)
class LinearPerSampleGrad(PerSampleGrad):
    """F.linear on inputs of rank 2 and more."""

    @staticmethod
    def refusal(arguments: Arguments) -> str | None:
        if arguments["input"].ndim < 2:
            return f"the input {tuple(arguments['input'].shape)} has no batch dimension"
        if len(arguments["weight"].shape) != 2:
            return f"the weight {tuple(arguments['weight'].shape)} is not a matrix"
        return None


@implements_per_sample_grads(F.embedding)
class EmbeddingPerSampleGrad(PerSampleGrad):
    """F.embedding on ids of rank 2 and more."""

    @staticmethod
    def refusal(arguments: Arguments) -> str | None:
        if arguments["input"].ndim < 2:
            return f"the ids {tuple(arguments['input'].shape)} need a batch dimension and one for positions"
        return None


@implements_per_sample_grads(F.conv1d)
@implements_per_sample_grads(F.conv2d)
@implements_per_sample_grads(F.conv3d)
class ConvPerSampleGrad(PerSampleGrad):
    """F.conv1d, F.conv2d and F.conv3d on batches."""

    @staticmethod
    def refusal(arguments: Arguments) -> str | None:
        x, weight, padding = arguments["input"], arguments["weight"], arguments.get("padding", 0)
        if x.ndim != len(weight.shape):
            return f"the input {tuple(x.shape)} has no batch dimension beside channels and positions"
        if isinstance(padding, str) and padding not in ("same", "valid"):
            return f"padding is {padding!r}, which is neither 'same' nor 'valid'"
        return None


@implements_per_sample_grads(F.layer_norm)
class LayerNormPerSampleGrad(PerSampleGrad):
    """F.layer_norm over dimensions after the batch."""

    @staticmethod
    def refusal(arguments: Arguments) -> str | None:
        x, shape = arguments["input"], arguments["normalized_shape"]
        if x.ndim <= len(shape):
            return f"it normalises the input {tuple(x.shape)} over {tuple(shape)}, batch dimension included"
        return None


@implements_per_sample_grads(F.group_norm)
class GroupNormPerSampleGrad(PerSampleGrad):
    """F.group_norm, which normalises within each sample."""


@implements_per_sample_grads(F.instance_norm)
class InstanceNormPerSampleGrad(PerSampleGrad):
    """F.instance_norm, by each sample's statistics or by running ones."""

    @staticmethod
    def unneeded(arguments: Arguments) -> tuple[str, ...]:
        # A second run must not update the running statistics again.
        return ("running_mean", "running_var") if arguments.get("use_input_stats", True) else ()
