"""Packs: gradients that have one norm, and in part one sum, for all of them.

A transformer has two biases or norms for every matrix. Each is a few thousand numbers a sample, and an op for each of them
takes longer to start than to run: of GPT-2's 148 parameters 99 are such, and are put side by side. Large ones stay where
they lie, and on a GPU a launch reads all of them. Of those that are not there but by their factors, what kernels find of
the norms is added up at once: 140 small kernels less for ViT-B/16, half a millisecond of 24 on an H200. Where norms alone
are asked for, factors are not held until all have come: see `waiting.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

from eachgrad.blocks import Dense, Outer, arithmetic
from eachgrad.blocks.arithmetic import real_dtype
from eachgrad.blocks.base import Rough
from eachgrad.gradient import Gradient, total
from eachgrad.kernels import many
from eachgrad.kernels.gram import gram_parts_of_many
from eachgrad.kernels.joined import joined
from eachgrad.kernels.launching import is_unwatched
from eachgrad.kernels.library import DTYPES
from eachgrad.queries.joining import Joined, in_dtype, is_plain, one_by_one, small_key_of, values_of

TOGETHER = 1 << 26  # numbers of all gradients of one launch, about: 256 MiB of sums


class Pack(Protocol):
    gradients: list[Gradient]

    def add(self, gradient: Gradient) -> None: ...

    def restore(self, gradients: list[Gradient]) -> None: ...

    def squares(self) -> Tensor:
        """(B,), in float32 or better."""
        ...

    def spread(self) -> Tensor | None:
        """(B,), as `Gradient.spread`."""
        ...

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        """sum_i c[i] g[i] of each, or of the samples in `index` alone; see `Gradient.weighted_sum`."""
        ...


class Holders:
    """Which pack has each gradient of a batch, for the questions that are asked together.

    One for norms alone must not hold large gradients. Asked beside a clipped sum, which does, it waits for the norms of the
    sum's pack.
    """

    def __init__(self) -> None:
        # Not the gradients themselves, which are to be free early: another one may come to lie where one has been.
        self._found: dict[int, tuple[ref[Gradient], Held]] = {}
        self._joined: dict[tuple[int, ...], Joined] = {}  # by their gradients, which these packs hold

    def shared(self, pack: Joined, reads: str) -> Joined:
        """The pack that another question has of the same small gradients, or this one; for a question that `reads` so."""
        found = self._joined.setdefault(tuple(map(id, pack.gradients)), pack)
        found.reads.append(reads)
        return found

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

    def restore(self, gradients: list[Gradient]) -> None:
        """Hold these again, whose norms are to be found anew."""
        self.gradients, self._found = gradients, None

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
        values = values_of([gradient for gradient in some if not gradient.has_norms])
        found = [many.squares_of_many(values)] if values else []
        return total([*found, *known]) if known else found[0], None

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        if index is not None or c.requires_grad:
            return one_by_one(self.gradients, c, index, wide)
        answer: dict[str, Tensor] = {}
        # A compiler frees the gradients of one launch before the next one's answers take their room.
        for some in _in_turn(self.gradients):
            values = values_of(some)
            found = many.weighted_of_many(c.to(values[0].device, torch.float32), values)
            answer |= in_dtype(some, found, wide)
        return answer


class Crossed(Held):
    """Gradients by their factors, whose norms kernels find tile by tile: all tiles of all of them are added up at once."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, Tensor] = {}  # by the gradient's id, where a compiler looks on
        self.unit = 0.0

    def add(self, gradient: Gradient) -> None:
        super().add(gradient)
        block = outer_of(gradient)
        self.unit = block.unit
        # A compiler frees what nobody reads later, and joins the norms itself (launches.py). Otherwise all have one turn.
        if not is_unwatched(block.left):
            self.parts[id(gradient)] = gradient.once("parts", block.parts)

    def measured(self, some: list[Gradient]) -> tuple[Tensor, Tensor | None]:
        known = all(id(gradient) in self.parts for gradient in some)
        found, bound = (self._joined(some) if known else _crossed_sums(some)).unbind()

        def exact(index: Tensor) -> Tensor:
            return total([outer_of(gradient).exact(index) for gradient in some])

        # What rounding leaves is a share of all terms together, and matters as one of the whole norm.
        return Rough(found, bound, exact, self.unit).settled()

    def _joined(self, some: list[Gradient]) -> Tensor:
        return joined([self.parts[id(gradient)] for gradient in some]).sum(2)

    def sums(self, c: Tensor, index: Tensor | None, wide: bool) -> dict[str, Tensor]:
        if index is not None or not all(is_unwatched(outer_of(gradient).left) for gradient in self.gradients):
            return one_by_one(self.gradients, c, index, wide)
        # `Gradient.weighted_sum` of each, with what is the same for all of them done once.
        answer, weights = {}, c.to(self.gradients[0].parameter.device, torch.float32).view(-1, 1, 1)
        with torch.no_grad():
            while self.gradients:
                gradient = self.gradients.pop(0)
                value = outer_of(gradient).sum_by_weights(weights)
                answer |= in_dtype([gradient], [value], wide)
        return answer


def _crossed_sums(gradients: list[Gradient]) -> Tensor:
    """Squared norms of all together, and the sizes of their terms, by few launches: (2, B)."""
    kinds: dict[torch.Size, list[Outer]] = {}
    for gradient in gradients:
        block = outer_of(gradient)
        kinds.setdefault(block.left.shape[:2], []).append(block)
    found = [gram_parts_of_many([b.left for b in some], [b.right for b in some]) for some in kinds.values()]
    return total([parts.sum((0, 3)) for parts in found])


def outer_of(gradient: Gradient) -> Outer:
    block = gradient.checked()
    assert isinstance(block, Outer)
    return block


Key = tuple[type[Joined] | type[Apart] | type[Crossed], torch.device, torch.dtype]


def key_of(gradient: Gradient, holders: Holders | None = None) -> Key | None:
    """What gradients in one pack have in common, its kind first; None: this one goes by itself.

    With `holders` it is kept until all have come, whether packed or not. Only then are large ones packed, into one pack.
    Without, its norms alone are asked for; what it is made of may wait for a few others.
    """
    held = holders is not None and holders.of(gradient) is None
    block = gradient.checked()
    if gradient.has_norms:
        return None
    if isinstance(block, Outer):
        return _crossed(gradient, block) if held or holders is None else None
    small = small_key_of(gradient, held)
    if small is not None or not isinstance(block, Dense):
        return small
    if held and is_plain(gradient, block.value) and _is_large(gradient, block.value):
        return Apart, block.value.device, block.value.dtype
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
    # Eagerly two ops for each take longer to start than one launch for all of those that are not small, as LoRA's are.
    return fits and (is_unwatched(value) or value[0].numel() >= arithmetic.LARGE)


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
