"""position_sums_of_many: what each sample adds up over its positions, for the biases of many layers in few launches.

In an eager step the host starts one kernel after another, and a sum for each bias took it longer than the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eachgrad.kernels.launching import direct, launch
from eachgrad.kernels.library import DTYPES, library, new_empty
from eachgrad.kernels.many import SHELF

# As `positions.tiling` has them for many samples. Tensors a launch: see `many.MOST`.
ROWS, COLUMNS, WARPS, MOST = 64, 64, 4, 64


def fits(value: Tensor) -> bool:
    """Whether the kernel takes a tensor as it lies: its positions one after another."""
    return value.ndim == 3 and value.stride(2) == 1 and value.stride(1) == value.shape[2] and value.dtype in DTYPES


def _check(values: Sequence[Tensor]) -> None:
    """The kernel goes by addresses, and by the sizes of the first."""
    kinds = {(*value.shape[:2], value.dtype, value.device) for value in values}
    if len(kinds) != 1 or not all(map(fits, values)):
        found = [(tuple(value.shape), value.stride(), value.dtype) for value in values]
        raise ValueError(f"position_sums_of_many takes (B, T, n) of one B, T, dtype and device, not {found}")


def _first(values: Sequence[Tensor]) -> list[int]:
    """The first block of COLUMNS numbers of each tensor, and that after the last."""
    first = [0]
    for value in values:
        first.append(first[-1] - (-value.shape[2] // COLUMNS))
    return first


def _room(values: Sequence[Tensor]) -> Tensor:
    return new_empty(values[0], (values[0].shape[0], _first(values)[-1] * COLUMNS), torch.float32)


def plain(values: list[Tensor]) -> Tensor:
    """The same in torch's own ops: (B, n), where each tensor begins at a multiple of COLUMNS."""
    _check(values)
    out = _room(values).zero_()
    for value, start in zip(values, _first(values), strict=False):
        out[:, start * COLUMNS :][:, : value.shape[2]] = value.sum(1, dtype=torch.float32)
    return out


def launched(values: list[Tensor]) -> Tensor:
    """The same by the kernel."""
    from eachgrad.kernels.triton_many_positions import position_sums_of_many_kernel

    _check(values)
    out, (B, T, _), column = _room(values), values[0].shape, 0
    for start in range(0, len(values) if out.numel() else 0, MOST):
        some = values[start : start + MOST]
        first = _first(some)
        blocks = first[-1]
        constants = {
            "FIRST": (*first, *first[-1:] * (-len(some) % SHELF)),
            "NUMBERS": tuple([value.shape[2] for value in some]),
            "STRIDES": tuple([value.stride(0) for value in some]),
            "SHELF": SHELF,
            "ALIGNED": all(_is_aligned(value) for value in some),
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
        }
        args = (tuple(some), out[:, column:], T, blocks, out.stride(0))
        launch(position_sums_of_many_kernel, B * blocks, out, args, constants, num_warps=WARPS)
        column += blocks * COLUMNS
    return out


def _is_aligned(value: Tensor) -> bool:
    """Whether every position begins at a multiple of sixteen bytes."""
    size = value.element_size()
    return not (value.data_ptr() % 16 or value.stride(0) * size % 16 or value.shape[2] * size % 16)


library.define("position_sums_of_many(Tensor[] values) -> Tensor", tags=(torch.Tag.flexible_layout,))
library.impl("position_sums_of_many", plain, "CPU")
library.impl("position_sums_of_many", launched, "CUDA")


@torch.library.register_fake("eachgrad::position_sums_of_many", lib=library)
def _(values: list[Tensor]) -> Tensor:
    return _room(values)


def position_sums_of_many(values: Sequence[Tensor]) -> list[Tensor]:
    """sum_t value[:, t] of each (B, T, n), in float32: (B, n) for each. All have one B, T and dtype, and `fits`."""
    found = direct(torch.ops.eachgrad.position_sums_of_many, launched, values[0], list(values))
    starts = _first(values)
    return [found[:, start * COLUMNS :][:, : value.shape[2]] for value, start in zip(values, starts, strict=False)]
