"""Convolutions of one to three dimensions, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from eachgrad.blocks import Block, Dense, Geometry, Patches
from eachgrad.blocks.arithmetic import cast
from eachgrad.dtypes import accumulation_dtype
from eachgrad.kernels.launching import is_unwatched
from eachgrad.rules.registry import NeedsLoop, rule

Size = int | Sequence[int]


def _tuple(value: Size, n: int) -> tuple[int, ...]:
    value = (value,) if isinstance(value, int) else tuple(value)
    return value * n if len(value) == 1 else value


def _bias(g: Tensor, bias: Tensor | None) -> dict[str, Block]:
    """What the bias of a convolution gets, if there is one: (B, p, *out) -> (B, p), in float32 or better."""
    return {} if bias is None else {"bias": Dense(g.flatten(2).sum(2, dtype=accumulation_dtype(g.dtype)))}


def geometry(weight: Tensor, stride: Size, padding: Size | str, dilation: Size, groups: int) -> Geometry:
    """The geometry of a convolution call, string padding resolved."""
    kernel = tuple(weight.shape[2:])
    n = len(kernel)
    spread = _tuple(dilation, n)
    if padding == "same":
        total = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
        pads = tuple((t // 2, t - t // 2) for t in total)
    elif padding == "valid":
        pads = ((0, 0),) * n
    else:
        assert not isinstance(padding, str)
        pads = tuple((p, p) for p in _tuple(padding, n))
    return Geometry(kernel, _tuple(stride, n), pads, spread, groups)


@rule(F.conv1d, F.conv2d, F.conv3d, values=False)
def _convolution(
    g: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> dict[str, Block]:
    if input.ndim != weight.ndim:  # a single map without a batch dimension
        raise NeedsLoop
    where = geometry(weight, stride, padding, dilation, groups)
    if g.ndim == 4 and groups == 1 and g.dtype == torch.bfloat16 and is_unwatched(g) and not input.requires_grad:
        # As the kernels of `Patches` read them: once for all that is asked, and of an input that is cast anyway at no cost.
        input, g = (t.to(g.dtype, memory_format=torch.channels_last) for t in (input, g))
    x = cast(input, g.dtype).conj().unsqueeze(1)
    return {"weight": Patches(x, g.unsqueeze(1), where), **_bias(g, bias)}


@rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, values=False)
def _transposed_convolution(
    g: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> dict[str, Block]:
    if input.ndim != weight.ndim:
        raise NeedsLoop
    # The transpose reads where the convolution writes: the output gradient is what is cut into patches.
    where = geometry(weight, stride, padding, dilation, groups)
    x = cast(input, g.dtype).conj().unsqueeze(1)
    return {"weight": Patches(g.unsqueeze(1), x, where), **_bias(g, bias)}
