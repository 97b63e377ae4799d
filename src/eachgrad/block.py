"""One piece of memory in which CUDA graphs have their tensors, by their plans, one graph at a time.

A step of several batches adds their answers up, and so has memory of its own beside that of the graphs. Where such batches
are small, the sums lie at the end of the block, which only graphs for larger batches use: 0.9 B parameters are 3.4 GiB.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from eachgrad.arena import UNIT, Plan


@dataclass(frozen=True)
class Placed:
    """A plan, in memory that is there."""

    plan: Plan
    base: Tensor
    lasts = True

    @property
    def size(self) -> int:
        return self.plan.size

    @contextmanager
    def within(self) -> Iterator[None]:
        with self.plan.within(self.base):
            yield


class Block:
    """Memory for the plans of graphs, as large as the largest needs."""

    def __init__(self) -> None:
        self.several, self.beside = 0, 0
        self.base: Tensor | None = None
        self._size = 0  # the most that was needed
        self._room: StorageWeakRef | None = None

    def keep_free(self, beside: int, several: int) -> None:
        """Let graphs for up to `several` samples, of which a step may have some, leave so many bytes alone.

        Those that are there would not: it is said before the first.
        """
        assert self.base is None or not beside
        self.several, self.beside = several, beside

    def has_room_for(self, plan: Plan, size: int) -> bool:
        """Whether a graph for so many samples could have its tensors there, as it is."""
        return self.base is not None and self._needed(plan, size) <= self.base.nbytes

    def placed(self, plan: Plan, size: int) -> Placed:
        """A plan for so many samples, in this memory; without room for it, in another, for all that come from now on."""
        if not self.has_room_for(plan, size):
            needed, self.base = max(self._size, self._needed(plan, size)), None
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # what was there before, which is too small
            self.base = torch.empty(needed, dtype=torch.uint8, device=plan.device)
            self._size = needed  # if there is so much
        assert self.base is not None
        return Placed(plan, self.base)

    def _needed(self, plan: Plan, size: int) -> int:
        return plan.size + (self.beside if self.is_one_of_several(size) else 0)

    def is_one_of_several(self, size: int) -> bool:
        """Whether a step may have other batches beside one of so many samples."""
        return 0 < size <= self.several

    def room(self) -> Tensor | None:
        """The bytes that were to be left alone; None if there is no such memory."""
        if self.base is None or not self.several or not self.beside or self.base.nbytes < self.beside:
            return None
        found = alias(self.base[self.base.nbytes - self.beside :])
        self._room = StorageWeakRef(found.untyped_storage())
        return found

    def is_in_use(self, size: int) -> bool:
        """Whether a graph for so many samples would write over what somebody has in the `room`."""
        return self._room is not None and not self.is_one_of_several(size) and not self._room.expired()

    def drop(self) -> None:
        """The graphs are gone, and so is the memory, unless somebody else has it."""
        self.base = self._room = None


def room_for(t: Tensor) -> int:
    """The bytes that are taken by a float32 tensor of this shape."""
    return -(-4 * t.numel() // UNIT) * UNIT


def alias(t: Tensor) -> Tensor:
    """The same memory as that of a tensor, which it keeps, in a storage that others can be seen to have."""
    return from_dlpack(to_dlpack(t))
