"""Random projections whose random numbers are the same on every machine, device and torch version."""

from __future__ import annotations

import math
from zlib import crc32

import torch
from torch import Tensor

from eachgrad.blocks import Block
from eachgrad.blocks.arithmetic import as_real
from eachgrad.dtypes import accumulation_dtype
from eachgrad.gradient import Gradient

# Buckets per coordinate of "sjlt": several keep the error small for gradients of a few large numbers.
BUCKETS = 4
# Most random numbers at a time: 2 MiB in float64, and a few such buffers while they are made, which stay in a cache.
# On two cores a normal number took 4.8 ns then; 5.7 ns with four times as many, and 14.7 ns not in place.
NUMBERS = 1 << 18

MASK = (1 << 64) - 1
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def check_projection(dim: int, kind: str) -> None:
    if dim < 1:
        raise ValueError(f"dim is a positive number, not {dim}")
    if kind not in KINDS:
        raise ValueError(f"kind is one of {', '.join(map(repr, KINDS))}, not {kind!r}")


def project(gradient: Gradient, dim: int, seed: int, kind: str) -> Tensor:
    """A parameter's share of the projection, (B, dim)."""
    block = gradient.checked()
    zeros = gradient.zeros(gradient.batch_size, dim)
    if block is None or not gradient.parameter.numel():
        return zeros
    return KINDS[kind](gradient, block, dim, key(seed, gradient.name, kind)).to(zeros)


def _by_matrix(gradient: Gradient, block: Block, dim: int, key: int, normal: bool = True) -> Tensor:
    """Times a matrix of independent numbers, a few of its rows at a time."""
    block, places = block.support()
    step, total = max(1, NUMBERS // dim), torch.zeros(())
    for start, value in block.tiles():
        where, value = _places(value, places, start), as_real(value)
        for x, rows in zip(value.split(step, 1), where.split(step), strict=True):
            matrix = gaussian(key, rows, dim) if normal else signs(key, rows, dim)
            total = total + x @ matrix.to(x.dtype)
    return total / math.sqrt(dim)


def _by_signs(gradient: Gradient, block: Block, dim: int, key: int) -> Tensor:
    return _by_matrix(gradient, block, dim, key, normal=False)


def _by_buckets(gradient: Gradient, block: Block, dim: int, key: int) -> Tensor:
    """Each number added to, or subtracted from, a few buckets."""
    block, places = block.support()
    total = torch.zeros(())
    for start, value in block.tiles():
        where, value = _places(value, places, start), as_real(value)
        for k in range(BUCKETS):
            random = words(key, where * BUCKETS + k)
            bucket = _shifted(random, 32) * dim >> 32
            zeros = value.new_zeros(len(value), dim)
            total = total + zeros.index_add(1, bucket, value * ((random & 1) * 2 - 1).to(value.dtype))
    return total / math.sqrt(BUCKETS)


def _by_factors(gradient: Gradient, block: Block, dim: int, key: int) -> Tensor:
    """(P_left kron P_right): one small matrix on either side of the gradient, seen as (p, d)."""
    parameter = gradient.parameter
    if parameter.ndim < 2 or parameter.is_complex():
        return _by_buckets(gradient, block, dim, key)
    p = len(parameter)
    a = max(n for n in range(1, math.isqrt(dim) + 1) if dim % n == 0)
    sizes = ((a, p), (dim // a, parameter.numel() // p))
    dtype, device = accumulation_dtype(parameter.dtype), parameter.device
    left, right = (
        gaussian(key + k, torch.arange(n, device=device), m).mT.to(dtype) / math.sqrt(m)
        for k, (m, n) in enumerate(sizes, 1)
    )
    return block.compressed(left, right).flatten(1)


KINDS = {"gaussian": _by_matrix, "rademacher": _by_signs, "sjlt": _by_buckets, "kronecker": _by_factors}


def _places(value: Tensor, places: Tensor | None, start: int) -> Tensor:
    """Which of the parameter's real numbers a tile (B, n) holds: (n,), or (2n,) for complex ones."""
    n, device = value.shape[1], value.device
    where = start + torch.arange(n, device=device) if places is None else places[start : start + n]
    return _grid(where, 2).flatten() if value.is_complex() else where


# Random numbers: a 64-bit mix (splitmix64) of a key and a place, in integers that wrap around.


def key(seed: int, name: str, kind: str) -> int:
    """A number of 64 bits for a seed, a parameter and a kind."""
    return _mixed(_mixed(_mixed(seed & MASK) ^ crc32(name.encode())) ^ crc32(kind.encode()))


def words(key: int, places: Tensor) -> Tensor:
    """64 random bits for each place, as int64."""
    z = (places + 1).mul_(_signed(GOLDEN)).add_(_signed(key))
    z.bitwise_xor_(_shifted(z, 30)).mul_(_signed(FIRST))
    z.bitwise_xor_(_shifted(z, 27)).mul_(_signed(SECOND))
    return z.bitwise_xor_(_shifted(z, 31))


def gaussian(key: int, places: Tensor, dim: int) -> Tensor:
    """(n, dim) normal numbers in float64, two from every word (Box-Muller)."""
    random = words(key, _grid(places, -(-dim // 2)))
    radius = _shifted(random, 32).double().add_(0.5).mul_(2.0**-32).log_().mul_(-2).sqrt_()
    angle = random.bitwise_and_(0xFFFFFFFF).double().mul_(2 * math.pi * 2.0**-32)
    pairs = torch.empty(*angle.shape, 2, dtype=torch.float64, device=angle.device)
    torch.mul(radius, angle.cos(), out=pairs[..., 0])
    torch.mul(radius, angle.sin_(), out=pairs[..., 1])
    return pairs.flatten(1)[:, :dim]


def signs(key: int, places: Tensor, dim: int) -> Tensor:
    """(n, dim) of +1 and -1 as int64, 64 from every word."""
    random = words(key, _grid(places, -(-dim // 64)))
    bits = random[..., None] >> torch.arange(64, device=places.device) & 1
    return bits.flatten(1)[:, :dim] * 2 - 1


def _grid(places: Tensor, count: int) -> Tensor:
    """`count` counters for each place: (n, count)."""
    return places[:, None] * count + torch.arange(count, device=places.device)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (z >> bits).bitwise_and_((1 << 64 - bits) - 1)


def _signed(z: int) -> int:
    z &= MASK
    return z - (1 << 64) if z >> 63 else z


def _mixed(z: int) -> int:
    z = (z + GOLDEN) & MASK
    z = (z ^ z >> 30) * FIRST & MASK
    z = (z ^ z >> 27) * SECOND & MASK
    return z ^ z >> 31
