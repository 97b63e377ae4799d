"""The cost model: which route an answer takes, and what that costs in FLOPs and bytes.

Letters: B samples, T positions, d inputs, p outputs. FLOPs are those of matrix products and convolutions, two for
each multiplication, as torch's own counter has them; bytes are what is held, not what is moved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

import torch

# Numbers of the largest buffer that a route makes at a time, whatever B is: 4 MiB in float32, which stays in a cache.
# On one core the direct norms of seven convolutions took 0.79 to 0.99 of their time with 32 MiB; with 1 MiB up to 1.08.
CHUNK = 1 << 20

# A GPU starts a kernel for each chunk, and fills only with many samples at a time: there it is this share of its memory.
GPU_SHARE = 1 / 512

# A GPU's matrix products are several times as slow for sizes that are no multiple of this.
ALIGNED = 8

# Forming a byte of gradients, to be kept, read for the norm and read for the sum, takes as long as this many FLOPs:
# 2.4 ms for 16.8 MB, where products run at 160 GFLOP/s (a Linear(256, 1024) of a transformer on two cores).
FLOPS_PER_BYTE = 24


@dataclass(frozen=True)
class Route:
    """One way to an answer."""

    name: str
    flops: int
    bytes: int  # held beside the factors while it runs
    reason: str


@dataclass(frozen=True)
class Cost:
    """One block: its sizes, what it holds, and the routes that its answers take."""

    kind: str
    B: int
    T: int
    d: int
    p: int
    factors: int  # bytes that it holds as it is
    dense: int  # bytes of its B gradients
    norms: Route
    direct: Route  # the gradients themselves
    total: Route  # a weighted sum over samples, without them
    weight: int  # FLOPs of the weight's gradient in a plain backward
    parts: tuple[Cost, ...] = ()  # of a sum of several uses

    @cached_property
    def is_small(self) -> bool:
        """Whether the gradients take no more room than what they are made of."""
        return self.dense <= self.factors

    @cached_property
    def kept(self) -> int:
        """Bytes of the gradients formed once, to be asked several times: those of the small parts of a sum."""
        if all(part.is_small for part in self.parts):
            return self.dense
        return sum(min(part.dense, part.factors) for part in self.parts)

    def __add__(self, other: Cost) -> Cost:
        """Two parts of one parameter's gradient, each answered by its own route."""
        return Cost(
            f"{self.kind} + {other.kind}", self.B, self.T + other.T, self.d, self.p, self.factors + other.factors,
            max(self.dense, other.dense), _both(self.norms, other.norms), _both(self.direct, other.direct),
            _both(self.total, other.total), self.weight + other.weight, (*(self.parts or (self,)), other),
        )  # fmt: skip


def _both(a: Route, b: Route) -> Route:
    name = a.name if a.name == b.name else f"{a.name} + {b.name}"
    return Route(name, a.flops + b.flops, max(a.bytes, b.bytes), a.reason if a.name == b.name else "part by part")


# Matrix products: g[i] = G^T A with G (T, p) and A (T, d)


def product(B: int, T: int, p: int, d: int, item: int, device: str = "cpu") -> Cost:
    """The gradient of a weight in a matrix product, of numbers of `item` bytes."""
    once, dense = 2 * B * T * p * d, B * p * d * item
    return Cost(
        "Outer", B, T, d, p, B * T * (p + d) * item, dense,
        norms=product_norms(B, T, p, d, item, device),
        direct=Route("direct", once if T > 1 else 0, dense, "every gradient is asked for"),
        total=Route("one product", once, min(p, d) * B * T * item, "scaled factors, all samples at once"),
        weight=once,
    )  # fmt: skip


def product_norms(B: int, T: int, p: int, d: int, item: int, device: str = "cpu") -> Route:
    """The cheapest way to |g[i]|^2."""
    return _product_norms(B, T, p, d, item, strips(T, device), chunk(device))


