"""Packs: gradients that have one norm, and in part one sum, for all of them.

A transformer has two biases or norms for every matrix. Each is a few thousand numbers a sample, and an op for each of them
takes longer to start than to run: of GPT-2's 148 parameters 99 are such, and are put side by side. Large ones stay where
they lie, and on a GPU a launch reads all of them. Of those that are not there but by their factors, what kernels find of
the norms is added up at once: 140 small kernels less for ViT-B/16, half a millisecond of 24 on an H200.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from eachgrad.blocks import Dense, Outer, Summed, arithmetic, form
from eachgrad.blocks.arithmetic import accumulation_dtype, cast, real_dtype, squared_norms, sum_of
from eachgrad.blocks.base import Rough
from eachgrad.gradient import Gradient, total
from eachgrad.kernels import many
from eachgrad.kernels.gram import gram_parts_of_many
from eachgrad.kernels.joined import joined
from eachgrad.kernels.launching import is_unwatched
from eachgrad.kernels.library import DTYPES

SMALL = 1 << 13  # numbers of a gradient that is not worth an op of its own
FEW = 8  # gradients that are not worth a copy side by side: an MLP's three took 1.47 times a plain step's memory, not 1.22
TOGETHER = 1 << 26  # numbers of all gradients of one launch, about: 256 MiB of sums


class Pack(Protocol):
    gradients: list[Gradient]

    def add(self, gradient: Gradient) -> None: ...

    def squares(self) -> Tensor:
        """(B,), in float32 or better."""
        ...

    def spread(self) -> Tensor | None:
        """(B,), as `Gradient.spread`."""
        ...

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        """sum_i c[i] g[i] of each, or of the samples in `index` alone; see `Gradient.weighted_sum`."""
        ...


@dataclass
class Joined:
    """Small gradients side by side."""

    gradients: list[Gradient] = field(default_factory=list)
    value: Tensor | None = None  # (B, n), when all are there

    def add(self, gradient: Gradient) -> None:
        self.gradients.append(gradient)

    def join(self) -> Tensor:
        if self.value is None:
            values = _values(self.gradients)
            parts = [value if value.ndim == 2 else value.reshape(len(value), -1) for value in values]
            self.value = joined(parts) if arithmetic.on_gpu(parts[0]) else torch.cat(parts, 1)
        return self.value

    def squares(self) -> Tensor:
        if len(self.gradients) < FEW:
            return total([gradient.squared_norms() for gradient in self.gradients])
        return squared_norms(self.join())

    def spread(self) -> Tensor | None:
        return None

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        if len(self.gradients) < FEW:
            return _one_by_one(self.gradients, c, index, wide)
        value = self.join() if index is None else self.join()[index.to(self.join().device)]
        found = sum_of(c.to(value.device), value) if c.numel() else value.new_zeros(value.shape[1])
        parts = found.split([gradient.parameter.numel() for gradient in self.gradients])
        return _in_dtype(self.gradients, list(parts), wide)


class Holders:
    """Which pack has each gradient of a batch, for the questions that are asked together.

    One for norms alone must not hold large gradients. Asked beside a clipped sum, which does, it waits for the norms of the
    sum's pack.
    """

    def __init__(self) -> None:
        # Not the gradients themselves, which are to be free early: another one may come to lie where one has been.
        self._found: dict[int, tuple[ref[Gradient], Held]] = {}

    def note(self, gradient: Gradient, pack: Held) -> None:
        self._found[id(gradient)] = ref(gradient), pack

    def of(self, gradient: Gradient) -> Held | None:
        """The pack that has this gradient."""
        known, pack = self._found.get(id(gradient), (None, None))
        return pack if known is not None and known() is gradient else None


@dataclass(eq=False)
class Held:
    """Large gradients, or what they are made of."""

    gradients: list[Gradient] = field(default_factory=list)
    size: int = 0
    _found: tuple[Tensor, Tensor | None] | None = None

    def add(self, gradient: Gradient) -> None:
        self.gradients.append(gradient)
        self.size += 1
        self._found = None

    def measured(self, some: list[Gradient]) -> tuple[Tensor, Tensor | None]:
        """As `Block.measured`, of all these gradients together."""
        raise NotImplementedError

    def squares(self) -> Tensor:
        if self._found is None:
            self._found = self.measured(self.gradients)
        return self._found[0]

    def spread(self) -> Tensor | None:
        self.squares()
        return None if self._found is None else self._found[1]

    def squares_of(self, some: list[Gradient]) -> Tensor:
        """The same of some of them alone; if they are all, computed once."""
        return self.squares() if len(some) == self.size else self.measured(some)[0]


class Apart(Held):
    """Large gradients, each where it lies: one launch for the norms of all, and few for the sums."""

    def measured(self, some: list[Gradient]) -> tuple[Tensor, Tensor | None]:
        # Another question may have found the norms of some since they were packed.
        known = [gradient.squared_norms() for gradient in some if gradient.has_norms]
        values = _values([gradient for gradient in some if not gradient.has_norms])
        found = [many.squares_of_many(values)] if values else []
        return total([*found, *known]) if known else found[0], None

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        if index is not None or c.requires_grad:
            return _one_by_one(self.gradients, c, index, wide)
        answer: dict[str, Tensor] = {}
        # A compiler frees the gradients of one launch before the next one's answers take their room.
        for some in _in_turn(self.gradients):
            values = _values(some)
            found = many.weighted_of_many(c.to(values[0].device, torch.float32), values)
            answer |= _in_dtype(some, found, wide)
        return answer


class Crossed(Held):
    """Gradients by their factors, whose norms kernels find tile by tile: all tiles of all of them are added up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, Tensor] = {}  # by the gradient's id, where a compiler looks on
        self.unit = 0.0

    def add(self, gradient: Gradient) -> None:
        super().add(gradient)
        block = _outer(gradient)
        self.unit = block.unit
        # A compiler frees what nobody reads later, and joins the norms itself (launches.py). Otherwise all have one turn.
        if not is_unwatched(block.left):
            self.parts[id(gradient)] = block.parts()

    def measured(self, some: list[Gradient]) -> tuple[Tensor, Tensor | None]:
        known = all(id(gradient) in self.parts for gradient in some)
        found, bound = (self._joined(some) if known else _crossed_sums(some)).unbind()

        def exact(index: Tensor) -> Tensor:
            return total([_outer(gradient).exact(index) for gradient in some])

        # What rounding leaves is a share of all terms together, and matters as one of the whole norm.
        return Rough(found, bound, exact, self.unit).settled()

    def _joined(self, some: list[Gradient]) -> Tensor:
        return joined([self.parts[id(gradient)] for gradient in some]).sum(2)

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        return _one_by_one(self.gradients, c, index, wide)


