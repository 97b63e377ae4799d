"""Whose each element of a tensor is: the tags that `mixing.py` passes on, and their algebra.

A tag is the dimension of the samples, in their order; or a table of owners, where they were picked, moved, folded or
compared; or Mixed, where every element is computed from several samples; or None, where nothing is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

NOBODY, SEVERAL = -1, -2
# A table of more elements is not made: nothing is claimed instead. Combining two of this size took 11 ms on one CPU core.
LIMIT = 1 << 20


@dataclass(frozen=True)
class Mixed:
    """Computed over a dimension that holds the samples, if there are as many as it had entries."""

    sizes: frozenset[int]
    what: str = ""  # the op that did it, and where
    places: bool = False  # integers: a count, an order, an offset. As an index they say where, and are no statistic


@dataclass(frozen=True, eq=False)
class Owners:
    """Which of `n` samples each element is computed from."""

    table: Tensor  # the tensor's rank; size 1 along a dimension where it makes no difference; NOBODY, SEVERAL
    n: int
    several: bool = False
    what: str = ""


class Loose(int):
    """The dimension of the samples of an input that may have none: a mask or positions of the same size."""


Tag = int | Owners | Mixed | None


def size_of(shape: Sequence[int], tag: int | Owners) -> int:
    """How many samples the tag of a tensor of this shape tells apart."""
    return shape[tag] if isinstance(tag, int) else tag.n


def table_of(shape: Sequence[int], tag: int | Owners) -> Tensor:
    if isinstance(tag, int):
        return torch.arange(shape[tag], device="cpu").view([-1 if d == tag else 1 for d in range(len(shape))])
    return tag.table


def settled(table: Tensor | None, n: int, what: str = "") -> Tag:
    """The plainest tag that says the same as this table."""
    if table is None or n < 2 or not table.numel():
        return None
    for dim, size in enumerate(table.shape):
        if size > 1 and (not table.stride(dim) or bool((table == table.narrow(dim, 0, 1)).all())):
            table = table.narrow(dim, 0, 1)
    low, high = (int(v) for v in table.aminmax())
    if low == high < 0:
        return None if low == NOBODY else Mixed(frozenset({n}), what)
    varying = [dim for dim, size in enumerate(table.shape) if size > 1]
    if len(varying) == 1 and table.numel() == n and bool((table.flatten() == torch.arange(n, device="cpu")).all()):
        return varying[0]
    return Owners(table, n, low == SEVERAL, what)


def joined(tables: Sequence[Tensor], ndim: int) -> Tensor | None:
    """The owners of what is computed element by element from all of these, broadcast to `ndim` dimensions."""
    aligned = [table.view((1,) * (ndim - table.ndim) + table.shape) for table in tables]
    if prod(torch.broadcast_shapes(*(table.shape for table in aligned))) > LIMIT:
        return None
    out = aligned[0]
    for other in aligned[1:]:
        either = torch.where(out == NOBODY, other, torch.where((other == NOBODY) | (other == out), out, SEVERAL))
        out = torch.where((out == SEVERAL) | (other == SEVERAL), SEVERAL, either)
    return out


def over(table: Tensor, dims: Iterable[int]) -> Tensor:
    """The owners of what is computed over `dims`, which stay with size 1."""
    varying = [dim for dim in dims if table.shape[dim] > 1]
    if not varying or not table.numel():
        return table
    high = table.amax(varying, keepdim=True)
    low = table.where(table != NOBODY, high).amin(varying, keepdim=True)
    return torch.where(low == high, high, SEVERAL)


def spread(table: Tensor, dims: Iterable[int], shape: Sequence[int]) -> Tensor:
    """The table with its full size along `dims`."""
    wanted = set(dims)
    return table.expand([shape[dim] if dim in wanted else -1 for dim in range(table.ndim)])


def reshaped(table: Tensor, old: Sequence[int], new: Sequence[int]) -> Tensor | None:
    """The table of a tensor of shape `old` after it was brought to shape `new`."""
    last = 0  # trailing dimensions that stay as they are, and need not be written out
    while last < min(len(old), len(new)) and old[-1 - last] == new[-1 - last] and table.shape[-1 - last] == 1:
        last += 1
    if prod(old[: len(old) - last]) > LIMIT:
        return None
    front = table.view(table.shape[: len(old) - last]).expand(old[: len(old) - last])
    return front.reshape(*new[: len(new) - last], *[1] * last)


def full_index(index: Any, ndim: int) -> list | None:
    """An index as a list with an entry for every dimension, and None where one is added; None if it is not understood."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.tensor(k) if isinstance(k, list) else k for k in parts]
    if not all(k is None or k is Ellipsis or type(k) in (int, slice) or isinstance(k, Tensor) for k in parts):
        return None
    used = sum(k.ndim if is_mask(k) else k is not None and k is not Ellipsis for k in parts)
    rest = [slice(None)] * (ndim - used)
    at = next((place for place, k in enumerate(parts) if k is Ellipsis), len(parts))
    return [*parts[:at], *rest, *parts[at + 1 :]]