@lru_cache(maxsize=1024)  # numbers alone go in: every parameter is asked about at every step
def _product_norms(B: int, T: int, p: int, d: int, item: int, strips: int, chunk: int) -> Route:
    if T == 1:
        return Route("product of norms", 0, 0, "T = 1")
    width = max(4, item)  # a Gram is never formed in less than float32
    gram, direct = _gram_flops(B, T, p + d, strips), 2 * B * T * p * d
    if gram < direct:
        rows = _gram_samples(B, T, strips, chunk) * (T // strips + 1)
        return Route("Gram", gram, 2 * rows * T * width, f"{gram / direct:.0%} of direct")
    size = _direct_samples(B, p, d, chunk) * p * d * item
    return Route("direct", direct, size, f"Gram would take {gram / direct:.0%}")


def chunk(device: str) -> int:
    """Numbers of the largest buffer that a route makes at a time."""
    return CHUNK if device == "cpu" else max(CHUNK, round(_gpu_memory() * GPU_SHARE / 2))


@cache
def _gpu_memory() -> int:
    """Bytes of the first GPU, or of a small one where there is none to ask."""
    return torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 16 << 30


def strips(T: int, device: str = "cpu") -> int:
    """In how many strips of rows a (T, T) Gram is made, each up to the diagonal: of a triangle, 75% or 62% are left."""
    if device != "cpu":  # which fills with the whole square of a short sequence, and is idle with a strip of it
        return 1 if T < 1024 else 2
    # T = 128: 4 strips took 74% of the time of the whole square, 2 strips 80%; T = 32: 2 strips 75%, 4 strips 90%.
    if T >= 128:
        return 4
    return 2 if T >= 32 else 1


def gram_flops(B: int, T: int, width: int, device: str = "cpu") -> int:
    """Of the Grams of (B, T, width), up to the diagonal."""
    return _gram_flops(B, T, width, strips(T, device))


def _gram_flops(B: int, T: int, width: int, strips: int) -> int:
    return 2 * B * width * sum((end - start) * end for start, end in _strip_bounds(T, strips))


def strip_bounds(T: int, device: str = "cpu") -> list[tuple[int, int]]:
    """The rows of each strip, from one to another."""
    return _strip_bounds(T, strips(T, device))


def _strip_bounds(T: int, strips: int) -> list[tuple[int, int]]:
    step = -(-T // strips)
    return [(start, min(start + step, T)) for start in range(0, T, step)]


def gram_samples(B: int, T: int, device: str = "cpu") -> int:
    """How many samples' Grams are made at a time."""
    return _gram_samples(B, T, strips(T, device), chunk(device))


def _gram_samples(B: int, T: int, strips: int, chunk: int) -> int:
    return min(B, max(1, chunk // max(1, T * -(-T // strips))))


def direct_samples(B: int, p: int, d: int, device: str = "cpu") -> int:
    """How many samples' gradients are made at a time where they are not kept."""
    return _direct_samples(B, p, d, chunk(device))


def _direct_samples(B: int, p: int, d: int, chunk: int) -> int:
    return min(B, max(1, chunk // max(1, p * d)))


# Blocks that hold their gradients, or rows of them


def dense(B: int, p: int, d: int, item: int) -> Cost:
    size = B * p * d * item
    norms = Route("sum of squares", 0, 0, "the gradients are there")
    direct = Route("as they are", 0, 0, "the gradients are there")
    return Cost("Dense", B, 1, d, p, size, size, norms, direct, dense_sum(B, p * d), 0)


def dense_sum(B: int, n: int) -> Route:
    """sum_i c[i] g[i] of gradients of n numbers that are there."""
    return Route("sum of gradients", 2 * B * n, 0, "the gradients are there")


def rows(B: int, T: int, size: int, d: int, item: int) -> Cost:
    """The gradient of a table of `size` rows of which each sample reads T."""
    factors, table = B * T * (d * item + 8), B * size * d * item
    norms = Route("sorted rows", 0, 4 * factors, "rows that a sample reads twice are added first")
    direct = Route("scatter", 0, table, "every gradient is asked for")
    total = Route("scatter of all samples", 0, factors, "one table")
    return Cost("Rows", B, T, d, size, factors, table, norms, direct, total, 0)


def answer(cost: Cost, query: str, held: str) -> Route:
    """The whole way to an answer: FLOPs, and bytes held until it is known."""
    if query == "norms":
        return cost.norms
    if query == "dense":
        return cost.direct
    if query == "weighted_sum":
        return cost.total
    kept = dense_sum(cost.B, cost.p * cost.d)
    if held == "gradients":
        name = cost.norms.name if cost.kind == "Dense" else "direct, kept"
        reason = cost.norms.reason if cost.kind == "Dense" else "no larger than the factors"
        reason = reason if cost.kept <= cost.factors else "the memory allowed spares a second product"
        return Route(name, cost.direct.flops + kept.flops, cost.kept, reason)
    if held == "again":
        return Route(f"{cost.norms.name}, then again", cost.norms.flops + cost.total.flops, 0, "the memory allowed")
    name = f"{cost.norms.name}, then {cost.total.name}"
    return Route(name, cost.norms.flops + cost.total.flops, cost.factors, cost.norms.reason)


# The schedule of a clipped sum: the factors of clipping are known only when every parameter has been seen


def schedule(costs: Mapping[str, Cost], budget: int | None) -> dict[str, str]:
    """What is held of each parameter until the norms are known: "gradients", "factors", or nothing: "again".

    `budget` bounds the bytes that are held; without one no parameter holds more than its factors.
    """
    found = {name: "gradients" if cost.kept <= cost.factors else "factors" for name, cost in costs.items()}
    if budget is None:
        return found
    held = sum(min(cost.kept, cost.factors) for cost in costs.values())
    # Over the budget: the largest go first, and are computed in a second backward.
    for name in sorted(costs, key=lambda n: -min(costs[n].kept, costs[n].factors)):
        if held <= budget:
            break
        held -= min(costs[name].kept, costs[name].factors)
        found[name] = "again"

    # Under it: gradients kept spare the norms' FLOPs.
    def gain(name: str) -> float:
        cost = costs[name]
        spared = cost.norms.flops + cost.total.flops - cost.direct.flops
        return spared - FLOPS_PER_BYTE * cost.kept

    for name in sorted(costs, key=lambda n: -gain(n)):
        extra = costs[name].kept - costs[name].factors
        if found[name] == "factors" and gain(name) > 0 and held + extra <= budget:
            held += extra
            found[name] = "gradients"
    return found


def parse_bytes(value: int | str | None) -> int | None:
    """ "2GiB", "500MB", 1_000_000 -> bytes."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        number, unit = value, ""
    elif isinstance(value, str):
        text = value.strip()
        digits = text.rstrip("KMGTiBkmgtb ")
        number, unit = _number(digits, value), text[len(digits) :].strip()
    else:
        raise ValueError(f"memory is a number of bytes or a text such as '2GiB', not {value!r}")
    if unit not in _UNITS:
        raise ValueError(f"memory is a number of bytes or a text such as '2GiB', not {value!r}")
    if number is None:
        return None
    if number < 0:
        raise ValueError(f"memory is not negative, as {value!r} is")
    return int(number * _UNITS[unit])


def _number(digits: str, value: str) -> float:
    try:
        return float(digits)
    except ValueError:
        raise ValueError(f"memory is a number of bytes or a text such as '2GiB', not {value!r}") from None


_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{end}": base**power for power, prefix in enumerate("KMGT", 1) for end, base in (("B", 1000), ("iB", 1024))
}
