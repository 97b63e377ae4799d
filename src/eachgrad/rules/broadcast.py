"""Ops that act element by element after broadcasting: one treatment for all of them.

A parameter in such an op is expanded to the output's shape first, and the gradient is taken at the
expanded parameter: autograd supplies the derivative of the op itself, and what is left is a sum over
the positions of each sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block, Dense
from eachgrad.blocks.arithmetic import over_positions
from eachgrad.rules.registry import BROADCAST, NeedsLoop, composite, rule

_NAMES = [
    "add",
    "sub",
    "mul",
    "div",
    "true_divide",
    "divide",
    "multiply",
    "subtract",
    "pow",
    "float_power",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "atan2",
    "arctan2",
    "hypot",
    "where",
    "lerp",
    "addcmul",
    "addcdiv",
    "fmod",
    "remainder",
    "copysign",
    "logaddexp",
    "logaddexp2",
    "xlogy",
    "rsub",
    "clamp",
    "clip",
    "clamp_min",
    "clamp_max",
    "heaviside",
    "ldexp",
    "xlog1py",
]
_OPERATORS = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__ __pow__ __rpow__"
)
_IN_PLACE = [
    "add_",
    "sub_",
    "mul_",
    "div_",
    "true_divide_",
    "divide_",
    "multiply_",
    "subtract_",
    "pow_",
    "lerp_",
    "addcmul_",
    "addcdiv_",
    "copy_",
    "clamp_",
    "clip_",
    "clamp_min_",
    "clamp_max_",
    "atan2_",
    "arctan2_",
    "hypot_",
    "copysign_",
    "fmod_",
    "remainder_",
    "xlogy_",
    "float_power_",
    "ldexp_",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ipow__",
]

_PLAIN = {"__iadd__": "add", "__isub__": "sub", "__imul__": "mul", "__itruediv__": "div", "__ipow__": "pow"}

# op in place -> the same out of place
IN_PLACE = {
    getattr(torch.Tensor, name): getattr(torch.Tensor, _PLAIN.get(name, name.rstrip("_")), None)
    for name in _IN_PLACE
    if hasattr(torch.Tensor, name)
}
for _owner, _names in ((torch, _NAMES), (torch.special, _NAMES), (torch.Tensor, [*_NAMES, *_OPERATORS.split()])):
    BROADCAST.update(getattr(_owner, name) for name in _names if hasattr(_owner, name))
BROADCAST.update(IN_PLACE)


@rule(torch.Tensor.expand, values=False)
def _expand(g: Tensor, input: Tensor, *sizes: int, batch_dim: int) -> dict[str, Block]:
    lead = g.ndim - input.ndim
    own = batch_dim - lead
    if own >= 0 and input.shape[own] != 1:
        raise NeedsLoop
    g = g.movedim(batch_dim, 0)
    # What is left of the parameter's own shape once the sample dimension is out of the way.
    rest = [n for k, n in enumerate(input.shape) if k != own]
    extra = g.ndim - 1 - len(rest)
    (value,) = over_positions(g.flatten(1, extra)) if extra else (g,)
    value = value.sum_to_size(len(g), *rest)
    return {"input": Dense(value.reshape(len(g), *input.shape))}


@composite(torch.broadcast_to, torch.Tensor.broadcast_to)
def _broadcast_to(input: Tensor, size: tuple[int, ...]) -> Tensor:
    return input.expand(size)


@composite(torch.broadcast_tensors)
def _broadcast_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each of them where nothing is chosen from the others: so a parameter meets those that hold samples."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    everywhere = torch.ones(shape, dtype=torch.bool, device=tensors[0].device)
    found = []
    for k, t in enumerate(tensors):
        spread = t.expand(shape)
        for other in (*tensors[:k], *tensors[k + 1 :]):
            spread = torch.where(everywhere, spread, other).to(t.dtype)
        found.append(spread)
    return tuple(found)


@composite(torch.meshgrid)
def _meshgrid(*tensors: Any, indexing: str | None = None) -> tuple[Tensor, ...]:
    if len(tensors) == 1 and not isinstance(tensors[0], Tensor):
        tensors = tuple(tensors[0])
    n = len(tensors)
    grids = torch.broadcast_tensors(
        *(t.reshape([-1 if k == j else 1 for j in range(n)]) for k, t in enumerate(tensors))
    )
    return tuple(t.transpose(0, 1) for t in grids) if indexing == "xy" and n > 1 else tuple(grids)


@composite(torch.Tensor.repeat, torch.tile, torch.Tensor.tile)
def _repeat(input: Tensor, *sizes: int) -> Tensor:
    repeats = list(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else list(sizes)
    repeats = [1] * (input.ndim - len(repeats)) + repeats
    shape = [1] * (len(repeats) - input.ndim) + list(input.shape)
    pairs = [k for r, n in zip(repeats, shape, strict=True) for k in (r, n)]
    spread = input.reshape([k for n in shape for k in (1, n)]).expand(pairs)
    # A copy, as torch's own is: what follows may view it, or change it.
    return spread.reshape([r * n for r, n in zip(repeats, shape, strict=True)]).clone(
        memory_format=torch.contiguous_format
    )


@composite(F.prelu, torch.prelu, torch.Tensor.prelu)
def _prelu(input: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1:
        weight = weight.reshape([-1 if k == 1 else 1 for k in range(input.ndim)])
    return torch.where(input > 0, input, input * weight)


@composite(torch.masked_fill, torch.Tensor.masked_fill)
def _masked_fill(input: Tensor, mask: Tensor, value: Tensor | float) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=input.dtype, device=input.device)
    return torch.where(mask, value.to(input.dtype), input)


@composite(torch.Tensor.masked_fill_)
def _masked_fill_in_place(input: Tensor, mask: Tensor, value: Tensor | float) -> Tensor:
    return input.copy_(_masked_fill(input.clone(), mask, value))


@composite(torch.Tensor.fill_)
def _fill_in_place(input: Tensor, value: Tensor) -> Tensor:
    return input.copy_(value)


@composite(torch.max, torch.Tensor.max)
def _max(input: Tensor, other: Any = None, *rest: Any, **options: Any) -> Tensor:
    return torch.maximum(input, other) if isinstance(other, Tensor) else NotImplemented


@composite(torch.min, torch.Tensor.min)
def _min(input: Tensor, other: Any = None, *rest: Any, **options: Any) -> Tensor:
    return torch.minimum(input, other) if isinstance(other, Tensor) else NotImplemented
