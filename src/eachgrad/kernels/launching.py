"""Starting a kernel, and an op that has one, with little work for the host.

Triton looks at every argument of a launch to find the code it has compiled for them, and torch's dispatcher takes a call of
an op written in Python through several layers. That is the same at every step, and an eager step has some for every layer.
Here the code is looked up by what a kernel was called with before, and where nobody watches the ops a kernel's function is
called as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._functorch import peek_interpreter_stack

R = TypeVar("R")

# Calls that are remembered: batches of texts have other lengths each time, and each is one more.
MOST = 4096
_known: dict[tuple, Any] = {}


def launch(kernel: Any, programs: int, like: Tensor, args: tuple, constants: dict[str, Any], **options: int) -> None:
    """Run so many programs of a Triton kernel on the device of `like`.

    `args`: its arguments, tensors and whole numbers, up to the last ones of its signature, which are the constants.
    """
    index = like.device.index
    elsewhere = like.is_cuda and index != torch._C._cuda_getDevice()
    key = (id(kernel), index, *_kinds(args), *constants.values(), *options.values())
    with torch.cuda.device(index) if elsewhere else nullcontext():
        found = _known.get(key)
        if found is not None and not kernel.pre_run_hooks:
            code, names = found
            code[programs, 1, 1](*args, *[constants[name] for name in names])  # code takes them by place
            return
        code = kernel[(programs,)](*args, **constants, **options)
        # Without a GPU an interpreter runs it, which has no code; and what somebody hears of every launch, he is to hear.
        if code is not None and not kernel.pre_run_hooks:
            if len(_known) >= MOST:
                _known.clear()
            _known[key] = code, kernel.arg_names[len(args) :]


def _kinds(values: Sequence[Any]) -> list[Any]:
    """All of the arguments that code may have been made for: whole numbers, dtypes, whether addresses are even."""
    found: list[Any] = []
    for value in values:  # one loop, and no call for each: this runs at every launch
        kind = type(value)
        if kind is int:
            found.append(value)
        elif kind is tuple:
            found.append(tuple(_kinds(value)))
        elif isinstance(value, Tensor):
            found += (value.dtype, value.data_ptr() % 16 == 0)
        else:  # a descriptor
            found.append((value.base.dtype, *value.block_shape, *value.shape, *value.strides))
    return found


def is_unwatched(t: Tensor) -> bool:
    """Whether a kernel may be called for `t` beside its op: it is there, on a GPU, and no mode or transform looks on."""
    return (
        type(t) is Tensor
        and t.is_cuda
        and not t.requires_grad
        and not _len_torch_dispatch_stack()
        and peek_interpreter_stack() is None
    )


def direct(op: Callable[..., R], launched: Callable[..., R], like: Tensor, *args: Any) -> R:
    """What the op gives for these arguments, by its kernel alone where that may be."""
    return launched(*args) if is_unwatched(like) and not _is_lazy(args) else op(*args)


def _is_lazy(values: Sequence[Any]) -> bool:
    """Whether the sign of a tensor's numbers is to be changed yet (`z.conj().imag`): the dispatcher sees to that."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_neg():
                return True
        elif isinstance(value, (tuple, list)) and _is_lazy(value):
            return True
    return False