def is_mask(k: Any) -> bool:
    return isinstance(k, Tensor) and k.dtype in (torch.bool, torch.uint8)


def taken(table: Tensor, shape: Sequence[int], index: list) -> Tensor | None:
    """The owners of `t[index]`; only dimensions along which they differ are looked at."""
    parts, dim, needed = [], 0, []
    for k in index:
        if k is None:
            parts.append(k)
            continue
        width = k.ndim if is_mask(k) else 1
        if is_mask(k):
            needed += range(dim, dim + width)
            parts.append(k.cpu().bool())
        elif table.shape[dim] > 1:
            parts.append(k.cpu() if isinstance(k, Tensor) else k)
        elif isinstance(k, Tensor):
            parts.append(torch.zeros_like(k, device="cpu"))
        else:
            parts.append(0 if type(k) is int else slice(None))
        dim += width
    out = spread(table, needed, shape)
    if sum(isinstance(k, Tensor) for k in parts) and out.numel() > LIMIT:
        return None
    return out[tuple(parts)]


def put(table: Tensor, shape: Sequence[int], index: list, value: Tensor, ndim: int) -> Tensor | None:
    """The owners of `t` after `t[index] = v`, where `value` is the table of v and `t[index]` has `ndim` dimensions."""
    value = (
        value.view((1,) * (ndim - value.ndim) + tuple(value.shape))
        if value.ndim <= ndim
        else value.flatten(0, -1 - ndim)
    )
    last = 0  # trailing dimensions that are whole and make no difference
    while last < min(len(index), ndim, table.ndim) and isinstance(index[-1 - last], slice):
        if index[-1 - last] != slice(None) or table.shape[-1 - last] > 1 or value.shape[-1 - last] > 1:
            break
        last += 1
    front = [*shape[: len(shape) - last], *[1] * last]
    if prod(front) > LIMIT:
        return None
    out = table.expand(front).clone()
    out[tuple(k.cpu() if isinstance(k, Tensor) else k for k in index)] = value
    return out


# The arguments of an op

Tagged = Sequence[tuple[Tensor, Tag]]
Known = Sequence[tuple[Tensor, int | Owners]]  # what is left when Mixed has been dealt with


def name_of(func: Callable) -> str:
    return getattr(func, "__name__", "")


def one_space(known: Known, ndim: int) -> Known:
    """Those that tell the same samples apart. Of two sizes the outermost counts: what is broadcast lies further in."""
    sizes = {size_of(t.shape, tag) for t, tag in known}
    if len(sizes) == 1:
        return known
    plain = [(t, tag) for t, tag in known if isinstance(tag, int)] or known
    t, tag = min(plain, key=lambda k: ndim - k[0].ndim + k[1] if isinstance(k[1], int) else 0)
    n = size_of(t.shape, tag)
    return [(t, tag) for t, tag in known if size_of(t.shape, tag) == n]


def owners_of(value: Any, known: Known) -> Tensor:
    """The owners of an argument; nobody's if nothing is known of it."""
    found = next(((t, tag) for t, tag in known if t is value), None)
    if found is not None:
        return table_of(found[0].shape, found[1])
    return torch.full((1,) * (value.ndim if isinstance(value, Tensor) else 0), NOBODY, device="cpu")


def count_of(known: Known) -> int:
    return size_of(known[0][0].shape, known[0][1])


def what_of(known: Known) -> str:
    return next((tag.what for _, tag in known if isinstance(tag, Owners) and tag.what), "")
