"""noisy: scaled sums plus Gaussian noise for all parameters of a model in one launch.

One random kernel a parameter took 3 ms of the host's time and 0.7 ms of an H200's for the 148 parameters of GPT-2 small.
To read and write their 124 million numbers once takes 0.25 ms there.

The random bits are Philox4x32-10 (Salmon et al. 2011) of a counter of four words: the key is the seed of 64 bits, low word
first; words 0 and 1 of the counter are the number of a group of four, low word first, and words 2 and 3 the offset. The
groups of all tensors are numbered in order: tensor k has ceil(n_k / 4), so that each begins with a group of its own, and
element i of it is normal i % 4 of its group i // 4. The numbers thus depend on the tensors' sizes and order, and on
nothing else: not on a block's size or the device.

The four words (x0, y0, x1, y1) of a group become four normals (r0 cos a0, r0 sin a0, r1 cos a1, r1 sin a1) by Box and
Muller: r = sqrt(-2 log((x + 1/2) / 2^32)) and a = 2 pi y / 2^32. The logarithm is of 2^-33 at least, never of 0, and no
normal is beyond sqrt(66 log 2) = 6.764, where a Gaussian is once in 7e10. The kernel's float32 is off by at most 1e-6 of r.
Whoever knows the seed knows the noise, and Philox is no cipher: this is not for `secure=True`.

Not a `torch.library` op, on purpose: a graph that holds it would hold its seed and offset, and repeat the noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BLOCK = (
    2048  # four groups a thread, which share the key's ten rounds: 293 us for GPT-2 small on an H200, two a thread 318
)
WARPS = 4
_KEPT = 8  # tables: a training loop needs one or two

_WORD = 0xFFFFFFFF


def noisy(
    values: Sequence[Tensor | None], out: Sequence[Tensor], unit: float, deviation: float, divisor: float, seed: int,
    offset: int,
) -> None:  # fmt: skip
    """Write (unit * value + deviation * z) / divisor, in float32, into each `out`, with z standard normal.

    `values` may be `out` themselves; None stands for zeros. z is independent over all numbers of all tensors, and over
    calls with another offset or seed: the same pair must never be used twice. `seed` and `offset` are in [0, 2^64).
    """
    _check(values, out, seed, offset)
    write = launched if out and out[0].is_cuda else plain
    write(values, out, unit, deviation, divisor, seed, offset)


def plain(
    values: Sequence[Tensor | None], out: Sequence[Tensor], unit: float, deviation: float, divisor: float, seed: int,
    offset: int,
) -> None:  # fmt: skip
    """The same in torch's own ops, on any device, computed in float64."""
    first = 0
    for value, target in zip(values, out, strict=True):
        groups = -(-target.numel() // 4)
        total = normals(seed, offset, first, groups, target.device)[: target.numel()].view(target.shape) * deviation
        if value is not None:
            total += unit * value.to(torch.float64).reshape(target.shape)
        target.copy_(total / divisor)
        first += groups


def launched(
    values: Sequence[Tensor | None], out: Sequence[Tensor], unit: float, deviation: float, divisor: float, seed: int,
    offset: int,
) -> None:  # fmt: skip
    """The same by the kernel."""
    sizes = tuple(map(Tensor.numel, out))
    if not any(sizes):
        return
    from eachgrad.kernels.triton_noise import noisy_kernel

    device = out[0].device
    # A table is written by the stream that reads it: another one could read it too early.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    read, written = values, out
    if not _in_order([*out, *[value for value in values if value is not None]]):
        read = [None if value is None else value.resolve_neg().contiguous() for value in values]
        written = [target if _in_order([target]) else torch.empty(target.shape, device=device) for target in out]
    where = (*[0 if value is None else value.data_ptr() for value in read], *map(Tensor.data_ptr, written))
    owner, layout = _layout(sizes, BLOCK, device, stream)
    addresses, aligned = _addresses(where, device, stream)
    kernel: Any = noisy_kernel
    with torch.cuda.device_of(out[0]):
        kernel[(len(owner),)](
            owner, layout, addresses, len(out), unit / divisor, deviation / divisor, seed, offset,
            BLOCK=BLOCK, ALIGNED=aligned, num_warps=WARPS,
        )  # fmt: skip
    for target, found in zip(out, written, strict=True):
        if found is not target:
            target.copy_(found)


def _in_order(tensors: list[Tensor]) -> bool:
    """Whether the memory at each tensor's address has its numbers one after another, as they are."""
    return all(map(Tensor.is_contiguous, tensors)) and not any(map(Tensor.is_neg, tensors))


def _check(values: Sequence[Tensor | None], out: Sequence[Tensor], seed: int, offset: int) -> None:
    """The kernel goes by addresses: whatever is no float32 of the right size on the right device would be a wild write."""
    if not (0 <= seed < 1 << 64 and 0 <= offset < 1 << 64):
        raise ValueError(f"seed and offset are whole numbers in [0, 2^64), not {seed} and {offset}")
    if len(values) != len(out):
        raise ValueError(f"{len(values)} values do not go into {len(out)} tensors")
    every = [*out, *[value for value in values if value is not None]]
    # Lists are compared as a whole, and filled by map: a loop over 148 parameters takes three times as long.
    if [tensor.dtype for tensor in every].count(torch.float32) < len(every) or len({t.get_device() for t in every}) > 1:
        raise TypeError("noisy takes tensors of float32 on one device")
    sizes = [*map(Tensor.numel, out)]
    wanted = [n for n, value in zip(sizes, values, strict=True) if value is not None]
    if wanted != [*map(Tensor.numel, every[len(out) :])]:
        raise ValueError("each value has as many numbers as the tensor that it goes into")
    if out and out[0].is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("noise in a CUDA graph would be the same at every replay: draw it outside the graph")


@lru_cache(_KEPT)
def _layout(sizes: tuple[int, ...], block: int, device: torch.device, stream: int) -> tuple[Tensor, Tensor]:
    """Which tensor each program has (programs,); (3, tensors): their numbers, first groups and first programs."""
    n = torch.tensor(sizes, dtype=torch.int64)
    groups, programs = (n + 3) // 4, (n + block - 1) // block
    owner = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(programs)
    layout = torch.stack([n, groups.cumsum(0) - groups, programs.cumsum(0) - programs])
    return owner.to(device), layout.to(device)


@lru_cache(_KEPT)
def _addresses(where: tuple[int, ...], device: torch.device, stream: int) -> tuple[Tensor, bool]:
    """The addresses on the device, and whether all are multiples of 16 bytes."""
    table = torch.tensor(where, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), all(address % 16 == 0 for address in where)


def normals(seed: int, offset: int, first: int, groups: int, device: torch.device | str = "cpu") -> Tensor:
    """The (4 groups,) standard normals of so many groups from number `first` on, in float64."""
    group = torch.arange(first, first + groups, dtype=torch.int64, device=device)
    high, low = (torch.full_like(group, part) for part in (offset >> 32, offset & _WORD))
    words = philox((group & _WORD, group >> 32, low, high), (seed & _WORD, seed >> 32))
    pairs = [_box_muller(words[0], words[1]), _box_muller(words[2], words[3])]
    return torch.stack([*pairs[0], *pairs[1]], dim=1).flatten()


def philox(counter: tuple[Tensor, ...], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of words in int64: four tensors of 32 random bits from four of a counter, and a key of two words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiplied(c0, 0xD2511F53)
        high1, low1 = _multiplied(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _multiplied(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a times b, by halves of b: the product itself has more than int64's 63 bits."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)
    middle = upper + (lower >> 16)
    return middle >> 16, (middle & 0xFFFF) << 16 | lower & 0xFFFF


def _box_muller(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    radius = torch.sqrt(-2.0 * torch.log((x.double() + 0.5) * 2.0**-32))
    angle = y.double() * (2.0 * math.pi * 2.0**-32)
    return radius * torch.cos(angle), radius * torch.sin(angle)
