"""The namespace of the ops, `torch.ops.eachgrad`, and memory for what they return."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

# What every kernel takes.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

library = torch.library.Library("eachgrad", "DEF")

# As the code that torch's compiler writes has them: whoever plans where its tensors lie (arena.py) plans those of ops, too.
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


def new_empty(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty`; a tensor that is there has its place by the plan that is in effect, if any."""
    dtype = dtype or like.dtype
    if type(like) is not Tensor:
        return like.new_empty(shape, dtype=dtype)
    if like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
        make = empty_strided_cuda
    elif like.is_cpu:
        make = empty_strided_cpu
    else:
        return like.new_empty(shape, dtype=dtype)
    sizes = tuple(shape)
    return make(sizes, _strides(sizes), dtype)  # of a tensor that is there all sizes are numbers


@lru_cache(4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, distance = [], 1
    for n in reversed(shape):
        strides.append(distance)
        distance *= max(1, n)
    return tuple(reversed(strides))