def _crossed_sums(gradients: list[Gradient]) -> Tensor:
    """Squared norms of all together, and the sizes of their terms, by few launches: (2, B)."""
    kinds: dict[torch.Size, list[Outer]] = {}
    for gradient in gradients:
        block = _outer(gradient)
        kinds.setdefault(block.left.shape[:2], []).append(block)
    found = [gram_parts_of_many([b.left for b in some], [b.right for b in some]) for some in kinds.values()]
    return total([parts.sum((0, 3)) for parts in found])


def _one_by_one(gradients: list[Gradient], c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
    """The sums of gradients, each of which is free when its sum is there."""
    answer = {}
    while gradients:
        gradient = gradients.pop(0)
        taken = gradient if index is None else gradient.take(index)
        answer[gradient.name] = taken.weighted_sum(c, wide)
    return answer


def _outer(gradient: Gradient) -> Outer:
    block = gradient.checked()
    assert isinstance(block, Outer)
    return block


Key = tuple[type[Joined] | type[Apart] | type[Crossed], torch.device, torch.dtype]


def key_of(gradient: Gradient, holders: Holders | None = None) -> Key | None:
    """What gradients in one pack have in common, its kind first; None: this one goes by itself.

    With `holders` it is kept until all have come, whether packed or not. Only then are large ones packed, into one pack.
    """
    held = holders is not None and holders.of(gradient) is None
    block = gradient.checked()
    if gradient.has_norms:
        return None
    if isinstance(block, Outer):
        return _crossed(gradient, block) if held else None
    if not isinstance(block, Dense):
        return None
    if held and isinstance(block, Summed) and block.terms is not None and gradient.parameter.numel() <= SMALL:
        return Joined, block.terms.device, torch.float32  # as what it will be
    value = block.value
    if value.dtype.is_complex or value.requires_grad or gradient.parameter.dtype.is_complex:
        return None
    if gradient.parameter.numel() <= SMALL:
        return Joined, value.device, value.dtype
    if held and _is_large(gradient, value):
        return Apart, value.device, value.dtype
    return None


def _crossed(gradient: Gradient, block: Outer) -> Key | None:
    fits = block.has_parts and real_dtype(gradient.parameter.dtype) == torch.float32 and not gradient.attached
    return (Crossed, block.left.device, block.left.dtype) if fits else None


def _is_large(gradient: Gradient, value: Tensor) -> bool:
    """Whether the kernels take these gradients as they are."""
    if not arithmetic.on_gpu(value) or value.dtype not in DTYPES or not len(value):
        return False
    # In one pack all norms have one dtype. Samples that do not lie in one piece would be copied, twice.
    fits = real_dtype(gradient.parameter.dtype) == torch.float32 and value[0].is_contiguous()
    return fits and value[0].numel() >= arithmetic.LARGE


def _in_turn(gradients: list[Gradient]) -> Iterator[list[Gradient]]:
    """Some of them at a time, with TOGETHER numbers of a sample or a little more."""
    some, numbers = [], 0
    for gradient in gradients:
        some.append(gradient)
        numbers += gradient.parameter.numel()
        if numbers >= TOGETHER:
            yield some
            some, numbers = [], 0
    if some:
        yield some


def _values(gradients: list[Gradient]) -> list[Tensor]:
    blocks = [block for gradient in gradients if (block := gradient.checked()) is not None]
    form(blocks)
    return [block.dense() for block in blocks]


def _in_dtype(gradients: list[Gradient], sums: list[Tensor], wide: bool) -> dict[str, Tensor]:
    """{name: sum}, each in the shape and the dtype of its parameter, or in float32 or better."""
    answer = {}
    for gradient, value in zip(gradients, sums, strict=True):
        dtype = gradient.parameter.dtype
        dtype = accumulation_dtype(dtype) if wide else dtype
        value = value if value.shape == gradient.parameter.shape else value.view(gradient.parameter.shape)
        answer[gradient.name] = cast(value, dtype)
    return answer
