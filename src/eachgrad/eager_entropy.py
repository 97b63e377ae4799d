"""Cross entropies over many classes in a recorded forward, by the kernels that traced graphs have (entropy.py).

Torch keeps the logarithms of all chances until the backward, in float32 under autocast, and casts them and their gradient
there and back. Here a row of logits keeps two numbers and the logits themselves, which are there anyway, and its gradient is
made in the logits' dtype, in rows that begin at multiples of sixteen bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from eachgrad.kernels import entropy as kernel
from eachgrad.kernels.entropy import is_large
from eachgrad.kernels.launching import direct
from eachgrad.kernels.library import DTYPES

_losses, _gradient = torch.ops.eachgrad.entropies.default, torch.ops.eachgrad.entropy_gradient.default


def row_losses(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None, ignore_index: int = -100,
    reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Tensor | None:  # fmt: skip
    """What F.cross_entropy gives for these arguments; None where torch's own op is to say it.

    Nothing but tensors, options and settings decides: a checkpoint that runs its forward again must get the same node.
    """
    if reduction != "none" or size_average is not None or reduce is not None or weight is not None or label_smoothing:
        return None
    if not _is_plain(input, target) or type(ignore_index) is not int or not _is_by_rows(input, target):
        return None
    if not is_large(input) or forward_ad._current_level >= 0 or _is_watched():
        return None
    with torch._C.DisableTorchFunction():
        return RowEntropies.apply(input, target, ignore_index)  # pyright: ignore[reportReturnType]


def _is_plain(logits: Tensor, target: Tensor) -> bool:
    return (
        type(logits) is Tensor
        and type(target) is Tensor
        and logits.dtype in DTYPES
        and target.dtype == torch.int64
        and target.device == logits.device
        and logits.requires_grad
        and torch.is_grad_enabled()
    )


def _is_by_rows(logits: Tensor, target: Tensor) -> bool:
    """Whether there is a class for each row of (N, classes, ...), and a row's numbers lie one after another."""
    if logits.ndim < 2 or not logits.numel() or target.shape != (logits.shape[0], *logits.shape[2:]):
        return False
    return logits.stride(1) == 1 and logits.layout == torch.strided


def _is_watched() -> bool:
    """Whether somebody beside the recorder, who is not among them now, is to see which ops run.

    A default device is none of them, nor is who counts FLOPs: `explain` is to find what a step keeps.
    """
    if any(type(mode) is not DeviceContext for mode in _get_current_function_mode_stack()):
        return True
    if not _len_torch_dispatch_stack():
        return False
    return any(type(mode).__module__ != "torch.utils.flop_counter" for mode in _get_current_dispatch_mode_stack())


def _rows(logits: Tensor) -> Tensor:
    """(N, classes, ...) -> (rows, classes)."""
    return logits if logits.ndim == 2 else logits.movedim(1, -1).reshape(-1, logits.shape[1])


class RowEntropies(torch.autograd.Function):
    """The losses of all rows, in the dtype that torch has them in."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        # Under autocast a cross entropy is in float32, whatever the logits are in.
        is_wide = torch.is_autocast_enabled(logits.device.type)
        classes = target.reshape(-1)
        # The kernel gives NaN for a target that is no class, and a clipped sum may be asked to leave NaN out. As with torch's
        # own op, an assertion of the device fails.
        known = (classes >= 0) & (classes < logits.shape[1]) | (classes == ignored)
        torch.ops.aten._assert_async.msg(known.all(), f"a target of cross_entropy is none of {logits.shape[1]} classes")
        sums = direct(_losses, kernel.launched, target, _rows(logits.detach()), classes, ignored)
        ctx.ignored = ignored
        ctx.save_for_backward(logits, sums, target)
        # Apart from what is kept, and no view: losses may be written into.
        return sums[2].view(target.shape).to(torch.float32 if is_wide else logits.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, sums, target = ctx.saved_tensors  # where a checkpoint runs its forward again, for the recorder to see
        # Which is on in a backward, too, and these are no ops of the forward.
        with torch._C.DisableTorchFunction():
            if torch.is_grad_enabled():  # the gradient is to be differentiated
                return RowGradients.apply(logits, sums, g, target, ctx.ignored), None, None  # pyright: ignore[reportReturnType]
            return _gradients(logits, sums, g, target, ctx.ignored), None, None


class RowGradients(torch.autograd.Function):
    """The same gradient, with a derivative of its own: of a loss that is one number it is asked for (`check_additive`)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int) -> Tensor:
        ctx.ignored = ignored
        ctx.save_for_backward(logits, g, target)
        return _gradients(logits.detach(), sums, g.detach(), target, ignored)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, h: Tensor) -> tuple[Tensor, None, Tensor, None, None]:  # type: ignore[override]
        logits, g, target = ctx.saved_tensors
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            wide, given = (t.detach().to(torch.float32).requires_grad_() for t in (logits, g))
            losses = F.cross_entropy(wide, target, reduction="none", ignore_index=ctx.ignored)
            (first,) = torch.autograd.grad(losses, wide, given, create_graph=True)
            by_logits, by_given = torch.autograd.grad(first, [wide, given], h.to(torch.float32))
        return by_logits.to(logits.dtype), None, by_given.to(g.dtype), None, None


def _gradients(logits: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int) -> Tensor:
    """That of the logits, as they lie; a view of rows that are longer, if need be."""
    rows = (_rows(logits.detach()), sums, g.reshape(-1), target.reshape(-1), ignored)
    made = direct(_gradient, kernel.launched_gradient, target, *rows)
    return made.view(*target.shape, -1)[..., : logits.shape[1]].movedim(-1, 1)
