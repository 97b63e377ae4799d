"""entropies and entropy_gradient: a cross entropy over many classes, and its gradient, from logits in their own dtype.

A compiler's code takes 2.8 ms for the 16,384 rows of GPT-2's 50,257 tokens on an H200, and copies the gradient then, since
products are slow with rows that are no multiple of sixteen bytes. Logits and gradient are 1.6 GB each: to read the first
twice and write the second, with zeros after the end of a row, takes 1.5 (benchmarks/kernels.py).
The Triton code is apart, as triton is there only where a GPU is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eachgrad import plan
from eachgrad.kernels.launching import launch
from eachgrad.kernels.library import DTYPES, library, new_empty

# Of twelve on an H200 the fastest for 16,384 rows of 50,257 classes.
COLUMNS, WARPS, GRADIENT_WARPS = 4096, 4, 16
CLASSES = 4096  # from which on a row is worth a program of its own


def is_large(logits: Tensor) -> bool:
    """Whether the kernels are faster; decided by the classes, which are as many for any number of samples."""
    return logits.is_cuda and logits.shape[1] >= CLASSES


def _check(logits: Tensor, *rows: Tensor) -> None:
    if logits.dtype not in DTYPES:
        raise TypeError(f"logits are {', '.join(map(str, DTYPES))}, not {logits.dtype}")
    if logits.ndim != 2:
        raise ValueError(f"logits are (rows, classes), not {tuple(logits.shape)}")
    for t in rows:
        if t.shape[-1:] != logits.shape[:1]:
            raise ValueError(f"{tuple(t.shape)} is not one for each of {len(logits)} rows")


def _gradient_like(logits: Tensor) -> Tensor:
    """Room for a gradient, with rows that are a multiple of sixteen bytes."""
    n, classes = logits.shape
    return new_empty(logits, (n, -(-classes // plan.ALIGNED) * plan.ALIGNED))


def _rows(logits: Tensor) -> tuple[Tensor, int, int]:
    """The logits, one row after another; what rows begin at a multiple of, and the distance of two in that."""
    logits = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    unit = 1 if logits.stride(0) % plan.ALIGNED else plan.ALIGNED
    return logits, unit, logits.stride(0) // unit


def plain(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The same in torch's own ops."""
    _check(logits, target)
    if not logits.numel():
        return logits.new_empty((3, len(logits)), dtype=torch.float32)
    wide = logits.to(torch.float32)
    most = wide.amax(1)
    logs = (wide - most[:, None]).exp().sum(1).log()
    of_target = wide.gather(1, target.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    losses = torch.where(_is_wrong(target, logits), torch.nan, logs - (of_target - most))
    return torch.stack([most, logs, torch.where(target == ignored, 0.0, losses)])


def _is_wrong(target: Tensor, logits: Tensor) -> Tensor:
    """Which targets are no class; the loss and the gradient of these are NaN, for the eager code to say what is wrong."""
    return (target < 0) | (target >= logits.shape[1])


def launched(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The same by the kernel."""
    from eachgrad.kernels.triton_entropy import entropies_kernel

    _check(logits, target)
    out = new_empty(logits, (3, len(logits)), torch.float32)
    given, unit, distance = _rows(logits)
    if logits.numel():
        args = (given, target.contiguous(), out, ignored, logits.shape[1], distance)
        launch(entropies_kernel, len(logits), out, args, {"UNIT": unit, "COLUMNS": COLUMNS}, num_warps=WARPS)
    return out


def plain_gradient(logits: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The same in torch's own ops."""
    _check(logits, sums, g, target)
    given = torch.where(_is_wrong(target, logits), torch.nan, g)
    given = torch.where(target == ignored, 0.0, given)[:, None]
    classes = torch.arange(logits.shape[1], device=logits.device)
    chance = (logits.to(torch.float32) - sums[0, :, None] - sums[1, :, None]).exp()
    out = _gradient_like(logits).zero_()
    out[:, : logits.shape[1]] = chance * given - torch.where(classes == target[:, None], given, 0.0)
    return out


def launched_gradient(logits: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int) -> Tensor:
    """The same by the kernel."""
    _check(logits, sums, g, target)
    return _launched(logits, sums, g, target, ignored, _gradient_like(logits))


def _launched(logits: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int, out: Tensor) -> Tensor:
    from eachgrad.kernels.triton_entropy import entropy_gradient_kernel

    given, unit, distance = _rows(logits)
    if logits.numel():
        given = (given, sums.contiguous(), g.contiguous(), target.contiguous(), out)
        args = (*given, ignored, logits.shape[1], distance, out.shape[1] // plan.ALIGNED)
        constants = {"UNIT": unit, "OUT": plan.ALIGNED, "COLUMNS": COLUMNS}
        launch(entropy_gradient_kernel, len(logits), out, args, constants, num_warps=GRADIENT_WARPS)
    return out


def _logits_in(out: Tensor, classes: int) -> Tensor:
    """The logits in rows that the gradient is to be written over."""
    if not out.is_contiguous() or out.shape[1] != -(-classes // plan.ALIGNED) * plan.ALIGNED:
        raise ValueError(f"{tuple(out.shape)} {out.stride()} are no rows of {classes} classes and nothing else")
    return out[:, :classes]


def plain_over(out: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int, classes: int) -> None:
    """The same in torch's own ops, written over the logits."""
    out.copy_(plain_gradient(_logits_in(out, classes), sums, g, target, ignored))


def launched_over(out: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int, classes: int) -> None:
    """The same by the kernel, which has read what it writes over."""
    logits = _logits_in(out, classes)
    _check(logits, sums, g, target)
    _launched(logits, sums, g, target, ignored, out)


library.define("entropies(Tensor logits, Tensor target, int ignored) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("entropies", plain, "CPU")
library.impl("entropies", launched, "CUDA")
library.define(
    "entropy_gradient(Tensor logits, Tensor sums, Tensor g, Tensor target, int ignored) -> Tensor",
    tags=(torch.Tag.flexible_layout,),
)
library.impl("entropy_gradient", plain_gradient, "CPU")
library.impl("entropy_gradient", launched_gradient, "CUDA")
library.define(
    "entropy_gradient_(Tensor(a!) rows, Tensor sums, Tensor g, Tensor target, int ignored, int classes) -> ()",
    tags=(torch.Tag.flexible_layout,),
)
library.impl("entropy_gradient_", plain_over, "CPU")
library.impl("entropy_gradient_", launched_over, "CUDA")


@torch.library.register_fake("eachgrad::entropies", lib=library)
def _(logits: Tensor, target: Tensor, ignored: int) -> Tensor:
    _check(logits)
    return logits.new_empty((3, logits.shape[0]), dtype=torch.float32)


@torch.library.register_fake("eachgrad::entropy_gradient", lib=library)
def _(logits: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int) -> Tensor:
    _check(logits)
    return _gradient_like(logits)


@torch.library.register_fake("eachgrad::entropy_gradient_", lib=library)
def _(out: Tensor, sums: Tensor, g: Tensor, target: Tensor, ignored: int, classes: int) -> None:
    _check(_logits_in(out, classes))
