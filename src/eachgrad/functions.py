"""What is known of torch's functions as such: their names, their bodies, and those that need no care."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import resolve_name


def op_name(func: Callable) -> str:
    """What to call a function in a message, so that it can be pasted into code."""
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{func}"
    name = resolve_name(func) or getattr(func, "__qualname__", repr(func))
    return name.replace("_VariableFunctionsClass.", "torch.")


def call_site() -> str:
    """file:line of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("torch.", "eachgrad.")):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown place"


def opened(func: Callable) -> Callable:
    """A Python function of torch that runs its own body, so that the ops inside it are seen one by one.

    Such a function hands itself to the active mode as a whole before anything else; the copy is told that
    there is none.
    """
    assert isinstance(func, types.FunctionType)
    blind = {n: _never for n in func.__globals__ if n.startswith("has_torch_function")}
    scope = func.__globals__ | blind
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def can_be_opened(func: Callable) -> bool:
    if not isinstance(func, types.FunctionType) or not func.__module__.startswith("torch"):
        return False
    return any(name.startswith("has_torch_function") for name in func.__code__.co_names)


def _never(*_: Any) -> bool:
    return False


# Functions that read something about a tensor, or move no numbers of the batch.
PASSIVE = {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.stride, torch.Tensor.is_contiguous,
    torch.Tensor.is_floating_point, torch.is_floating_point, torch.Tensor.__len__, torch.Tensor.get_device,
    torch.Tensor.data_ptr, torch.Tensor.element_size, torch.Tensor.requires_grad_, torch.Tensor.retain_grad,
    torch.Tensor.register_hook, torch.Tensor.__hash__, torch.Tensor.__format__, torch.Tensor.__repr__,
}  # fmt: skip
_ATTRIBUTES = """
shape dtype device layout is_cuda is_nested is_sparse is_quantized is_leaf grad_fn requires_grad ndim names grad is_meta
is_mkldnn is_mps is_xpu itemsize nbytes output_nr _version is_cpu _backward_hooks
""".split()
PASSIVE |= {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES if hasattr(torch.Tensor, name)}
DERIVATIVES = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}
EXPANDING = {
    torch.Tensor.expand, torch.Tensor.expand_as, torch.broadcast_to, torch.Tensor.broadcast_to, torch.Tensor.repeat,
    torch.tile, torch.Tensor.tile,
}  # fmt: skip
